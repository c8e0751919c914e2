"""A client's connection to the buffer: requests, replies, and what is sent again.

    request ──► reply with the same number      none in time ──► the same request again
                HelloNeeded: the buffer was restarted and knows nobody
                             ──► hello, resumed, with the leases known ──► all that is open again

A request that is sent twice has the same number, by which the buffer knows it. Waits for: a
reply (released by the buffer, or by the request's own deadline).
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import zmq
from zmq.asyncio import Context as AsyncContext

from asyncrl import errors, wire
from asyncrl.errors import AsyncRLError, DeadlineError, HelloNeeded, WireError
from asyncrl.security import Keys, secure_client

RESEND_S = 2.0
"""A request without a reply is sent again after so long, besides the time that it asks to wait."""
KNOWN_LEASES = 4096
"""Newest leases that a connection remembers, to name them to a restarted buffer."""

M = TypeVar("M", bound=wire.Message)


@dataclass(frozen=True, slots=True)
class Peer:
    """Who connects where."""

    endpoint: str
    run_id: str
    role: str
    rank: int
    timeout_s: float
    """Time for a reply, on top of the time that a request asks to wait."""
    resend_s: float = RESEND_S
    keys: Keys | None = None

    @property
    def name(self) -> str:
        """ROLE-RANK."""
        return f"{self.role}-{self.rank}"

    def hello(self, leases: Sequence[int] | None = None) -> wire.Hello:
        """The introduction; with `leases` it is a client that the buffer has known."""
        return wire.Hello(
            run_id=self.run_id, role=self.role, rank=self.rank, pid=os.getpid(),
            resumed=leases is not None, leases=tuple(leases or ()),
        )  # fmt: skip

    def connect(self, context: Any) -> Any:
        """A DEALER whose identity stays the same when the connection is made anew."""
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IDENTITY, f"{self.name}/{uuid.uuid4().hex[:12]}".encode())
        secure_client(socket, self.keys)
        socket.connect(self.endpoint)
        return socket

    def late(self, what: str, seconds: float) -> DeadlineError:
        """No reply in time."""
        return DeadlineError(
            f"{self.name} waited {seconds:.0f} s for the buffer's reply to {what} "
            f"({self.endpoint}): the buffer is gone or overloaded, or does not take our keys; "
            "see its log"
        )


def expect(message: wire.Message, *kinds: type[M]) -> M:
    """The reply, if it is of a kind that answers the request; an Error is raised as its class."""
    if isinstance(message, kinds):
        return message
    if isinstance(message, wire.Error):
        kind = getattr(errors, message.error, AsyncRLError)
        if not (isinstance(kind, type) and issubclass(kind, AsyncRLError)):
            kind = AsyncRLError
        raise kind(message.message)
    raise WireError(f"the buffer answered with {type(message).__name__}, expected {kinds}")


def _hello_needed(reply: wire.Message) -> bool:
    return isinstance(reply, wire.Error) and reply.error == HelloNeeded.__name__


@dataclass(slots=True)
class _Open:
    """A request without a reply."""

    frames: list[wire.Frame]
    reply: asyncio.Future[wire.Message]


class AsyncConnection:
    """For one event loop; requests may be open at the same time."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.resent = 0
        """Requests sent again."""
        self._context = AsyncContext()
        self._socket = peer.connect(self._context)
        self._req = 0
        self._open: dict[int, _Open] = {}
        self._known: deque[int] = deque(maxlen=KNOWN_LEASES)
        self._reader: asyncio.Task[None] | None = None
        self._greeting: asyncio.Task[None] | None = None

    async def exchange(
        self, request: wire.Message, what: str, *, payload: Sequence[wire.Frame] = (),
        wait_s: float = 0.0,
    ) -> wire.Message:  # fmt: skip
        """The reply to a request that asks the buffer to wait up to `wait_s`.

        Raises:
            DeadlineError: no reply; the message names who waits for what.
            WireError: a reply cannot be read.
        """
        if self._reader is None:
            self._reader = asyncio.create_task(self._read(), name=f"{self.peer.name} replies")
        self._req += 1
        req, limit_s = self._req, self.peer.timeout_s + wait_s
        frames = wire.encode(msgspec.structs.replace(request, req=req), payload)
        entry = _Open(frames, asyncio.get_running_loop().create_future())
        self._open[req] = entry
        try:
            async with asyncio.timeout(limit_s):
                await self._socket.send_multipart(frames, copy=False)
                again_s = wait_s + self.peer.resend_s
                while not (await asyncio.wait((entry.reply,), timeout=again_s))[0]:
                    self.resent += 1
                    await self._socket.send_multipart(frames, copy=False)
                return entry.reply.result()
        except TimeoutError as e:
            raise self.peer.late(what, limit_s) from e
        finally:
            self._open.pop(req, None)

    async def _read(self) -> None:
        """Hand each reply to the call that waits for it; one that nobody waits for is dropped."""
        while True:
            parts = await self._socket.recv_multipart(copy=False)
            try:
                reply, _ = wire.decode([part.buffer for part in parts])
            except WireError as e:
                self._fail_all(e)
                continue
            if _hello_needed(reply):
                if self._greeting is None or self._greeting.done():
                    self._greeting = asyncio.create_task(self._greet())
                continue
            entry = self._open.get(reply.req)
            if entry is not None and not entry.reply.done():
                if isinstance(reply, wire.Leases):
                    self._known.extend(x.lease for x in reply.leases)
                entry.reply.set_result(reply)

    async def _greet(self) -> None:
        """Introduce this client to a restarted buffer, and send again what is open."""
        try:
            reply = await self.exchange(self.peer.hello(list(self._known)), "Hello")
            expect(reply, wire.Ok)
        except DeadlineError:
            return  # each open request has a deadline of its own
        except AsyncRLError as e:
            self._fail_all(e)
            return
        for entry in list(self._open.values()):
            if not entry.reply.done():
                self.resent += 1
                await self._socket.send_multipart(entry.frames, copy=False)

    def _fail_all(self, error: AsyncRLError) -> None:
        """A reply that cannot be read may be anybody's: every call fails now, not later."""
        for entry in self._open.values():
            if not entry.reply.done():
                entry.reply.set_exception(error)

    def close(self) -> None:
        """Cancel what waits and close; nothing is left behind. Safe to call twice."""
        for task in (self._reader, self._greeting):
            if task is not None:
                task.cancel()
        self._reader = self._greeting = None
        for entry in self._open.values():
            entry.reply.cancel()
        self._open.clear()
        if not self._socket.closed:
            self._socket.close(linger=0)
            self._context.term()


