"""From what an engine generated to what the learner trains."""

from __future__ import annotations

import math

import numpy as np

from asyncrl.errors import EngineError
from asyncrl.protocols import Generation
from asyncrl.types import NO_VERSION, SampleHeader, SampleId, Trajectory, Version


def build_trajectory(
    sample: SampleId, lease: int, actor: str, prompt_ids: tuple[int, ...],
    generation: Generation, reward: float, temperature: float,
) -> Trajectory:  # fmt: skip
    """The trajectory of a generation: every response token is a policy token.

    The header's lowest and highest version are those by number: after a restart of the learner
    from a checkpoint, tokens of the later incarnation may have the lower number.

    Raises:
        EngineError: the engine returned no token, or a token without a version.
    """
    length = len(generation.response_ids)
    if length < 1:
        raise EngineError(f"the engine returned no token for sample {tuple(sample)}")
    if (generation.versions == NO_VERSION).any():
        raise EngineError(f"sample {tuple(sample)} has tokens without a version")
    by_number = set(
        zip(generation.versions.tolist(), generation.incarnations.tolist(), strict=True)
    )
    (v_min, i_min), (v_max, i_max) = min(by_number), max(by_number)
    if not math.isfinite(reward):
        raise ValueError(f"reward {reward} of sample {tuple(sample)} is not finite")
    header = SampleHeader(
        id=sample, lease=lease, actor=actor, prompt_tokens=len(prompt_ids),
        response_tokens=length, policy_tokens=length, version_min=Version(i_min, v_min),
        version_max=Version(i_max, v_max), version_dispatch=generation.version_dispatch,
        version_finish=generation.version_finish, reward=float(reward),
        finish_reason=generation.finish_reason, temperature=temperature,
        kv_mixed=generation.kv_mixed,
    )  # fmt: skip
    return Trajectory(
        header=header, prompt_ids=np.asarray(prompt_ids, np.int32),
        response_ids=generation.response_ids, behaviour_logprobs=generation.logprobs,
        versions=generation.versions, incarnations=generation.incarnations,
        loss_mask=np.ones(length, np.uint8),
    )  # fmt: skip
