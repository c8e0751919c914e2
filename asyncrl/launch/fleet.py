"""The actors as the launcher sees them: started, watched, restarted with back-off, scaled.

    starting ──set up──► ready ──endpoints known──► running ──► finished
        ▲                  │                           │ └─ too many ─► leaving ──► left
        └── back-off ◄─────┴── died, failed, late ◄────┘        (max_restarts in a row: gone)

The run has the actors 0 to N - 1. `scale` changes N: who is missing is started, also where one was
gone or left; who is one too many works off what it has, by rollout.lease_timeout_s, and ends.

An actor that ends before the run does costs nothing but its work: the buffer gives its leases to
others at once, and its successor leases nothing before it runs the current version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from asyncrl import out_of_memory
from asyncrl.config.schema import Config
from asyncrl.errors import AsyncRLError, EngineMemoryError, RoleDiedError, UserError
from asyncrl.launch.backoff import backoff_s
from asyncrl.launch.cluster import Cluster
from asyncrl.launch.concurrency import SETTING, lacked_memory, with_in_flight
from asyncrl.launch.processes.role_main import RoleSpec
from asyncrl.monitor.fleet_view import RoleState
from asyncrl.types import Version

GATHER_S = 20.0
"""How long training waits for the other actors after the first one is set up."""

State = Literal["starting", "ready", "running", "leaving", "backoff", "gone", "left", "finished"]
_OVER = ("finished", "gone", "left")


@dataclass
class Slot:
    """One actor, through all its processes."""

    rank: int
    state: State = "starting"
    host: Any = None
    ref: Any = None
    """The host's call that is under way."""
    since: float = 0.0
    """When it began to run (time.monotonic)."""
    until: float = 0.0
    """When its set-up is late, its back-off over, or its leave too long (time.monotonic)."""
    restarts: int = 0
    failures: int = 0
    """In a row, without a sample in between."""
    introduced: bool = False
    """Whether a process of it was told to evaluate version 0."""
    why: str = ""
    """How its last process ended."""
    produced: bool = field(default=False, repr=False)
    max_in_flight: int | None = None
    """Samples at once, since its engine ran out of memory with more; None is the setting."""
    kills: int | None = None
    """Processes that the kernel had killed for memory when it was started."""

    @property
    def name(self) -> str:
        """E.g. "actor-0"."""
        return f"actor-{self.rank}"

    @property
    def shown(self) -> RoleState:
        """Its state as people are told."""
        again: RoleState = "restarting" if self.restarts else "starting"
        shown: dict[State, RoleState] = {
            "starting": again, "ready": "alive", "running": "alive", "backoff": "restarting",
            "gone": "dead", "finished": "finished", "leaving": "leaving", "left": "left",
        }  # fmt: skip
        return shown[self.state]


