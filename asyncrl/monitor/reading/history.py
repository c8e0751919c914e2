"""What a run's metrics.jsonl and events.jsonl tell, by metric: the memory of every display.

    metrics.jsonl ──(lines since the last look)──► RunHistory ──► series(name), latest(role, rank)
    events.jsonl  ──────────────────────────────►                 hists(name), events

A batch that was trained again, by a later incarnation, replaces what was read of its step. A pulse
(a record a second) belongs to its time, not to a step: all are kept, thinned when they are many.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec

from asyncrl.monitor import words
from asyncrl.monitor.reading.clock import LARGEST, RunClock
from asyncrl.monitor.reading.happened import Happened
from asyncrl.monitor.reading.tail import Lines, Tail

_T = TypeVar("_T")
Axis = Literal["step", "version", "wall_s"]
Source = tuple[str, int]
"""Role and rank of a writer, e.g. ("actor", 3)."""

LEARNER: Source = ("learner", 0)
BUFFER: Source = ("buffer", 0)
LAUNCHER: Source = ("launcher", 0)
MAX_POINTS = 4_000
"""Of a series by time; beyond it every second one of the older half goes."""
MAX_EVENTS = 20_000


class Point(NamedTuple):
    """Where a value lies.

    >>> Point(12, 11, 0, 61.2).step
    12
    """

    step: int
    version: int
    incarnation: int
    wall_s: float


class Histogram(NamedTuple):
    """Counts of the values between neighbouring edges, [n + 1] edges and [n] counts."""

    at: Point
    edges: tuple[float, ...]
    counts: tuple[float, ...]


@dataclass(slots=True)
class Series:
    """One metric of one writer, in order."""

    by_step: bool
    points: list[Point] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)

    def add(self, at: Point, value: Any) -> None:
        """Append a value, or put it in the place of what an earlier incarnation had from there."""
        if self.by_step and self.points and at.step <= self.points[-1].step:
            if at.incarnation < self.points[-1].incarnation:
                return  # of a learner that is no more
            keep = bisect_left([p.step for p in self.points], at.step)
            del self.points[keep:], self.values[keep:]
        self.points.append(at)
        self.values.append(value)
        if not self.by_step and len(self.points) > MAX_POINTS:
            half = MAX_POINTS // 2
            self.points[:half], self.values[:half] = self.points[:half:2], self.values[:half:2]


_Number = Annotated[float, msgspec.Meta(ge=-LARGEST, le=LARGEST)]
_Count = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]


class _Hist(msgspec.Struct, frozen=True):
    edges: tuple[_Number, ...]
    counts: tuple[_Number, ...]

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1:
            raise ValueError(f"{len(self.edges)} edges of {len(self.counts)} counts")


class _Record(msgspec.Struct, frozen=True):
    """A line of metrics.jsonl."""

    role: str
    rank: _Count
    step: _Count
    version: _Count
    wall_s: _Number
    metrics: dict[str, _Number]
    hist: dict[str, _Hist] | None = None
    incarnation: _Count = 0


class _Event(msgspec.Struct, frozen=True):
    """What every line of events.jsonl has; the rest belongs to its kind."""

    event: str
    wall_s: _Number
    role: str = ""
    rank: _Count = 0
    step: _Count = 0
    version: _Count = 0
    incarnation: _Count = 0


class RunHistory:
    """A run's records as far as they were read; `update` reads on.

    Args:
        folder: of the run.
        metrics: where its records come from; its file without.
        events: likewise.
    """

    def __init__(
        self, folder: Path, *, metrics: Lines | None = None, events: Lines | None = None
    ) -> None:
        self.folder = folder
        self.events: list[dict[str, Any]] = []
        """Newest last; at most MAX_EVENTS."""
        self.happened = Happened()
        """The events for people."""
        self.clock = RunClock()
        """How long it has lived and trained, and at what pace."""
        self._metrics = metrics or Tail(folder / "metrics.jsonl")
        self._event_lines = events or Tail(folder / "events.jsonl")
        self._series: dict[Source, dict[str, Series]] = {}
        self._hists: dict[Source, dict[str, Series]] = {}
        self._latest: dict[Source, dict[str, float]] = {}
        self._last_at: dict[Source, Point] = {}

    def update(self) -> bool:
        """Read what was written since; whether there was anything."""
        news = False
        for line in self._metrics.lines():
            news |= self._take(line)
        for event in self._event_lines.lines():
            if _read(event, _Event, self._event_lines) is None:
                continue
            news = True
            self.events.append(event)
            self.happened.add(event)
            self.clock.write(event)
        del self.events[:-MAX_EVENTS]
        return news

    @property
    def malformed(self) -> int:
        """Lines that could not be read, and were left out."""
        return self._metrics.malformed + self._event_lines.malformed

    # --- questions ---------------------------------------------------------------------------

    def sources(self, role: str | None = None) -> list[Source]:
        """Who wrote, in order."""
        return sorted(s for s in self._series if role in (None, s[0]))

    def names(self, source: Source = LEARNER) -> list[str]:
        """The metrics of a writer, in order."""
        return sorted(self._series.get(source, {}))

    def series(
        self, name: str, source: Source = LEARNER, axis: Axis = "step"
    ) -> tuple[list[float], list[float]]:
        """Places and values of a metric, [n] each; empty when nobody wrote it."""
        found = self._series.get(source, {}).get(name)
        if found is None:
            return [], []
        return [float(getattr(p, axis)) for p in found.points], list(found.values)

    def newest(self, name: str, source: Source = LEARNER) -> tuple[Point, float] | None:
        """The last value of a metric, and where it lies."""
        found = self._series.get(source, {}).get(name)
        return (found.points[-1], found.values[-1]) if found and found.points else None

    def value_at(self, name: str, source: Source, wall_s: float) -> float | None:
        """The newest value of a pulse's metric at or before a moment; None if there is none."""
        found = self._series.get(source, {}).get(name)
        if found is None:
            return None
        after = bisect_right(found.points, wall_s, key=lambda p: p.wall_s)
        return float(found.values[after - 1]) if after else None

    def scores(self) -> dict[str, list[tuple[Point, float]]]:
        """By task, the scores of held-out prompts in order of their versions.

        Of a version the newest counts. What the learner had reached beyond the version from which
        it went on is left out as soon as that is known.
        """
        found = {}
        for name, series in sorted(self._series.get(LAUNCHER, {}).items()):
            if not (name.startswith("eval/") and name.endswith("/score")):
                continue
            kept: dict[int, tuple[Point, float]] = {}
            incarnation = 0
            for at, value in zip(series.points, series.values, strict=True):
                if at.incarnation > incarnation:
                    incarnation = at.incarnation
                    kept = {v: one for v, one in kept.items() if v < at.version}
                kept[at.version] = (at, value)
            found[name.removeprefix("eval/").removesuffix("/score")] = [
                kept[version] for version in sorted(kept)
            ]
        return found

    def hists(
        self, name: str, source: Source = LEARNER, last: int | None = None
    ) -> list[Histogram]:
        """The histograms of a metric, one a batch; all, or the last ones."""
        found = self._hists.get(source, {}).get(name)
        if found is None:
            return []
        first = 0 if last is None else max(0, len(found.points) - last)
        return [
            Histogram(p, h.edges, h.counts)
            for p, h in zip(found.points[first:], found.values[first:], strict=True)
        ]

    def latest(self, source: Source = LEARNER) -> Mapping[str, float]:
        """The newest value of each metric of a writer."""
        return self._latest.get(source, {})

    def last_at(self, source: Source = LEARNER) -> Point | None:
        """Where the newest record of a writer lies."""
        return self._last_at.get(source)

    def events_of(self, kinds: Iterable[str]) -> list[dict[str, Any]]:
        """The events of these kinds, newest last."""
        wanted = set(kinds)
        return [e for e in self.events if e.get("event") in wanted]

    # --- reading -----------------------------------------------------------------------------

    def _take(self, line: Mapping[str, Any]) -> bool:
        record = _read(line, _Record, self._metrics)
        if record is None:
            return False
        self.clock.write(line)
        source, metrics = (record.role, record.rank), record.metrics
        at = Point(record.step, record.version, record.incarnation, record.wall_s)
        by_step = is_of_batch(source, metrics)
        self._last_at[source] = at
        self._latest.setdefault(source, {}).update(metrics)
        found: tuple[tuple[dict[Source, dict[str, Series]], Mapping[str, Any]], ...] = (
            (self._series, metrics), (self._hists, record.hist or {}),
        )  # fmt: skip
        for store, values in found:
            mine = store.setdefault(source, {})
            for name, value in values.items():
                if name not in mine:
                    # Both a pulse and a batch tell where the time goes.
                    mine[name] = Series(by_step and not name.startswith("time/"))
                mine[name].add(at, value)
        return True


def _read(line: Mapping[str, Any], kind: type[_T], lines: Lines) -> _T | None:
    """A line as what it must be; else it is counted, and left out."""
    try:
        return msgspec.convert(line, kind)
    except (msgspec.ValidationError, OverflowError):
        lines.malformed += 1
        return None


def source_name(source: Source) -> str:
    """A process by name."""
    return words.named(*source)


def is_of_batch(source: Source, metrics: Mapping[str, float]) -> bool:
    """Whether a record speaks of a batch: a rank's after its step, or the buffer's at a commit."""
    if source[0] == "learner":
        return "queue/get_wait_s" in metrics
    return source[0] == "buffer" and "samples/dispatched" in metrics
