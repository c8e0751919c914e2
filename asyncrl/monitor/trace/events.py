"""Spans as events of the trace-event format, which Perfetto and chrome://tracing open.

    actor    state · weights · one lane for each sample in flight: leased [generate|reward|push]
    buffer   batches: from the first sample's arrival to the last rank's pull; samples waiting
    learner  state · batch [wait for data | train [prepare|look|update|measure] | commit]
             · publication [gather | join | begin | receive | commit]
    launcher the run's events

A flow follows each sample that was trained: from its lease, by the batch that it waits in, into
the training of that batch. A process here is a role; its pid is a number of its own.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from asyncrl.monitor.trace.lanes import Lanes
from asyncrl.monitor.trace.reading import Process, Span, Spans, of_track

Event = dict[str, Any]
Id = tuple[Any, ...]

TRACKS = ("state", "batch", "publication", "weights", "event", "sample", "batches", "other")
"""In the order in which a process shows them."""
LANES = 10_000
"""More than a track has: a sample in flight each."""
FIRST_PID = {"launcher": 1, "buffer": 2, "learner": 100, "relay": 500, "actor": 1000}
SAMPLE_PARTS = ("generate", "reward", "push")
BATCH_PARTS = ("wait for data", "train", "commit")


@dataclass(slots=True)
class _Trained:
    """Where a sample was trained."""

    batch: int
    at: int
    pid: int
    tid: int


@dataclass(frozen=True, slots=True)
class _Life:
    """A sample that was trained: from its lease, by its arrival in the buffer, to its training."""

    leased: int
    pid: int
    tid: int
    came: int
    trained: _Trained


class Timeline:
    """All events of a run, in the order of their time.

    Args:
        spans: what was read.
        steps: first and last batch to show; None shows the whole run.
    """

    def __init__(self, spans: Spans, steps: tuple[int, int] | None = None) -> None:
        self._spans = spans
        self._steps = steps or (0, sys.maxsize)
        self._window = _window(spans, steps)
        self._events: list[Event] = []
        self._threads: dict[tuple[int, int], str] = {}
        self._names: dict[int, str] = {}

    def events(self) -> list[Event]:
        """Metadata first; then by time, and of one time slices before the flows in them."""
        trained = self._learners()
        for process in self._spans.processes:
            self._plain(process)
        lives = self._samples(trained)
        self._flows(lives, self._buffer(lives))
        self._events.sort(key=lambda e: (e["ts"], e["ph"] in "stf", -e.get("dur", 0)))
        begin = self._events[0]["ts"] if self._events else 0
        for event in self._events:
            event["ts"] -= begin
        return [*self._metadata(), *self._events]

    # --- roles -------------------------------------------------------------------------------

    def _learners(self) -> dict[Id, _Trained]:
        """Batches; and which sample was trained where, the last time if it was several times."""
        trained: dict[Id, _Trained] = {}
        for process in self._spans.processes:
            if process.role != "learner":
                continue
            first, last = self._steps
            mine = [
                s for s in process.spans
                if s.track == "batch" and self._shown(s)
                and first <= s.fields.get("batch", first) <= last
            ]  # fmt: skip
            parts = [p for s in mine if "batch" in s.fields for p in _parts(s, BATCH_PARTS)]
            # One track, so that a batch's phases lie in it.
            for span, tid in self._lay(process, "batch", mine + parts, nested=True):
                self._slice(process, tid, span)
                if "batch" not in span.fields:
                    continue
                began = span.ends()[0]
                for sample in span.fields["ids"]:
                    trained[tuple(sample)] = _Trained(
                        int(span.fields["batch"]), began, _pid(process), tid
                    )
        return trained

    def _plain(self, process: Process) -> None:
        """What is drawn as it was noted."""
        tracks: dict[str, list[Span]] = defaultdict(list)
        for span in process.spans:
            if span.track not in ("batch", "sample") and self._shown(span):
                tracks[span.track if span.track in TRACKS else "other"].append(span)
        for track, spans in tracks.items():
            if track == "event":
                self._instants(process, spans)
                continue
            for span, tid in self._lay(process, track, spans, nested=True):
                self._slice(process, tid, span)

    def _instants(self, process: Process, spans: Iterable[Span]) -> None:
        tid = self._tid(process, "event", 0)
        self._events += [
            {"name": s.name, "cat": "event", "ph": "i", "s": "p", "ts": s.at,
             "pid": _pid(process), "tid": tid, "args": s.fields}
            for s in spans
        ]  # fmt: skip

    def _samples(self, trained: dict[Id, _Trained]) -> list[_Life]:
        """Samples, each in a lane; and the lives of those that were trained."""
        lives = []
        for process in self._spans.processes:
            mine = [
                s for s in process.spans
                if s.track == "sample" and (self._shown(s) or tuple(s.fields["id"]) in trained)
            ]  # fmt: skip
            for span, tid in self._lay(process, "sample", mine, nested=False):
                self._slice(process, tid, span)
                for part in _parts(span, SAMPLE_PARTS):
                    self._slice(process, tid, part)
                where = trained.get(tuple(span.fields["id"]))
                if where is not None and span.fields["became"] == "accepted":
                    came = min(span.end, where.at)  # clocks of two machines may disagree
                    lives.append(_Life(span.at, _pid(process), tid, came, where))
        return lives

    def _buffer(self, lives: Sequence[_Life]) -> dict[int, int]:
        """Batches while they gather, and how many samples wait; the thread of each batch."""
        pid, depth = FIRST_PID["buffer"], 0
        gathers: dict[int, list[_Life]] = defaultdict(list)
        for life in lives:
            gathers[life.trained.batch].append(life)
        rows = [
            Span("batches", f"batch {batch} gathers", min(x.came for x in mine),
                 max(x.trained.at for x in mine), {"batch": batch, "samples": len(mine)})
            for batch, mine in gathers.items()
        ]  # fmt: skip
        buffer = Process("buffer", 0, 0, "", "")
        threads: dict[int, int] = {}
        for span, tid in self._lay(buffer, "batches", rows, nested=False):
            self._slice(buffer, tid, span)
            threads[span.fields["batch"]] = tid
        changes = [(x.came, 1) for x in lives] + [(x.trained.at, -1) for x in lives]
        for at, change in sorted(changes):
            depth += change
            self._events.append({
                "name": "samples waiting", "ph": "C", "ts": at, "pid": pid, "tid": 0,
                "args": {"samples": depth},
            })  # fmt: skip
        return threads

    def _flows(self, lives: Sequence[_Life], threads: dict[int, int]) -> None:
        """An arrow for each life."""
        for number, life in enumerate(lives, start=1):
            where = life.trained
            ends = (
                ("s", life.leased, life.pid, life.tid),
                ("t", life.came, FIRST_PID["buffer"], threads[where.batch]),
                ("f", max(where.at, life.leased), where.pid, where.tid),
            )
            for phase, at, pid, tid in ends:
                event = {"name": "sample", "cat": "sample", "ph": phase, "id": number, "ts": at,
                         "pid": pid, "tid": tid}  # fmt: skip
                self._events.append(event | ({"bp": "e"} if phase == "f" else {}))

    # --- parts -------------------------------------------------------------------------------

    def _lay(
        self, process: Process, track: str, spans: Sequence[Span], *, nested: bool
    ) -> Iterator[tuple[Span, int]]:
        """The spans of a track with their threads."""
        lanes = Lanes(nested)
        for span in sorted(spans, key=lambda s: (s.at, -s.end)):
            yield span, self._tid(process, track, lanes.put(span.at, span.end))

    def _tid(self, process: Process, track: str, lane: int) -> int:
        tid = TRACKS.index(track) * LANES + lane + 1
        self._threads[(_pid(process), tid)] = track if not lane else f"{track} {lane + 1}"
        self._names[_pid(process)] = process.name
        return tid

    def _slice(self, process: Process, tid: int, span: Span) -> None:
        args = {k: v for k, v in span.fields.items() if k not in ("ends", "ids", "id")}
        self._events.append({
            "name": span.name, "cat": span.track, "ph": "X", "ts": span.at,
            "dur": span.end - span.at, "pid": _pid(process), "tid": tid, "args": args,
        })  # fmt: skip

    def _shown(self, span: Span) -> bool:
        begin, end = self._window
        return span.end >= begin and span.at <= end

    def _metadata(self) -> Iterator[Event]:
        for pid, name in sorted(self._names.items()):
            yield _named("process_name", pid, 0, name=name)
            yield _named("process_sort_index", pid, 0, sort_index=pid)
        for (pid, tid), name in sorted(self._threads.items()):
            yield _named("thread_name", pid, tid, name=name)
            yield _named("thread_sort_index", pid, tid, sort_index=tid)


def _named(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _pid(process: Process) -> int:
    return FIRST_PID.get(process.role, 900) + process.rank


def _parts(span: Span, names: Sequence[str]) -> Iterator[Span]:
    """The parts of a span, which end at `ends`; the last one may end with the span."""
    at = span.at
    for name, end in zip(names, [*span.ends(), span.end], strict=False):
        end = min(max(end, at), span.end)
        if end > at:
            yield Span(span.track, name, at, end, {})
        at = end


def _window(spans: Spans, steps: tuple[int, int] | None) -> tuple[float, float]:
    """When the batches `steps` were waited for and trained; without limits where there is none."""
    if steps is None:
        return float("-inf"), float("inf")
    first, last = steps
    shown = [
        s for _, s in of_track(spans, "batch", "learner")
        if first <= s.fields.get("batch", 0) <= last
    ]  # fmt: skip
    if not shown:
        return float("inf"), float("-inf")
    return min(s.at for s in shown), max(s.end for s in shown)
