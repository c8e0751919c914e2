"""The control socket of a publication, on the side of whoever takes weights.

learner rank 0 ──one request at a time──► WeightService ──► a WeightSubscriber ──► Ok, Error
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import zmq
import zmq.asyncio

from asyncrl import wire
from asyncrl.errors import AlreadyAppliedError, AsyncRLError, WireError
from asyncrl.protocols import WeightSubscriber
from asyncrl.security import MAX_CONTROL_BYTES, Keys, secure_server
from asyncrl.types import Version

log = logging.getLogger(__name__)

STEPS = {
    wire.WeightsInit: "join", wire.WeightsBegin: "begin", wire.WeightsReceive: "receive",
    wire.WeightsCommit: "commit",
}  # fmt: skip


class WeightService:
    """Serves a subscriber to the learner: one ROUTER socket, one request at a time.

    Failures go back as `wire.Error`; the service itself goes on. Since the learner may be the one
    that failed, and hear of nothing any more, they are logged here too, and `on_failure` hears of
    them: the version (None: of a join), and why. Should the service end all the same, `wait` says
    why. `on_idle`, when set, is called after each request served.
    """

    def __init__(
        self,
        subscriber: WeightSubscriber,
        host: str = "127.0.0.1",
        keys: Keys | None = None,
        *,
        on_failure: Callable[[Version | None, str], None] = lambda version, reason: None,
    ) -> None:
        self._subscriber, self._on_failure = subscriber, on_failure
        self._version: Version | None = None  # begun last
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
        req, step, began = 0, "", time.monotonic()
        unforeseen: Exception | None = None
        try:
            message, _ = wire.decode(frames)
            req, step = message.req, STEPS.get(type(message), "")
            await self._dispatch(message)
        except AlreadyAppliedError as e:
            return wire.Error(req=req, error=type(e).__name__, message=str(e))
        except AsyncRLError as e:
            error = wire.Error(req=req, error=type(e).__name__, message=str(e))
        except Exception as e:
            unforeseen = e
            error = wire.Error(req=req, error="EngineError", message=f"{type(e).__name__}: {e}")
        else:
            return wire.Ok(req=req)
        if step:  # else it is nobody's step
            self._failed(step, time.monotonic() - began, error.message, unforeseen)
        return error

    def _failed(self, step: str, seconds: float, why: str, unforeseen: Exception | None) -> None:
        version = None if step == "join" else self._version
        of = "" if version is None else f" of {version}"
        reason = f"{step}{of} from learner-0 failed after {seconds:.1f} s: {why}"
        log.warning("weights: %s", reason, exc_info=unforeseen)
        self._on_failure(version, reason)

    async def _dispatch(self, message: wire.Message) -> None:
        match message:
            case wire.WeightsInit():
                await self._subscriber.join({**message.info, "rank_offset": message.rank_offset})
            case wire.WeightsBegin():
                self._version = message.version
                await self._subscriber.begin(message.version)
            case wire.WeightsReceive():
                await self._subscriber.receive(message.info)
            case wire.WeightsCommit():
                await self._subscriber.commit(message.version)
            case _:
                raise WireError(f"{type(message).__name__} is not for the weight service")
