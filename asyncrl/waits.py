"""What a process waits for, and on whom: one small registry in every role.

    with waits.on("batch 31", owner="buffer-0") as wait:
        ...                                    # any thread, any asyncio task
        wait.owner = "buffer-0: 12 samples held by actor-3 (lease 812, 41 s)"

The process's pulse (asyncrl.pulse) sends the open waits to the launcher, and the deadlines that
have passed, and writes those that grow long to the log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from asyncrl.wire import OpenWait

log = logging.getLogger(__name__)

Owner = str | Callable[[], str]
"""Who can end a wait, and what is known of that; asked each time it is shown, if it is a call."""

WARN_S = 10.0
"""Default of `log.wait_warn_s`."""
EARLY_S = 0.1
"""A wait that ends so shortly before its deadline has reached it: its owner's clock began first."""
PASSED = 100
"""Passed deadlines that are kept until they are told; the oldest go first."""


class Wait:
    """One wait, open from `with` to its end. `owner` may be updated in between."""

    __slots__ = ("_next_warning_s", "_passed", "_waits", "deadline_s", "owner", "since", "what")

    def __init__(self, waits: Waits, what: str, owner: Owner, deadline_s: float | None) -> None:
        self._waits = waits
        self._next_warning_s = waits.warn_s
        self._passed = False
        self.what, self.owner, self.deadline_s = what, owner, deadline_s
        self.since = 0.0
        """Clock time of the beginning."""

    def __enter__(self) -> Wait:
        self.since = self._waits.clock()
        self._waits._add(self)
        return self

    def renew(self, deadline_s: float) -> None:
        """Something came: it is given up in `deadline_s` from now."""
        self.deadline_s = self._waits.clock() - self.since + deadline_s

    def whom(self) -> str:
        """`owner`, as it is now."""
        return self.owner if isinstance(self.owner, str) else self.owner()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._waits._remove(self)


class Waits:
    """The open waits of one process; of all its threads and tasks.

    >>> t = 0.0
    >>> waits = Waits("learner-0", clock=lambda: t)
    >>> with waits.on("batch 31", owner="buffer-0", deadline_s=60):
    ...     t = 41.0
    ...     waits.open()
    (OpenWait(what='batch 31', on='buffer-0', age_s=41.0, deadline_s=19.0),)
    >>> waits.open()
    ()
    """

    def __init__(
        self, name: str, warn_s: float = WARN_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self.warn_s = warn_s
        self.clock = clock
        self._lock = threading.Lock()
        self._open: dict[int, Wait] = {}  # in order of their beginning
        self._passed: deque[OpenWait] = deque(maxlen=PASSED)

    def on(self, what: str, owner: Owner = "", deadline_s: float | None = None) -> Wait:
        """A wait, to be used as a context manager once.

        Args:
            what: e.g. "batch 31".
            owner: who can end it, and what is known of that.
            deadline_s: seconds from now after which it is given up; None where the other side
                has the deadline.
        """
        return Wait(self, what, owner, deadline_s)

    def open(self) -> tuple[OpenWait, ...]:
        """What is waited for now, the longest wait first."""
        now = self.clock()
        with self._lock:
            waits = list(self._open.values())
        return tuple(
            OpenWait(
                what=w.what, on=w.whom(), age_s=now - w.since,
                deadline_s=None if w.deadline_s is None else w.since + w.deadline_s - now,
            )
            for w in waits
        )  # fmt: skip

    def warn(self) -> None:
        """Log the waits that have passed `warn_s`: once, and again at twice that, four times..."""
        now = self.clock()
        with self._lock:
            waits = list(self._open.values())
        for w in waits:
            age = now - w.since
            self._look_at_deadline(w, age)
            if age < w._next_warning_s:
                continue
            while w._next_warning_s <= age:
                w._next_warning_s *= 2
            left = "" if w.deadline_s is None else f"; gives up in {w.deadline_s - age:.0f} s"
            log.warning("%s has waited %.0f s for %s%s", self.name, age, _target(w), left)

    def take_passed(self) -> list[OpenWait]:
        """The waits that have reached their deadline since the last call, as they were then."""
        with self._lock:
            passed = list(self._passed)
            self._passed.clear()
        return passed

    def _look_at_deadline(self, wait: Wait, age: float) -> None:
        if wait._passed or wait.deadline_s is None or age < wait.deadline_s - EARLY_S:
            return
        wait._passed = True
        told = OpenWait(
            what=wait.what, on=wait.whom(), age_s=age, deadline_s=wait.deadline_s - age
        )  # fmt: skip
        with self._lock:
            self._passed.append(told)
        log.warning(
            "%s: the deadline of %.0f s for %s has passed",
            self.name, wait.deadline_s, _target(wait),
        )  # fmt: skip

    def _add(self, wait: Wait) -> None:
        with self._lock:
            self._open[id(wait)] = wait

    def _remove(self, wait: Wait) -> None:
        with self._lock:
            del self._open[id(wait)]
        age = self.clock() - wait.since
        self._look_at_deadline(wait, age)
        if age >= self.warn_s:
            log.warning("%s waited %.0f s for %s", self.name, age, _target(wait))


def _target(wait: Wait) -> str:
    whom = wait.whom()
    return f"{wait.what} on {whom}" if whom else wait.what
