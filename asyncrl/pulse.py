"""The sign of life of a process: about once a second, what it waits for and what it costs.

    Pulse (a daemon thread) ──Record(waits, time/*, host/*)──► the role's HubClient ──► Hub

It goes on when the role's own thread or event loop is blocked, which is when one wants to know.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import psutil

from asyncrl.hub import HubClient
from asyncrl.metrics import process_began
from asyncrl.types import Version
from asyncrl.waits import Waits

log = logging.getLogger(__name__)

EVERY_S = 1.0
LOOK_FOR_CHILDREN_EVERY_S = 5.0
"""Listing children reads the whole process table."""
JOIN_S = 5.0

SHORT_S = 0.1
"""A share of a shorter time than this is noise and is left out."""

Metrics = Callable[[], Mapping[str, float]]
T = TypeVar("T")


class ProcessMeter:
    """Memory and processor time of this process and, if asked, of those it started."""

    def __init__(self, children: bool = True) -> None:
        self._me = psutil.Process()
        self._children = children
        self._known: list[psutil.Process] = [self._me]
        self._looked = float("-inf")
        self._cpu: dict[psutil.Process, float] = {}
        self._began, self._at = process_began(), time.monotonic()
        self._look()

    def _look(self) -> None:
        """Find the processes and read what they have used; a new one counts from here."""
        now = time.monotonic()
        if self._children and now - self._looked >= LOOK_FOR_CHILDREN_EVERY_S:
            self._looked = now
            self._known = [self._me, *self._me.children(recursive=True)]
        for process in self._known:
            if process not in self._cpu:
                self._cpu[process] = _cpu_s(process) or 0.0

    def read(self) -> dict[str, float]:
        """`host/rss_bytes` and `host/age_s` now, `host/cpu_frac` since the last reading."""
        now, rss, spent = time.monotonic(), 0.0, 0.0
        cpu: dict[psutil.Process, float] = {}
        for process in self._known:
            used = _cpu_s(process)
            if used is None:
                continue  # ended meanwhile
            spent += used - self._cpu[process]
            cpu[process] = used
            rss += _rss(process)
        values = {"host/rss_bytes": rss, "host/age_s": now - self._began}
        if now - self._at >= SHORT_S:
            values["host/cpu_frac"] = spent / (now - self._at)
        self._cpu, self._at, self._known = cpu, now, list(cpu)
        self._look()
        return values


def _cpu_s(process: psutil.Process) -> float | None:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return None
    return float(times.user + times.system)


def _rss(process: psutil.Process) -> float:
    try:
        return float(process.memory_info().rss)
    except psutil.Error:
        return 0.0


class Pulse:
    """Sends a record a second until `close`; nothing that goes wrong in it reaches the role.

    Args:
        client: of the role; to be closed after the pulse.
        waits: the process's registry; its long waits are logged from here, too.
        position: last completed step and applied version.
        metrics: called once a second, in the pulse's thread; each gives some metrics.
        children: whether `host/*` counts the processes below this one, e.g. an engine's.
        every_s: seconds from one record to the next.
    """

    def __init__(
        self, client: HubClient, *, waits: Waits,
        position: Callable[[], tuple[int, Version]], metrics: Sequence[Metrics] = (),
        children: bool = True, every_s: float = EVERY_S,
    ) -> None:  # fmt: skip
        self._client = client
        self._waits, self._position, self._children = waits, position, children
        self._metrics = tuple(metrics)
        self._every_s = every_s
        self._complained: set[object] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send a last record and end; safe to call twice, takes at most some seconds."""
        self._end.set()
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            meter = ProcessMeter(self._children)
        except Exception:
            log.exception("%s has no pulse", self._waits.name)
            return
        sources = [*self._metrics, meter.read]
        self._guarded(self._beat, sources)
        while not self._end.wait(self._every_s):
            self._guarded(self._beat, sources)
        self._guarded(self._beat, sources)

    def _beat(self, sources: Sequence[Metrics]) -> None:
        self._waits.warn()
        values: dict[str, float] = {}
        for source in sources:
            values |= self._guarded(source) or {}
        step, version = self._position()
        self._client.emit(
            values, step=step, version=version.version, incarnation=version.incarnation,
            waits=self._waits.open(),
        )  # fmt: skip
        for passed in self._waits.take_passed():
            self._client.emit(
                step=step, version=version.version, incarnation=version.incarnation,
                event={
                    "event": "deadline_passed", "what": passed.what, "on": passed.on,
                    "waited_s": round(passed.age_s, 1),
                },
            )  # fmt: skip

    def _guarded(self, call: Callable[..., T], *arguments: object) -> T | None:
        """The result, or None and, once for each callable, its traceback in the log."""
        try:
            return call(*arguments)
        except Exception:
            if call not in self._complained:
                self._complained.add(call)
                log.exception("pulse of %s: %s failed", self._waits.name, call)
            return None
