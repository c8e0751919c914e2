"""What a process did, and when: its file in a run's `trace/`, for `asyncrl trace`.

    any thread ──add──► memory, bounded ──(the pulse, once a second)──► trace/ROLE-RANK.jsonl

Each line has `track` and `name`, `at` (begin, seconds of time.monotonic) and `s` (seconds), and
what belongs to the track (docs/monitoring.md). A process begins with a line of the track "process",
which has the time of the clock on the wall too. The newest are kept: a file of half the limit
becomes `*.old`, in the place of the one before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec

log = logging.getLogger(__name__)

MAX_PENDING = 50_000
"""Spans that may wait for the disk; what comes beyond is lost, and counted."""
SHORTEST_S = 50e-6
"""A state that lasted less is not worth a line."""

Span = tuple[str, str, float, float, dict[str, Any]]
"""Track, name, begin, end, further fields."""


class SpanLog:
    """The spans of one process. Nothing that goes wrong in it reaches the role.

    Args:
        path: of the file; its folder is made. None keeps nothing.
        max_bytes: of the file and the one before it together.
    """

    def __init__(
        self, path: str | None = None, *, role: str = "", rank: int = 0, run_id: str = "",
        max_bytes: int = 64 << 20,
    ) -> None:  # fmt: skip
        self._path, self._max_bytes = path, max_bytes
        self._whoami = {"role": role, "rank": rank, "run_id": run_id, "host": socket.gethostname()}
        self._lock = threading.Lock()
        self._pending: list[Span] = []
        self._dropped = 0
        self._fd: int | None = None
        self._failed = False

    @property
    def on(self) -> bool:
        """Whether anything is kept."""
        return self._path is not None

    def add(self, track: str, name: str, began: float, ended: float, **fields: Any) -> None:
        """Note what lasted from `began` to `ended` (time.monotonic)."""
        if self._path is None:
            return
        with self._lock:
            if len(self._pending) < MAX_PENDING:
                self._pending.append((track, name, began, ended, fields))
            else:
                self._dropped += 1

    def state(self, name: str, began: float, ended: float) -> None:
        """Note that the process's time belonged to a state (`TimeShares` tells)."""
        if ended - began >= SHORTEST_S:
            self.add("state", name, began, ended)

    @contextlib.contextmanager
    def span(self, track: str, name: str, **fields: Any) -> Iterator[None]:
        """Note how long the block takes."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.add(track, name, began, time.monotonic(), **fields)

    def flush(self) -> dict[str, float]:
        """Write what waits; `trace/dropped`, unless it is 0. One thread at a time."""
        with self._lock:
            spans, self._pending = self._pending, []
        if spans:
            try:
                if self._failed:
                    raise OSError
                self._write(b"".join(map(_line, spans)))
            except OSError as e:
                with self._lock:
                    self._dropped += len(spans)
                if not self._failed:
                    self._failed = True  # a file with holes would mislead
                    log.warning("no more spans are written to %s: %s", self._path, e.strerror or e)
        return {"trace/dropped": float(self._dropped)} if self._dropped else {}

    def close(self) -> None:
        """Write what waits, and end; safe to call twice."""
        self.flush()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self._failed = True

    def _write(self, data: bytes) -> None:
        assert self._path is not None
        if self._fd is None:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            self._fd = self._open(self._path)
        size = os.fstat(self._fd).st_size
        if size + len(data) > self._max_bytes // 2:
            os.close(self._fd)
            self._fd = None
            os.replace(self._path, f"{self._path}.old")
            self._fd = self._open(self._path)
        _put(self._fd, data)

    def _open(self, path: str) -> int:
        """Open the file and say whose it is, and how its clocks stand to each other."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        now, fields = time.monotonic(), self._whoami | {"pid": os.getpid(), "wall": time.time()}
        line = _line(("process", f"{fields['role']}-{fields['rank']}", now, now, fields))
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"  # by a process that was killed
        _put(fd, b"\n" + line if torn else line)
        return fd


def span_log(run_dir: str, role: str, rank: int, run_id: str, max_mib: float | None) -> SpanLog:
    """Where a process of a run notes what it does when; with None nowhere."""
    if max_mib is None:
        return SpanLog()
    path = os.path.join(run_dir, "trace", f"{role}-{rank}.jsonl")
    return SpanLog(path, role=role, rank=rank, run_id=run_id, max_bytes=int(max_mib * 2**20))


def _line(span: Span) -> bytes:
    track, name, began, ended, fields = span
    at, end = round(began, 6), round(ended, 6)  # the same instant is the same number everywhere
    line = {"track": track, "name": name, "at": at, "s": round(end - at, 6), **fields}
    return msgspec.json.encode(line) + b"\n"


def _put(fd: int, data: bytes) -> None:
    size = os.fstat(fd).st_size
    if (written := os.write(fd, data)) != len(data):
        os.ftruncate(fd, size)  # a torn line would spoil the next one
        raise OSError(f"the disk took {written} of {len(data)} bytes")
