"""What came of bench/off_policy.py: the best rate of each method, intervals, table and figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

BASELINE = "naive-ppo"
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % quantiles of Student's t with 1, 2, ... degrees of freedom."""

Record = Mapping[str, Any]
"""What `off_policy_run.execute` returns."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A method at one age of the data."""

    method: str
    k: int
    lr: float
    """The rate with the best mean reward over the seeds of the sweep."""
    at_edge: bool
    """The lowest or the highest rate of the sweep was best: another might be better."""
    rewards: tuple[float, ...]
    """Final reward at that rate, a seed each; other seeds than those that chose the rate."""
    sweep: Mapping[float, tuple[float, ...]]
    """Final rewards of the sweep, by rate."""

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.rewards)

    @property
    def half(self) -> float:
        """Half the width of the 95 % interval of the mean."""
        return half_width(self.rewards)


def half_width(values: Sequence[float]) -> float:
    """Of the 95 % interval of the mean, by Student's t; infinite with a single value.

    >>> round(half_width([0.1, 0.2, 0.3]), 3)
    0.248
    """
    n = len(values)
    if n < 2:
        return math.inf
    return _T95[min(n - 1, len(_T95)) - 1] * statistics.stdev(values) / math.sqrt(n)


def best_rate(sweep: Mapping[float, Sequence[float]]) -> float:
    """The rate with the highest mean reward; of equals the lowest.

    >>> best_rate({1e-3: [0.5, 0.7], 3e-3: [0.9, 0.1]})
    0.001
    """
    return max(sorted(sweep), key=lambda lr: statistics.fmean(sweep[lr]))


def sweeps(records: Iterable[Record]) -> dict[tuple[str, int], dict[float, tuple[float, ...]]]:
    """Final rewards by method and age, then by rate."""
    out: dict[tuple[str, int], dict[float, tuple[float, ...]]] = {}
    for r in records:
        rates = out.setdefault((r["method"], r["k"]), {})
        rates[r["lr"]] = (*rates.get(r["lr"], ()), r["reward"])
    return out


def cells(swept: Iterable[Record], reported: Iterable[Record]) -> list[Cell]:
    """The rate of each method and age from `swept`, its result from `reported`."""
    final = sweeps(reported)
    out = []
    for (method, k), sweep in sweeps(swept).items():
        lr = best_rate(sweep)
        edge = len(sweep) > 1 and lr in (min(sweep), max(sweep))
        out.append(Cell(method, k, lr, edge, final[method, k][lr], sweep))
    return out


def ranked(found: Sequence[Cell]) -> list[str]:
    """Methods by their reward on the oldest data, best first."""
    oldest = max(c.k for c in found)
    at = {c.method: c.mean for c in found if c.k == oldest}
    return sorted(at, key=lambda m: (-at[m], m))


def table(found: Sequence[Cell]) -> str:
    """Markdown: a row a method, a column an age; the rate in brackets, * at the sweep's edge."""
    ages = sorted({c.k for c in found})
    at = {(c.method, c.k): c for c in found}
    rows = [
        "| method | " + " | ".join(f"k = {k}" for k in ages) + " |",
        "|---" * (len(ages) + 1) + "|",
    ]
    for method in ranked(found):
        row = [f"`{method}`"] + [_cell(at.get((method, k))) for k in ages]
        rows.append(f"| {' | '.join(row)} |")
    return "\n".join(rows)


def _cell(c: Cell | None) -> str:
    if c is None:
        return ""
    edge = "*" if c.at_edge else ""
    return f"{c.mean:.3f} ± {c.half:.3f} ({c.lr:g}{edge})"


# --- figure: a panel an age, a row a method --------------------------------------------------

_LEFT, _PANEL, _GAP, _ROW, _TOP, _BOTTOM = 150, 180, 34, 24, 62, 74
_INK, _GREY, _BLUE, _BAND = "#1f2328", "#6e7781", "#0969da", "#f3f4f6"


