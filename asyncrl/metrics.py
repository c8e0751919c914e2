"""Where a process's time goes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from asyncrl.spans import SpanLog

STATES = (
    "sync", "train", "generate", "reward", "put_wait", "get_wait", "eval", "checkpoint", "serve",
    "idle",
)  # fmt: skip
"""What a process can be doing, highest priority first (docs/metrics.md)."""

WAITING = frozenset({"put_wait", "get_wait", "idle"})
"""States in which a process does no work of its own."""


def process_began() -> float:
    """When this process began, on the clock of time.monotonic, to some 10 ms."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot
    return time.monotonic() - max(age, 0.0)


class TimeShares:
    """Gives each second of a process to exactly one state; from any of its threads.

    States may overlap (an asyncio process generates and scores at once): the one of the
    highest priority gets the time. The totals always add up to the time since the start, which is
    `since` or now. `spans` gets each state once another one has the time.

    >>> t = 0.0
    >>> shares = TimeShares(clock=lambda: t)
    >>> with shares.state("train"):
    ...     t = 2.0
    >>> t = 3.0
    >>> totals = shares.totals()
    >>> totals["train"], totals["idle"]
    (2.0, 1.0)
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, since: float | None = None,
        spans: SpanLog | None = None,
    ) -> None:  # fmt: skip
        self._clock = clock
        self.spans = spans or SpanLog()
        """What else of this process is worth a line of its trace goes there."""
        self._lock = threading.Lock()
        self._active = dict.fromkeys(STATES, 0)
        self._active["idle"] = 1
        self._totals = dict.fromkeys(STATES, 0.0)
        self._since = clock() if since is None else since
        self._current, self._began = "idle", self._since

    def _settle(self) -> None:
        now = self._clock()
        self._totals[self._current] += now - self._since
        self._since = now

    def _turn(self) -> None:
        """See which state has the time from now on."""
        current = next(s for s in STATES if self._active[s])
        if current != self._current:
            self.spans.state(self._current, self._began, self._since)
            self._current, self._began = current, self._since

    def enter(self, name: str) -> None:
        """Begin a state; states nest and overlap."""
        with self._lock:
            self._settle()
            self._active[name] += 1
            self._turn()

    def leave(self, name: str) -> None:
        """End one `enter` of a state."""
        with self._lock:
            self._settle()
            if self._active[name] < 1:
                raise ValueError(f"state {name} was left more often than entered")
            self._active[name] -= 1
            self._turn()

    @contextlib.contextmanager
    def state(self, name: str) -> Iterator[None]:
        """The block's time belongs to `name`, unless a state of higher priority overlaps."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)

    @contextlib.contextmanager
    def away(self, name: str) -> Iterator[None]:
        """The block's time does not belong to `name`, which is entered: the reverse of `state`."""
        self.leave(name)
        try:
            yield
        finally:
            self.enter(name)

    def totals(self) -> dict[str, float]:
        """Seconds of each state since the start."""
        with self._lock:
            self._settle()
            return dict(self._totals)

    def metrics(self) -> dict[str, float]:
        """The totals under their metric names, states never entered left out."""
        return {f"time/{s}_s": v for s, v in self.totals().items() if v > 0}


class IdleMeter:
    """Share of time spent waiting since the last reading, from a TimeShares."""

    def __init__(self, shares: TimeShares) -> None:
        self._shares = shares
        self._last = shares.totals()

    def read(self) -> float | None:
        """Waiting seconds / all seconds since the last reading; None if no time passed."""
        totals = self._shares.totals()
        spent = {s: totals[s] - self._last[s] for s in STATES}
        self._last = totals
        whole = sum(spent.values())
        return sum(spent[s] for s in WAITING) / whole if whole > 0 else None
