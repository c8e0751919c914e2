"""Group-relative advantages: pure functions of the manifest, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from asyncrl.errors import DataError
from asyncrl.types import GroupId, SampleHeader

Estimator = Literal["grpo", "dr_grpo", "rloo"]
Floats64 = npt.NDArray[np.float64]

STD_EPS = 1e-6
"""Added to the standard deviation of a group, or of a batch (`returns.whiten`)."""


def batch_advantages(
    rewards: Floats64,
    manifest: Sequence[SampleHeader],
    kept: Iterable[int],
    estimator: Estimator,
) -> npt.NDArray[np.float32]:
    """Advantage of each sample of the manifest, [len(manifest)]; 0 for those not in `kept`.

    A group is what is kept of it: a dropped sample is no baseline for the others.

    Args:
        rewards: [len(manifest)] from `shaping.shaped_rewards`.
        manifest: the samples of the batch.
        kept: indexes into the manifest of those that are trained.
        estimator: see `group_advantages`.

    Raises:
        DataError: a kept reward is not finite.
    """
    groups = by_group(manifest, kept)
    out = np.zeros(len(manifest), np.float32)
    for members in groups.values():
        check_finite(rewards, manifest, members)
        out[members] = group_advantages(rewards[members], estimator)
    return out


def group_advantages(rewards: Floats64, estimator: Estimator) -> Floats64:
    """Advantages of one group's rewards R, [n] to [n].

    A group of one, and a group whose rewards are all equal, has advantage exactly 0.

    * grpo: (R - mean) / (std + eps), sample standard deviation (arXiv 2402.03300);
    * dr_grpo: R - mean (arXiv 2503.20783);
    * rloo: R_i - mean of the others (arXiv 2402.14740).

    >>> group_advantages(np.array([1.0, 0.0, 0.0, 0.0]), "dr_grpo").tolist()
    [0.75, -0.25, -0.25, -0.25]
    """
    n = len(rewards)
    if n < 2 or np.all(rewards == rewards[0]):
        return np.zeros(n)
    centred: Floats64 = rewards - rewards.mean()
    if estimator == "grpo":
        return centred / float(rewards.std(ddof=1) + STD_EPS)
    if estimator == "rloo":
        return centred * (n / (n - 1))
    return centred


def by_group(manifest: Sequence[SampleHeader], which: Iterable[int]) -> dict[GroupId, list[int]]:
    """The indexes of `which`, in their order, by the group that the sample belongs to."""
    groups: dict[GroupId, list[int]] = {}
    for i in which:
        groups.setdefault(manifest[i].id.group, []).append(i)
    return groups


def check_finite(rewards: Floats64, manifest: Sequence[SampleHeader], which: Iterable[int]) -> None:
    """Refuse rewards [len(manifest)] that are not finite.

    Raises:
        DataError: naming the first sample of `which` with such a reward.
    """
    for i in which:
        if not np.isfinite(rewards[i]):
            raise DataError(
                f"reward of sample {tuple(manifest[i].id)} is {rewards[i]}: "
                "a reward must return a finite number"
            )