def figure(found: Sequence[Cell], start: float) -> str:
    """SVG: mean and 95 % interval of each method, next to each other for each age of the data.

    Args:
        found: all cells.
        start: reward of the model before training, drawn as a dotted line.
    """
    ages, methods = sorted({c.k for c in found}), ranked(found)
    at = {(c.method, c.k): c for c in found}
    low, high = _range(found, start)
    width = _LEFT + len(ages) * (_PANEL + _GAP)
    height = _TOP + len(methods) * _ROW + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(12, 22, "Reward after training on data k versions old", bold=True),
    ]
    for i, method in enumerate(methods):
        y = _TOP + i * _ROW
        if i % 2 == 0:
            parts.append(f'<rect y="{y}" width="{width}" height="{_ROW}" fill="{_BAND}"/>')
        parts.append(_text(_LEFT - 12, y + 16, method, anchor="end", bold=method == BASELINE))
    for j, k in enumerate(ages):
        x0 = _LEFT + j * (_PANEL + _GAP)
        of_age = [at.get((m, k)) for m in methods]
        parts += _panel(of_age, k, x0, low, high, start, at.get((BASELINE, k)))
    note = (
        f"bars: 95 % intervals; filled: apart from {BASELINE}'s (dashed); dotted: before training; "
        "each method at its best learning rate"
    )
    parts += [_text(12, height - 14, note, colour=_GREY), "</svg>"]
    return "\n".join(parts) + "\n"


def _range(found: Sequence[Cell], start: float) -> tuple[float, float]:
    """Even tenths that hold all intervals, within 0 and 1."""
    halves = [0.0 if math.isinf(c.half) else c.half for c in found]
    low = min([start, *(c.mean - h for c, h in zip(found, halves, strict=True))])
    high = max([start, *(c.mean + h for c, h in zip(found, halves, strict=True))])
    low, high = max(0.0, math.floor(low * 5) / 5), min(1.0, math.ceil(high * 5) / 5)
    return (low, high) if high > low else (max(0.0, low - 0.2), high)


def _panel(
    column: Sequence[Cell | None], k: int, x0: int, low: float, high: float, start: float,
    baseline: Cell | None,
) -> list[str]:  # fmt: skip
    bottom = _TOP + len(column) * _ROW

    def x(value: float) -> float:
        return round(x0 + _PANEL * (min(max(value, low), high) - low) / (high - low), 1)

    parts = [_text(x0 + _PANEL / 2, _TOP - 14, f"k = {k}", anchor="middle", bold=True)]
    for tick in range(round((high - low) * 5) + 1):
        value = low + tick / 5
        parts.append(_line(x(value), _TOP, x(value), bottom, "#d0d7de"))
        parts.append(_text(x(value), bottom + 18, f"{value:.1f}", anchor="middle", colour=_GREY))
    parts.append(_line(x(start), _TOP, x(start), bottom, _GREY, dash="1 3"))
    if baseline is not None:
        parts.append(_line(x(baseline.mean), _TOP, x(baseline.mean), bottom, _GREY, dash="5 4"))
    for i, c in enumerate(column):
        if c is not None:
            parts += _dot(c, baseline, _TOP + i * _ROW + _ROW / 2, x)
    return parts


def _dot(c: Cell, baseline: Cell | None, y: float, x: Any) -> list[str]:
    half = 0.0 if math.isinf(c.half) else c.half
    clear = baseline is not None and abs(c.mean - baseline.mean) > half + baseline.half
    colour = _INK if c.method == BASELINE else _BLUE
    fill = colour if clear or c.method == BASELINE else "white"
    return [
        _line(x(c.mean - half), y, x(c.mean + half), y, colour, width=2),
        f'<circle cx="{x(c.mean)}" cy="{y}" r="4" fill="{fill}" stroke="{colour}" stroke-width="2">'
        f"<title>{escape(c.method)}, k = {c.k}: {_cell(c)}</title></circle>",
    ]


def _line(
    x1: float, y1: float, x2: float, y2: float, colour: str, dash: str = "", width: int = 1
) -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" '
        f'stroke-width="{width}"{dashed}/>'
    )


def _text(
    x: float, y: float, text: str, anchor: str = "start", colour: str = _INK, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    where = f'x="{x}" y="{y}" text-anchor="{anchor}"'
    return f'<text {where} fill="{colour}"{weight}>{escape(text)}</text>'
