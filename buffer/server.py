"""The buffer's process: the ledger behind one ZeroMQ ROUTER socket, on one event loop.

    actors ── lease, push, progress, fail ──►┐                        ┌─► metrics (emit)
                                             │  ROUTER ─► answer ─► ledger ─► retired samples
    learner ── pull, commit, published ─────►┘     ▲         │        (buffer/trajectories.py)
                                                   └─ parked ┘
    consumes  one message at a time, in the order of arrival, in one task
    waits     for a message, or for the next tick (TICK_S)
    settles   after each burst of messages: the store commits once, then the replies leave
    releases  parked lease requests: free samples, lower positions, a stop, their time
              parked pulls: a complete batch, exhausted prompts, hopeless work, a stop, their time
              leases: their deadline, an actor that is silent, gone or replaced

Every request gets exactly one reply, so a client's own outstanding requests bound the send queue
(its high-water mark is off: a reply is never dropped). Array frames are kept and sent as they
came. After a stop, batches that are assigned are still served, so that no rank is left alone in a
batch that another has; new ones are not. The buffer stops the run itself when its prompts end or
groups are left out without end.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.asyncio import Context as AsyncContext

from asyncrl import wire
from asyncrl.buffer.answers import Answers
from asyncrl.buffer.clients import Clients
from asyncrl.buffer.durable import Keeper
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.record import Emit, Recorder
from asyncrl.buffer.refuse import refusal
from asyncrl.buffer.saving import Saving
from asyncrl.buffer.trajectories import TrajectoryWriter
from asyncrl.errors import ConservationError, DeadlineError, WireError
from asyncrl.metrics import TimeShares
from asyncrl.security import Keys, secure_server
from asyncrl.types import Version

TICK_S = 0.25
"""Longest time between two looks at deadlines."""
BURST = 256
"""Messages handled before the loop looks at deadlines and other tasks."""
MAX_FRAME_BYTES = 256 << 20
"""A client that sends a longer frame is disconnected."""
LOGGED_MALFORMED = 100
"""Malformed messages that the log tells of one by one; a flood of them must not fill the disk."""
MAX_FRAMES = 8
"""Frames of one message that are looked at; a message with more is malformed."""
BIND_S = 15.0
"""How long a restarted buffer tries to get the port of its predecessor."""

logger = logging.getLogger(__name__)


class BufferServer:
    """Serves a ledger to actors and learner ranks.

    >>> server = BufferServer(ledger, run_id="r")  # doctest: +SKIP
    >>> endpoint = await server.start()            # doctest: +SKIP
    >>> await server.run()                         # doctest: +SKIP

    Args:
        ledger: the rules; nobody else may use it while the server runs.
        run_id: clients of another run are refused.
        host: address to bind.
        port: port to bind; 0 is the system's choice. A restarted buffer has its predecessor's.
        keys: CURVE keys; None is plain text.
        keeper: where payloads live and what survives this process (`durable`); None: nothing.
        emit: takes the buffer's metrics after each commit, and its events.
        recording: takes the samples that retire; the server closes it at its end.
        silent_after_s: an actor that says nothing for this long loses its leases to others.
        clock: seconds, never going back.
        drain_s: after a stop, `run` ends when no message has come for this long.
        copies_below: the run's folder, below which copies of the ledger may be written; None: none.
        shares: gets the time in which it serves, and does not wait for messages.
    """

    def __init__(
        self,
        ledger: Ledger,
        *,
        run_id: str,
        host: str = "127.0.0.1",
        port: int = 0,
        keys: Keys | None = None,
        keeper: Keeper | None = None,
        emit: Emit | None = None,
        recording: TrajectoryWriter | None = None,
        silent_after_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        drain_s: float = 60.0,
        copies_below: Path | None = None,
        shares: TimeShares | None = None,
    ) -> None:
        self._host, self._port, self._keys = host, port, keys
        self._clock = clock
        self._drain_s = drain_s
        self._shares = shares or TimeShares()
        self._ledger = ledger
        self._keeper = keeper or Keeper()
        self._recorder = Recorder(ledger, recording, emit)
        self._outbox: list[tuple[bytes, Sequence[wire.Frame]]] = []
        self._saving = Saving(ledger, run_id, copies_below, self._reply)
        self._answers = Answers(
            ledger, Clients(run_id, silent_after_s), clock, self._reply, self._recorder,
            self._keeper, self._saving,
        )  # fmt: skip
        self._context: Any = None
        self._poller: Any = None  # the ROUTER as the event loop sees it
        self._socket: Any = None  # the same one, to take and send without a future per message
        self._gate: Any = None
        self._last_message_s = 0.0

    async def start(self) -> str:
        """Bind, and return the endpoint to announce, e.g. "tcp://127.0.0.1:41873".

        Raises:
            DeadlineError: the port is not free within BIND_S.
        """
        self._context = AsyncContext()
        self._poller = self._context.socket(zmq.ROUTER)
        self._socket = zmq.Socket.shadow(self._poller)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 0),
            (zmq.ROUTER_MANDATORY, 1),  # a reply to a client that is gone is an error, not a drop
            (zmq.ROUTER_HANDOVER, 1),  # a client that reconnects keeps its identity
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
        ):
            self._socket.setsockopt(option, value)
        self._gate = secure_server(self._poller, self._keys)
        self._answers.facts.append(self._gate.metrics)
        await self._bind()
        self._answers.resume(self._clock())
        self._recorder.put(self._keeper.unrecorded)
        self._keeper.unrecorded = ()
        self._last_message_s = self._clock()
        return str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))

    async def _bind(self) -> None:
        until = time.monotonic() + BIND_S
        while True:
            try:
                self._socket.bind(f"tcp://{self._host}:{self._port}")
                return
            except zmq.ZMQError as e:
                if e.errno != errno.EADDRINUSE or time.monotonic() > until:
                    raise DeadlineError(
                        f"cannot bind {self._host}:{self._port}: {e}; it is another "
                        f"process's, and did not become free in {BIND_S:.0f} s"
                    ) from e
            await asyncio.sleep(0.1)

    async def run(self) -> None:
        """Serve until stopped and drained, or cancelled; then close.

        Raises:
            ConservationError: the conservation law does not hold (the message has the counts).
            StoreError: the store cannot take what happened; nobody was told that it has.
        """
        if self._socket is None:
            await self.start()
        next_tick = self._clock()
        self._shares.enter("serve")
        try:
            while not self._drained():
                with self._shares.away("serve"):
                    await self._poller.poll(TICK_S * 1000)
                all_read = self._receive()
                now = self._clock()
                if now >= next_tick:
                    next_tick = now + TICK_S
                    self._ledger.expire(now)
                    if all_read:
                        self._answers.look_for_silence(now)
                self._answers.serve_parked(now)
                self._recorder.drain(over=self._answers.ending.state == "done")
                self._settle()
            self._answers.check_conservation()
        except ConservationError:
            if self._outbox:  # its last is the refusal of what brought it to light
                self._send(*self._outbox[-1])
            raise
        finally:
            self._shares.leave("serve")
            self.close()
            self._saving.close()
            self._recorder.close()
            self._keeper.close()

    def _settle(self) -> None:
        """What has happened is stored, then those who asked for it are told."""
        self._keeper.settle(recorded=self._recorder.idle)
        for identity, frames in self._outbox:
            self._send(identity, frames)
        self._outbox.clear()

    def metrics(self) -> dict[str, float]:
        """`wire/unauthenticated`, unless it is 0."""
        gauges: dict[str, float] = self._gate.metrics()
        return gauges

    def stop(self, reason: str, final: Version | None = None, evaluate: bool = False) -> None:
        """End the run (call it on the server's loop): "done" with `final`, else "stopping".

        Parked requests are answered within TICK_S.
        """
        self._answers.ending.stop(reason, final, evaluate)

    def close(self) -> None:
        """Close the socket; `run` does it at its end."""
        if self._poller is not None:
            self._poller.close(linger=0)
            self._poller = self._socket = None
        if self._context is not None:
            self._context.term()
            self._context = None

    def _drained(self) -> bool:
        if self._answers.ending.running or len(self._answers.polls) or self._saving.busy:
            return False
        return self._clock() - self._last_message_s >= self._drain_s

    def _receive(self) -> bool:
        """Answer what has come, a burst at most; whether that was all."""
        for _ in range(BURST):
            try:
                identity = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            self._last_message_s = self._clock()
            self._handle(identity, self._frames())
        return False

    def _frames(self) -> list[wire.Frame]:
        """The rest of a message; of one with too many frames no more than shows it."""
        socket = self._socket
        # A header is small: copied it is faster than as a frame. A payload stays where it is.
        # (A ROUTER always has a frame behind the identity. A frame knows whether more follow for a
        # tenth of what asking the socket costs.)
        frames: list[wire.Frame] = [socket.recv()]
        more = socket.rcvmore
        while more:
            frame = socket.recv(copy=False)
            more = frame.more
            if len(frames) <= MAX_FRAMES:
                frames.append(frame.buffer)
        return frames

    def _handle(self, identity: bytes, frames: Sequence[wire.Frame]) -> None:
        """Answer one message; whatever it is, the server goes on."""
        try:
            message, arrays = wire.decode(frames)
        except WireError as e:
            self._answers.malformed += 1
            if self._answers.malformed <= LOGGED_MALFORMED:
                logger.warning("malformed message from %r: %.500s", identity, e)
            if self._answers.malformed == LOGGED_MALFORMED:
                logger.warning("further malformed messages are counted only")
            self._reply(identity, refusal(_request_number(frames), e, "message"))
            return
        self._answers.answer(identity, message, arrays)

    def _reply(self, identity: bytes, frames: Sequence[wire.Frame]) -> None:
        """A reply leaves when what it tells is settled."""
        self._outbox.append((identity, frames))

    def _send(self, identity: bytes, frames: Sequence[wire.Frame]) -> None:
        try:
            parts = [identity, *map(_as_it_came, frames)]
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as e:
            # The client is gone; what it held expires, and a resend is answered afresh.
            logger.info("no reply to %r: %s", identity, e)


def _as_it_came(part: wire.Frame) -> wire.Frame | zmq.Frame:
    """The whole frame that a payload was received in, which libzmq sends on by reference.

    A view of it would be wrapped anew, at ten times the cost.
    """
    if isinstance(part, memoryview):
        frame = part.obj
        if isinstance(frame, zmq.Frame) and len(frame) == part.nbytes:
            return frame
    return part


def _request_number(frames: Sequence[wire.Frame]) -> int:
    """The `req` of a message that did not decode, or 0, so that its client can match the reply."""
    try:
        req = msgspec.msgpack.decode(frames[0])["req"]
    except (IndexError, KeyError, TypeError, ValueError, msgspec.DecodeError, RecursionError):
        return 0
    return req if type(req) is int and 0 <= req < 1 << 63 else 0  # a bool is no number
