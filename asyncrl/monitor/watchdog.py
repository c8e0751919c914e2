"""Says why a run that trains makes no progress: who waits on whom, who is silent, since when.

    board (records of all roles) ─► look, every turn of the launcher ─► stalled ─► resumed_progress
                                        again at twice the time, four times...

Progress is a step, a sample, or tokens, which long responses bring long before. A learner that
computes is at work: it is told of only when its step takes ten times the limit. A role that has
said nothing for the limit is told of whatever the others do: its pulse goes on when it only hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from asyncrl.monitor import words
from asyncrl.monitor.board import Board
from asyncrl.monitor.fleet_view import RoleWait

PATIENCE = 10.0
"""Times the limit that one step may take while tokens come or the learner computes."""
HEARD_S = 5.0
"""Whoever was heard within this time is alive: a pulse comes every second."""
TOLD_WAITS = 3


@dataclass(frozen=True, slots=True)
class Stall:
    """A run, or a role of it, stands still."""

    since: float
    """On the clock of time.monotonic."""
    why: str
    """In a line."""
    silent: tuple[str, ...] = ()
    """Roles that have said nothing for the limit."""
    waits: tuple[RoleWait, ...] = ()
    """The longest waits."""


@dataclass(slots=True)
class Watchdog:
    """Looks at the board; `Board.stalled` is what it found last.

    Args:
        limit_s: `log.stall_warn_s`.
    """

    board: Board
    limit_s: float
    clock: Callable[[], float] = time.monotonic
    _made: tuple[float, float] = (-1.0, -1.0)
    _moved: float = 0.0
    """When an actor last made a token or delivered a sample."""
    _computed: tuple[float, float] = (0.0, 0.0)
    """The learner's seconds of work as last told, and when they last changed."""
    _told_s: float = field(default=0.0)

    def look(self) -> tuple[str, dict[str, Any]] | None:
        """An event to write, with its fields: `stalled` or `resumed_progress`; None is silence."""
        now, board = self.clock(), self.board
        self._note(now)
        stall = self._stall(now) if board.phase == "training" else None
        before, board.stalled = board.stalled, stall
        if stall is None:
            self._told_s = 0.0
            if before is None or board.phase != "training":  # it ends: that is no progress
                return None
            return "resumed_progress", {"after_s": round(now - before.since, 1)}
        age = now - stall.since
        if age < max(self.limit_s, 2 * self._told_s):
            return None
        self._told_s = age
        return "stalled", {
            "for_s": round(age, 1), "why": stall.why, "silent": list(stall.silent),
            "waits": [
                {"role": w.role, "what": w.what, "on": w.on, "age_s": round(w.age_s, 1)}
                for w in stall.waits
            ],
        }  # fmt: skip

    def _note(self, now: float) -> None:
        """Remember when tokens or samples came, and when the learner last computed."""
        board = self.board
        actors = list(board.actors.values())
        pushed = sum(a.get("actor/samples_pushed", 0.0) for a in actors)
        if (made := (board.generated_tokens, pushed)) != self._made:
            self._made, self._moved = made, now
        work = sum(board.learner.get(f"time/{s}_s", 0.0) for s in ("train", "checkpoint"))
        if work != self._computed[0]:
            self._computed = work, now

    def _stall(self, now: float) -> Stall | None:
        board = self.board
        if board.training_began is None:
            return None
        silent = self._silent(now)
        since = max(board.last_step_at, board.training_began)
        quiet = now - since
        if quiet > self.limit_s:
            busy = self._computing(now) or now - self._moved < self.limit_s
            if not busy:
                since = max(since, self._moved)
            elif quiet < PATIENCE * self.limit_s:
                quiet = 0.0
        if quiet <= self.limit_s and not silent:
            return None
        if quiet <= self.limit_s:
            since = now - max(silent.values())
        waits = tuple(board.fleet.longest_waits(now, min(1.0, self.limit_s / 2))[:TOLD_WAITS])
        return Stall(since, self._why(now, silent, waits), tuple(silent), waits)

    def _silent(self, now: float) -> dict[str, float]:
        """Roles that have said nothing for the limit, and for how long."""
        return {
            view.name: now - view.heard
            for view in self.board.fleet.ordered()
            if view.name != "launcher"
            and view.state in ("alive", "leaving")
            and view.heard is not None
            and now - view.heard > self.limit_s
        }

    def _computing(self, now: float) -> bool:
        """Whether learner rank 0 works, and waits for nobody."""
        view = self.board.fleet.roles.get("learner-0")
        if view is None or view.heard is None or now - view.heard > HEARD_S:
            return False
        return not view.waits and now - self._computed[1] < HEARD_S

    def _why(self, now: float, silent: dict[str, float], waits: tuple[RoleWait, ...]) -> str:
        parts = [
            f"{name} has said nothing for {words.age(age)} (stopped, cut off, or ended?)"
            for name, age in silent.items()
        ]
        parts += [f"{w.role} waits {words.wait(w.what, w.on, w.age_s)}" for w in waits]
        stats = self.board.stats
        if stats is not None and stats.waiting_for and not any("batch" in w.what for w in waits):
            parts.append(f"the next batch: {stats.waiting_for}")
        if self._computing(now):
            parts.append("learner-0 computes")
        return "; ".join(parts) or "nobody waits for anybody"
