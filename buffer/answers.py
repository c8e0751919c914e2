"""What the buffer replies to each request (docs/wire.md), and what it does about waiting ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from asyncrl import wire
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.parked import Parked, Waiting
from asyncrl.buffer.refuse import refusal
from asyncrl.errors import AsyncRLError, ConservationError, LedgerError, WireError
from asyncrl.types import Envelope, Version

MAX_WAIT_S = 600.0
"""Longest time a request may ask to wait."""

logger = logging.getLogger(__name__)

Reply = list[wire.Frame] | None
"""The multipart of a reply, or None when the request is parked."""


class Client(NamedTuple):
    """Who said hello."""

    name: str
    """ROLE-RANK, e.g. "actor-0"."""
    pid: int


class Emit(Protocol):
    """Where the buffer's metrics go, e.g. `asyncrl.metrics.HubClient.emit`."""

    def __call__(
        self, metrics: Mapping[str, float], *, step: int, version: int, incarnation: int
    ) -> None:
        """Take one record (fields as in `wire.Record`)."""


class Answers:
    """One method per request; owned by the server, which sends what they return."""

    def __init__(
        self,
        ledger: Ledger,
        run_id: str,
        clock: Callable[[], float],
        send: Callable[[bytes, Sequence[wire.Frame]], None],
        emit: Emit | None,
    ) -> None:
        self._ledger = ledger
        self._run_id = run_id
        self._clock = clock
        self._send = send
        self._emit = emit
        self._clients: dict[bytes, Client] = {}
        self._current: dict[str, bytes] = {}  # name -> identity of its newest client
        self._lease_requests: Parked[wire.LeaseRequest] = Parked()
        self._pulls: Parked[wire.Pull] = Parked()
        self._seen_epoch = 0
        self._reason = ""
        self.malformed = 0
        self.state: wire.State = "running"
        self._final: Version | None = None

    @property
    def waiting(self) -> int:
        """Requests that are parked."""
        return len(self._lease_requests) + len(self._pulls)

    def answer(self, identity: bytes, message: wire.Message, arrays: Sequence[wire.Frame]) -> None:
        """Do what a request asks, and send its reply unless it is parked.

        Raises:
            ConservationError: the ledger broke; any other error becomes an Error reply.
        """

        def attempt() -> bool:
            reply = self._reply(identity, message, arrays)
            if reply is not None:
                self._send(identity, reply)
            return True

        self._guard(identity, message, attempt)

    def _guard(self, identity: bytes, message: wire.Message, attempt: Callable[[], bool]) -> bool:
        """Run `attempt`; an error becomes the client's reply (True) and the server goes on."""
        what = type(message).__name__
        try:
            return attempt()
        except ConservationError as e:
            self._send(identity, refusal(message.req, e, what))
            raise
        except Exception as e:
            bug = not isinstance(e, AsyncRLError)
            logger.warning("refused %s from %r: %s", what, identity, e, exc_info=bug)
            self._send(identity, refusal(message.req, e, what))
        return True

    def _reply(self, identity: bytes, message: wire.Message, arrays: Sequence[wire.Frame]) -> Reply:
        match message:
            case wire.Hello():
                return self._hello(identity, message)
            case _ if identity not in self._clients:
                raise WireError(f"{type(message).__name__} before Hello: say hello first")
            case wire.Push():
                return self._push(identity, message, arrays)
            case wire.LeaseRequest():
                return self._lease_request(identity, message)
            case wire.Pull():
                return self._pull(identity, message)
            case wire.Fail():
                return self._fail(identity, message)
            case wire.Commit():
                return self._commit(message)
            case wire.StatsRequest():
                return self._stats(message)
            case wire.Progress():
                self._check_name(identity, message.actor)
                self._ledger.progress(message.actor, message.tokens, self._clock())
            case wire.Published():
                self._ledger.published(message.version)
            case wire.Stop():
                self.stop(message.reason, message.final)
            case _:
                raise WireError(f"{type(message).__name__} is not a request to the buffer")
        return _ok(message)

    def check_conservation(self) -> None:
        """Raise ConservationError with the counts if the law does not hold."""
        if not self._ledger.conserved():
            raise ConservationError(f"conservation violated: {self._ledger.counts()}")

    def stop(self, reason: str, final: Version | None) -> None:
        """No more leases, no more batches; a later stop may add the final version."""
        self._reason = self._reason or reason
        if final is not None:
            self.state, self._final = "done", final
        elif self.state == "running":
            self.state = "stopping"

    def serve_parked(self, now: float) -> None:
        """Answer the parked requests that can be, and those whose time is up."""
        epoch = self._ledger.work_epoch
        stopped = self.state != "running"
        if epoch != self._seen_epoch or stopped or self._lease_requests.due(now):
            self._seen_epoch = epoch
            self._lease_requests.serve(
                lambda w: self._guard(w.identity, w.message, lambda: self._try_lease(w, now))
            )
        if len(self._pulls):
            self._pulls.serve(
                lambda w: self._guard(w.identity, w.message, lambda: self._try_pull(w, now))
            )

    # --- actors ------------------------------------------------------------------------------

    def _hello(self, identity: bytes, message: wire.Hello) -> Reply:
        if message.run_id != self._run_id:
            raise WireError(
                f"this is the buffer of run {self._run_id!r}, {message.role}-{message.rank} "
                f"belongs to {message.run_id!r}: it has another run's endpoint"
            )
        client = Client(f"{message.role}-{message.rank}", message.pid)
        older = self._current.get(client.name)
        if older is not None and (older != identity or self._clients[older] != client):
            # A new process under this name: what the old one held will not come.
            waiting = self._lease_requests.take(client.name)
            if waiting is not None:
                error = _replaced(client.name)
                self._send(waiting.identity, refusal(waiting.message.req, error, "LeaseRequest"))
            dropped = self._ledger.drop_actor(client.name)
            logger.info("%s is here again; %d of its leases dropped", client.name, dropped)
        self._clients[identity] = client
        self._current[client.name] = identity
        return _ok(message)

    def _check_name(self, identity: bytes, actor: str) -> None:
        name = self._clients[identity].name
        if name != actor:
            raise WireError(f"message names actor {actor!r}, its sender said hello as {name!r}")

    def _push(self, identity: bytes, message: wire.Push, arrays: Sequence[wire.Frame]) -> Reply:
        self._check_name(identity, message.header.actor)
        status = self._ledger.accept(Envelope(message.header, tuple(arrays)), self._clock())
        if status == "unknown":
            logger.warning("%s: result refused: %s", self._clients[identity].name, message.header)
        return wire.encode(wire.Ack(req=message.req, status=status))

    def _fail(self, identity: bytes, message: wire.Fail) -> Reply:
        self._check_name(identity, message.actor)
        logger.warning("%s failed %s: %s", message.actor, tuple(message.id), message.reason)
        status = self._ledger.fail(
            message.actor, message.lease, message.id, message.kind, message.reason, self._clock()
        )
        return wire.encode(wire.Ack(req=message.req, status=status))

    def _lease_request(self, identity: bytes, message: wire.LeaseRequest) -> Reply:
        self._check_name(identity, message.actor)
        if self._current[message.actor] != identity:
            raise _replaced(message.actor)
        now = self._clock()
        waiting = Waiting(identity, message, now + _wait(message.wait_s))
        if (older := self._lease_requests.take(message.actor)) is not None:
            self._send(older.identity, wire.encode(wire.Leases(req=older.message.req)))
        if not self._try_lease(waiting, now):
            self._lease_requests.add(message.actor, waiting)
        return None

    def _try_lease(self, waiting: Waiting[wire.LeaseRequest], now: float) -> bool:
        message = waiting.message
        if self.state != "running":
            reply = wire.Leases(req=message.req, state=self.state, final=self._final)
        else:
            leases = self._ledger.lease(message.actor, message.applied, message.capacity, now)
            if not leases and now < waiting.until_s:
                return False
            reply = wire.Leases(
                req=message.req,
                leases=tuple(leases),
                held_back=not leases and self._ledger.held_back(message.actor),
            )
        self._send(waiting.identity, wire.encode(reply))
        return True

    # --- the learner ---------------------------------------------------------------------------

    def _pull(self, identity: bytes, message: wire.Pull) -> Reply:
        now = self._clock()
        waiting = Waiting(identity, message, now + _wait(message.wait_s))
        key = (identity, message.batch)
        if (older := self._pulls.take(key)) is not None:
            text = "superseded by a newer pull of the same batch"
            self._send(identity, wire.encode(wire.NotYet(req=older.message.req, waiting_for=text)))
        if not self._try_pull(waiting, now):
            self._pulls.add(key, waiting)
        return None

    def _try_pull(self, waiting: Waiting[wire.Pull], now: float) -> bool:
        message = waiting.message
        frames: Sequence[wire.Frame]
        stopped = self.state != "running"
        if stopped and not self._ledger.assigned(message.batch):
            frames = wire.encode(wire.Stopped(req=message.req, reason=self._reason))
        elif (part := self._ledger.part(message.batch, message.rank)) is not None:
            frames = wire.part_frames(part, message.req)
        elif self._ledger.exhausted:
            reason = self._ledger.exhausted_reason()
            frames = wire.encode(wire.Stopped(req=message.req, reason=reason))
        elif why := self._ledger.hopeless():
            raise LedgerError(why)
        elif now >= waiting.until_s:
            text = self._ledger.waiting_for(message.batch, now)
            frames = wire.encode(wire.NotYet(req=message.req, waiting_for=text))
        else:
            return False
        self._send(waiting.identity, frames)
        return True

    def _commit(self, message: wire.Commit) -> Reply:
        before = self._ledger.committed
        self._ledger.commit(message.batch, message.dropped)
        self.check_conservation()
        if self._emit is not None and self._ledger.committed > before:
            metrics = self._ledger.metrics(self._clock())
            incarnation, version = self._ledger.version
            self._emit(metrics, step=message.batch, version=version, incarnation=incarnation)
        return _ok(message)

    # --- facts -----------------------------------------------------------------------------------

    def _stats(self, message: wire.StatsRequest) -> Reply:
        return wire.encode(
            wire.Stats(
                req=message.req,
                counts=self._ledger.counts() | {"malformed": self.malformed},
                gauges=self._ledger.gauges(self._clock()),
                conserved=self._ledger.conserved(),
                state=self.state,
                waiting_for=self._ledger.waiting_for_next(self._clock()),
            )
        )


def _replaced(actor: str) -> LedgerError:
    return LedgerError(f"{actor} was replaced by another process: no more leases")


def _ok(message: wire.Message) -> Reply:
    return wire.encode(wire.Ok(req=message.req))


def _wait(wait_s: float) -> float:
    """The time a request may wait: within 0 and MAX_WAIT_S, and 0 for not-a-number."""
    return min(wait_s, MAX_WAIT_S) if wait_s > 0 else 0.0
