"""From totals that only grow to what happened between two marks: work per second, time shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from asyncrl.metrics import STATES
from asyncrl.monitor.reading.clock import Span
from asyncrl.monitor.reading.history import LEARNER, Axis, RunHistory, Source
from asyncrl.monitor.reading.totals import Floats, gained

MAX_MARKS = 240
SHORTEST_S = 2.0
"""Between two marks of the axis of time: roles tell their totals once a second."""


class Marks(NamedTuple):
    """Where a run is cut into pieces: n + 1 moments, and the n places where each piece is drawn."""

    times: Floats
    places: list[float]
    spans: tuple[Span, ...] = ()
    """The time that counts; empty: all of it. Over steps it is the run's training: between the last
    step of a launch and the first one of the next lie an end and a start."""


def marks_of(history: RunHistory, axis: Axis) -> Marks:
    """Even pieces of time, or one piece a batch (a power of two of them in a long run).

    Only whole pieces, so that what is drawn stays as it is while a run goes on.
    """
    if axis == "wall_s":
        ends = [p.wall_s for s in history.sources() if (p := history.last_at(s)) is not None]
        end = max(ends, default=0.0)
        width = SHORTEST_S
        while end / width > MAX_MARKS:
            width *= 2
        times = np.arange(int(end / width) + 1, dtype=np.float64) * width
        return Marks(times, [float(t) for t in times[1:]])
    places, _ = history.series("loss/tokens", LEARNER, axis)
    times_of, _ = history.series("loss/tokens", LEARNER, "wall_s")
    each = 1
    while len(places) / each > MAX_MARKS:
        each *= 2
    times = np.array(times_of[::each], dtype=float)
    return Marks(times, places[::each][1:], tuple(history.clock.training()))


def in_pieces(
    history: RunHistory, names: Iterable[str], sources: Iterable[Source], marks: Marks
) -> tuple[Floats, Floats] | None:
    """What these totals grew by in each piece, together, and the seconds of the piece, [n] each, of
    the time that counts; None without any such total."""
    times = marks.times
    bounds = [edge for span in marks.spans for edge in span]
    edges = np.unique(np.concatenate([times, bounds])) if bounds else times
    grown = gained(history, names, sources, edges)
    if grown is None:
        return None
    seconds = np.diff(edges)
    if not bounds:
        return grown, seconds
    middle = (edges[:-1] + edges[1:]) / 2
    counts = np.array([any(s.began <= m <= s.ended for s in marks.spans) for m in middle], bool)
    piece = np.searchsorted(times, middle) - 1
    counts &= (piece >= 0) & (piece < len(times) - 1)
    sums = []
    for values in (grown, seconds):
        one = np.zeros(max(len(times) - 1, 0))
        np.add.at(one, piece[counts], values[counts])
        sums.append(one)
    return sums[0], sums[1]


def per_second(
    history: RunHistory, names: Iterable[str], sources: Iterable[Source], marks: Marks
) -> list[float] | None:
    """`in_pieces`, one divided by the other."""
    found = in_pieces(history, names, sources, marks)
    if found is None:
        return None
    return [float(g / s) if s > 0 else 0.0 for g, s in zip(*found, strict=True)]


def shares(
    history: RunHistory, sources: Sequence[Source], marks: Marks
) -> dict[str, list[float | None]]:
    """Share of each state in the time that these processes lived, for each piece."""
    spent = {
        state: found[0]
        for state in STATES
        if (found := in_pieces(history, [f"time/{state}_s"], sources, marks)) is not None
    }
    if not spent:
        return {}
    whole = np.sum(list(spent.values()), axis=0)
    alive = whole > 0
    return {
        state: [float(g / w) if a else None for g, w, a in zip(growth, whole, alive, strict=True)]
        for state, growth in spent.items()
    }
