"""What pages are drawn with: lines of text of a given width, in the terminal's own colours.

Pure functions. Everything reads without colours, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

UP = " ▁▂▃▄▅▆▇█"
ALONG = " ▏▎▍▌▋▊▉█"
SHADES = " ░▒▓█"
LABEL = 9
"""Columns left of a chart."""
GAP = 2
"""Columns between panels side by side."""
NARROWEST = 64
"""Columns that a panel wants when there are several."""
LETTERS = {
    "sync": "S", "train": "T", "generate": "G", "reward": "R", "put_wait": "p", "get_wait": "w",
    "eval": "E", "checkpoint": "C", "serve": "V", "idle": ".",
}  # fmt: skip
"""Of what a process does (asyncrl.metrics.STATES); small ones for waiting."""
COLOURS = {
    "sync": "yellow", "train": "blue", "generate": "green", "reward": "cyan", "put_wait": "red",
    "get_wait": "magenta", "eval": "blue", "checkpoint": "yellow", "serve": "blue", "idle": "dim",
}  # fmt: skip

_CONSOLE = Console()  # breaking lines asks for one; nothing is printed on it

Lines = list[Text]


class Panel(NamedTuple):
    """A titled part of a page; `lines` draws it at a width."""

    title: str
    lines: Callable[[int], Lines]


def crop(text: Text, width: int, *, pad: bool = False) -> Text:
    """At most `width` columns, with an ellipsis where something is left out."""
    made = text.copy()
    made.truncate(max(width, 0), overflow="ellipsis", pad=pad)
    return made


def arrange(panels: Sequence[Panel], width: int) -> Text:
    """Panels under one another, in columns where the screen is wide."""
    count = max(1, min(3, width // NARROWEST, len(panels)))
    each = (width - GAP * (count - 1)) // count
    columns: list[Lines] = [[] for _ in range(count)]
    for panel in panels:
        drawn = panel.lines(each)
        if not drawn:
            continue
        column = min(columns, key=len)
        if column:
            column.append(Text())
        if panel.title:
            column.append(crop(Text(panel.title, "bold underline"), each))
        column += [crop(line, each) for line in drawn]
    rows = []
    for k in range(max(map(len, columns))):
        cells = [column[k] if k < len(column) else Text() for column in columns]
        *before, last = cells
        padded = [crop(cell, each + GAP, pad=True) for cell in before]
        rows.append(Text.assemble(*padded, last))
    return Text("\n").join(rows)


# --- parts of a panel ----------------------------------------------------------------------------


def buckets(values: Sequence[float], count: int) -> list[float]:
    """`count` values for a series: means of neighbours, or each several times.

    >>> buckets([1, 3, 5, 7], 2), buckets([1, 2], 4)
    ([2.0, 6.0], [1.0, 1.0, 2.0, 2.0])
    """
    found = []
    for k in range(count if values else 0):
        first = k * len(values) // count
        part = values[first : max(first + 1, (k + 1) * len(values) // count)]
        finite = [v for v in part if math.isfinite(v)]
        found.append(sum(finite) / len(finite) if finite else math.nan)
    return found


def chart(
    label: str, xs: Sequence[float], values: Sequence[float], width: int, height: int, *,
    form: str = "{:.3f}", axis: str = "step", low: float | None = None, colour: str = "cyan",
) -> Lines:  # fmt: skip
    """A series as bars: its last value, what is drawn of the axis, and the scale at the left."""
    if not values:
        return [Text.assemble(label, ("  nothing yet", "dim"))]
    heights = buckets(values, max(width - LABEL, 1))
    finite = [h for h in heights if math.isfinite(h)] or [0.0]
    bottom, top = min(finite) if low is None else min(low, *finite), max(finite)
    last = form.format(values[-1])
    span = f"{axis} {xs[0]:.0f} to {xs[-1]:.0f}"
    head = Text.assemble(label, "  ", (last, "bold"))
    room = width - cell_len(head.plain) - len(span)
    if room > 1:
        head.append(" " * room + span, "dim")
    lines = [head]
    scale = (top - bottom) or 1.0
    # The lowest value is still a mark: only what is missing is empty.
    levels = [1 + round((h - bottom) / scale * (8 * height - 1)) if math.isfinite(h) else 0
              for h in heights]  # fmt: skip
    for row in reversed(range(height)):
        edge = top if row == height - 1 else bottom if row == 0 else None
        mark = "" if edge is None else form.format(edge)
        cells = "".join(UP[max(0, min(8, level - 8 * row))] for level in levels)
        lines.append(Text.assemble((f"{mark:>{LABEL - 2}.{LABEL - 2}} │", "dim"), (cells, colour)))
    return lines


def bar(share: float, width: int, colour: str = "cyan") -> Text:
    """A share of 1 as a bar of at most `width` columns.

    >>> bar(0.5, 4).plain
    '██  '
    """
    eighths = round(max(0.0, min(share, 1.0)) * width * 8)
    whole, part = divmod(eighths, 8)
    return Text(("█" * whole + (ALONG[part] if part else "")).ljust(width), colour)


def stacked(shares: Mapping[str, float], width: int) -> Text:
    """Shares of states, which add up to 1, as a bar of their letters.

    >>> stacked({"generate": 0.5, "get_wait": 0.25, "idle": 0.25}, 8).plain
    'GGGGww..'
    """
    text, done, filled = Text(), 0.0, 0
    for state, share in shares.items():
        done += share
        upto = min(width, round(done * width))
        text.append(LETTERS.get(state, "?") * (upto - filled), COLOURS.get(state, ""))
        filled = max(filled, upto)
    return text


def shade(share: float) -> str:
    """A share as one character; what is there at all is seen.

    >>> shade(0), shade(0.01), shade(0.6), shade(1)
    (' ', '░', '▓', '█')
    """
    return SHADES[0] if share <= 0 else SHADES[min(4, 1 + int(share * 4))]


def heat(label: str, rows: Mapping[str, Sequence[float]], xs: Sequence[float], width: int) -> Lines:
    """Shares by row over an axis, drawn from the last row up; each row has a value for each x."""
    columns = max(width - LABEL, 1)
    span = f"step {xs[0]:.0f} to {xs[-1]:.0f}"
    room = max(width - len(span), len(label) + 1)
    lines = [Text.assemble(label.ljust(room), (span, "dim"))]
    for name, shares in reversed(list(rows.items())):
        cells = "".join(shade(share) for share in buckets(shares, columns))
        lines.append(Text.assemble((f"{name:>{LABEL - 2}} │", "dim"), (cells, "cyan")))
    return lines


def table(head: Sequence[str], rows: Iterable[Sequence[str | Text]], *, left: int = 1) -> Lines:
    """Rows under a head, each column as wide as its widest cell; `left` columns, and the last, to
    the left."""
    cells = [[c if isinstance(c, Text) else Text(c) for c in row] for row in rows]
    widths = [max([cell_len(h), *(cell_len(row[k].plain) for row in cells)])
              for k, h in enumerate(head)]  # fmt: skip

    def line(row: Sequence[Text]) -> Text:
        made = Text()
        for k, cell in enumerate(row):
            space = " " * (widths[k] - cell_len(cell.plain))
            aligned = k < left or k == len(head) - 1
            made.append_text(Text.assemble(cell, space) if aligned else Text.assemble(space, cell))
            made.append("  ")
        made.rstrip()
        return made

    return [line([Text(h, "dim") for h in head]), *map(line, cells)]


def pairs(found: Sequence[tuple[str, str]], width: int) -> Lines:
    """Names and values in as many columns as there is room for, read downwards."""
    name = max((cell_len(n) for n, _ in found), default=0)
    each = name + 10
    count = max(1, min(3, (width + GAP) // (each + GAP)))
    deep = -(-len(found) // count)
    each = (width - GAP * (count - 1)) // count
    lines = []
    for row in range(deep):
        cells = []
        for n, v in found[row::deep]:
            cells.append(Text.assemble((n.ljust(name + 1), "dim"), v))
        *before, last = cells
        padded = [crop(c, each + GAP, pad=True) for c in before]
        lines.append(Text.assemble(*padded, crop(last, each)))
    return lines


def legend(states: Iterable[str], width: int) -> Lines:
    """The letters of states, in as many lines as they need."""
    lines = [Text()]
    for state in states:
        entry = Text.assemble((LETTERS[state], COLOURS[state]), f" {state}  ")
        if cell_len(lines[-1].plain) + cell_len(entry.plain) > width:
            lines.append(Text())
        lines[-1].append_text(entry)
    return lines


def wrapped(text: str, width: int, style: str = "") -> Lines:
    """Words in lines of at most `width` columns."""
    return list(Text(text, style).wrap(_CONSOLE, max(width, 1)))


def size(value: float) -> str:
    """Bytes for people.

    >>> size(512), size(3.2e9)
    ('512 B', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
