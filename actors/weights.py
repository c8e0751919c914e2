"""The actor's side of a publication: a state machine over the engine, and its control socket.

    learner rank 0 ──WeightsInit──► join      whenever the group is another one
                   ──WeightsBegin─► begin    pause, as in_flight.py says
                   ──WeightsReceive► receive the collective brings the bytes
                   ──WeightsCommit► commit   load, stamp, go on generating

Never is half a version served: an update that fails before it is loaded leaves the old version
generating, one that fails later kills the engine. An update whose next step does not come
is given up after a deadline, so that a dead learner leaves no engine paused. Where another
actor's failure breaks the group of a begun update, the engine stays paused and joins the next
group: the same version, or a newer one, then comes through that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import zmq
import zmq.asyncio

from asyncrl import wire
from asyncrl.errors import (
    AlreadyAppliedError,
    AsyncRLError,
    DamagedWeightsError,
    EngineError,
    WeightSyncError,
    WireError,
)
from asyncrl.metrics import TimeShares
from asyncrl.protocols import WeightSubscriber
from asyncrl.security import MAX_CONTROL_BYTES, Keys, secure_server
from asyncrl.types import Version
from asyncrl.weights import TransferPlan, publication_deadline_s

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
    engine, and any other one, may wait for its requests. `shares` gets the time for which an update
    holds the engine up, as `sync`.
    """

    def __init__(
        self,
        engine: UpdatableEngine,
        *,
        timeout_s: float,
        staged: bool,
        drain_s: float = 0.0,
        on_applied: Callable[[Version], None] | None = None,
        shares: TimeShares | None = None,
    ) -> None:
        self._engine = engine
        self._shares = shares or TimeShares()
        self._timeout_s = timeout_s
        self._drain_s = drain_s
        self._staged = staged
        self._on_applied = on_applied
        self.__state = "idle"
        self._version: Version | None = None
        self._deadline_s = timeout_s
        self._watchdog: asyncio.Task[None] | None = None
        self._steps = asyncio.Lock()  # one at a time, giving up included

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
                self._state = "begun"
                await self._step("begin", self._engine.begin_update())
            self._watch()

    async def receive(self, info: Mapping[str, Any]) -> None:
        """Take part in the collective; afterwards every worker holds the whole version."""
        async with self._steps:
            self._expect("receive", "begun")
            nbytes = TransferPlan.from_info(info).nbytes
            self._unwatch()
            self._deadline_s = publication_deadline_s(self._timeout_s, nbytes)
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
            self._state = "committing"
            await self._step("commit", self._engine.commit_update(version))
            self._state = "idle"
            if self._on_applied is not None:
                self._on_applied(version)

    async def close(self) -> None:
        """Give up an unfinished update."""
        async with self._steps:
            self._unwatch()
            if self._state in ("begun", "received"):
                await self._give_up("the actor is closing")

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
        async def expire() -> None:
            await asyncio.sleep(self._deadline_s)
            async with self._steps:  # a step that came just now cancels this wait
                self._watchdog = None
                await self._give_up(f"no next step within {self._deadline_s:.0f} s")

        self._watchdog = asyncio.create_task(expire())

    def _unwatch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            self._watchdog = None


class WeightService:
    """Serves a subscriber to the learner: one ROUTER socket, one request at a time.

    Failures go back as `wire.Error`; the service itself goes on. Should it end all the same,
    `wait` says why. `on_idle`, when set, is called after each request served.
    """

    def __init__(
        self, subscriber: WeightSubscriber, host: str = "127.0.0.1", keys: Keys | None = None
    ) -> None:
        self._subscriber = subscriber
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
        self.gate = secure_server(self._socket, keys)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"
        self._task: asyncio.Task[None] | None = None
        self._serving = False
        self.on_idle: Callable[[], None] | None = None

    @property
    def ready(self) -> bool:
        """Whether a request would be taken up at once: none is being served."""
        return not self._serving

    def start(self) -> None:
        """Serve in a task of the running loop."""
        self._task = asyncio.create_task(self._serve())

    async def wait(self) -> None:
        """Wait until the started service ends, which only `close` or a bug makes it do.

        Raises:
            Exception: what ended it.
        """
        assert self._task is not None, "start() comes first"
        await asyncio.shield(self._task)  # whoever waits may be cancelled, the service goes on

    async def close(self) -> None:
        """Stop serving."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def _serve(self) -> None:
        while True:
            peer, *frames = await self._socket.recv_multipart()
            self._serving = True
            reply = await self._answer(frames)
            await self._socket.send_multipart([peer, *wire.encode(reply)])
            self._serving = False
            if self.on_idle is not None:
                self.on_idle()

    async def _answer(self, frames: list[bytes]) -> wire.Message:
        req = 0
        try:
            message, _ = wire.decode(frames)
            req = message.req
            await self._dispatch(message)
        except AsyncRLError as e:
            return wire.Error(req=req, error=type(e).__name__, message=str(e))
        except Exception as e:
            return wire.Error(req=req, error="EngineError", message=f"{type(e).__name__}: {e}")
        return wire.Ok(req=req)

    async def _dispatch(self, message: wire.Message) -> None:
        match message:
            case wire.WeightsInit():
                await self._subscriber.join({**message.info, "rank_offset": message.rank_offset})
            case wire.WeightsBegin():
                await self._subscriber.begin(message.version)
            case wire.WeightsReceive():
                await self._subscriber.receive(message.info)
            case wire.WeightsCommit():
                await self._subscriber.commit(message.version)
            case _:
                raise WireError(f"{type(message).__name__} is not for the weight service")
