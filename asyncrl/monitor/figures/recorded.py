"""A figure of any metric that was recorded, by name: any=learner-0/loss/policy."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.monitor import words
from asyncrl.monitor.figures.catalogue import Entry
from asyncrl.monitor.figures.kit import Figure, Line, Run, by_place, lines
from asyncrl.monitor.reading.history import Axis, RunHistory, source_name

PREFIX = "any="


def names(history: RunHistory) -> list[str]:
    """What can be drawn of a run: WRITER/METRIC, e.g. actor-0/host/cpu_frac."""
    return [f"{source_name(s)}/{name}" for s in history.sources() for name in history.names(s)]


def entry(name: str) -> Entry | None:
    """The figure of this name; None if it is not one of these."""
    writer, slash, metric = name.removeprefix(PREFIX).partition("/")
    if not (name.startswith(PREFIX) and slash):
        return None
    kind, rank = words.numbered(writer)

    def draw(runs: Sequence[Run], axis: Axis) -> Figure | None:
        wanted = [Line(metric, f"{writer} {metric}")]
        figure = lines(runs, axis, wanted, "", source=(kind, rank or 0))
        for line in figure["data"] if figure else ():
            # A pulse comes once a second, whatever step it is.
            line["x"], line["y"] = by_place(line["x"], line["y"])
        return figure

    return Entry(name, "Any metric", f"{writer}/{metric}", "", draw)
