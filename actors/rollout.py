"""The actor's loop: leases in, finished samples out.

    buffer ──leases──► room for samples? ──► one task per sample:
                          ▲                    tokenise ► engine ► reward ► push ──► buffer
                          └──────── freed when a sample's task ends ───────────────────┘

Waits for: room (released by a finished sample), leases (released by the buffer, at the latest
after LEASE_WAIT_S), a newer version (released by the weights service). When the engine moves to
a new version another lease request goes out at once, because the buffer judged the one that is
parked there by the older version.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import numpy as np

from asyncrl import wire
from asyncrl.buffer.client import AsyncBufferClient
from asyncrl.config.schema import Config
from asyncrl.errors import AsyncRLError, DataError, EngineError, RewardError
from asyncrl.idlog import IdLog
from asyncrl.metrics import TimeShares
from asyncrl.protocols import Engine, Generation, GenerationRequest
from asyncrl.types import (
    NO_VERSION,
    FailureKind,
    Lease,
    Prompt,
    SampleHeader,
    SampleId,
    Trajectory,
    Version,
)  # fmt: skip

log = logging.getLogger(__name__)

LEASE_WAIT_S = 5.0
"""How long the buffer may park a lease request."""
PROGRESS_EVERY_S = 2.0
"""How often token progress renews the leases."""

Encode = Callable[[Prompt], list[int]]
"""Token ids of a prompt."""


class Scorer(Protocol):
    """What the loop needs of a reward worker."""

    async def score(self, prompt: Prompt, response: str, finish_reason: str) -> float:
        """A finite reward, or RewardError."""


class RolloutLoop:
    """Keeps up to `rollout.max_in_flight` samples in the engine until the buffer says stop."""

    def __init__(
        self, config: Config, *, name: str, engine: Engine, client: AsyncBufferClient,
        reward: Scorer, encode: Encode, shares: TimeShares, ids: IdLog,
    ) -> None:  # fmt: skip
        self.config = config
        self.name = name
        self.engine = engine
        self.client = client
        self.reward = reward
        self.encode = encode
        self.shares = shares
        self.ids = ids
        self.generated_tokens = 0
        self.samples_pushed = 0
        self.failures: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking: set[asyncio.Task[wire.Leases]] = set()
        self._tokens: dict[int, int] = {}
        self._reserved = 0
        self._applied_changed = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """Samples being generated, scored or pushed."""
        return len(self._tasks)

    def on_applied(self, version: Version) -> None:
        """The engine runs `version` now: ask for leases with it."""
        self._applied_changed.set()

    async def run(self) -> wire.Leases:
        """Loop until the buffer answers that the run is stopping or done; that answer.

        Raises:
            EngineError, DeadlineError: the engine or the buffer is gone.
        """
        progress = asyncio.create_task(self._report_progress())
        try:
            return await self._loop(progress)
        finally:
            for task in (progress, *self._tasks, *self._asking):
                task.cancel()
            await asyncio.gather(progress, *self._tasks, *self._asking, return_exceptions=True)
            self.ids.flush()

    async def _loop(self, progress: asyncio.Task[None]) -> wire.Leases:
        asked_with: Version | None = None
        while True:
            room = self.config.rollout.max_in_flight - len(self._tasks)
            if room > 0 and (not self._asking or asked_with != self.engine.applied):
                asked_with = self.engine.applied
                self._asking.add(asyncio.create_task(self._ask(room)))
            self._applied_changed.clear()
            changed = asyncio.create_task(self._applied_changed.wait())
            waiting: set[asyncio.Task[Any]] = {*self._tasks, *self._asking, progress, changed}
            done, _ = await asyncio.wait(
                waiting,
                return_when=asyncio.FIRST_COMPLETED,
                timeout=LEASE_WAIT_S,
            )
            changed.cancel()
            if progress in done:
                progress.result()
            for task in done & self._tasks:
                self._tasks.discard(task)
                task.result()  # a failed engine ends the loop; sample failures do not raise
            for asking in done & self._asking:
                self._asking.discard(asking)
                reply: wire.Leases = asking.result()
                if reply.state != "running":
                    return reply
                for lease in reply.leases:
                    self._start(lease)

    async def _ask(self, room: int) -> wire.Leases:
        with self.shares.state("get_wait"):
            return await self.client.lease(
                self.name, self.engine.applied, capacity=room, wait_s=LEASE_WAIT_S
            )

    def _start(self, lease: Lease) -> None:
        self._tokens[lease.lease] = 0
        try:
            if self.engine.applied < lease.version:
                raise EngineError(
                    f"lease {lease.lease} needs version {lease.version}, "
                    f"this engine runs {self.engine.applied}"
                )
            prompt_ids = tuple(self.encode(lease.prompt))
            limit = self.config.rollout.max_prompt_tokens
            if len(prompt_ids) > limit:
                raise DataError(
                    f"prompt {lease.group} has {len(prompt_ids)} tokens, "
                    f"rollout.max_prompt_tokens is {limit}"
                )
        except AsyncRLError as e:
            kind = FailureKind.DATA if isinstance(e, DataError) else FailureKind.INFRASTRUCTURE
            for k in lease.samples:
                self._spawn(self._fail(lease, lease.group.sample(k), kind, str(e)))
            return
        for k in lease.samples:
            self._spawn(self._produce(lease, lease.group.sample(k), prompt_ids))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(work))

    async def _produce(self, lease: Lease, sample: SampleId, prompt_ids: tuple[int, ...]) -> None:
        rollout = self.config.rollout
        self.ids.add("dispatched", sample, lease.lease)
        request = GenerationRequest(
            f"{self.name}-{lease.lease}-{sample.sample}", prompt_ids,
            max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature,
        )  # fmt: skip
        with self.shares.state("generate"):
            generation = await self.engine.generate(request, lambda n: self._count(lease.lease, n))
        try:
            with self.shares.state("reward"):
                value = await self.reward.score(
                    lease.prompt, generation.text, str(generation.finish_reason)
                )
        except RewardError as e:
            await self._fail(lease, sample, FailureKind.REWARD, str(e))
            return
        trajectory = build_trajectory(
            sample, lease.lease, self.name, prompt_ids, generation, value, rollout.temperature
        )
        with self.shares.state("put_wait"):
            status = await self.client.push(wire.pack_trajectory(trajectory))
        self.samples_pushed += 1
        self.ids.add(f"pushed-{status}", sample, lease.lease)

    def _count(self, lease: int, tokens: int) -> None:
        self._tokens[lease] = self._tokens.get(lease, 0) + tokens
        self.generated_tokens += tokens

    async def _fail(self, lease: Lease, sample: SampleId, kind: FailureKind, reason: str) -> None:
        self.failures[kind] = self.failures.get(kind, 0) + 1
        log.warning("sample %s failed (%s): %s", tuple(sample), kind, reason)
        status = await self.client.fail(self.name, lease.lease, sample, kind, reason)
        self.ids.add(f"failed-{kind}-{status}", sample, lease.lease)

    async def _report_progress(self) -> None:
        told: dict[int, int] = {}
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            grown = {k: v for k, v in self._tokens.items() if v > told.get(k, 0)}
            told |= grown
            if grown:
                await self.client.progress(self.name, grown)
            if len(self._tokens) > 4096:  # leases that ended long ago
                for lease in list(self._tokens)[:-1024]:
                    self._tokens.pop(lease), told.pop(lease, None)
            self.ids.flush()


def build_trajectory(
    sample: SampleId, lease: int, actor: str, prompt_ids: tuple[int, ...],
    generation: Generation, reward: float, temperature: float,
) -> Trajectory:  # fmt: skip
    """The trajectory of a generation: every response token is a policy token.

    Raises:
        EngineError: the engine returned no token, or a token without a version.
    """
    length = len(generation.response_ids)
    if length < 1:
        raise EngineError(f"the engine returned no token for sample {tuple(sample)}")
    if (generation.versions == NO_VERSION).any():
        raise EngineError(f"sample {tuple(sample)} has tokens without a version")
    pairs = [Version(int(i), int(v)) for i, v in zip(
        generation.incarnations, generation.versions, strict=True)]  # fmt: skip
    if not math.isfinite(reward):
        raise ValueError(f"reward {reward} of sample {tuple(sample)} is not finite")
    header = SampleHeader(
        id=sample, lease=lease, actor=actor, prompt_tokens=len(prompt_ids),
        response_tokens=length, policy_tokens=length, version_min=min(pairs),
        version_max=max(pairs), version_dispatch=generation.version_dispatch,
        version_finish=generation.version_finish, reward=float(reward),
        finish_reason=generation.finish_reason, temperature=temperature,
    )  # fmt: skip
    return Trajectory(
        header=header, prompt_ids=np.asarray(prompt_ids, np.int32),
        response_ids=generation.response_ids, behaviour_logprobs=generation.logprobs,
        versions=generation.versions, incarnations=generation.incarnations,
        loss_mask=np.ones(length, np.uint8),
    )  # fmt: skip
