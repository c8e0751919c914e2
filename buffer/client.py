"""Clients of the buffer: asynchronous for actors, blocking for learner ranks and the launcher.

Every call has a deadline and raises DeadlineError naming who waits for what; a call may then be
made again: results are deduplicated by sample id, pulls and commits are idempotent.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import zmq
from zmq.asyncio import Context as AsyncContext

from asyncrl import errors, wire
from asyncrl.errors import AsyncRLError, DeadlineError, WireError
from asyncrl.types import BatchPart, Envelope, FailureKind, SampleId, Version

TIMEOUT_S = 30.0
"""Default time for a reply, on top of the time that a request asks to wait."""

M = TypeVar("M", bound=wire.Message)


def _identity(name: str) -> bytes:
    """A socket identity that stays the same when the connection is made anew."""
    return f"{name}/{uuid.uuid4().hex[:12]}".encode()


def _expect(message: wire.Message, *kinds: type[M]) -> M:
    """The reply, if it is of a kind that answers the request; an Error is raised as its class."""
    if isinstance(message, kinds):
        return message
    if isinstance(message, wire.Error):
        kind = getattr(errors, message.error, AsyncRLError)
        if not (isinstance(kind, type) and issubclass(kind, AsyncRLError)):
            kind = AsyncRLError
        raise kind(message.message)
    raise WireError(f"the buffer answered with {type(message).__name__}, expected {kinds}")


def _late(name: str, what: str, endpoint: str, seconds: float) -> DeadlineError:
    return DeadlineError(
        f"{name} waited {seconds:.0f} s for the buffer's reply to {what} ({endpoint}): "
        "the buffer is gone or overloaded; see its log"
    )


class AsyncBufferClient:
    """An actor's connection; calls may run concurrently. Make and use it inside one event loop.

    Raises (every call): DeadlineError; what the buffer refused, as its class of asyncrl.errors.
    """

    def __init__(
        self, endpoint: str, run_id: str, role: str, rank: int, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.name = f"{role}-{rank}"
        self._hello = wire.Hello(run_id=run_id, role=role, rank=rank, pid=os.getpid())
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._context = AsyncContext()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, _identity(self.name))
        self._socket.connect(endpoint)
        self._req = 0
        self._pending: dict[int, asyncio.Future[wire.Message]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def hello(self) -> None:
        """Introduce this process; a former one of the same name loses its leases."""
        await self._call(self._hello, "Hello", wire.Ok)

    async def lease(
        self, actor: str, applied: Version, capacity: int, wait_s: float = 10.0
    ) -> wire.Leases:
        """Ask for up to `capacity` samples; the answer may take `wait_s` and may be empty.

        A newer request answers an older one that still waits (empty): ask again when the
        engine's version changes.
        """
        request = wire.LeaseRequest(actor=actor, applied=applied, capacity=capacity, wait_s=wait_s)
        return await self._call(request, "LeaseRequest", wire.Leases, wait_s=wait_s)

    async def push(self, envelope: Envelope) -> str:
        """Deliver a sample: "accepted", "duplicate" or "unknown"."""
        what = f"Push of {'/'.join(map(str, envelope.header.id))}"
        request = wire.Push(header=envelope.header)
        return (await self._call(request, what, wire.Ack, frames=envelope.frames)).status

    async def progress(self, actor: str, tokens: Mapping[int, int]) -> None:
        """Report tokens so far by lease; a number that grows renews its lease."""
        await self._call(wire.Progress(actor=actor, tokens=dict(tokens)), "Progress", wire.Ok)

    async def fail(
        self, actor: str, lease: int, sample: SampleId, kind: FailureKind, reason: str
    ) -> str:
        """Report that a sample cannot be produced; returns as `push` does."""
        request = wire.Fail(actor=actor, lease=lease, id=sample, kind=kind, reason=reason)
        return (await self._call(request, f"Fail of lease {lease}", wire.Ack)).status

    async def stats(self) -> wire.Stats:
        """The ledger's counts and gauges."""
        return await self._call(wire.StatsRequest(), "StatsRequest", wire.Stats)

    def close(self) -> None:
        """Cancel what waits and close; nothing is left behind. Safe to call twice."""
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        for future in self._pending.values():
            future.cancel()
        self._pending.clear()
        if not self._socket.closed:
            self._socket.close(linger=0)
            self._context.term()

    async def _call(
        self,
        request: wire.Message,
        what: str,
        kind: type[M],
        *,
        frames: Sequence[wire.Frame] = (),
        wait_s: float = 0.0,
    ) -> M:
        if self._reader is None:
            self._reader = asyncio.create_task(self._read(), name=f"{self.name} buffer replies")
        self._req += 1
        req = self._req
        future: asyncio.Future[wire.Message] = asyncio.get_running_loop().create_future()
        self._pending[req] = future
        limit_s = self._timeout_s + wait_s
        try:
            async with asyncio.timeout(limit_s):
                message = msgspec.structs.replace(request, req=req)
                await self._socket.send_multipart(wire.encode(message, frames), copy=False)
                reply = await future
        except TimeoutError as e:
            raise _late(self.name, what, self._endpoint, limit_s) from e
        finally:
            self._pending.pop(req, None)
        return _expect(reply, kind)

    async def _read(self) -> None:
        """Hand each reply to the call that waits for it; one that nobody waits for is dropped."""
        while True:
            parts = await self._socket.recv_multipart(copy=False)
            try:
                reply, _ = wire.decode([part.buffer for part in parts])
            except WireError as e:
                self._fail_all(e)
                continue
            future = self._pending.pop(reply.req, None)
            if future is not None and not future.done():
                future.set_result(reply)

    def _fail_all(self, error: WireError) -> None:
        """A reply that cannot be read may be anybody's: every call fails now, not later."""
        for future in self._pending.values():
            if not future.done():
                future.set_exception(error)


