"""From the task's rewards to those that advantages are made of: the same on every rank.

task's reward ─► user's function ─► minus overlong penalty ─► over relative length
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from asyncrl.config.learning import ShapingConfig
from asyncrl.errors import DataError
from asyncrl.learner.maths.advantages import by_group, check_finite
from asyncrl.types import SampleHeader
from asyncrl.user_function import as_number, describe, load

Floats64 = npt.NDArray[np.float64]
ShapingFunction = Callable[[SampleHeader, float], float]

KEY = "learner.shaping.function"
ARGUMENTS = ("SampleHeader", "reward")
"""What it is called with, for messages."""


def shaped_rewards(
    manifest: Sequence[SampleHeader], config: ShapingConfig, max_new_tokens: int
) -> Floats64:
    """Shaped reward of each sample of the manifest, [len(manifest)]; by default the task's own.

    Length is that of the whole response, tool tokens included; at least 1.

    Args:
        manifest: the samples of the batch; a group's mean length is over all of it found here.
        config: `learner.shaping`.
        max_new_tokens: `rollout.max_new_tokens`, where a response is cut off.

    Raises:
        ConfigError: `learner.shaping.function` cannot be loaded.
        DataError: a reward is not a finite number, or the function failed.
    """
    rewards = np.array([h.reward for h in manifest], np.float64)
    everything = range(len(manifest))
    check_finite(rewards, manifest, everything)
    if config.function is not None:
        function = load_function(config.function)
        for i in everything:
            rewards[i] = _call(function, config.function, manifest[i], float(rewards[i]))
    lengths = np.maximum(1.0, np.array([h.response_tokens for h in manifest], np.float64))
    if config.overlong_tokens is not None:
        over = overlong_share(lengths, max_new_tokens, config.overlong_tokens)
        rewards = rewards - config.overlong_penalty * over
    if config.length_normalise:
        mean = np.zeros(len(manifest))
        for members in by_group(manifest, everything).values():
            mean[members] = lengths[members].mean()
        rewards = rewards / (lengths / mean)
    return rewards


def overlong_share(lengths: Floats64, max_tokens: int, soft_tokens: int) -> Floats64:
    """How far each response reaches into the last `soft_tokens` below `max_tokens`, from 0 to 1.

    The soft overlong punishment of DAPO (arXiv 2503.14476) is minus this.

    >>> overlong_share(np.array([5.0, 80.0, 90.0, 100.0]), 100, 20).tolist()
    [0.0, 0.0, 0.5, 1.0]
    """
    share: Floats64 = np.clip((lengths - (max_tokens - soft_tokens)) / soft_tokens, 0.0, 1.0)
    return share


def load_function(spec: str) -> ShapingFunction:
    """The function that `learner.shaping.function` names.

    It runs on every learner rank for every sample of a batch, so it must be deterministic.

    Raises:
        ConfigError: the module cannot be imported, or has no such function.
    """
    return cast(ShapingFunction, load(spec, KEY, ARGUMENTS))


def _call(function: ShapingFunction, spec: str, header: SampleHeader, reward: float) -> float:
    """The function's value for one sample, as a finite float."""
    where = f"{KEY}={spec}: for sample {tuple(header.id)}, reward {reward}, it"
    try:
        value = function(header, reward)
    except (Exception, SystemExit) as e:
        raise DataError(f"{where} raised {describe(e)}") from e
    try:
        return as_number(value)
    except (TypeError, ValueError) as e:
        raise DataError(f"{where} {e}") from e
