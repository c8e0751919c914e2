"""Who talks to the buffer: what each may ask, and when it was last heard."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from asyncrl import wire
from asyncrl.errors import LedgerError, WireError

_MAY_ASK: dict[type[wire.Message], tuple[str, ...]] = {
    wire.LeaseRequest: ("actor",),
    wire.Push: ("actor",),
    wire.Progress: ("actor",),
    wire.Fail: ("actor",),
    wire.Pull: ("learner",),
    wire.Commit: ("learner",),
    wire.Published: ("learner",),
    wire.Covered: ("learner",),
    wire.Rewind: ("learner", "launcher"),
    wire.SaveLedger: ("learner",),
    wire.Stop: ("learner", "launcher"),
    wire.Gone: ("launcher",),
    wire.Scale: ("launcher",),
}
"""Roles that may send a request; what is not here, everybody may."""


class Client(NamedTuple):
    """Who said hello."""

    name: str
    """ROLE-RANK, e.g. "actor-0"."""
    role: str
    pid: int


class Clients:
    """The clients by connection and by name.

    An actor asks for leases anew, reports progress or delivers long before it would count as
    silent: the buffer answers a parked lease request within half of `silent_after_s`, so a silent
    actor never has one that could be granted.

    Args:
        run_id: clients of another run are refused.
        silent_after_s: an actor that has said nothing for this long is silent.
    """

    def __init__(self, run_id: str, silent_after_s: float) -> None:
        self.silent_after_s = silent_after_s
        self._run_id = run_id
        self._by_identity: dict[bytes, Client] = {}
        self._current: dict[str, bytes] = {}  # name -> identity of its newest client
        self._heard: dict[str, float] = {}  # actor -> time of its last message
        self._silent: set[str] = set()
        self._looked_s: float | None = None

    def hello(self, identity: bytes, message: wire.Hello) -> tuple[str, bool]:
        """Admit a client: its name, and whether it may take that over from another process.

        It may when it is new here: a restarted buffer does not know who had the name before.

        Raises:
            WireError: it belongs to another run.
            LedgerError: it was known once, but its name is another process's by now.
        """
        name = f"{message.role}-{message.rank}"
        if message.run_id != self._run_id:
            raise WireError(
                f"this is the buffer of run {self._run_id!r}, {name} belongs to "
                f"{message.run_id!r}: it has another run's endpoint"
            )
        client = Client(name, message.role, message.pid)
        older = self._current.get(name)
        # A learner rank may have a second connection, for its checkpoints.
        if message.resumed and client.role == "actor" and older not in (None, identity):
            raise replaced(name)
        taken_over = older != identity or self._by_identity[identity] != client
        self._by_identity[identity] = client
        self._current[name] = identity
        return name, taken_over

    def knows(self, identity: bytes) -> bool:
        """Whether the client said hello."""
        return identity in self._by_identity

    def check(self, identity: bytes, message: wire.Message) -> None:
        """Refuse what the sender's role may not ask, or asks in another's name.

        Raises:
            WireError: it may not.
        """
        client, what = self._by_identity[identity], type(message).__name__
        allowed = _MAY_ASK.get(type(message), (client.role,))
        if client.role not in allowed:
            raise WireError(
                f"{what} may come from {' or '.join(allowed)} only, its sender said hello as "
                f"{client.name!r}"
            )
        actor = message.header.actor if isinstance(message, wire.Push) else client.name
        if isinstance(message, wire.LeaseRequest | wire.Progress | wire.Fail):
            actor = message.actor
        if actor != client.name:
            raise WireError(
                f"message names actor {actor!r}, its sender said hello as {client.name!r}"
            )

    def check_current(self, identity: bytes, actor: str) -> None:
        """Refuse a client whose name another process has taken over, or that was declared gone.

        Raises:
            LedgerError: it is not the one that has the name.
        """
        if self._current.get(actor) != identity:
            raise replaced(actor)

    def gone(self, actor: str) -> None:
        """The actor's process has ended: it is nobody until it says hello again."""
        self._current.pop(actor, None)
        self._heard.pop(actor, None)
        self._silent.discard(actor)

    # --- liveness --------------------------------------------------------------------------------

    def heard(self, identity: bytes, now: float) -> str:
        """Note a message; the sender's name if it had been silent, else empty."""
        client = self._by_identity.get(identity)
        if client is None or client.role != "actor" or self._current.get(client.name) != identity:
            return ""
        self._heard[client.name] = now
        if client.name not in self._silent:
            return ""
        self._silent.remove(client.name)
        return client.name

    def expect(self, actors: Iterable[str], now: float) -> None:
        """These are to be heard from: they hold leases that a former buffer process granted."""
        self._heard = dict.fromkeys(actors, now) | self._heard

    def newly_silent(self, now: float) -> list[str]:
        """Actors that have become silent since the last look; all messages must have been read.

        Time in which the buffer itself stood still is nobody's silence.
        """
        missed = 0.0 if self._looked_s is None else now - self._looked_s
        self._looked_s = now
        if missed > self.silent_after_s / 2:
            self._heard = {actor: at + missed for actor, at in self._heard.items()}
        late = [a for a, age in self.ages(now).items() if age >= self.silent_after_s]
        new = [actor for actor in late if actor not in self._silent]
        self._silent.update(new)
        return new

    def ages(self, now: float) -> dict[str, float]:
        """Seconds since each actor's last message."""
        return {actor: max(0.0, now - at) for actor, at in sorted(self._heard.items())}

    def metrics(self, now: float) -> dict[str, float]:
        """`actor/heartbeat_age_s` of the actor that has been silent longest, if there is one."""
        ages = self.ages(now)
        return {"actor/heartbeat_age_s": max(ages.values())} if ages else {}


def replaced(actor: str) -> LedgerError:
    """The refusal for a process that no longer is `actor`."""
    return LedgerError(f"{actor} was replaced by another process or has ended: no more leases")
