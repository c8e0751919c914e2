"""A run's `trajectories/`: every accepted sample as it travelled, and what became of it.

The format (docs/wire.md) and its reader; asyncrl.buffer.trajectories writes it. A line of the
index is written only after its frames, so a process that is killed leaves frames without a line
and at most one torn line: the reader skips both.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from asyncrl import wire
from asyncrl.errors import DataError, WireError
from asyncrl.types import Envelope, SampleId, Trajectory, Version

INDEX = "index.jsonl"

Outcome = Literal["trained", "dropped_stale", "filtered", "failed", "held", "requeued"]


@dataclass(frozen=True, slots=True)
class Retired:
    """An accepted sample whose fate is settled; the last four are those of its consumption."""

    envelope: Envelope
    outcome: Outcome
    incarnation: int
    """Of the learner at that time."""
    version: int | None = None
    """V of the batch."""
    batch: int | None = None
    rank: int | None = None
    position: int | None = None


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the index. Versions are [incarnation, version]."""

    id: SampleId
    lease: int
    actor: str
    version_min: Version
    """As in the header: the lowest by number."""
    version_max: Version
    outcome: Outcome
    """failed: its group was given up. held: the run ended first. requeued: its incarnation ended
    before a batch had it (`buffer.prior_incarnation=drop`), and it is produced again."""
    incarnation: int
    """Of the learner when the sample's fate was settled."""
    version: int | None
    """V, the learner's version for the batch; this and the next three are null unless the sample
    was consumed (trained or dropped_stale)."""
    batch: int | None
    """The optimizer batch, from 1."""
    rank: int | None
    """The learner rank that got it."""
    position: int | None
    """Its group's position when the batch was assigned."""
    reward: float
    file: Annotated[str, msgspec.Meta(pattern=r"^\d{6,}\.frames$")]
    """Where its frames are: file of the same folder, first byte and number of bytes."""
    offset: int
    bytes: int
    time: float
    """When its fate was settled, in seconds since 1970."""
    crc: int | None = None
    """CRC-32 of those bytes; null in recordings of before there was one."""

    @property
    def head_staleness(self) -> int | None:
        """V - version_min, in versions (an earlier incarnation's: at least 0); None if unused."""
        if self.version is None:
            return None
        behind = self.version - self.version_min.version
        return behind if self.version_min.incarnation == self.incarnation else max(0, behind)


def encode_sample(envelope: Envelope) -> bytes:
    """The two frames of a sample's `push`, with `req` 0, each after its length (uint32)."""
    frames = wire.encode(wire.Push(header=envelope.header), [envelope.payload])
    return b"".join(p for f in frames for p in (len(f).to_bytes(4, "little"), f))


def decode_sample(data: bytes | memoryview) -> Envelope:
    """What `encode_sample` wrote.

    Raises:
        WireError: not the frames of one sample, or of another schema.
    """
    frames, at = [], 0
    for _ in range(2):  # header and payload
        size = int.from_bytes(data[at : at + 4], "little")
        frames.append(bytes(data[at + 4 : at + 4 + size]))
        at += 4 + size
    message, payloads = wire.decode(frames)
    if not isinstance(message, wire.Push) or at != len(data):
        raise WireError(f"{len(data)} bytes are not the frames of one sample")
    return Envelope(message.header, payloads[0])


@dataclass(frozen=True, slots=True)
class Recorded:
    """A sample of a recording; its frames are read when asked for."""

    entry: Entry
    folder: Path

    def envelope(self) -> Envelope:
        """Header and payload as they travelled.

        Raises:
            DataError: the frames cannot be read.
        """
        try:
            with open(self.folder / self.entry.file, "rb") as file:
                file.seek(self.entry.offset)
                data = file.read(self.entry.bytes)
            if self.entry.crc is not None and zlib.crc32(data) != self.entry.crc:
                raise WireError("they are damaged, their checksum is not that of the index")
            return decode_sample(data)
        except (OSError, ValueError, WireError) as e:
            where = f"{self.folder / self.entry.file} at byte {self.entry.offset}"
            raise DataError(f"{where}: the frames of {self.entry.id} cannot be read: {e}") from e

    def trajectory(self) -> Trajectory:
        """The sample with its arrays (raises as `envelope`)."""
        return wire.unpack_trajectory(self.envelope())


def read_recording(folder: str | os.PathLike[str]) -> Iterator[Recorded]:
    """The samples of a run's `trajectories/`, in the order in which they retired.

    A sample whose batch was trained again, after the learner's restart, comes again, with the
    later incarnation; so does one that was "held" when a buffer ended whose successor went on. The
    last line of a sample counts. A torn last line is left out, and so are samples whose frames are
    not there whole. A recording that is still being written may be read.

    Raises:
        DataError: there is no index, or one of its whole lines is malformed.
    """
    index = Path(folder) / INDEX
    try:
        file = open(index, "rb")  # noqa: SIM115
    except OSError as e:
        raise DataError(f"{index}: no recording can be read there: {e.strerror}") from e
    sizes: dict[str, int] = {}
    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                entry = msgspec.json.decode(line, type=Entry)
            except msgspec.DecodeError as e:
                raise DataError(f"{index}:{number}: {e}") from e
            end = entry.offset + entry.bytes
            if end > sizes.get(entry.file, 0):
                with contextlib.suppress(OSError):
                    sizes[entry.file] = (Path(folder) / entry.file).stat().st_size
            if end <= sizes.get(entry.file, 0):
                yield Recorded(entry, Path(folder))
