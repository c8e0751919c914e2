"""The machines' receivers of weights, as the launcher sees them (`weights.strategy=relay`).

    running ──died, silent──► back-off ──► running, and caught up by learner rank 0
                      └─ too often in a row: the run ends

One for each machine that has an actor; a machine that gets its first one by `asyncrl scale` gets a
receiver too. One that has no actor any more keeps its own, which costs no more than its memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.config.schema import Config
from asyncrl.errors import AsyncRLError, RoleDiedError
from asyncrl.launch.backoff import backoff_s
from asyncrl.launch.cluster import Cluster
from asyncrl.launch.processes.role_main import RoleSpec
from asyncrl.types import INITIAL, Version

SILENT_S = 30.0
"""One that sent no record for so long is ended and restarted; the learner cut it out before. Until
its first one it has cluster.ready_timeout_s."""


@dataclass
class Relay:
    """One receiver, through all its processes."""

    rank: int
    state: Literal["running", "backoff"] = "running"
    host: Any = None
    ref: Any = None
    """The host's call that is under way."""
    since: float = 0.0
    """When it began to run (time.monotonic)."""
    until: float = 0.0
    """When its back-off is over (time.monotonic)."""
    restarts: int = 0
    failures: int = 0
    """In a row, without a version in between."""
    heard: bool = False
    """Whether its process has sent a record."""

    @property
    def name(self) -> str:
        """E.g. "relay-0"."""
        return f"relay-{self.rank}"


class Relays:
    """All receivers of a run; none where weights are broadcast. `write` is to hear the records.

    Args:
        spec_of: what the receiver of a rank is made from.
        fleet: where they announce themselves to learner rank 0.
        tell: writes an event (name, fields).
        placed: tells in the events where they run (names).
    """

    def __init__(
        self, config: Config, cluster: Cluster, *, spec_of: Callable[[int], RoleSpec],
        log_of: Callable[[str], str], fleet: str, tell: Callable[..., None],
        placed: Callable[[list[str]], None],
    ) -> None:  # fmt: skip
        self._config, self._cluster = config, cluster
        self._spec_of, self._log_of, self._tell, self._placed = spec_of, log_of, tell, placed
        self._fleet = fleet
        self.slots: list[Relay] = []

    def refs(self) -> dict[Any, Relay]:
        """The calls under way."""
        return {s.ref: s for s in self.slots if s.ref is not None}

    def write(self, record: Mapping[str, Any]) -> None:
        """Take note of who has begun, and of who has got a version."""
        if record["role"] == "relay" and record["rank"] < len(self.slots):
            slot = self.slots[record["rank"]]
            slot.heard = True
            if Version(record["incarnation"], record["version"]) > INITIAL:
                slot.failures = 0

    def tick(self, silent: Callable[[Relay, float], bool]) -> list[str]:
        """Start who is missing; end who is silent; restart who has waited long enough.

        Args:
            silent: whether one has sent no record for so many seconds.

        Returns:
            What to tell people, a line for each that failed.

        Raises:
            RoleDiedError: as `ended`.
        """
        new = [Relay(rank) for rank in range(len(self.slots), self._cluster.relays())]
        self.slots += new
        for slot in new:
            self._start(slot)
        if new:
            self._placed([slot.name for slot in new])
        told = []
        for slot in self.slots:
            limit = SILENT_S if slot.heard else self._config.cluster.ready_timeout_s
            if slot.state == "running" and silent(slot, limit):
                why = f"{slot.name} stood still: no sign of life of it for {limit:.0f} s"
                told.append(self._failed(slot, RoleDiedError(why)))
            elif slot.state == "backoff" and time.monotonic() >= slot.until:
                slot.restarts += 1
                self._tell("relay_restarted", relay=slot.name, restarts=slot.restarts)
                self._start(slot)
        return told

    def ended(self, slot: Relay, result: Callable[[], Any]) -> str:
        """The call of a receiver has ended, which only a failure makes it do.

        Args:
            result: it raises what the receiver failed with.

        Returns:
            What to tell people.

        Raises:
            RoleDiedError: it failed too often in a row: its machine's actors get no weights.
        """
        slot.ref = None
        try:
            result()
        except AsyncRLError as e:
            return self._failed(slot, e)
        return self._failed(slot, RoleDiedError(f"{slot.name} ended early"))

    def _start(self, slot: Relay) -> None:
        slot.state, slot.since, slot.heard = "running", time.monotonic(), False
        slot.host = self._cluster.start(self._spec_of(slot.rank), self._log_of(slot.name))
        slot.ref = slot.host.call.remote("run", self._fleet)

    def _failed(self, slot: Relay, error: AsyncRLError) -> str:
        self._cluster.kill(slot.host)
        self._cluster.kill_role(slot.name)  # one that is stopped does not notice that
        slot.host = slot.ref = None
        slot.failures += 1
        limit, why = self._config.cluster.max_restarts, str(error).splitlines()[0]
        if slot.failures > limit:
            raise RoleDiedError(
                f"{error}; more than cluster.max_restarts={limit} times in a row: the actors of "
                "its machine get no weights"
            ) from error
        wait = backoff_s(self._config.cluster.restart_backoff_s, slot.failures)
        slot.state, slot.until = "backoff", time.monotonic() + wait
        self._tell("relay_died", relay=slot.name, reason=why, restart_in_s=round(wait, 1))
        return f"{why}; restarting, its machine's actors go on with the version they have"
