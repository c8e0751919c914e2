"""Clients of the buffer: asynchronous for actors, blocking for learner ranks and the launcher.

Every call has a deadline and raises DeadlineError naming who waits for what; a call may then be
made again: results are deduplicated by sample id, pulls and commits are idempotent. A buffer that
is restarted meanwhile costs a call only time (see `connection`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

from asyncrl import wire
from asyncrl.buffer.connection import RESEND_S, AsyncConnection, Connection, Peer, expect
from asyncrl.config.schema import Config
from asyncrl.security import Keys
from asyncrl.types import BatchPart, Envelope, FailureKind, SampleId, Version

TIMEOUT_S = 30.0
"""Default time for a reply, on top of the time that a request asks to wait."""

SAVE_BYTES_S = 10e6
"""Bytes a second that a copy of the ledger is written with at least, a slow disk's share."""

M = TypeVar("M", bound=wire.Message)


def patience_s(config: Config) -> float:
    """A role's time for a reply: with a store, long enough for the buffer's return as well."""
    if config.buffer.durability == "none":
        return TIMEOUT_S
    return TIMEOUT_S + config.cluster.ready_timeout_s


class AsyncBufferClient:
    """An actor's connection; calls may run concurrently. Make and use it inside one event loop.

    Raises (every call): DeadlineError; what the buffer refused, as its class of asyncrl.errors.
    """

    def __init__(
        self, endpoint: str, run_id: str, role: str, rank: int, *, timeout_s: float = TIMEOUT_S,
        resend_s: float = RESEND_S, keys: Keys | None = None,
    ) -> None:  # fmt: skip
        peer = Peer(endpoint, run_id, role, rank, timeout_s, resend_s, keys)
        self.name = peer.name
        self._connection = AsyncConnection(peer)

    @property
    def resent(self) -> int:
        """Requests that were sent again."""
        return self._connection.resent

    async def hello(self) -> None:
        """Introduce this process; a former one of the same name loses its leases."""
        await self._call(self._connection.peer.hello(), "Hello", wire.Ok)

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
        """Deliver a sample: "accepted", "duplicate" or "unknown".

        "duplicate" may mean an earlier push of this very sample of which the answer was lost.
        """
        what = f"Push of {'/'.join(map(str, envelope.header.id))}"
        request, payload = wire.Push(header=envelope.header), (envelope.payload,)
        return (await self._call(request, what, wire.Ack, payload=payload)).status

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
        self._connection.close()

    async def _call(
        self, request: wire.Message, what: str, kind: type[M], *,
        payload: Sequence[wire.Frame] = (), wait_s: float = 0.0,
    ) -> M:  # fmt: skip
        reply = await self._connection.exchange(request, what, payload=payload, wait_s=wait_s)
        return expect(reply, kind)


class BufferClient:
    """A blocking connection, for one thread at a time.

    Raises (every call): DeadlineError; what the buffer refused, as its class of asyncrl.errors.
    """

    def __init__(
        self, endpoint: str, run_id: str, role: str, rank: int, *, timeout_s: float = TIMEOUT_S,
        resend_s: float = RESEND_S, keys: Keys | None = None,
    ) -> None:  # fmt: skip
        peer = Peer(endpoint, run_id, role, rank, timeout_s, resend_s, keys)
        self.name = peer.name
        self._connection = Connection(peer)

    def hello(self) -> None:
        """Introduce this process."""
        self._call(self._connection.peer.hello(), "Hello", wire.Ok)

    def pull(
        self, batch: int, wait_s: float = 10.0, deadline_s: float | None = None
    ) -> BatchPart | wire.NotYet | wire.Stopped:
        """This rank's part of batch k. Idempotent.

        Args:
            batch: batch number, from 1.
            wait_s: how long the buffer may wait for the batch before it answers NotYet.
            deadline_s: longest time for the reply; default `wait_s` and the client's timeout.
        """
        request = wire.Pull(rank=self._connection.peer.rank, batch=batch, wait_s=wait_s)
        what = f"Pull of batch {batch}"
        reply, payloads = self._connection.exchange(
            request, what, wait_s=wait_s, limit_s=deadline_s
        )
        if isinstance(reply, wire.Part):
            return wire.read_part(reply, payloads)
        if isinstance(reply, wire.NotYet):
            return reply
        return expect(reply, wire.Stopped)

    def commit(self, batch: int, dropped: Sequence[SampleId] = (), incarnation: int = 0) -> bool:
        """Batch k is trained, less `dropped`, by this incarnation of the learner. Idempotent.

        Returns:
            Whether bytes hold actors back until a checkpoint covers what is kept (`covered`).
        """
        request = wire.Commit(batch=batch, dropped=tuple(dropped), incarnation=incarnation)
        return self._call(request, f"Commit of batch {batch}", wire.Ok).checkpoint

    def published(self, version: Version) -> None:
        """The learner cut the snapshot of this version."""
        self._call(wire.Published(version=version), f"Published {version}", wire.Ok)

    def covered(self, batch: int) -> None:
        """A checkpoint covers all batches up to this one: they need not be served again."""
        self._call(wire.Covered(batch=batch), f"Covered {batch}", wire.Ok)

    def rewind(self, batch: int, incarnation: int) -> None:
        """The learner was restarted from the checkpoint that covers `batch`."""
        request = wire.Rewind(batch=batch, incarnation=incarnation)
        self._call(request, f"Rewind to batch {batch}", wire.Ok)

    def save_ledger(self, path: str | os.PathLike[str], batch: int) -> wire.Saved:
        """Have a copy of the ledger and of all samples held written into the folder `path`.

        For the checkpoint that covers `batch`; when this returns the copy is on the disk. The
        deadline grows with what the buffer holds; other calls wait, so use a client of its own.
        """
        held = self.stats().gauges["queue/bytes"]
        limit_s = self._connection.peer.timeout_s + held / SAVE_BYTES_S
        request = wire.SaveLedger(path=os.fspath(path), batch=batch)
        what = f"SaveLedger of batch {batch} ({held / 2**20:.0f} MiB)"
        reply, _ = self._connection.exchange(request, what, limit_s=limit_s)
        return expect(reply, wire.Saved)

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

    def scale(self, actors: int, leaving: Sequence[str] = ()) -> None:
        """The run is to have so many actors (launcher only); `leaving` get no more leases."""
        run_id = self._connection.peer.run_id
        request = wire.Scale(run_id=run_id, actors=actors, leaving=tuple(leaving))
        self._call(request, f"Scale to {actors} actors", wire.Ok)

    def stats(self) -> wire.Stats:
        """The ledger's counts and gauges."""
        return self._call(wire.StatsRequest(), "StatsRequest", wire.Stats)

    def close(self) -> None:
        """Close; nothing is left behind. Safe to call twice."""
        self._connection.close()

    def _call(self, request: wire.Message, what: str, kind: type[M]) -> M:
        return expect(self._connection.exchange(request, what)[0], kind)
