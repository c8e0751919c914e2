"""What all figures are made with: series of several runs, thinned, on one of three axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from asyncrl.monitor.figures.themes import HUES
from asyncrl.monitor.reading.history import LEARNER, Axis, RunHistory, Source
from asyncrl.monitor.reading.retired import Retired

Figure = dict[str, Any]
"""`data` and `layout` of Plotly; `layout.template` is left to whoever shows it."""

MAX_DRAWN = 1_000
"""Points of a line; beyond that the lowest and the highest of neighbouring ones stand for them."""
FEW = 40
"""Up to so many points each has a marker."""
DASHES = ("solid", "dot", "dash", "dashdot", "longdash")


class Run(NamedTuple):
    """A run to draw."""

    name: str
    history: RunHistory
    retired: Retired | None = None
    """What its recording tells of each actor; None if that is not read."""


class Line(NamedTuple):
    """One metric of a figure of lines."""

    metric: str
    label: str
    dash: str = "solid"
    """With one run; with several the colour tells the run, and the dash the metric."""


class Scale(NamedTuple):
    """Of an axis: what it is called, and how many seconds (steps, versions) one of it is."""

    title: str
    unit: float


def scale_of(runs: Sequence[Run], axis: Axis) -> Scale:
    """The x axis of a figure: seconds become minutes or hours where a run is long."""
    if axis != "wall_s":
        return Scale(axis, 1.0)
    ends = [p.wall_s for r in runs for s in r.history.sources() if (p := r.history.last_at(s))]
    longest = max(ends, default=0.0)
    if longest < 600:
        return Scale("seconds since the start", 1.0)
    if longest < 4 * 3600:
        return Scale("minutes since the start", 60.0)
    return Scale("hours since the start", 3600.0)


def thin(
    xs: Sequence[float], ys: Sequence[float], most: int = MAX_DRAWN
) -> tuple[list[float], list[float]]:
    """At most `most` points that keep every peak: of each few neighbours the lowest and highest.

    The number of neighbours is a power of two, so that what is drawn of the past stays as it is
    while a series grows, until it doubles.

    >>> thin([1, 2, 3, 4, 5, 6, 7, 8], [0, 9, 1, 1, 5, 5, 5, 5], most=4)
    ([1, 2, 5, 8], [0, 9, 5, 5])
    """
    if len(xs) <= most:
        return list(xs), list(ys)
    width = 2
    while 2 * -(-len(xs) // width) > max(most, 2):
        width *= 2
    kept: list[int] = []
    for start in range(0, len(xs), width):
        near = range(start, min(start + width, len(xs)))
        low, high = min(near, key=ys.__getitem__), max(reversed(near), key=ys.__getitem__)
        kept += sorted({low, high})
    return [xs[i] for i in kept], [ys[i] for i in kept]


def by_place(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """The mean of what lies at one place: of a second's records within a step.

    >>> by_place([1, 1, 2], [3, 5, 7])
    ([1, 2], [4.0, 7.0])
    """
    sums: dict[float, tuple[float, int]] = {}
    for x, y in zip(xs, ys, strict=True):
        total, n = sums.get(x, (0.0, 0))
        sums[x] = (total + y, n + 1)
    return list(sums), [total / n for total, n in sums.values()]


def trace(
    name: str, xs: Sequence[float], ys: Sequence[float], *, color: str, dash: str = "solid",
    unit: float = 1.0, **more: Any,
) -> Figure:  # fmt: skip
    """A line, thinned; `unit` divides its places."""
    xs, ys = thin(xs, ys)
    line: Figure = {"color": color, "width": 1.8}
    if dash != "solid":
        line["dash"] = dash
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(xs) <= FEW else "lines",
        "name": name,
        "x": [x / unit for x in xs] if unit != 1 else xs,
        "y": ys,
        "line": line,
        "marker": {"size": 4, "color": color},
        "hovertemplate": "%{y:.4~g}",
    } | more


def layout(x: Scale, y: str, *, log: bool = False, **y_axis: Any) -> Figure:
    """The layout of a figure over an axis; `y` is the unit of its values."""
    return {
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "hovermode": "x unified",
        "showlegend": True,
        "legend": {
            "orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11},
            "traceorder": "normal",
        },
        "xaxis": {"title": {"text": x.title, "font": {"size": 11}}},
        "yaxis": {"title": {"text": y, "font": {"size": 11}}}
        | ({"type": "log", "exponentformat": "power"} if log else {})
        | y_axis,
    }  # fmt: skip


def lines(
    runs: Sequence[Run], axis: Axis, wanted: Iterable[Line], y: str, *, source: Source = LEARNER,
    log: bool = False, **y_axis: Any,
) -> Figure | None:  # fmt: skip
    """A figure of metrics of one writer, those that are there; None when none is."""
    wanted, scale = tuple(wanted), scale_of(runs, axis)
    data = []
    for i, run in enumerate(runs):
        for j, line in enumerate(wanted):
            xs, ys = run.history.series(line.metric, source, axis)
            if not xs:
                continue
            several = len(runs) > 1
            data.append(
                trace(
                    label_of(runs, run, line.label), xs, ys,
                    color=HUES[(i if several else j) % len(HUES)],
                    dash=DASHES[j % len(DASHES)] if several else line.dash,
                    unit=scale.unit, meta=line.metric,
                )
            )  # fmt: skip
    return {"data": data, "layout": layout(scale, y, log=log, **y_axis)} if data else None


def label_of(runs: Sequence[Run], run: Run, label: str) -> str:
    """What a line is called: with several runs, which one it is of."""
    return f"{run.name}: {label}" if len(runs) > 1 else label
