"""Histograms over steps, as heat maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncrl.metrics import WAITING
from asyncrl.monitor.figures.kit import Figure, Run, layout, scale_of
from asyncrl.monitor.figures.rates import marks_of, shares
from asyncrl.monitor.reading.history import Axis, Histogram, source_name

MAX_COLUMNS = 300
MAX_ROWS = 300
"""Neighbouring bins are drawn as one where there are more."""

Bin = tuple[float, float]


def heat(runs: Sequence[Run], axis: Axis, name: str, y: str, *, whole: bool) -> Figure | None:
    """The first run's histogram of a metric: the share of each bin in each batch.

    Args:
        whole: bins of one integer each, named by it; else by their edges. Where they are many,
            several are a row.
    """
    found = runs[0].history.hists(name)
    if not found:
        return None
    scale = scale_of(runs, axis)
    places, columns = _columns(found, axis)
    bins = sorted({bin for column in columns for bin, n in column.items() if n})
    rows, row_of = _rows(bins, whole)
    counts = [[0.0] * len(rows) for _ in columns]
    for column, row in zip(columns, counts, strict=True):
        for bin, n in column.items():
            if n:
                row[row_of(bin)] += n
    trace: Figure = {
        "type": "heatmap",
        "name": name,
        "meta": name,
        "x": [x / scale.unit for x in places],
        "y": [edge_name(row, whole) for row in rows],
        "z": [[n / (sum(row) or 1.0) for n in row] for row in counts],
        "customdata": [[[n] for n in row] for row in counts],
        "transpose": True,
        "zmin": 0,
        "hovertemplate": f"{scale.title} %{{x}}, {y} %{{y}}: %{{z:.1%}} (%{{customdata[0]}})"
        "<extra></extra>",
        "hoverongaps": False,
    }
    drawn = layout(scale, y, type="category", ticks="outside", nticks=12)
    return {"data": [trace], "layout": drawn | {"hovermode": "closest", "showlegend": False}}


def _columns(found: Sequence[Histogram], axis: Axis) -> tuple[list[float], list[dict[Bin, float]]]:
    """Places and counts by bin; neighbouring batches together where there are many."""
    each = 1
    while len(found) / each > MAX_COLUMNS:
        each *= 2
    places: list[float] = []
    columns: list[dict[Bin, float]] = []
    for number, h in enumerate(found):
        place = float(getattr(h.at, axis))
        if number % each == 0 and place not in places[-1:]:
            places.append(place)
            columns.append({})
        for low, high, n in zip(h.edges[:-1], h.edges[1:], h.counts, strict=True):
            columns[-1][low, high] = columns[-1].get((low, high), 0.0) + n
    return places, columns


def _rows(bins: Sequence[Bin], whole: bool) -> tuple[list[Bin], Callable[[Bin], int]]:
    """At most MAX_ROWS rows, without holes where bins are `whole`, and which one a bin is in."""
    if whole and bins:
        first, last = int(bins[0][0]), int(bins[-1][0])
        each = (last - first) // MAX_ROWS + 1
        rows = [(float(k), float(k + each)) for k in range(first, last + 1, each)]
        return rows, lambda bin: (int(bin[0]) - first) // each
    each = (len(bins) - 1) // MAX_ROWS + 1
    parts = [bins[k : k + each] for k in range(0, len(bins), each)]
    place = {bin: k for k, part in enumerate(parts) for bin in part}
    return [(part[0][0], part[-1][1]) for part in parts], place.__getitem__


def edge_name(row: Bin, whole: bool) -> str:
    """A row in words.

    >>> edge_name((2.0, 3.0), True), edge_name((2.0, 5.0), True), edge_name((0.7943, 1.0), False)
    ('2', '2 to 4', '0.79 to 1')
    """
    if not whole:
        return f"{row[0]:.2g} to {row[1]:.2g}"
    last = row[1] - 1
    return f"{row[0]:.0f}" if last <= row[0] else f"{row[0]:.0f} to {last:.0f}"


def staleness(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """Of the samples trained, by head staleness."""
    return heat(runs, axis, "staleness/head", "versions behind", whole=True)


def tokens(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """Of the tokens trained, by their own staleness."""
    return heat(runs, axis, "staleness/token", "versions behind", whole=True)


def ratio(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """Of the tokens trained, by importance weight before any cut."""
    return heat(runs, axis, "is/ratio_raw", "weight", whole=False)


def idle(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """The first run's actors, one a row: the share of each piece of time that they waited."""
    history, scale = runs[0].history, scale_of(runs, axis)
    actors, marks = history.sources("actor"), marks_of(runs[0].history, axis)
    rows: list[list[float | None]] = []
    for actor in actors:
        of = [v for state, v in shares(history, [actor], marks).items() if state in WAITING]
        rows.append([
            None if any(v is None for v in piece) else sum(v for v in piece if v is not None)
            for piece in zip(*of, strict=True)
        ])  # fmt: skip
    if not any(rows):
        return None
    trace = {
        "type": "heatmap", "name": "waiting", "meta": "idle/actors_frac",
        "x": [x / scale.unit for x in marks.places], "y": [source_name(a) for a in actors],
        "z": rows, "zmin": 0, "zmax": 1, "hoverongaps": False,
        "hovertemplate": f"%{{y}}, {scale.title} %{{x}}: waited %{{z:.0%}}<extra></extra>",
    }  # fmt: skip
    drawn = layout(scale, "", type="category", autorange="reversed")
    return {"data": [trace], "layout": drawn | {"hovermode": "closest", "showlegend": False}}
