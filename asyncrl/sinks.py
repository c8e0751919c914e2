"""Where records end: each sink behind a queue and a thread of its own, and the run's files.

    Hub.write ──► queue (bounded) ──► thread ──► sink.write

A sink that is slow, hangs or fails loses records of its own; what it loses is counted. A sink
may say `lossless = True` (the run's files): its queue has no bound.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from asyncrl.disk import LineFile, trouble
from asyncrl.protocols import MetricSink

log = logging.getLogger(__name__)

Line = Mapping[str, Any]

QUEUE_RECORDS = 10_000
"""Records that may wait for a sink; what comes beyond is lost to it."""


def tag(record: Line, name: str) -> str:
    """A metric's name among those of all roles: rank 0's of the learner and scores as they are.

    >>> tag({"role": "actor", "rank": 3}, "time/idle_s")
    'actor-3/time/idle_s'
    """
    if (record["role"], record["rank"]) == ("learner", 0) or name.startswith("eval/"):
        return name
    return f"{record['role']}-{record['rank']}/{name}"


class Outlet:
    """A sink, its queue and its thread."""

    def __init__(self, sink: MetricSink, limit: int = QUEUE_RECORDS) -> None:
        self.name = type(sink).__name__
        self.dropped = 0
        """Records that the sink lost: no room, or its `write` failed."""
        self.trouble = ""
        """Why it loses records now, in a line; "" while it takes them."""
        self._sink = sink
        self._limit = None if getattr(sink, "lossless", False) else limit
        self._queue: deque[Line] = deque()
        self._changed = threading.Condition()
        self._closing = self._abandoned = self._failed = False
        self._thread = threading.Thread(target=self._run, name=f"sink-{self.name}", daemon=True)
        self._thread.start()

    def put(self, line: Line) -> None:
        """Queue a record; never waits."""
        with self._changed:
            if self._limit is not None and len(self._queue) >= self._limit:
                self._lose("it is too slow, its queue is full")
                return
            self._queue.append(line)
            self._changed.notify()

    def ask_to_close(self) -> None:
        """Write what is queued, then close the sink; `join` waits for that."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def join(self, deadline: float) -> None:
        """Wait for the end until `deadline` (monotonic); after that the sink is left behind."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._abandoned = True
            with self._changed:
                left = len(self._queue)
            log.error(
                "metric sink %s did not end by its deadline: left behind with %d record(s)",
                self.name, left,
            )  # fmt: skip
        if self.dropped:
            log.warning("metric sink %s lost %d record(s) in all", self.name, self.dropped)

    def _lose(self, why: str) -> None:
        self.dropped += 1
        if str(self.dropped).strip("0") == "1":  # 1, 10, 100...
            log.warning("metric sink %s lost %d record(s): %s", self.name, self.dropped, why)

    def _next(self) -> Line | None:
        with self._changed:
            while not self._queue and not self._closing:
                self._changed.wait()
            return self._queue.popleft() if self._queue and not self._abandoned else None

    def _run(self) -> None:
        while (line := self._next()) is not None:
            try:
                self._sink.write(line)
                self.trouble = ""
            except Exception as e:
                if isinstance(e, OSError) and e.filename is not None:
                    why = trouble(e.filename, e)
                else:
                    why = f"metric sink {self.name} failed ({type(e).__name__}: {e})"
                    if not self._failed:
                        log.exception("metric sink %s failed; it is tried again", self.name)
                self._failed, self.trouble = True, f"{why}; records are lost until then"
                with self._changed:
                    self._lose(f"{type(e).__name__}: {e}")
        try:
            self._sink.close()
        except Exception:
            log.exception("metric sink %s failed to close", self.name)


class JsonlSink:
    """metrics.jsonl and events.jsonl of a run's folder, one object a line, each line at once."""

    lossless = True

    def __init__(self, metrics_path: str, events_path: str) -> None:
        self._metrics, self._events = LineFile(metrics_path), LineFile(events_path)

    def write(self, record: Line) -> None:
        """Write the record's metrics and its event, each to its own file.

        Raises:
            OSError: the disk did not take it; nothing of the line stays in the file.
        """
        try:
            if record["metrics"] or record["hist"]:
                line = {k: v for k, v in record.items() if k != "event"}
                self._put(self._metrics, line)
        finally:  # an event that has room is written
            if record["event"] is not None:
                line = {k: v for k, v in record.items() if k not in ("metrics", "hist", "event")}
                self._put(self._events, line | record["event"])

    @staticmethod
    def _put(file: LineFile, line: Line) -> None:
        try:
            file.append(msgspec.json.encode(line) + b"\n")
        except OSError as e:
            raise OSError(e.errno, e.strerror or str(e), file.path) from e

    def close(self) -> None:
        """Close both files."""
        self._metrics.close()
        self._events.close()
