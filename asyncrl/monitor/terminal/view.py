"""What a page is drawn from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from asyncrl.metrics import STATES
from asyncrl.monitor.reading.history import RunHistory, Source
from asyncrl.monitor.terminal.draw import Lines, chart

LATELY_S = 60.0


class Wanted(NamedTuple):
    """What the user looks at."""

    page: str
    width: int
    height: int
    """Rows that there are for a page."""
    level: str = "DEBUG"
    """Of log lines, the least."""
    only: str = ""
    """Of samples: trained, other, or all."""


class View(NamedTuple):
    """A run at a moment, for one page; what the page does not show is empty."""

    history: RunHistory
    state: Mapping[str, Any]
    wanted: Wanted
    log: Sequence[Mapping[str, str]] = ()
    samples: Sequence[Mapping[str, str]] = ()
    advice: Sequence[Mapping[str, Any]] = ()

    @property
    def tall(self) -> int:
        """Rows of a chart."""
        return 3 if self.wanted.height < 32 else min(9, self.wanted.height // 6)


def spent(history: RunHistory, source: Source, since_s: float | None = None) -> dict[str, float]:
    """Seconds of each state of a process: of its life, or of the last `since_s` (if it was there).

    Totals that fell are those of a process that was restarted: then it is its whole life.
    """
    found = {s: p for s in STATES if (p := history.newest(f"time/{s}_s", source)) is not None}
    if not found:
        return {}
    # A state that the present process has not entered yet has its last value from an earlier one.
    end = max(at.wall_s for at, _ in found.values())
    totals = {s: total for s, (at, total) in found.items() if at.wall_s == end}
    if since_s is None:
        return totals
    before = {s: history.value_at(f"time/{s}_s", source, end - since_s) or 0.0 for s in totals}
    if any(total < before[s] for s, total in totals.items()):
        return totals
    return {s: total - before[s] for s, total in totals.items()}


def shares(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds as shares of their sum.

    >>> shares({"train": 3.0, "idle": 1.0})
    {'train': 0.75, 'idle': 0.25}
    """
    whole = sum(seconds.values())
    return {s: v / whole for s, v in seconds.items() if v > 0} if whole > 0 else {}


def over_time(
    history: RunHistory, name: str, role: str, count: int
) -> tuple[list[float], list[float]]:
    """A pulse's metric summed over the processes of a role: places (seconds) and sums.

    Time is cut into at most `count` pieces; a process counts in a piece with its mean there.
    """
    each = [history.series(name, source, "wall_s") for source in history.sources(role)]
    each = [(times, values) for times, values in each if times]
    if not each:
        return [], []
    first, last = min(t[0] for t, _ in each), max(t[-1] for t, _ in each)
    # A piece has a record of every process, which comes once a second.
    width = max((last - first) / max(count, 1), 2.0)
    pieces = max(1, int((last - first) / width))
    sums = [0.0] * pieces
    for times, values in each:
        totals, counts = [0.0] * pieces, [0] * pieces
        for t, v in zip(times, values, strict=True):
            k = min(int((t - first) / width), pieces - 1)
            totals[k] += v
            counts[k] += 1
        for k in range(pieces):
            sums[k] += totals[k] / counts[k] if counts[k] else 0.0
    return [first + width * k for k in range(pieces)], sums


def series(
    view: View, label: str, metric: str, width: int, *, form: str = "{:.3f}",
    low: float | None = None, short: bool = False,
) -> Lines:  # fmt: skip
    """A chart of a metric of learner rank 0."""
    xs, values = view.history.series(metric)
    tall = max(2, view.tall // 2) if short else view.tall
    return chart(label, xs, values, width, tall, form=form, low=low)
