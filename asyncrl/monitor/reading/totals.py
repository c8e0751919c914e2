"""Totals that only grow, read over the restarts of their writers: the one rule for it.

    a process's total:   3 5 8 | 1 4          grown:  3 5 8 9 12
                               ^ began anew

A total that falls to less than half is that of a process that began anew, and all of it is growth.
A smaller fall is none: two threads of a process may tell their readings in the other order.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.metrics import STATES
from asyncrl.monitor.reading.clock import Span
from asyncrl.monitor.reading.history import RunHistory, Source

Floats = NDArray[np.float64]


def anew(before: float, now: float) -> bool:
    """Whether a total is that of a process that began anew since the record before it."""
    return now < before / 2


def growth(before: float, now: float) -> float:
    """What a total grew by from one record of its writer to the next.

    >>> growth(5.0, 8.0), growth(8.0, 1.0), growth(8.0, 7.9)
    (3.0, 1.0, 0.0)
    """
    return now if anew(before, now) else max(now - before, 0.0)


def total(history: RunHistory, name: str, source: Source) -> tuple[Floats, Floats]:
    """Times and values of a total, as if its process had never been restarted, [n] each."""
    times, values = history.series(name, source, "wall_s")
    t, c = np.array(times, dtype=float), np.array(values, dtype=float)
    if len(c) < 2:
        return t, c
    before, now = c[:-1], c[1:]
    grown = np.where(now < before / 2, now, np.maximum(now - before, 0.0))
    return t, np.concatenate([c[:1], c[0] + np.cumsum(grown)])


def gained(
    history: RunHistory, names: Iterable[str], sources: Iterable[Source], times: Floats
) -> Floats | None:
    """What these totals of these writers grew by between each two of the times, together: of n + 1
    times [n]; None without any."""
    wanted, found = tuple(names), None
    for source in sources:
        for name in wanted:
            t, c = total(history, name, source)
            if len(t):
                grown = np.diff(np.interp(times, t, c, left=0.0))
                found = grown if found is None else found + grown
    return found


def per_training_second(
    history: RunHistory, names: Iterable[str], sources: Iterable[Source]
) -> float | None:
    """What these totals grew by while the run trained, per second of it.

    Up to the last record of any of them: what a process did since is told by its next one.
    """
    names, sources = tuple(names), tuple(sources)
    told = sorted(t for n in names for s in sources for t in history.series(n, s, "wall_s")[0])
    spans = []
    for span in history.clock.training():
        last = bisect_right(told, span.ended)
        if last and told[last - 1] > span.began:
            spans.append(Span(span.began, told[last - 1]))
    grown = _within(history, names, sources, spans)
    seconds = sum(s.ended - s.began for s in spans)
    return grown / seconds if grown is not None and seconds else None


def spent(
    history: RunHistory, sources: Sequence[Source], spans: Sequence[Span]
) -> dict[str, float]:
    """Seconds of each state of these processes within some stretches of time; what stays 0 is left
    out."""
    found = {s: _within(history, [f"time/{s}_s"], sources, spans) for s in STATES}
    return {state: seconds for state, seconds in found.items() if seconds}


def lifetime(history: RunHistory, source: Source) -> dict[str, float]:
    """Seconds of each state in a process's life, those before a restart included."""
    found = {}
    for state in STATES:
        _, c = total(history, f"time/{state}_s", source)
        if len(c):
            found[state] = float(c[-1])
    return found


def _within(
    history: RunHistory, names: Iterable[str], sources: Iterable[Source], spans: Sequence[Span]
) -> float | None:
    if not spans:
        return None
    edges = np.array([edge for span in spans for edge in span], dtype=float)
    found = gained(history, names, sources, edges)
    return None if found is None else float(found[::2].sum())
