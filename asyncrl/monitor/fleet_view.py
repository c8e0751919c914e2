"""What the launcher knows of each role's process, for the console and status.json."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from asyncrl.monitor import words

RoleState = Literal["starting", "alive", "restarting", "leaving", "dead", "left", "finished"]
_STARTING = ("starting", "restarting")
ENDED = ("dead", "left", "finished")
"""States that do not change any more, whatever became of the launcher."""
_KINDS = ("launcher", "buffer", "learner", "relay", "actor")
_LOADING = {"actor": "loading the engine", "learner": "loading the model"}
"""What a role of a kind does while it starts."""


@dataclass(frozen=True, slots=True)
class RoleWait:
    """An open wait of a role, as old as it is now."""

    role: str
    what: str
    on: str
    age_s: float
    deadline_s: float | None
    """Seconds left until it is given up."""


@dataclass(frozen=True, slots=True)
class RoleView:
    """One role's process. Replaced whole, so that a reader in another thread sees one moment."""

    name: str
    state: RoleState = "starting"
    pid: int | None = None
    restarts: int = 0
    version: int | None = None
    """Of its last record: what an actor's engine runs, what a relay offers, what the learner has
    published."""
    done: str = ""
    """The last phase of its start that it has told the end of, e.g. "engine"."""
    doing_since: float = 0.0
    """When its start began, or that phase ended."""
    heard: float | None = None
    """When its last record came."""
    waits: tuple[Mapping[str, Any], ...] = ()
    """Its open waits when that record was made."""

    @property
    def doing(self) -> str:
        """What it does while it starts; empty when it is ready."""
        if self.state not in _STARTING:
            return ""
        if self.done:
            return f"{self.done} done"
        kind = self.name.rpartition("-")[0]
        return _LOADING.get(kind, self.state) if self.state == "starting" else self.state

    def open_waits(self, now: float) -> list[RoleWait]:
        """Its waits, the longest first. They grow on: a process that hangs still waits."""
        passed = 0.0 if self.heard is None else now - self.heard
        return [
            RoleWait(
                self.name, w["what"], w["on"], w["age_s"] + passed,
                None if w["deadline_s"] is None else w["deadline_s"] - passed,
            )
            for w in self.waits
        ]  # fmt: skip


@dataclass
class FleetView:
    """All roles. Written by the hub's and the launcher's threads, each role by replacement."""

    actors: int = 0
    """How many actors the run is to have."""
    roles: dict[str, RoleView] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def update(self, name: str, **changes: Any) -> None:
        """What the launcher knows: `state`, `restarts` (fields of RoleView)."""
        with self._lock:
            before = self.roles.get(name)
            view = replace(before or RoleView(name, doing_since=time.monotonic()), **changes)
            if before is not None and view.state != before.state:
                view = _changed(view)
            self.roles[name] = view

    def heard(self, record: Mapping[str, Any], now: float) -> None:
        """A record of a role's own."""
        role, event = record["role"], record["event"] or {}
        name = words.named(role, record["rank"])
        changes: dict[str, Any] = {"heard": now}
        if record.get("pid") is not None:  # the launcher's events have none
            changes["pid"] = record["pid"]
        if role in ("actor", "learner", "relay"):
            changes["version"] = record["version"]
        if record.get("waits") is not None:
            changes["waits"] = tuple(record["waits"])
        with self._lock:
            view = self.roles.get(name) or RoleView(name, doing_since=now)
            if view.state in ENDED or (view.state == "restarting" and not event):
                return  # last words, still on their way: its pulse begins when it is ready
            if role == "launcher":
                changes["state"] = "alive"
            elif event.get("event") == "startup" and view.state != "alive":
                changes |= {"done": str(event["phase"]), "doing_since": now}
            elif not event and view.state == "starting":
                changes["state"] = "alive"
            self.roles[name] = replace(view, **changes)

    def ordered(self) -> list[RoleView]:
        """Launcher, buffer, learners, relays, actors, each by rank."""

        def key(view: RoleView) -> tuple[int, int, str]:
            kind, _, rank = view.name.rpartition("-")
            place = _KINDS.index(kind) if kind in _KINDS else 0
            return place, int(rank) if rank.isdigit() else 0, view.name

        return sorted(list(self.roles.values()), key=key)

    def longest_waits(self, now: float, at_least_s: float = 1.0, each: int = 2) -> list[RoleWait]:
        """The longest waits of the learners, then of the actors, `each` of a kind."""
        found = []
        for kind in ("learner", "actor"):
            waits = [
                w for v in self.ordered() if v.name.startswith(kind) for w in v.open_waits(now)[:1]
            ]
            waits.sort(key=lambda w: -w.age_s)
            found += [w for w in waits if w.age_s >= at_least_s][:each]
        return found

    def loading(self, now: float) -> list[tuple[str, list[str], float]]:
        """(phase, roles in it, seconds of the longest) of what is starting, the oldest first."""
        phases: dict[str, tuple[list[str], float]] = {}
        for view in self.ordered():
            if view.doing:
                names, oldest = phases.get(view.doing, ([], 0.0))
                age = now - view.doing_since
                phases[view.doing] = ([*names, view.name], max(oldest, age))
        return sorted(((p, n, a) for p, (n, a) in phases.items()), key=lambda item: -item[2])

    def alive(self, kind: str = "actor") -> int:
        """How many roles of a kind are alive."""
        return self.count("alive", kind)

    def count(self, state: RoleState, kind: str = "actor") -> int:
        """How many roles of a kind are in a state."""
        views = list(self.roles.values())
        return sum(v.state == state and v.name.startswith(f"{kind}-") for v in views)

    def restarts(self) -> int:
        """Restarts of all actors so far."""
        return sum(v.restarts for v in list(self.roles.values()) if v.name.startswith("actor-"))

    def metrics(self) -> dict[str, float]:
        """`actor/*` of the launcher's records; empty before the first actor is known."""
        if not any(name.startswith("actor-") for name in list(self.roles)):
            return {}
        return {"actor/alive": float(self.alive()), "actor/restarts": float(self.restarts())}


def _changed(view: RoleView) -> RoleView:
    """A role in a new state: what its last process was doing is over."""
    view = replace(view, done="", doing_since=time.monotonic())
    if view.state in ("alive", "leaving"):
        return view
    return replace(view, waits=(), heard=None, pid=None)
