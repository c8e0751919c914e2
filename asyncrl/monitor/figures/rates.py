"""From totals that only grow to what happened between two marks: work per second, time shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncrl.metrics import STATES
from asyncrl.monitor.reading.history import LEARNER, Axis, RunHistory, Source

Floats = NDArray[np.float64]

MAX_MARKS = 240
SHORTEST_S = 2.0
"""Between two marks of the axis of time: roles tell their totals once a second."""


class Marks(NamedTuple):
    """Where a run is cut into pieces: n + 1 moments, and the n places where each piece is drawn."""

    times: Floats
    places: list[float]


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
    return Marks(np.array(times_of[::each], dtype=float), places[::each][1:])


def total(history: RunHistory, name: str, source: Source) -> tuple[Floats, Floats]:
    """Times and values of a total, as if its process had never been restarted."""
    times, values = history.series(name, source, "wall_s")
    t, c = np.array(times, dtype=float), np.array(values, dtype=float)
    if len(c) < 2:
        return t, c
    steps = np.diff(c)
    return t, np.concatenate([c[:1], c[0] + np.cumsum(np.where(steps < 0, c[1:], steps))])


def gained(
    history: RunHistory, names: Iterable[str], sources: Iterable[Source], times: Floats
) -> Floats | None:
    """What these totals of these writers grew by in each piece, together; None without any."""
    wanted, found = tuple(names), None
    for source in sources:
        for name in wanted:
            t, c = total(history, name, source)
            if len(t):
                growth = np.diff(np.interp(times, t, c, left=0.0))
                found = growth if found is None else found + growth
    return found


def per_second(
    history: RunHistory, names: Iterable[str], sources: Iterable[Source], marks: Marks
) -> list[float] | None:
    """`gained` divided by each piece's seconds."""
    growth = gained(history, names, sources, marks.times)
    return None if growth is None else (growth / np.diff(marks.times)).tolist()


def shares(
    history: RunHistory, sources: Sequence[Source], marks: Marks
) -> dict[str, list[float | None]]:
    """Share of each state in the time that these processes lived, for each piece."""
    spent = {
        state: growth
        for state in STATES
        if (growth := gained(history, [f"time/{state}_s"], sources, marks.times)) is not None
    }
    if not spent:
        return {}
    whole = np.sum(list(spent.values()), axis=0)
    alive = whole > 0
    return {
        state: [float(g / w) if a else None for g, w, a in zip(growth, whole, alive, strict=True)]
        for state, growth in spent.items()
    }


def lifetime(history: RunHistory, source: Source) -> dict[str, float]:
    """Seconds of each state in a process's life, those before a restart included."""
    found = {}
    for state in STATES:
        _, c = total(history, f"time/{state}_s", source)
        if len(c):
            found[state] = float(c[-1])
    return found
