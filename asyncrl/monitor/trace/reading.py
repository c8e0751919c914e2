"""What the processes of a run noted (asyncrl.spans), on one clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from asyncrl.errors import DataError
from asyncrl.monitor.reading.tail import Tail


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a process did; times in whole microseconds since 1970.

    >>> Span("state", "train", 10, 30, {}).end - Span("state", "train", 10, 30, {}).at
    20
    """

    track: str
    name: str
    at: int
    end: int
    fields: dict[str, Any]

    def ends(self) -> list[int]:
        """When its parts ended."""
        return [int(e) for e in self.fields["ends"]]


@dataclass(slots=True)
class Process:
    """One process of a role; a restarted role has several."""

    role: str
    rank: int
    pid: int
    host: str
    run_id: str
    offset: int = 0
    """From its monotonic clock to the one on the wall, in microseconds."""
    spans: list[Span] = field(default_factory=list)

    @property
    def name(self) -> str:
        """E.g. "actor-3"."""
        return f"{self.role}-{self.rank}"


SAME_BOOT_US = 60 * 1_000_000
"""Further apart, two processes of a machine have different monotonic clocks: it was booted in
between, or slept."""


LONGEST_S = 1e11
"""Of a time; seconds since 1970 are below it for three thousand years."""
MOST_RANKS = 1_000_000
Id = tuple[str | int, ...]


class _Sample(msgspec.Struct, frozen=True):
    """What a sample's line has, besides its times."""

    id: Id
    ends: tuple[float, ...]
    became: str


class _Batch(msgspec.Struct, frozen=True):
    """Likewise that of a batch; those of its parts have none of it."""

    batch: int
    ids: tuple[Id, ...]
    ends: Annotated[tuple[float, ...], msgspec.Meta(min_length=1)]


@dataclass(slots=True)
class Spans:
    """All that was read."""

    processes: list[Process]
    malformed: int
    """Lines that could not be read, and were left out."""


def read_spans(folder: Path) -> Spans:
    """The spans of a run's `trace/`, also while it is written.

    All processes of a machine share its monotonic clock until it is booted again; those of several
    machines are brought together by their clocks on the wall, and are as far apart as these.

    Raises:
        DataError: nothing was kept, or it cannot be read.
    """
    paths = sorted((folder / "trace").glob("*.jsonl"))
    if not paths:
        raise DataError(
            f"{folder / 'trace'} holds nothing: the run had trace.enabled=false, or has not begun"
        )
    offsets: dict[str, list[int]] = {}
    processes: list[Process] = []
    malformed = 0
    for path in paths:
        mine: list[Process] = []
        for part in (path.with_name(f"{path.name}.old"), path):
            tail = Tail(part)
            try:
                for line in tail.lines():
                    malformed += not _taken(line, mine, offsets)
            except OSError as e:
                raise DataError(f"{part} cannot be read: {e.strerror or e}") from e
            malformed += tail.malformed
        processes += mine
    return Spans(processes, malformed)


def _taken(line: dict[str, Any], processes: list[Process], offsets: dict[str, list[int]]) -> bool:
    """Take a line; whether it could be read."""
    try:
        _take(line, processes, offsets)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError):
        return False
    return True


def _take(line: dict[str, Any], processes: list[Process], offsets: dict[str, list[int]]) -> None:
    track, name = str(line.pop("track")), str(line.pop("name"))
    at, lasted = _us(line.pop("at")), _us(line.pop("s"))
    if track == "process":
        mine, known = _us(line["wall"]) - at, offsets.setdefault(str(line["host"]), [])
        offset = next((o for o in known if abs(o - mine) < SAME_BOOT_US), mine)
        if offset not in known:
            known.append(offset)
        begun = Process(
            str(line["role"]), _rank(line["rank"]), int(line["pid"]), str(line["host"]),
            str(line["run_id"]), offset,
        )  # fmt: skip
        if not processes or (processes[-1].pid, processes[-1].offset) != (begun.pid, offset):
            processes.append(begun)
        return
    process = processes[-1]
    offset = process.offset
    if track == "sample":
        msgspec.convert(line, _Sample)
    elif track == "batch" and "batch" in line:
        msgspec.convert(line, _Batch)
    if "ends" in line:
        line["ends"] = [_us(e) + offset for e in line["ends"]]
    process.spans.append(Span(track, name, at + offset, at + lasted + offset, line))


def _us(seconds: Any) -> int:
    found = float(seconds)
    if not abs(found) < LONGEST_S:
        raise ValueError(f"{found} is no time")
    return round(found * 1e6)


def _rank(number: Any) -> int:
    found = int(number)
    if not 0 <= found < MOST_RANKS:
        raise ValueError(f"{found} is no rank")
    return found


def of_track(spans: Spans, track: str, role: str) -> Iterator[tuple[Process, Span]]:
    """The spans of one track of all processes of a role."""
    for process in spans.processes:
        if process.role == role:
            for span in process.spans:
                if span.track == track:
                    yield process, span
