"""Where time goes, and records on their way to the one writer.

    role ──Record (ZeroMQ PUSH)──► Hub (PULL, a thread of the launcher) ──► metrics.jsonl
                                                                      ├──► events.jsonl
                                                                      └──► other sinks

A role never waits for the hub: what does not fit in the socket's queue is counted in
`hub/records_dropped` of the role's next record.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import zmq

from asyncrl import wire
from asyncrl.errors import WireError
from asyncrl.protocols import MetricSink

log = logging.getLogger(__name__)

STATES = (
    "sync", "train", "generate", "reward", "put_wait", "get_wait", "eval", "checkpoint", "idle",
)  # fmt: skip
"""What a process can be doing, highest priority first (docs/metrics.md)."""

WAITING = frozenset({"put_wait", "get_wait", "idle"})
"""States in which a process does no work of its own."""


class TimeShares:
    """Gives each second of a process to exactly one state.

    States may overlap (an asyncio process generates and scores at once): the one of the
    highest priority gets the time. The totals always add up to the time since the start.

    >>> t = 0.0
    >>> shares = TimeShares(clock=lambda: t)
    >>> with shares.state("train"):
    ...     t = 2.0
    >>> t = 3.0
    >>> totals = shares.totals()
    >>> totals["train"], totals["idle"]
    (2.0, 1.0)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._active = dict.fromkeys(STATES, 0)
        self._active["idle"] = 1
        self._totals = dict.fromkeys(STATES, 0.0)
        self._since = clock()

    def _settle(self) -> None:
        now = self._clock()
        current = next(s for s in STATES if self._active[s])
        self._totals[current] += now - self._since
        self._since = now

    def enter(self, name: str) -> None:
        """Begin a state; states nest and overlap."""
        self._settle()
        self._active[name] += 1

    def leave(self, name: str) -> None:
        """End one `enter` of a state."""
        self._settle()
        if self._active[name] < 1:
            raise ValueError(f"state {name} was left more often than entered")
        self._active[name] -= 1

    @contextlib.contextmanager
    def state(self, name: str) -> Iterator[None]:
        """The block's time belongs to `name`, unless a state of higher priority overlaps."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave(name)

    def totals(self) -> dict[str, float]:
        """Seconds of each state since the start."""
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


class HubClient:
    """A role's end of the hub. Never blocks; used from one thread."""

    def __init__(self, endpoint: str, role: str, rank: int = 0) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.SNDHWM, 10_000)
        self._socket.connect(endpoint)
        self._role, self._rank = role, rank
        self._dropped = 0

    def emit(
        self,
        metrics: Mapping[str, float] | None = None,
        *,
        step: int,
        version: int,
        incarnation: int = 0,
        hist: Mapping[str, Any] | None = None,
        event: Mapping[str, Any] | None = None,
    ) -> None:
        """Send a record (fields as in `wire.Record`)."""
        values = dict(metrics or {})
        if self._dropped:
            values["hub/records_dropped"] = self._dropped
        record = wire.Record(
            role=self._role, rank=self._rank, step=step, version=version,
            incarnation=incarnation, metrics=values, hist=dict(hist or {}),
            event=None if event is None else dict(event),
        )  # fmt: skip
        try:
            self._socket.send_multipart(wire.encode(record), flags=zmq.NOBLOCK)
        except zmq.Again:
            self._dropped += 1

    def close(self) -> None:
        """Send what is queued, for at most 2 s, and end."""
        self._socket.close()
        self._context.term()


class Hub:
    """The single writer of a run's records: a thread of the launcher."""

    def __init__(
        self, sinks: list[MetricSink], *, run_id: str, host: str = "127.0.0.1",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._sinks = sinks
        self._run_id = run_id
        self._clock = clock
        self._started = clock()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 100_000)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"
        self.malformed = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="metrics-hub", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while True:
            # After close() whatever still arrives within a short quiet time is taken too.
            if not self._socket.poll(100):
                if self._closing.is_set():
                    return
                continue
            try:
                message, _ = wire.decode(self._socket.recv_multipart())
            except WireError:
                self.malformed += 1
                continue
            if isinstance(message, wire.Record):
                self.write(message)
            else:
                self.malformed += 1

    def write(self, record: wire.Record) -> None:
        """Hand a record to every sink, from any thread; one that fails is reported and dropped."""
        line = msgspec.to_builtins(record)
        for extra in ("type", "schema", "req"):
            line.pop(extra, None)
        with self._lock:
            line |= {"run_id": self._run_id, "wall_s": round(self._clock() - self._started, 3)}
            for sink in list(self._sinks):
                try:
                    sink.write(line)
                except Exception:
                    name = type(sink).__name__
                    log.exception("metric sink %s failed and is off from now on", name)
                    self._sinks.remove(sink)

    def drain(self) -> None:
        """Take what is still queued, and listen no more."""
        self._closing.set()
        self._thread.join(timeout=10)

    def close(self) -> None:
        """Take what is still queued, then close every sink."""
        self.drain()
        for sink in self._sinks:
            sink.close()
        self._socket.close(linger=0)
        self._context.term()


class JsonlSink:
    """metrics.jsonl and events.jsonl of a run's folder, one object a line, flushed each line."""

    def __init__(self, metrics_path: str, events_path: str) -> None:
        self._metrics = open(metrics_path, "a", encoding="utf-8")  # noqa: SIM115
        self._events = open(events_path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the record's metrics and its event, each to its own file."""
        if record["metrics"] or record["hist"]:
            line = {k: v for k, v in record.items() if k != "event"}
            self._put(self._metrics, line)
        if record["event"] is not None:
            line = {k: v for k, v in record.items() if k not in ("metrics", "hist", "event")}
            self._put(self._events, line | record["event"])

    @staticmethod
    def _put(file: Any, line: Mapping[str, Any]) -> None:
        file.write(msgspec.json.encode(line).decode() + "\n")
        file.flush()

    def close(self) -> None:
        """Close both files."""
        self._metrics.close()
        self._events.close()
