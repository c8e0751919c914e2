"""The actor's side of a publication: a state machine over the engine.

    learner rank 0 ──WeightsInit──► join      whenever the group is another one
                   ──WeightsBegin─► begin    pause, as in_flight.py says
                   ──WeightsReceive► receive the collective brings the bytes
                   ──WeightsCommit► commit   load, stamp, go on generating

Never is half a version served: an update that fails before it is loaded leaves the old version
generating, one that fails later kills the engine. An update whose next step does not come
is given up after a deadline, so that a dead learner leaves no engine paused: the log says who has
not come, after which step and for how long. Where another actor's failure breaks the group of a
begun update, the engine stays paused and joins the next group: the same version, or a newer one,
then comes through that. However often that happens, it waits for a next step no longer than twice
the deadline after it was paused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from asyncrl.adapters import bytes_to_load
from asyncrl.errors import (
    AlreadyAppliedError,
    DamagedWeightsError,
    EngineError,
    WeightSyncError,
)
from asyncrl.metrics import TimeShares
from asyncrl.types import Version
from asyncrl.weights import publication_deadline_s

log = logging.getLogger(__name__)

STEP_MARGIN_S = 10.0
"""Seconds beyond a publication's deadline before a step counts as stuck: the collective
has that deadline too, and ends first unless a worker hangs."""


class UpdatableEngine(Protocol):
    """The steps of an engine that an update consists of (`VllmEngine` has them)."""

    @property
    def applied(self) -> Version: ...  # noqa: D102
    async def join_transfer(self, info: Mapping[str, Any]) -> None: ...  # noqa: D102
    async def begin_update(self) -> None: ...  # noqa: D102
    async def receive_update(self, info: Mapping[str, Any]) -> None: ...  # noqa: D102
    async def commit_update(self, version: Version) -> None: ...  # noqa: D102
    async def abandon_update(self) -> None: ...  # noqa: D102
    def fail(self, reason: str) -> None: ...  # noqa: D102


class EngineWeights:
    """`WeightSubscriber` over an engine.

    `staged` tells whether the backend receives into staging buffers (gloo) or straight
    into the model (nccl): then an update cannot be given up once begun. `drain_s` is how long the
    engine, and any other one, may wait for its requests. `on_given_up` hears of each version whose
    next step did not come from `sender`, and why the engine goes on without it. `shares` gets the
    time for which an update holds the engine up, as `sync`.
    """

    def __init__(
        self,
        engine: UpdatableEngine,
        *,
        timeout_s: float,
        staged: bool,
        drain_s: float = 0.0,
        sender: str = "learner-0",
        on_applied: Callable[[Version], None] | None = None,
        on_given_up: Callable[[Version, str], None] = lambda version, reason: None,
        shares: TimeShares | None = None,
    ) -> None:
        self._engine = engine
        self._shares = shares or TimeShares()
        self._timeout_s = timeout_s
        self._drain_s = drain_s
        self._staged = staged
        self._sender = sender
        self._on_applied, self._on_given_up = on_applied, on_given_up
        self.__state = "idle"
        self._version: Version | None = None
        self._deadline_s = timeout_s
        self._watchdog: asyncio.Task[None] | None = None
        self._steps = asyncio.Lock()  # one at a time, giving up included
        self._paused_at = 0.0
        self._longest_s = timeout_s  # of the deadlines since the pause
        self._timings: dict[str, float] = {}
        self._taken = False
        self._skipped = 0

    @property
    def _state(self) -> str:
        return self.__state

    @_state.setter
    def _state(self, state: str) -> None:
        """The time from the pause until the engine goes on, or is broken, is `sync`."""
        held_up, holds_up = (s not in ("idle", "broken") for s in (self.__state, state))
        if holds_up and not held_up:
            self._shares.enter("sync")
        elif held_up and not holds_up:
            self._shares.leave("sync")
        self.__state = state

    @property
    def updating(self) -> bool:
        """Whether an update is under way."""
        return self._state not in ("idle", "broken")

    def metrics(self) -> dict[str, float]:
        """sync/skipped so far; once of each update, sync/pause_s and sync/load_s."""
        timings, self._timings = self._timings, {}
        return {"sync/skipped": float(self._skipped), **timings}

    async def join(self, info: Mapping[str, Any]) -> None:
        """Join the transfer group described by the publisher; leaves an earlier one.

        An engine that is paused already stays so, and what it had received is forgotten.
        """
        async with self._steps:
            self._expect("join", "idle", "begun", "received")
            self._unwatch()
            if self._state == "received":
                if not self._staged:
                    await self._give_up("it holds weights of a group that is no more")
                    raise EngineError(f"weight update to {self._version}: loaded but not committed")
                self._state = "begun"
            self._deadline_s = self._timeout_s
            try:
                with self._shares.state("sync"):  # the engine's workers do nothing else meanwhile
                    await self._step("join", self._engine.join_transfer(info))
            finally:
                if self._state == "begun":
                    self._watch()

    async def begin(self, version: Version) -> None:
        """Pause at a token boundary, empty the prefix cache, get ready to receive.

        Raises:
            AlreadyAppliedError: the engine runs `version` or a newer one.
        """
        async with self._steps:
            self._expect("begin", "idle", "begun")
            if version <= self._engine.applied:
                raise AlreadyAppliedError(f"version {version} is not above {self._engine.applied}")
            self._unwatch()
            self._deadline_s, self._version = self._timeout_s + self._drain_s, version
            if self._state == "idle":
                self._state, self._paused_at = "begun", time.monotonic()
                self._longest_s = self._deadline_s
                await self._step("begin", self._engine.begin_update())
            self._watch()

    async def receive(self, info: Mapping[str, Any]) -> None:
        """Take part in the collective; afterwards every worker holds the whole version."""
        async with self._steps:
            self._expect("receive", "begun")
            self._unwatch()
            try:
                nbytes = bytes_to_load(info)
            except Exception as e:  # the next try would begin again, and find it paused
                await self._give_up(f"receive failed: {e!r}")
                raise
            self._deadline_s = publication_deadline_s(self._timeout_s, nbytes)
            self._longest_s = max(self._longest_s, self._deadline_s)
            await self._step("receive", self._engine.receive_update(info))
            self._state = "received"
            self._watch()

    async def commit(self, version: Version) -> None:
        """Load what was received, stamp it as `version`, go on generating."""
        async with self._steps:
            self._expect("commit", "received")
            if version != self._version:
                raise WeightSyncError(f"commit of {version}, but {self._version} was begun")
            self._unwatch()
            before, began = self._engine.applied, time.monotonic()
            self._state = "committing"
            await self._step("commit", self._engine.commit_update(version))
            self._state = "idle"
            self._note(before, version, began)
            if self._on_applied is not None:
                self._on_applied(version)

    async def close(self) -> None:
        """Give up an unfinished update."""
        async with self._steps:
            self._unwatch()
            if self._state in ("begun", "received"):
                await self._give_up("the actor is closing")

    def _note(self, before: Version, version: Version, load_began: float) -> None:
        now = time.monotonic()
        self._timings = {
            "sync/pause_s": now - self._paused_at,
            "sync/load_s": now - load_began,
        }
        # What came before this process's first update, it was not there to take.
        if self._taken and before.incarnation == version.incarnation:
            self._skipped += version.version - before.version - 1
        self._taken = True

    def _expect(self, step: str, *states: str) -> None:
        if self._state == "broken":
            raise EngineError(f"{step}: the engine is broken by an earlier weight update")
        if self._state not in states:
            raise WeightSyncError(f"{step} in state {self._state!r}, expected {states[0]!r}")

    async def _step(self, name: str, work: Awaitable[None]) -> None:
        """Run one step by its deadline; on failure the old version goes on, or the engine ends.

        Raises:
            WeightSyncError: it failed, a whole version goes on (or stays paused: join);
                DamagedWeightsError if that was the reason.
            EngineError: it failed, and the engine with it.
        """
        try:
            with self._shares.spans.span("weights", name, version=str(self._version)):
                async with asyncio.timeout(self._deadline_s + STEP_MARGIN_S):
                    await work
        except TimeoutError:
            # The workers are stuck in the call: nothing else can be asked of them.
            reason = f"weight update: {name} took over {self._deadline_s + STEP_MARGIN_S:.0f} s"
            self._state = "broken"
            self._engine.fail(reason)
            raise EngineError(reason) from None
        except Exception as e:
            if name != "join":
                await self._give_up(f"{name} failed: {e}")
            dead = self._state == "broken" or isinstance(e, EngineError)
            damaged = isinstance(e, DamagedWeightsError)
            kind = EngineError if dead else DamagedWeightsError if damaged else WeightSyncError
            raise kind(f"weight update: {name} failed: {e}") from e

    async def _give_up(self, reason: str) -> None:
        """Go on with the old version where that is whole, else end the engine."""
        state, self._state = self._state, "idle"
        if self._staged and state in ("begun", "received"):
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._engine.abandon_update()
                return
            except Exception as e:
                reason = f"{reason}; going back to {self._engine.applied} failed: {e}"
        self._state = "broken"
        self._engine.fail(f"weight update to {self._version} left no whole version: {reason}")

    def _watch(self) -> None:
        wait_s = self._deadline_s
        if self._state == "begun":  # which any number of groups may leave it in
            left_s = self._paused_at + 2 * self._longest_s - time.monotonic()
            wait_s = max(0.0, min(wait_s, left_s))

        async def expire() -> None:
            await asyncio.sleep(wait_s)
            async with self._steps:  # a step that came just now cancels this wait
                self._watchdog = None
                await self._expire(wait_s)

        self._watchdog = asyncio.create_task(expire())

    async def _expire(self, waited_s: float) -> None:
        """Go on without the next step, and say who has not come with it."""
        version, last = self._version, "receive" if self._state == "received" else "begin"
        paused_s = time.monotonic() - self._paused_at
        reason = (
            f"no step after {last} from {self._sender} within {waited_s:.0f} s, "
            f"paused for {paused_s:.0f} s"
        )
        await self._give_up(reason)
        if version is not None and self._state == "idle":  # a lost engine says it itself
            log.warning("weights %s: %s; going on with %s", version, reason, self._engine.applied)
            self._on_given_up(version, reason)

    def _unwatch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None