class Connection:
    """Blocking, for one thread at a time."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.resent = 0
        """Requests sent again."""
        self._context: Any = zmq.Context()
        self._socket: Any = peer.connect(self._context)
        self._req = 0

    def exchange(
        self, request: wire.Message, what: str, *, wait_s: float = 0.0, limit_s: float | None = None
    ) -> tuple[wire.Message, tuple[wire.Frame, ...]]:
        """The reply to a request, and its payload frames (see `AsyncConnection.exchange`)."""
        limit_s = wait_s + self.peer.timeout_s if limit_s is None else limit_s
        until = time.monotonic() + limit_s
        message = self._numbered(request)
        frames = wire.encode(message)
        self._send(frames, until)
        while True:
            again = min(until, time.monotonic() + wait_s + self.peer.resend_s)
            found = self._reply_to(message.req, again)
            if found is not None and _hello_needed(found[0]):
                hello = self._numbered(self.peer.hello([]))
                self._send(wire.encode(hello), until)
                by = min(until, time.monotonic() + self.peer.resend_s)
                greeted = self._reply_to(hello.req, by)
                if greeted is not None:
                    expect(greeted[0], wire.Ok)
            elif found is not None:
                return found
            if time.monotonic() >= until:
                raise self.peer.late(what, limit_s)
            self.resent += 1
            self._send(frames, until)

    def _numbered(self, request: M) -> M:
        self._req += 1
        return msgspec.structs.replace(request, req=self._req)

    def _send(self, frames: list[wire.Frame], until: float) -> None:
        """Send; a queue that stays full until then is left to the deadline."""
        self._socket.sndtimeo = max(1, int(1000 * (until - time.monotonic())))
        try:
            self._socket.send_multipart(frames, copy=False)
        except zmq.Again:
            return

    def _reply_to(
        self, req: int, until: float
    ) -> tuple[wire.Message, tuple[wire.Frame, ...]] | None:
        """The reply with this number, or None by then; older ones came too late."""
        while (left := until - time.monotonic()) > 0 and self._socket.poll(left * 1000):
            parts = self._socket.recv_multipart(copy=False)
            reply, arrays = wire.decode([part.buffer for part in parts])
            if reply.req == req:
                return reply, arrays
        return None

    def close(self) -> None:
        """Close; nothing is left behind. Safe to call twice."""
        if not self._socket.closed:
            self._socket.close(linger=0)
            self._context.term()
