"""Samples as the learner receives them from the buffer, made up for a bench. Numpy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from asyncrl.types import (
    INITIAL,
    BatchPart,
    FinishReason,
    SampleHeader,
    SampleId,
    Trajectory,
    Version,
)
from asyncrl.wire import pack_trajectory

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Workload:
    """A batch: groups of one prompt each, responses of ragged lengths, random tokens and rewards.

    >>> Workload(groups=4, group_size=8).samples
    32
    """

    groups: int
    group_size: int
    longest: int = 256
    """Tokens of the longest response; their mean is a quarter of it."""
    prompt: tuple[int, int] = (30, 50)
    """Tokens of a prompt, smallest and largest."""
    vocabulary: tuple[int, int] = (1000, 49000)
    """Token ids are drawn from this range, which has no special ones."""
    seed: int = 0

    @property
    def samples(self) -> int:
        """Samples of the batch."""
        return self.groups * self.group_size


def ragged(count: int, longest: int) -> Ints:
    """Lengths up to `longest` with a quarter of it as their mean, in the shape of Beta(1, 3).

    >>> lengths = ragged(32, 256)
    >>> int(lengths.max()), round(float(lengths.mean()))
    (256, 64)
    """
    share = 1 - (1 - (np.arange(count - 1) + 0.5) / count) ** (1 / 3)
    others = share * (count / 4 - 1) / share.sum()
    return np.append(np.maximum(1, np.round(longest * others)), longest).astype(np.int64)


def make_samples(workload: Workload, behaviour: Floats | None = None) -> list[Trajectory]:
    """The batch, the same in every process.

    Args:
        workload: what to make.
        behaviour: log mu of all response tokens in the order of the samples; None leaves zeros.
    """
    rng = np.random.default_rng(workload.seed)
    lengths = rng.permutation(ragged(workload.samples, workload.longest))
    log_mu = np.zeros(lengths.sum(), np.float32) if behaviour is None else behaviour
    parts = np.split(log_mu, np.cumsum(lengths)[:-1])
    out: list[Trajectory] = []
    for g in range(workload.groups):
        low, high = workload.prompt
        prompt = rng.integers(*workload.vocabulary, rng.integers(low, high + 1))
        for k in range(workload.group_size):
            i = len(out)
            response = rng.integers(*workload.vocabulary, lengths[i])
            # Long ones are worse, so that the loss is not near 0, where nothing can be compared.
            reward = float(rng.random() - lengths[i] / workload.longest)
            out.append(make_trajectory(g, k, prompt, response, parts[i], reward))
    return out


def make_trajectory(
    group: int, sample: int, prompt: npt.NDArray[Any], response: npt.NDArray[Any],
    behaviour: npt.NDArray[Any], reward: float, version: Version = INITIAL,
) -> Trajectory:  # fmt: skip
    """A sample whose tokens all carry loss and are of one version."""
    n = len(response)
    header = SampleHeader(
        id=SampleId("bench", 0, group, sample), lease=group, actor="actor-0",
        prompt_tokens=len(prompt), response_tokens=n, policy_tokens=n, version_min=version,
        version_max=version, version_dispatch=version, version_finish=version, reward=reward,
        finish_reason=FinishReason.STOP, temperature=1.0,
    )  # fmt: skip
    return Trajectory(
        header=header, prompt_ids=prompt.astype(np.int32), response_ids=response.astype(np.int32),
        behaviour_logprobs=behaviour.astype(np.float32),
        versions=np.full(n, version.version, np.int32),
        incarnations=np.full(n, version.incarnation, np.int32), loss_mask=np.ones(n, np.uint8),
    )  # fmt: skip


def make_part(samples: Sequence[Trajectory], batch: int) -> BatchPart:
    """All of batch number `batch`, for the only rank."""
    return BatchPart(
        batch=batch, rank=0, manifest=tuple(t.header for t in samples),
        mine=tuple(range(len(samples))), envelopes=tuple(pack_trajectory(t) for t in samples),
        fresh=len(samples),
    )  # fmt: skip
