"""What the buffer replies to each request (docs/wire.md), and what it does about waiting ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from asyncrl import wire
from asyncrl.buffer.clients import Clients, replaced
from asyncrl.buffer.durable import Keeper
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.parked import M, Parked, Waiting
from asyncrl.buffer.record import Recorder
from asyncrl.buffer.refuse import refusal
from asyncrl.errors import AsyncRLError, ConservationError, HelloNeeded, LedgerError, WireError
from asyncrl.types import Version

MAX_WAIT_S = 600.0
"""Longest time a request may ask to wait."""

logger = logging.getLogger(__name__)

Reply = list[wire.Frame] | None
"""The multipart of a reply, or None when the request is parked."""


class Answers:
    """One method per request; owned by the server, which sends what they return."""

    def __init__(
        self,
        ledger: Ledger,
        clients: Clients,
        clock: Callable[[], float],
        send: Callable[[bytes, Sequence[wire.Frame]], None],
        recorder: Recorder,
        keeper: Keeper,
    ) -> None:
        self._ledger = ledger
        self._clients = clients
        self._clock = clock
        self._send = send
        self._recorder = recorder
        self._keeper = keeper
        self._lease_requests: Parked[wire.LeaseRequest] = Parked()
        self._granted: dict[str, tuple[bytes, wire.Leases]] = {}  # actor -> client, last grant
        self._pulls: Parked[wire.Pull] = Parked()
        self._seen_epoch = 0
        self._reason = ""
        self.malformed = 0
        self.strangers = 0  # messages before a hello
        self.facts: list[Callable[[], dict[str, float]]] = [recorder.gauges, keeper.gauges]
        """What the statistics tell besides the ledger."""
        self.state: wire.State = "running"
        self._final: Version | None = None
        self._evaluate = True

    @property
    def waiting(self) -> int:
        """Requests that are parked."""
        return len(self._lease_requests) + len(self._pulls)

    def answer(self, identity: bytes, message: wire.Message, arrays: Sequence[wire.Frame]) -> None:
        """Do what a request asks, and send its reply unless it is parked.

        Raises:
            ConservationError: the ledger broke; any other error becomes an Error reply.
        """

        if name := self._clients.heard(identity, self._clock()):
            logger.info("%s speaks again", name)

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
        if isinstance(message, wire.Hello):
            return self._hello(identity, message)
        if not self._clients.knows(identity):
            self.strangers += 1
            raise HelloNeeded(f"{type(message).__name__} before Hello: say hello first")
        self._clients.check(identity, message)
        match message:
            case wire.Push():
                return self._push(message, arrays)
            case wire.LeaseRequest():
                return self._lease_request(identity, message)
            case wire.Pull():
                return self._pull(identity, message)
            case wire.Fail():
                return self._fail(message)
            case wire.Commit():
                return self._commit(message)
            case wire.StatsRequest():
                return self._stats(message)
            case wire.Progress():
                self._ledger.progress(message.actor, message.tokens, self._clock())
            case wire.Published():
                self._ledger.published(message.version)
            case wire.Stop():
                self.stop(message.reason, message.final, message.evaluate)
            case wire.Covered():
                self._ledger.covered(message.batch)
            case wire.Rewind():
                self._ledger.rewind(message.batch, message.incarnation)
                self._recorder.event("rewind", batch=message.batch)
            case wire.Gone():
                self._gone(message)
            case _:
                raise WireError(f"{type(message).__name__} is not a request to the buffer")
        return _ok(message)

    def check_conservation(self) -> None:
        """Raise ConservationError with the counts if the law does not hold."""
        if not self._ledger.conserved():
            raise ConservationError(f"conservation violated: {self._ledger.counts()}")

    def resume(self, now: float) -> None:
        """Take up where a former process of this buffer ended."""
        for stop in self._keeper.stops:
            self.stop(stop.reason, stop.final, stop.evaluate)
        self._clients.expect(self._ledger.lessees(), now)

    def stop(self, reason: str, final: Version | None, evaluate: bool) -> None:
        """No more leases, no more batches; a later stop may add the final version.

        The first reason stays. The final version is evaluated unless any stop was against it.
        """
        self._reason = self._reason or reason
        self._evaluate = self._evaluate and evaluate
        self._keeper.stopped(reason, final, evaluate)
        if final is not None:
            self.state, self._final = "done", final
        elif self.state == "running":
            self.state = "stopping"

    def serve_parked(self, now: float) -> None:
        """Answer the parked requests that can be, and those whose time is up."""
        if self.state == "running" and (why := self._ledger.over()):
            self._stop_in_order(why)
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

    def look_for_silence(self, now: float) -> None:
        """Free what silent actors hold; call it when all messages have been read.

        After a stop nobody would take it, and an actor may be quiet while it evaluates.
        """
        for actor in self._clients.newly_silent(now):
            if self.state == "running" and (dropped := self._ledger.drop_actor(actor)):
                silent_s = self._clients.silent_after_s
                logger.warning(
                    "%s has said nothing for %.0f s: %d of its leases go to others",
                    actor, silent_s, dropped,
                )  # fmt: skip
                self._recorder.event("actor_silent", actor=actor, leases=dropped)

    def _stop_in_order(self, reason: str) -> None:
        logger.info("the run ends: %s", reason)
        self.stop(reason, final=None, evaluate=True)

    # --- actors ------------------------------------------------------------------------------

    def _hello(self, identity: bytes, message: wire.Hello) -> Reply:
        name, taken_over = self._clients.hello(identity, message)
        self._clients.heard(identity, self._clock())
        if message.resumed:  # known to a former process of this buffer
            if ended := self._ledger.resume_actor(name, message.leases):
                logger.info("%s is back; %d leases of which it does not know", name, ended)
        elif taken_over:  # by a new process: what the old one held will not come
            self._drop(name, "is here again")
        return _ok(message)

    def _gone(self, message: wire.Gone) -> None:
        self._clients.gone(message.actor)
        self._drop(message.actor, f"is gone ({message.reason})")

    def _drop(self, actor: str, why: str) -> None:
        """Free what an actor's former process held, and refuse what it waits for."""
        if (waiting := self._lease_requests.take(actor)) is not None:
            refused = refusal(waiting.message.req, replaced(actor), "LeaseRequest")
            self._send(waiting.identity, refused)
        dropped = self._ledger.drop_actor(actor)
        logger.info("%s %s; %d of its leases dropped", actor, why, dropped)

    def _push(self, message: wire.Push, arrays: Sequence[wire.Frame]) -> Reply:
        envelope = self._keeper.envelope(message.header, arrays[0])
        status = self._ledger.accept(envelope, self._clock())
        if status == "unknown":
            logger.warning("%s: result refused: %s", message.header.actor, message.header)
        return wire.encode(wire.Ack(req=message.req, status=status))

    def _fail(self, message: wire.Fail) -> Reply:
        logger.warning("%s failed %s: %s", message.actor, tuple(message.id), message.reason)
        status = self._ledger.fail(
            message.actor, message.lease, message.id, message.kind, message.reason, self._clock()
        )
        return wire.encode(wire.Ack(req=message.req, status=status))

    def _lease_request(self, identity: bytes, message: wire.LeaseRequest) -> Reply:
        self._clients.check_current(identity, message.actor)
        now = self._clock()
        # Answered long before its sender would count as silent, so that it asks again in time.
        wait_s = min(_wait(message.wait_s), self._clients.silent_after_s / 2)
        waiting = Waiting(identity, message, now + wait_s)
        client, granted = self._granted.get(message.actor, (b"", wire.Leases()))
        if client == identity and granted.req == message.req:  # sent again: the same answer
            self._send(identity, wire.encode(granted))
            return None
        older = self._lease_requests.take(message.actor)
        if older is not None and not _resent(older, waiting):
            self._send(older.identity, wire.encode(wire.Leases(req=older.message.req)))
        if not self._try_lease(waiting, now):
            self._lease_requests.add(message.actor, waiting)
        return None

    def _try_lease(self, waiting: Waiting[wire.LeaseRequest], now: float) -> bool:
        message = waiting.message
        if self.state != "running":
            reply = wire.Leases(
                req=message.req, state=self.state, final=self._final, evaluate=self._evaluated
            )
        else:
            leases = self._ledger.lease(message.actor, message.applied, message.capacity, now)
            if not leases and now < waiting.until_s:
                return False
            reply = wire.Leases(
                req=message.req,
                leases=tuple(leases),
                held_back=not leases and bool(self._ledger.held_back(message.actor)),
            )
            self._granted[message.actor] = (waiting.identity, reply)
        self._send(waiting.identity, wire.encode(reply))
        return True

    # --- the learner ---------------------------------------------------------------------------

    def _pull(self, identity: bytes, message: wire.Pull) -> Reply:
        now = self._clock()
        waiting = Waiting(identity, message, now + _wait(message.wait_s))
        key = (identity, message.batch)
        older = self._pulls.take(key)
        if older is not None and not _resent(older, waiting):
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
            self._stop_in_order(self._ledger.exhausted_reason())
            frames = wire.encode(wire.Stopped(req=message.req, reason=self._reason))
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
        if self._ledger.committed > before:
            now = self._clock()
            self._recorder.committed(self._ledger.metrics(now) | self._clients.metrics(now))
        return wire.encode(wire.Ok(req=message.req, checkpoint=self._ledger.wants_checkpoint))

    # --- facts -----------------------------------------------------------------------------------

    @property
    def _evaluated(self) -> bool:
        return self.state == "done" and self._evaluate

    def _stats(self, message: wire.StatsRequest) -> Reply:
        now = self._clock()
        ages = {f"heartbeat_age_s/{a}": age for a, age in self._clients.ages(now).items()}
        gauges = self._ledger.gauges(now) | self._clients.metrics(now)
        for fact in self.facts:
            gauges |= fact()
        return wire.encode(
            wire.Stats(
                req=message.req,
                counts=self._ledger.counts()
                | {"malformed": self.malformed, "strangers": self.strangers},
                gauges=gauges | ages,
                conserved=self._ledger.conserved(),
                state=self.state,
                final=self._final,
                evaluate=self._evaluated,
                reason=self._reason,
                waiting_for=self._ledger.waiting_for_next(now),
            )
        )


def _ok(message: wire.Message) -> Reply:
    return wire.encode(wire.Ok(req=message.req))


def _resent(older: Waiting[M], newer: Waiting[M]) -> bool:
    """Whether a request is one that waits already: it is answered once, by its number."""
    return (older.identity, older.message.req) == (newer.identity, newer.message.req)


def _wait(wait_s: float) -> float:
    """The time a request may wait: within 0 and MAX_WAIT_S, and 0 for not-a-number."""
    return min(wait_s, MAX_WAIT_S) if wait_s > 0 else 0.0
