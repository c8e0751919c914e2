"""What the processes of a run noted (asyncrl.spans), on one clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
        DataError: nothing was kept.
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
            for line in tail.lines():
                try:
                    _take(line, mine, offsets)
                except (KeyError, TypeError, ValueError, IndexError):
                    malformed += 1
            malformed += tail.malformed
        processes += mine
    return Spans(processes, malformed)


def _take(line: dict[str, Any], processes: list[Process], offsets: dict[str, list[int]]) -> None:
    track, name = str(line.pop("track")), str(line.pop("name"))
    at, lasted = _us(line.pop("at")), _us(line.pop("s"))
    if track == "process":
        mine, known = _us(line["wall"]) - at, offsets.setdefault(str(line["host"]), [])
        offset = next((o for o in known if abs(o - mine) < SAME_BOOT_US), mine)
        if offset not in known:
            known.append(offset)
        begun = Process(
            str(line["role"]), int(line["rank"]), int(line["pid"]), str(line["host"]),
            str(line["run_id"]), offset,
        )  # fmt: skip
        if not processes or (processes[-1].pid, processes[-1].offset) != (begun.pid, offset):
            processes.append(begun)
        return
    process = processes[-1]
    offset = process.offset
    if "ends" in line:
        line["ends"] = [_us(e) + offset for e in line["ends"]]
    process.spans.append(Span(track, name, at + offset, at + lasted + offset, line))


def _us(seconds: Any) -> int:
    return round(float(seconds) * 1e6)


def of_track(spans: Spans, track: str, role: str) -> Iterator[tuple[Process, Span]]:
    """The spans of one track of all processes of a role."""
    for process in spans.processes:
        if process.role == role:
            for span in process.spans:
                if span.track == track:
                    yield process, span
