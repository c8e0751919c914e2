"""What the buffer replies to each request (docs/wire.md); `polls` has those that may wait."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from asyncrl import wire
from asyncrl.buffer.clients import Clients
from asyncrl.buffer.durable import Keeper
from asyncrl.buffer.ending import Ending
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.polls import Polls
from asyncrl.buffer.record import Recorder
from asyncrl.buffer.refuse import refusal
from asyncrl.buffer.saving import Saving
from asyncrl.errors import AsyncRLError, ConservationError, HelloNeeded, LedgerError, WireError

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
        saving: Saving,
    ) -> None:
        self._ledger = ledger
        self._clients = clients
        self._clock = clock
        self._send = send
        self._recorder = recorder
        self._keeper = keeper
        self._saving = saving
        self.ending = Ending(keeper)
        self.polls = Polls(ledger, clients, self.ending, send)
        self.malformed = 0
        self.strangers = 0  # messages before a hello
        self.facts: list[Callable[[], dict[str, float]]] = [recorder.gauges, keeper.gauges]
        """What the statistics tell besides the ledger."""

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
            level = logging.INFO if isinstance(e, HelloNeeded) else logging.WARNING
            logger.log(level, "refused %s from %r: %s", what, identity, e, exc_info=bug)
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
                self.polls.lease(identity, message, self._clock())
                return None
            case wire.Pull():
                self.polls.pull(identity, message, self._clock())
                return None
            case wire.SaveLedger():
                self._saving.save(identity, message)
                return None
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
                self.ending.stop(message.reason, message.final, message.evaluate)
            case wire.Covered():
                self._ledger.covered(message.batch)
            case wire.Rewind():
                self._ledger.rewind(message.batch, message.incarnation)
                self._recorder.event("rewind", batch=message.batch)
            case wire.Gone():
                self._gone(message)
            case wire.Scale():
                self.polls.scale(message)
            case _:
                raise WireError(f"{type(message).__name__} is not a request to the buffer")
        return _ok(message)

    def check_conservation(self) -> None:
        """Raise ConservationError with the counts if the law does not hold."""
        if not self._ledger.conserved():
            raise ConservationError(f"conservation violated: {self._ledger.counts()}")

    def resume(self, now: float) -> None:
        """Take up where a former process of this buffer ended."""
        self.ending.resume()
        self._clients.expect(self._ledger.lessees(), now)

    def serve_parked(self, now: float) -> None:
        """Answer the parked requests that can be, and those whose time is up."""
        if self.ending.running and (why := self._ledger.over()):
            self.ending.in_order(why)
        self.polls.serve(now, self._guard)
        self._saving.serve()

    def look_for_silence(self, now: float) -> None:
        """Free what silent actors hold; call it when all messages have been read.

        After a stop nobody would take it, and an actor may be quiet while it evaluates.
        """
        for actor in self._clients.newly_silent(now):
            if self.ending.running and (dropped := self._ledger.drop_actor(actor)):
                silent_s = self._clients.silent_after_s
                logger.warning(
                    "%s has said nothing for %.0f s: %d of its leases go to others",
                    actor, silent_s, dropped,
                )  # fmt: skip
                self._recorder.event("actor_silent", actor=actor, leases=dropped)

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
        self.polls.gone(message.actor)
        self._drop(message.actor, f"is gone ({message.reason})")

    def _drop(self, actor: str, why: str) -> None:
        """Free what an actor's former process held, and refuse what it waits for."""
        self.polls.refuse(actor)
        dropped = self._ledger.drop_actor(actor)
        if dropped:
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

    # --- the learner ---------------------------------------------------------------------------

    def _commit(self, message: wire.Commit) -> Reply:
        before, current = self._ledger.committed, self._ledger.version.incarnation
        if message.incarnation < current:  # it waited here while its learner died
            raise LedgerError(
                f"batch {message.batch} was trained by incarnation {message.incarnation} of the "
                f"learner, which is {current} by now: it does not count"
            )
        self._ledger.commit(message.batch, message.dropped)
        self.check_conservation()
        if self._ledger.committed > before:
            now = self._clock()
            self._recorder.committed(self._ledger.metrics(now) | self._clients.metrics(now))
        return wire.encode(wire.Ok(req=message.req, checkpoint=self._ledger.wants_checkpoint))

    # --- facts -----------------------------------------------------------------------------------

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
                state=self.ending.state,
                final=self.ending.final,
                evaluate=self.ending.evaluated,
                reason=self.ending.reason,
                waiting_for=self._ledger.waiting_for_next(now),
            )
        )


def _ok(message: wire.Message) -> Reply:
    return wire.encode(wire.Ok(req=message.req))
