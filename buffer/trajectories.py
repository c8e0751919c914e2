"""Writes a run's `trajectories/` (format: asyncrl.recording) without holding up the buffer.

retired samples ──► queue (bounded by bytes) ──► thread ──► NNNNNN.frames
                      │ full, or recording ended       └──► index.jsonl
                      └──► counted as unrecorded
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec

from asyncrl.recording import INDEX, Entry, Outcome, Retired, encode_sample, read_recording
from asyncrl.types import SampleId

SEGMENT_BYTES = 64 << 20
"""A file of frames is closed when the next sample would make it longer than this."""
QUEUE_BYTES = 128 << 20
"""Most array bytes that wait for the disk."""
RESUME_SAMPLES = 100_000
"""Newest samples of a former process that are not written again; older ones do not come again."""
CHUNK_BYTES = 1 << 20
"""Array bytes taken from the queue at a time: one write of frames, one of lines."""

logger = logging.getLogger(__name__)


def _create(path: str) -> BinaryIO:
    """A new file, unbuffered: what was written survives the process."""
    return open(path, "xb", buffering=0)  # noqa: SIM115


class TrajectoryWriter:
    """Writes retired samples from a thread of its own; no method waits for the disk but `close`.

    A failure of the disk ends the recording, never the run.

    Args:
        folder: made if it is not there; it must hold no recording, unless `resume`.
        resume: go on with the recording that is there; samples that it has are not written again.
        max_bytes: recording ends before frames and index together would be longer.
        segment_bytes, queue_bytes: see SEGMENT_BYTES and QUEUE_BYTES.
        create: opens a new file for unbuffered writing.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        max_bytes: int,
        resume: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
        queue_bytes: int = QUEUE_BYTES,
        create: Callable[[str], BinaryIO] = _create,
    ) -> None:
        self._disk = _Disk(os.fspath(folder), max_bytes, segment_bytes, create)
        if resume:
            self._disk.resume()
        self._queue_bytes = queue_bytes
        self._queue: deque[tuple[Retired, float]] = deque()
        self._changed = threading.Condition()  # guards all that follows, and the queue
        self._waiting = 0  # samples put and neither recorded nor given up
        self._waiting_bytes = 0
        self._unrecorded = 0
        self._closing = False
        self._ended = ""
        self._thread = threading.Thread(target=self._run, name="trajectory-writer", daemon=True)
        self._thread.start()

    def put(self, samples: Iterable[Retired]) -> None:
        """Have samples written; those that find no room are counted as unrecorded."""
        now = time.time()
        with self._changed:
            for sample in samples:
                size = sample.envelope.nbytes
                if self._ended or self._closing or self._waiting_bytes + size > self._queue_bytes:
                    if not self._unrecorded and not self._ended:
                        logger.warning("trajectories: the disk is too slow, samples are left out")
                    self._unrecorded += 1
                    continue
                self._queue.append((sample, now))
                self._waiting += 1
                self._waiting_bytes += size
            self._changed.notify()

    @property
    def ended(self) -> str:
        """Why nothing more is recorded, in a line; empty while it goes on."""
        return self._ended

    @property
    def waiting(self) -> int:
        """Samples that wait for the disk."""
        return self._waiting

    def metrics(self) -> dict[str, float]:
        """Samples and bytes on disk, and samples left out; with `waiting` they are all put."""
        with self._changed:
            return {
                "record/samples": self._disk.samples,
                "record/bytes": self._disk.bytes,
                "record/unrecorded": self._unrecorded,
            }

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what waits, for at most `timeout_s`, and end. Safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._end(f"the disk did not take what was left within {timeout_s:.0f} s")

    def _run(self) -> None:
        while chunk := self._take():
            before = self._disk.handled
            try:
                full = self._disk.write(chunk)
            except Exception as e:
                full = f"{self._disk.folder} cannot be written: {e}"
            with self._changed:
                self._waiting -= len(chunk)
                self._waiting_bytes -= sum(s.envelope.nbytes for s, _ in chunk)
                self._unrecorded += len(chunk) - (self._disk.handled - before)
                if full:
                    self._end(full)
        self._disk.close()

    def _take(self) -> list[tuple[Retired, float]]:
        """The next samples to write; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing or self._ended)
            chunk, size = [], 0
            while self._queue and size < CHUNK_BYTES:
                chunk.append(self._queue.popleft())
                size += chunk[-1][0].envelope.nbytes
            return chunk

    def _end(self, reason: str) -> None:
        """Record nothing more; what waits is counted as unrecorded."""
        with self._changed:
            if self._ended:
                return
            self._ended = reason
            self._unrecorded += len(self._queue)
            self._waiting -= len(self._queue)
            self._queue.clear()
            self._changed.notify()
        logger.warning("trajectories: recording ended: %s", reason)


class _Disk:
    """The files of a recording; used by the writer's thread alone."""

    def __init__(
        self, folder: str, max_bytes: int, segment_bytes: int, create: Callable[[str], BinaryIO]
    ) -> None:
        self.folder = folder
        self.samples = 0
        self.bytes = 0
        self.handled = 0  # samples written, or there already
        self._max_bytes, self._segment_bytes, self._create = max_bytes, segment_bytes, create
        self._segments = 0
        self._frames: BinaryIO | None = None
        self._index: BinaryIO | None = None
        self._offset = 0  # of the open file of frames
        self._index_bytes = 0
        self._there: dict[tuple[int, SampleId, int, Outcome], None] = {}  # by a former process

    def resume(self) -> None:
        """Go on after what a former process has written; its torn last line goes.

        Raises:
            DataError, OSError: the recording cannot be read, or not be written.
        """
        path = Path(self.folder, INDEX)
        if not path.exists():
            return
        for recorded in read_recording(self.folder):
            e = recorded.entry
            self.samples += 1
            # With the outcome: what was held when the former process ended may be trained now.
            self._there[e.lease, e.id, e.incarnation, e.outcome] = None
            if len(self._there) > RESUME_SAMPLES:
                del self._there[next(iter(self._there))]
        self._segments = max((int(p.stem) for p in path.parent.glob("*.frames")), default=0)
        self.bytes = sum(p.stat().st_size for p in path.parent.glob("*.frames"))
        with path.open("rb") as f:
            self._index_bytes = f.read().rfind(b"\n") + 1
        os.truncate(path, self._index_bytes)
        self.bytes += self._index_bytes
        self._index = path.open("ab", buffering=0)

    def write(self, chunk: list[tuple[Retired, float]]) -> str:
        """Write samples; why the recording must end after them, or empty.

        Raises:
            OSError: the disk refused; `samples` counts those that are there whole.
        """
        frames, lines, samples = bytearray(), bytearray(), 0
        for sample, when in chunk:
            h = sample.envelope.header
            if (h.lease, h.id, sample.incarnation, sample.outcome) in self._there:
                self.handled += 1
                continue
            data = encode_sample(sample.envelope)
            at = self._offset + len(frames)
            if self._frames is None or (at and at + len(data) > self._segment_bytes):
                self._flush(frames, lines, samples)
                frames, lines, samples, at = bytearray(), bytearray(), 0, 0
                self._open_segment()
            line = self._line(sample, when, at, data)
            if self.bytes + len(frames) + len(lines) + len(data) + len(line) > self._max_bytes:
                self._flush(frames, lines, samples)
                return f"record.max_gib is reached after {self.samples} samples"
            frames += data
            lines += line
            samples += 1
        self._flush(frames, lines, samples)
        return ""

    def close(self) -> None:
        """Close the files."""
        for file in (self._frames, self._index):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()

    def _open_segment(self) -> None:
        if self._index is None:
            os.makedirs(self.folder, exist_ok=True)
            self._index = self._create(os.path.join(self.folder, INDEX))
        if self._frames is not None:
            self._frames.close()
        self._segments += 1
        self._frames = self._create(os.path.join(self.folder, self._name()))
        self._offset = 0

    def _name(self) -> str:
        return f"{self._segments:06}.frames"

    def _line(self, sample: Retired, when: float, offset: int, data: bytes) -> bytes:
        h = sample.envelope.header
        entry = Entry(
            id=h.id, lease=h.lease, actor=h.actor, version_min=h.version_min,
            version_max=h.version_max, outcome=sample.outcome, incarnation=sample.incarnation,
            version=sample.version, batch=sample.batch, rank=sample.rank,
            position=sample.position, reward=h.reward, file=self._name(), offset=offset,
            bytes=len(data), time=when, crc=zlib.crc32(data),
        )  # fmt: skip
        return msgspec.json.encode(entry) + b"\n"

    def _flush(self, frames: bytearray, lines: bytearray, samples: int) -> None:
        """Frames first, so that every line has its frames."""
        if self._frames is None or self._index is None or not samples:
            return
        _append(self._frames, frames, self._offset)
        _append(self._index, lines, self._index_bytes)
        self._offset += len(frames)
        self._index_bytes += len(lines)
        self.bytes += len(frames) + len(lines)
        self.samples += samples
        self.handled += samples


def _append(file: BinaryIO, data: bytearray, good: int) -> None:
    """Write all of `data`; if that fails, cut the file back to its `good` bytes."""
    left = memoryview(data)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(good)
        raise
