"""Long polls: requests that wait at the server until they can be answered or their time is up.

    lease request ─► leases there? the end? its time? ─► reply, else parked
    pull          ─► batch there?  the end? its time? ─► reply, else parked

A request that is sent again, with the same number, gets the same answer, or waits on: its client
takes one reply. A newer one of the same actor, or for the same batch, answers the older one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from asyncrl import wire
from asyncrl.buffer.clients import Clients, replaced
from asyncrl.buffer.ending import Ending
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.refuse import refusal
from asyncrl.errors import LedgerError

MAX_WAIT_S = 600.0
"""Longest time a request may ask to wait."""

Send = Callable[[bytes, Sequence[wire.Frame]], None]
Guard = Callable[[bytes, wire.Message, Callable[[], bool]], bool]
"""Runs an attempt to answer; an error becomes the client's reply."""

M = TypeVar("M", bound=wire.Message)


@dataclass(frozen=True, slots=True)
class Waiting(Generic[M]):
    """A request that waits."""

    identity: bytes
    message: M
    until_s: float
    """Clock time at which it is answered whatever the state."""


class Parked(Generic[M]):
    """Waiting requests by key, oldest first, one for each key."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, Waiting[M]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: Hashable, waiting: Waiting[M]) -> None:
        """Park a request; there must be none under this key."""
        if key in self._waiting:
            raise KeyError(f"a request is already parked under {key!r}")
        self._waiting[key] = waiting

    def take(self, key: Hashable) -> Waiting[M] | None:
        """Remove a request, if there is one; the caller answers it, or knows its client gone."""
        return self._waiting.pop(key, None)

    def serve(self, answer: Callable[[Waiting[M]], bool]) -> None:
        """Offer each to `answer`, oldest first; those it answered (True) leave."""
        for key, waiting in list(self._waiting.items()):
            if answer(waiting):
                del self._waiting[key]

    def due(self, now: float) -> bool:
        """Whether the time of any is up."""
        return any(w.until_s <= now for w in self._waiting.values())


class Polls:
    """The requests for leases and for batches."""

    def __init__(self, ledger: Ledger, clients: Clients, ending: Ending, send: Send) -> None:
        self._ledger, self._clients, self._ending, self._send = ledger, clients, ending, send
        self._lease_requests: Parked[wire.LeaseRequest] = Parked()
        self._granted: dict[str, tuple[bytes, wire.Leases]] = {}  # actor -> client, last grant
        self._pulls: Parked[wire.Pull] = Parked()
        self._seen_epoch = 0
        self._actors = 0
        self._leaving: set[str] = set()

    def __len__(self) -> int:
        return len(self._lease_requests) + len(self._pulls)

    def serve(self, now: float, guard: Guard) -> None:
        """Answer the parked requests that can be, and those whose time is up."""
        epoch = self._ledger.work_epoch
        new = epoch != self._seen_epoch or not self._ending.running
        if new or self._lease_requests.due(now):
            self._seen_epoch = epoch
            self._lease_requests.serve(
                lambda w: guard(w.identity, w.message, lambda: self._try_lease(w, now))
            )
        if len(self._pulls):
            self._pulls.serve(
                lambda w: guard(w.identity, w.message, lambda: self._try_pull(w, now))
            )

    def lease(self, identity: bytes, message: wire.LeaseRequest, now: float) -> None:
        """Answer a request for leases, or park it."""
        self._clients.check_current(identity, message.actor)
        # Answered long before its sender would count as silent, so that it asks again in time.
        wait_s = min(_wait(message.wait_s), self._clients.silent_after_s / 2)
        waiting = Waiting(identity, message, now + wait_s)
        client, granted = self._granted.get(message.actor, (b"", wire.Leases()))
        if client == identity and granted.req == message.req:
            self._send(identity, wire.encode(granted))
            return
        older = self._lease_requests.take(message.actor)
        if older is not None and not _resent(older, waiting):
            self._send(older.identity, wire.encode(wire.Leases(req=older.message.req)))
        if not self._try_lease(waiting, now):
            self._lease_requests.add(message.actor, waiting)

    def scale(self, message: wire.Scale) -> None:
        """From now on these actors are told to leave, and all how many there are to be."""
        self._actors, self._leaving = message.actors, set(message.leaving)
        self._seen_epoch = -1  # look at all that wait

    def gone(self, actor: str) -> None:
        """The actor's process has ended: its successor is not told to leave."""
        self._leaving.discard(actor)

    def refuse(self, actor: str) -> None:
        """The actor's process is gone: what it waits for is refused."""
        if (waiting := self._lease_requests.take(actor)) is not None:
            refused = refusal(waiting.message.req, replaced(actor), "LeaseRequest")
            self._send(waiting.identity, refused)

    def _try_lease(self, waiting: Waiting[wire.LeaseRequest], now: float) -> bool:
        message, end = waiting.message, self._ending
        if not end.running:
            reply = wire.Leases(
                req=message.req, state=end.state, final=end.final, evaluate=end.evaluated,
                actors=self._actors,
            )  # fmt: skip
        elif message.actor in self._leaving:
            if message.capacity < 1 and now < waiting.until_s:
                return False  # it has no room: it is told when it has, or waits for the end
            reply = wire.Leases(req=message.req, leave=True, actors=self._actors)
        else:
            leases = self._ledger.lease(message.actor, message.applied, message.capacity, now)
            if not leases and now < waiting.until_s:
                return False
            reply = wire.Leases(
                req=message.req,
                leases=tuple(leases),
                held_back=not leases and bool(self._ledger.held_back(message.actor)),
                actors=self._actors,
            )
            self._granted[message.actor] = (waiting.identity, reply)
        self._send(waiting.identity, wire.encode(reply))
        return True

    def pull(self, identity: bytes, message: wire.Pull, now: float) -> None:
        """Answer a request for a part of a batch, or park it."""
        waiting = Waiting(identity, message, now + _wait(message.wait_s))
        key = (identity, message.batch)
        older = self._pulls.take(key)
        if older is not None and not _resent(older, waiting):
            text = "superseded by a newer pull of the same batch"
            self._send(identity, wire.encode(wire.NotYet(req=older.message.req, waiting_for=text)))
        if not self._try_pull(waiting, now):
            self._pulls.add(key, waiting)

    def _try_pull(self, waiting: Waiting[wire.Pull], now: float) -> bool:
        message, end = waiting.message, self._ending
        frames: Sequence[wire.Frame]
        if not end.running and not self._ledger.assigned(message.batch):
            frames = wire.encode(wire.Stopped(req=message.req, reason=end.reason))
        elif (part := self._ledger.part(message.batch, message.rank)) is not None:
            frames = wire.part_frames(part, message.req)
        elif self._ledger.exhausted:
            end.in_order(self._ledger.exhausted_reason())
            frames = wire.encode(wire.Stopped(req=message.req, reason=end.reason))
        elif why := self._ledger.hopeless():
            raise LedgerError(why)
        elif now >= waiting.until_s:
            text = self._ledger.waiting_for(message.batch, now)
            frames = wire.encode(wire.NotYet(req=message.req, waiting_for=text))
        else:
            return False
        self._send(waiting.identity, frames)
        return True


def _resent(older: Waiting[M], newer: Waiting[M]) -> bool:
    """Whether a request is one that waits already."""
    return (older.identity, older.message.req) == (newer.identity, newer.message.req)


def _wait(wait_s: float) -> float:
    """The time a request may wait: within 0 and MAX_WAIT_S, and 0 for not-a-number."""
    return min(wait_s, MAX_WAIT_S) if wait_s > 0 else 0.0
