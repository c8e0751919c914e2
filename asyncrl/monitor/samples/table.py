"""Samples as a table, a line each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.cells import cell_len

from asyncrl.monitor.samples.search import Sample
from asyncrl.monitor.samples.texts import Texts, on_a_line

HEAD = ("id", "outcome", "batch", "behind", "reward", "tokens", "finish", "actor", "response")
LEFT = {"id", "outcome", "finish", "actor", "response"}
GAP = "  "
LEAST = 20
"""Characters of a response that are shown however narrow the terminal is."""


def name(sample: Sample) -> str:
    """Its id, as --show takes it."""
    return ":".join(map(str, sample.entry.id))


def known(value: object) -> str:
    """A dash for what does not apply."""
    return "-" if value is None else str(value)


def table(samples: Sequence[Sample], texts: Texts, width: int) -> Iterator[str]:
    """The lines, as wide as the terminal; the response has what is left."""
    rows = [HEAD[:-1], *(_cells(s) for s in samples)]
    widths = [max(cell_len(row[k]) for row in rows) for k in range(len(HEAD) - 1)]
    left = max(LEAST, width - sum(widths) - len(GAP) * len(widths))
    said = ["response", *(on_a_line(texts.response(s.trajectory), left) for s in samples)]
    for row, response in zip(rows, said, strict=True):
        cells = [
            _padded(cell, w, left=head in LEFT)
            for head, cell, w in zip(HEAD, row, widths, strict=False)
        ]
        yield GAP.join([*cells, response]).rstrip()


def _padded(cell: str, width: int, *, left: bool) -> str:
    space = " " * (width - cell_len(cell))  # not ljust: a character may take two columns
    return cell + space if left else space + cell


def _cells(s: Sample) -> tuple[str, ...]:
    e, h = s.entry, s.trajectory.header
    return (
        on_a_line(name(s), 60), e.outcome, known(e.batch), known(e.head_staleness),
        f"{e.reward:.3g}", str(h.response_tokens), str(h.finish_reason), on_a_line(e.actor, 30),
    )  # fmt: skip