class BufferClient:
    """A blocking connection, for one thread at a time.

    Raises (every call): DeadlineError; what the buffer refused, as its class of asyncrl.errors.
    """

    def __init__(
        self, endpoint: str, run_id: str, role: str, rank: int, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.name = f"{role}-{rank}"
        self._rank = rank
        self._hello = wire.Hello(run_id=run_id, role=role, rank=rank, pid=os.getpid())
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._context: Any = zmq.Context()
        self._socket: Any = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, _identity(self.name))
        self._socket.connect(endpoint)
        self._req = 0

    def hello(self) -> None:
        """Introduce this process."""
        self._call(self._hello, "Hello", wire.Ok)

    def pull(
        self, batch: int, wait_s: float = 10.0, deadline_s: float | None = None
    ) -> BatchPart | wire.NotYet | wire.Stopped:
        """This rank's part of batch k. Idempotent.

        Args:
            batch: batch number, from 1.
            wait_s: how long the buffer may wait for the batch before it answers NotYet.
            deadline_s: longest time for the reply; default `wait_s` and the client's timeout.
        """
        request = wire.Pull(rank=self._rank, batch=batch, wait_s=wait_s)
        if deadline_s is None:
            deadline_s = wait_s + self._timeout_s
        reply, arrays = self._exchange(request, f"Pull of batch {batch}", deadline_s)
        if isinstance(reply, wire.Part):
            return wire.read_part(reply, arrays)
        if isinstance(reply, wire.NotYet):
            return reply
        return _expect(reply, wire.Stopped)

    def commit(self, batch: int, dropped: Sequence[SampleId] = ()) -> None:
        """Batch k is trained, less `dropped`. Idempotent."""
        request = wire.Commit(batch=batch, dropped=tuple(dropped))
        self._call(request, f"Commit of batch {batch}", wire.Ok)

    def published(self, version: Version) -> None:
        """The learner cut the snapshot of this version."""
        self._call(wire.Published(version=version), f"Published {version}", wire.Ok)

    def stop(self, reason: str, final: Version | None = None, evaluate: bool = False) -> None:
        """End the run; `final` is the last version when the learner finished.

        It is evaluated if every stop of the run asks for it: an interrupt does not.
        """
        request = wire.Stop(reason=reason, final=final, evaluate=evaluate)
        self._call(request, "Stop", wire.Ok)

    def gone(self, actor: str, reason: str) -> None:
        """The actor's process has ended (launcher only): its leases are free for others.

        Say it before its successor is started: whoever has the name must say hello again.
        """
        self._call(wire.Gone(actor=actor, reason=reason), f"Gone of {actor}", wire.Ok)

    def stats(self) -> wire.Stats:
        """The ledger's counts and gauges."""
        return self._call(wire.StatsRequest(), "StatsRequest", wire.Stats)

    def close(self) -> None:
        """Close; nothing is left behind. Safe to call twice."""
        if not self._socket.closed:
            self._socket.close(linger=0)
            self._context.term()

    def _call(self, request: wire.Message, what: str, kind: type[M]) -> M:
        return _expect(self._exchange(request, what, self._timeout_s)[0], kind)

    def _exchange(
        self, request: wire.Message, what: str, limit_s: float
    ) -> tuple[wire.Message, tuple[wire.Frame, ...]]:
        """Send, and wait for the reply with the same number; older ones came too late."""
        self._req += 1
        message = msgspec.structs.replace(request, req=self._req)
        until = time.monotonic() + limit_s
        self._socket.send_multipart(wire.encode(message), copy=False)
        while (left := until - time.monotonic()) > 0 and self._socket.poll(left * 1000):
            parts = self._socket.recv_multipart(copy=False)
            reply, arrays = wire.decode([part.buffer for part in parts])
            if reply.req == self._req:
                return reply, arrays
        raise _late(self.name, what, self._endpoint, limit_s)