class Fleet:
    """All actors of a run. `write` is to hear the records: they tell which process produces.

    Args:
        spec_of: what the actor of a rank is made from.
        tell: writes an event (name, fields).
        gone: tells the buffer that an actor's process has ended (name, why).
    """

    def __init__(
        self, config: Config, cluster: Cluster, *, spec_of: Callable[[int], RoleSpec],
        log_of: Callable[[str], str], tell: Callable[..., None], gone: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        self._config, self._cluster = config, cluster
        self._spec_of, self._log_of, self._tell, self._gone = spec_of, log_of, tell, gone
        self.slots = [Slot(rank) for rank in range(config.cluster.actors)]
        self.wanted = len(self.slots)
        """How many actors the run is to have."""
        self.first_ready: float | None = None
        self.ending = False

    @property
    def ever_ready(self) -> bool:
        """Whether an actor has ever been set up."""
        return self.first_ready is not None

    # --- facts -------------------------------------------------------------------------------

    def refs(self) -> dict[Any, Slot]:
        """The calls under way."""
        return {s.ref: s for s in self.slots if s.ref is not None}

    def in_state(self, *states: State) -> list[Slot]:
        """The actors in one of the states."""
        return [s for s in self.slots if s.state in states]

    @property
    def over(self) -> bool:
        """Whether every actor has finished, has left or is gone for good."""
        return all(s.state in _OVER for s in self.slots)

    @property
    def gathered(self) -> bool:
        """Whether training may begin: every actor has been set up once, or failed to, or GATHER_S
        have passed since the first was. The later ones load faster while nothing trains."""
        if self.first_ready is None:
            return False
        late = time.monotonic() - self.first_ready > GATHER_S
        return late or not any(s.state == "starting" and not s.failures for s in self.slots)

    def write(self, record: Mapping[str, Any]) -> None:
        """Take note of who produces."""
        pushed = record["metrics"].get("actor/samples_pushed", 0)
        if record["role"] == "actor" and pushed > 0 and record["rank"] < len(self.slots):
            slot = self.slots[record["rank"]]
            slot.produced = slot.state == "running"

    # --- what happens to them ----------------------------------------------------------------

    def start(self, slots: list[Slot] | None = None) -> None:
        """Start these actors (default: all), beside each other."""
        for slot in self.slots if slots is None else slots:
            slot.state, slot.produced = "starting", False
            slot.until = time.monotonic() + self._config.cluster.ready_timeout_s
            slot.kills = out_of_memory.kills()
            spec = with_in_flight(self._spec_of(slot.rank), slot.max_in_flight)
            slot.host = self._cluster.start(spec, self._log_of(slot.name))
            slot.ref = slot.host.call.remote("setup")

    def _lower(self, slot: Slot) -> None:
        """Halve what an actor has in flight at once."""
        was = slot.max_in_flight or self._config.rollout.max_in_flight
        if was == 1:
            return
        slot.max_in_flight = now = max(1, was // 2)
        slot.why += f"; goes on with {SETTING}={now}"
        self._tell("concurrency_lowered", actor=slot.name, setting=SETTING, to=now, was=was)

    def scale(self, actors: int) -> tuple[list[Slot], list[Slot]]:
        """Have so many actors from now on.

        Returns:
            Who starts, at once or once it has left, and who leaves.
        """
        self.wanted = actors
        for rank in range(len(self.slots), actors):
            self.slots.append(Slot(rank, state="left", introduced=True))
        starting = [s for s in self.slots[:actors] if s.state in ("gone", "left", "leaving")]
        leaving = [s for s in self.slots[actors:] if s.state not in (*_OVER, "leaving")]
        for slot in leaving:
            if slot.state == "running":
                wait = self._config.rollout.lease_timeout_s
                slot.state, slot.until = "leaving", time.monotonic() + wait
            else:
                self._leave(slot, "it did not run yet")
        for slot in starting:
            if slot.state != "leaving":
                slot.failures = 0
                self.start([slot])
        return starting, leaving

    def _leave(self, slot: Slot, why: str = "") -> None:
        """An actor that was one too many is not needed any more: end its process."""
        if slot.host is not None:
            self._cluster.kill(slot.host)
        slot.host = slot.ref = None
        slot.state, slot.why, slot.failures = "left", why, 0
        self._gone(slot.name, why or "it has left")
        self._tell("actor_left", actor=slot.name, **({"reason": why} if why else {}))

    def run_ready(self, buffer: str, fleet: str, version: Version) -> None:
        """Let the actors that are set up produce, from the version that is published."""
        for slot in self.in_state("ready"):
            first, slot.introduced = not slot.introduced, True
            slot.state, slot.since = "running", time.monotonic()
            slot.ref = slot.host.call.remote("run", buffer, fleet, version, first)

    def ended(self, slot: Slot, result: Callable[[], Any]) -> None:
        """A call of an actor has ended.

        Args:
            result: its result, or it raises what the actor failed with.

        Raises:
            AsyncRLError: no actor was ever set up, and this one cannot be: for a mistake of the
                user's, or for the second time.
            RoleDiedError: no actor is left.
        """
        slot.ref = None
        try:
            result()
        except AsyncRLError as e:
            if slot.state == "leaving":  # whatever ended it, it has ended
                self._leave(slot, str(e).splitlines()[0])
            else:
                self.failed(slot, e)
            return
        if slot.state == "leaving":
            self._leave(slot)
        elif slot.state == "starting":
            slot.state = "ready"
            self.first_ready = self.first_ready or time.monotonic()
        else:
            slot.state = "finished"

    def failed(self, slot: Slot, error: AsyncRLError) -> None:
        """An actor's process is of no use any more; see `ended` for what is raised."""
        hopeless = slot.state == "starting" and not self.ever_ready
        self._cluster.kill(slot.host)
        slot.host = slot.ref = None
        slot.why = str(error).splitlines()[0]
        self._gone(slot.name, slot.why)
        # An engine that does not start may have been killed; twice in a row it is a setting.
        mistake = isinstance(error, (UserError, EngineMemoryError)) or slot.failures > 0
        if hopeless and mistake and not isinstance(error, RoleDiedError):
            raise error
        slot.failures = 1 if slot.produced else slot.failures + 1
        limit = self._config.cluster.max_restarts
        if self.ending or slot.failures > limit:
            slot.state = "gone"
            self._tell("actor_gone", actor=slot.name, reason=slot.why, failures=slot.failures)
            if not self.ending and self.over:
                raise RoleDiedError(
                    f"no actor is left, each failed more than cluster.max_restarts={limit} times "
                    f"in a row; the last: {error}"
                )
            return
        if lacked_memory(error, slot.kills):
            self._lower(slot)
        wait = backoff_s(self._config.cluster.restart_backoff_s, slot.failures)
        slot.state, slot.until = "backoff", time.monotonic() + wait
        self._tell("actor_died", actor=slot.name, reason=slot.why, restart_in_s=round(wait, 1))

    def tick(self, silent: Callable[[Slot], bool]) -> None:
        """Restart who has waited long enough; give up who is late with its set-up, or silent, or
        takes too long to leave; start again who has left and is wanted again."""
        now = time.monotonic()
        for slot in self.slots:
            if slot.state == "running" and silent(slot):
                self.failed(slot, RoleDiedError(f"{slot.name} stood still: no sign of life of it"))
            if slot.state == "left" and slot.rank < self.wanted and not self.ending:
                self.start([slot])
            if slot.until > now:
                continue
            if slot.state == "leaving":
                limit = self._config.rollout.lease_timeout_s
                self._leave(slot, f"not done within rollout.lease_timeout_s={limit:g}")
            if slot.state == "backoff":
                slot.restarts += 1
                self._tell("actor_restarted", actor=slot.name, restarts=slot.restarts)
                self.start([slot])
            elif slot.state == "starting" and self.ever_ready:  # else the whole run is late
                limit = self._config.cluster.ready_timeout_s
                self.failed(slot, RoleDiedError(
                    f"{slot.name} was not ready within cluster.ready_timeout_s={limit:.0f}; "
                    f"see {self._log_of(slot.name)}"
                ))  # fmt: skip

    def end(self, silent: Callable[[Slot], bool]) -> Iterator[Slot]:
        """The run is over: nobody is restarted, and who is silent is ended (and yielded)."""
        self.ending = True
        for slot in self.slots:
            waits = slot.state in ("starting", "ready", "backoff")
            if waits or (slot.state == "running" and silent(slot)):
                if slot.host is not None:
                    self._cluster.kill(slot.host)
                running, slot.state = slot.state == "running", "gone"
                slot.host = slot.ref = None
                if running:
                    yield slot
