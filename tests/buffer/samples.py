"""Samples for the buffer's tests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from asyncrl import wire
from asyncrl.types import (
    Envelope,
    FinishReason,
    GroupId,
    Lease,
    Prompt,
    SampleHeader,
    SampleId,
    Trajectory,
    Version,
)


def prompts(count: int = 1_000_000) -> Iterator[tuple[GroupId, Prompt]]:
    for i in range(count):
        yield GroupId("p", 0, i), Prompt(text=f"{i} + 1 =", answer=str(i + 1))


def header(
    sample: SampleId,
    lease: int,
    actor: str,
    version: Version,
    reward: float = 0.0,
    prompt_tokens: int = 2,
    response_tokens: int = 3,
) -> SampleHeader:
    return SampleHeader(
        id=sample, lease=lease, actor=actor, prompt_tokens=prompt_tokens,
        response_tokens=response_tokens, policy_tokens=response_tokens, version_min=version,
        version_max=version, version_dispatch=version, version_finish=version, reward=reward,
        finish_reason=FinishReason.STOP, temperature=1.0,
    )  # fmt: skip


def envelope(
    sample: SampleId, lease: int, actor: str, version: Version, reward: float = 0.0
) -> Envelope:
    """A result whose payload the ledger does not read: 6 (1 + k) bytes for sample k."""
    tokens = 1 + sample.sample
    h = header(sample, lease, actor, version, reward, response_tokens=tokens)
    return Envelope(h, bytes(6 * tokens))


def trajectory(lease: Lease, k: int, actor: str, reward: float = 0.0) -> Trajectory:
    """A whole sample with arrays that depend on its id alone, so that any copy can be checked."""
    sample = lease.group.sample(k)
    rng = np.random.default_rng([sample.index, k])
    p, t = int(rng.integers(1, 20)), int(rng.integers(1, 50))
    h = header(sample, lease.lease, actor, lease.version, reward, p, t)
    return Trajectory(
        header=h,
        prompt_ids=rng.integers(0, 50_000, p, dtype=np.int32),
        response_ids=rng.integers(0, 50_000, t, dtype=np.int32),
        behaviour_logprobs=-rng.random(t, dtype=np.float32),
        versions=np.full(t, lease.version.version, np.int32),
        incarnations=np.full(t, lease.version.incarnation, np.int32),
        loss_mask=np.ones(t, np.uint8),
    )


def same_arrays(got: Envelope, sent: Trajectory) -> bool:
    """Whether the arrays are those of `sent`, bit for bit."""
    return got.payload == wire.pack_trajectory(sent).payload
