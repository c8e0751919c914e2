"""Records on their way to the one writer.

    role ──Record (ZeroMQ PUSH)──► Hub (PULL, a thread of the launcher)
                                    ├──► listeners (in memory, at once): board, fleet
                                    └──► each sink's queue ──► metrics.jsonl, wandb, ...

Nobody waits for anybody: what does not fit in a role's socket is counted in
`hub/records_dropped` of its next record, what does not fit in a sink's queue in
`hub/sink_dropped/<Sink>` of the launcher's (asyncrl.sinks).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import zmq

from asyncrl import wire
from asyncrl.errors import WireError
from asyncrl.protocols import MetricSink
from asyncrl.security import MAX_CONTROL_BYTES, Keys, secure_client, secure_server
from asyncrl.sinks import QUEUE_RECORDS, Outlet

log = logging.getLogger(__name__)

CLOSE_S = 30.0
"""How long the sinks may take, together, to write what they have and to close."""
DRAIN_S = 5.0
"""How long records are still taken after the end was asked for, if they never cease."""


class HubClient:
    """A role's end of the hub, for all its threads: records arrive in the order of `emit`.

    Never blocks but for another thread's `emit`.
    """

    def __init__(
        self, endpoint: str, role: str, rank: int = 0, *, keys: Keys | None = None
    ) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._socket.setsockopt(zmq.SNDHWM, 10_000)
        secure_client(self._socket, keys)
        self._socket.connect(endpoint)
        self._role, self._rank = role, rank
        self._lock = threading.Lock()
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
        waits: tuple[wire.OpenWait, ...] | None = None,
    ) -> None:
        """Send a record (fields as in `wire.Record`)."""
        values = dict(metrics or {})
        with self._lock:
            if self._dropped:
                values["hub/records_dropped"] = self._dropped
            record = wire.Record(
                role=self._role, rank=self._rank, step=step, version=version,
                incarnation=incarnation, metrics=values, hist=dict(hist or {}),
                event=None if event is None else dict(event), waits=waits, pid=os.getpid(),
            )  # fmt: skip
            try:
                self._socket.send_multipart(wire.encode(record), flags=zmq.NOBLOCK)
            except zmq.Again:
                self._dropped += 1

    def close(self) -> None:
        """Send what is queued, for at most 2 s, and end; close the pulse before."""
        with self._lock:
            self._socket.close()
        self._context.term()


Listener = Callable[[Mapping[str, Any]], None]
"""Takes each record at once, in the hub's thread: one that only remembers, and is quick."""
IN_MEMORY = ("waits", "pid")
"""Fields of a record that listeners see and sinks do not."""


class Hub:
    """The single writer of a run's records: a thread of the launcher, and one for each sink.

    Args:
        sinks: each gets its own queue and thread; all see the records in the same order.
        listeners: each is called with every record, before the sinks have it (`listen`).
        run_id: stamped on each record.
        host: address to bind.
        keys: CURVE keys; None is plain text.
        began_at_s: `wall_s` to begin with: how long the run's launches have lived so far.
        queue_records: how many records may wait for a sink that is not lossless.
    """

    def __init__(
        self, sinks: Sequence[MetricSink], *, run_id: str, host: str = "127.0.0.1",
        keys: Keys | None = None, began_at_s: float = 0.0,
        listeners: Sequence[Listener] = (), queue_records: int = QUEUE_RECORDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._listeners = list(listeners)
        self._outlets = [Outlet(sink, queue_records) for sink in sinks]
        self._run_id = run_id
        self._clock = clock
        self._started = clock() - began_at_s
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 100_000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
        self._gate = secure_server(self._socket, keys)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"
        self.malformed = 0
        self._failed: set[Listener] = set()
        self._lock = threading.Lock()
        self._closing_since: float | None = None
        self._thread = threading.Thread(target=self._loop, name="metrics-hub", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while True:
            # After close() whatever still arrives within a short quiet time is taken too.
            quiet, since = not self._socket.poll(100), self._closing_since
            if since is not None and (quiet or time.monotonic() - since > DRAIN_S):
                return
            if quiet:
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
        """Hand a record to every sink, from any thread; never waits for one."""
        line = msgspec.to_builtins(record)
        for extra in ("type", "schema", "req"):
            line.pop(extra, None)
        in_memory = {name: line.pop(name, None) for name in IN_MEMORY}
        with self._lock:
            line |= {"run_id": self._run_id, "wall_s": round(self._clock() - self._started, 3)}
            for listener in self._listeners:
                try:
                    listener(line | in_memory)
                except Exception:
                    if listener not in self._failed:
                        self._failed.add(listener)
                        log.exception("%s failed; it is tried again", listener)
            if line["metrics"] or line["hist"] or line["event"] is not None:
                for outlet in self._outlets:
                    outlet.put(line)

    def listen(self, listener: Listener) -> None:
        """Call `listener` with each record from now on, `waits` and `pid` included."""
        with self._lock:
            self._listeners.append(listener)

    def metrics(self) -> dict[str, float]:
        """Losses so far, for the launcher's own records; only what is not 0."""
        values = {f"hub/sink_dropped/{o.name}": float(o.dropped) for o in self._outlets}
        values["hub/malformed"] = float(self.malformed)
        return {name: value for name, value in values.items() if value} | self._gate.metrics()

    def troubles(self) -> dict[str, str]:
        """Of each sink that loses records now: why, in a line."""
        return {o.name: o.trouble for o in self._outlets if o.trouble}

    def drain(self) -> None:
        """Take what is still queued at the socket, and listen no more; `write` goes on."""
        if self._closing_since is None:
            self._closing_since = time.monotonic()
        self._thread.join(timeout=2 * DRAIN_S)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Take what is still queued, then close every sink.

        Args:
            timeout_s: for all sinks together. One that is not done by then is named in the
                log and left behind.
        """
        self.drain()
        for outlet in self._outlets:
            outlet.ask_to_close()
        deadline = time.monotonic() + timeout_s
        for outlet in self._outlets:
            outlet.join(deadline)
        self._socket.close(linger=0)
        self._context.term()
