"""The actor's loop: leases in, finished samples out.

    buffer ──leases──► room for samples? ──► one task per sample:
                          ▲                    tokenise ► engine ► reward ► push ──► buffer
                          └──────── freed when a sample's task ends ───────────────────┘

Waits for: room (released by a finished sample), leases (released by the buffer, at the latest
after LEASE_WAIT_S), a newer version (released by the weights service). A lease request is always
parked at the buffer, because its answer also brings the end of the run: without room it asks for
nothing. A newer one replaces it when there is room again, or when the engine moved to a new
version (the buffer judged the parked one by the older). An actor that is told to leave asks for
nothing either, and ends with its last sample.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from asyncrl import wire
from asyncrl.actors.progress import Progress
from asyncrl.actors.trajectories import build_trajectory
from asyncrl.buffer.client import AsyncBufferClient
from asyncrl.config.schema import Config
from asyncrl.errors import AsyncRLError, DataError, EngineError, RewardError
from asyncrl.idlog import IdLog
from asyncrl.metrics import TimeShares
from asyncrl.protocols import Engine, Generation, GenerationRequest, Scorer
from asyncrl.types import FailureKind, Lease, Prompt, SampleId, Version
from asyncrl.waits import Waits

log = logging.getLogger(__name__)

LEASE_WAIT_S = 5.0
"""How long the buffer may park a lease request."""
PROGRESS_EVERY_S = 2.0
"""How often progress renews the leases."""

Encode = Callable[[Prompt], list[int]]
"""Token ids of a prompt."""


class RolloutLoop:
    """Keeps up to `rollout.max_in_flight` samples in the engine until the buffer says stop."""

    def __init__(
        self, config: Config, *, name: str, engine: Engine, client: AsyncBufferClient,
        reward: Scorer, encode: Encode, shares: TimeShares, ids: IdLog, waits: Waits | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self.name = name
        self.engine = engine
        self.client = client
        self.reward = reward
        self.encode = encode
        self.shares = shares
        self.ids = ids
        self.waits = waits or Waits(name)
        self.generated_tokens = 0
        self.discarded_tokens = 0  # of samples that failed, or that the buffer did not take
        self.samples_pushed = 0
        self.pushes, self.push_s = 0, 0.0  # answered, and how long they took altogether
        self.scoring = 0  # samples that wait for their reward
        self.first_token = asyncio.Event()
        self.failures: dict[str, int] = {}
        """Samples that failed, by kind."""
        self.scored_failures = 0
        """Samples whose reward failed and that have `rollout.reward_failure_score` instead."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking: set[asyncio.Task[wire.Leases]] = set()
        self._progress: dict[int, Progress] = {}
        self._applied_changed = asyncio.Event()
        self._told_to_leave: wire.Leases | None = None

    @property
    def in_flight(self) -> int:
        """Samples being generated, scored or pushed."""
        return len(self._tasks)

    def on_applied(self, version: Version) -> None:
        """The engine runs `version` now: ask for leases with it."""
        self._applied_changed.set()

    async def run(self) -> wire.Leases:
        """Loop until the buffer answers that the run is stopping or done, or that this actor is to
        leave, and then until it has nothing left; that answer.

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
            self._tasks.clear()
            self._asking.clear()
            self.ids.flush()

    async def _loop(self, progress: asyncio.Task[None]) -> wire.Leases:
        asked_for, asked_with = 0, self.engine.applied
        while True:
            if self._told_to_leave is not None and not self._tasks:
                return self._told_to_leave
            room = max(0, self.config.rollout.max_in_flight - len(self._tasks))
            if self._told_to_leave is not None:
                room = 0
            outdated = room > 0 and (asked_for == 0 or asked_with != self.engine.applied)
            if not self._asking or outdated:
                asked_for, asked_with = room, self.engine.applied
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
                if reply.leave:
                    self._told_to_leave = reply
                for lease in reply.leases:
                    self._start(lease)

    async def _ask(self, room: int) -> wire.Leases:
        with self.shares.state("get_wait"), self._asking_wait(room):
            return await self.client.lease(
                self.name, self.engine.applied, capacity=room, wait_s=LEASE_WAIT_S
            )

    def _asking_wait(self, room: int) -> AbstractContextManager[object]:
        """Registered only when there is room: without, nothing is missing."""
        if not room:
            return nullcontext()
        samples = "1 sample" if room == 1 else f"{room} samples"
        # Why there are none the buffer knows: monitor/status_file.py adds it, by these words.
        return self.waits.on(f"leases for {samples}", owner="buffer-0")

    def _start(self, lease: Lease) -> None:
        self._progress[lease.lease] = Progress(open=len(lease.samples))
        samples = [lease.group.sample(k) for k in lease.samples]
        for sample in samples:
            self.ids.add("dispatched", sample, lease.lease)
        self.ids.flush()  # an actor that is killed leaves the list of what it had
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
            for sample in samples:
                self._spawn(lease, self._fail(lease, sample, kind, str(e)))
            return
        for sample in samples:
            self._spawn(lease, self._produce(lease, sample, prompt_ids))

    def _spawn(self, lease: Lease, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._ended(lease.lease))

    def _ended(self, lease: int) -> None:
        self._progress[lease].open -= 1
        if self._progress[lease].open == 0:
            del self._progress[lease]

    async def _produce(self, lease: Lease, sample: SampleId, prompt_ids: tuple[int, ...]) -> None:
        rollout = self.config.rollout
        request = GenerationRequest(
            f"{self.name}-{lease.lease}-{sample.sample}", prompt_ids,
            max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature,
        )  # fmt: skip
        times = [time.monotonic()]
        with self.shares.state("generate"):
            generation = await self.engine.generate(request, lambda n: self._count(lease.lease, n))
        times.append(time.monotonic())
        self._progress[lease.lease].leaving += 1
        try:
            became = await self._deliver(lease, sample, prompt_ids, generation, times)
            tokens = len(generation.response_ids)
            self.discarded_tokens += 0 if became == "accepted" else tokens
            self._trace(lease, sample, times, became, tokens)
        finally:
            self._progress[lease.lease].leaving -= 1

    async def _deliver(
        self, lease: Lease, sample: SampleId, prompt_ids: tuple[int, ...], generation: Generation,
        times: list[float],
    ) -> str:  # fmt: skip
        """Score and push; what became of the sample. `times` gets the end of each."""
        self.scoring += 1
        try:
            with self.shares.state("reward"), self.waits.on("a reward", "the reward's processes"):
                value = await self.reward.score(
                    lease.prompt, generation.text, str(generation.finish_reason)
                )
        except RewardError as e:
            if self.config.rollout.reward_failure == "drop":
                times.append(time.monotonic())
                await self._fail(lease, sample, FailureKind.REWARD, str(e))
                return "failed"
            value = self.config.rollout.reward_failure_score
            self.scored_failures += 1
            log.warning("sample %s is scored %g: %s", tuple(sample), value, e)
        finally:
            self.scoring -= 1
        times.append(time.monotonic())
        trajectory = build_trajectory(
            sample, lease.lease, self.name, prompt_ids, generation, value,
            self.config.rollout.temperature,
        )  # fmt: skip
        began = time.monotonic()
        with self.shares.state("put_wait"), self.waits.on("a push", owner="buffer-0"):
            status = await self.client.push(wire.pack_trajectory(trajectory))
        times.append(time.monotonic())
        self.pushes, self.push_s = self.pushes + 1, self.push_s + times[-1] - began
        self.samples_pushed += 1
        self.ids.add(f"pushed-{status}", sample, lease.lease)
        self.ids.flush()
        return status

    def _trace(
        self, lease: Lease, sample: SampleId, times: list[float], became: str, tokens: int
    ) -> None:
        """A line of the trace: when it was leased, generated, scored and pushed."""
        name = "/".join(map(str, sample))
        self.shares.spans.add(
            "sample", name, times[0], times[-1], id=sample, lease=lease.lease, ends=times[1:],
            became=became, tokens=tokens,
        )  # fmt: skip

    def _count(self, lease: int, tokens: int) -> None:
        self._progress[lease].number += tokens
        self.generated_tokens += tokens
        self.first_token.set()

    async def _fail(self, lease: Lease, sample: SampleId, kind: FailureKind, reason: str) -> None:
        self.failures[kind] = self.failures.get(kind, 0) + 1
        log.warning("sample %s failed (%s): %s", tuple(sample), kind, reason)
        status = await self.client.fail(self.name, lease.lease, sample, kind, reason)
        self.ids.add(f"failed-{kind}-{status}", sample, lease.lease)

    async def _report_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            for progress in self._progress.values():
                progress.number += self.engine.held_up  # an update has deadlines of its own
            grown = {lease: p.number for lease, p in self._progress.items() if p.report()}
            if grown:
                await self.client.progress(self.name, grown)
            self.ids.flush()
