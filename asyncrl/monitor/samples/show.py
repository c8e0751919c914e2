"""One sample in full, its tokens coloured; and a group side by side."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from asyncrl.monitor.samples.search import Sample
from asyncrl.monitor.samples.table import known, name
from asyncrl.monitor.samples.texts import Texts, clean, on_a_line, pieces
from asyncrl.types import NO_VERSION, Trajectory, Version

By = Literal["logprob", "version"]
BYS: tuple[By, ...] = get_args(By)

SHADES = (
    (0.9, "9 in 10 or more", ""),
    (0.5, "from 1 in 2", "green"),
    (0.1, "from 1 in 10", "yellow"),
    (0.01, "from 1 in 100", "red"),
    (0.0, "less", "bold white on red"),
)
"""Of the probability with which the engine drew a token: least, name, style."""
UNKNOWN = ("not known", "magenta")
"""Its log-probability is missing."""
VERSION_STYLES = ("cyan", "yellow", "green", "magenta", "blue", "red")
"""By a version's place among the sample's own, again from the first after the last."""
NO_LOSS = "dim"
"""On top of it: the token is not trained."""
COLUMN = 30
"""Characters of a sample beside others."""

Painted = tuple[str, str]
"""Name in the legend, and style."""


def show(s: Sample, texts: Texts, by: By) -> Iterator[RenderableType]:
    """What is known of a sample, its prompt, its response coloured, and the legend."""
    yield Text(f"{clean(name(s))}  " + ", ".join(f"{k} {v}" for k, v in facts(s)))
    yield Text("\nprompt", style="bold")
    yield Text(clean(texts.prompt(s.trajectory)))
    yield Text("\nresponse", style="bold")
    painted = paint(s.trajectory, by)
    response = Text()
    split = pieces(texts.decode, s.trajectory.response_ids.tolist())
    for piece, (_, style), mask in zip(split, painted, s.trajectory.loss_mask, strict=True):
        response.append(clean(piece), style if mask else f"{style} {NO_LOSS}".strip())
    yield response
    yield Text()
    yield legend(s, painted, by)


def facts(s: Sample) -> list[tuple[str, str]]:
    """What the recording says of a sample besides its text."""
    e, t = s.entry, s.trajectory
    behind = known(e.head_staleness)
    if e.version is not None:
        behind += f" (newest token {max(0, e.version - e.version_max.version)})"
    return [
        ("outcome", e.outcome),
        ("reward", f"{e.reward:.6g}"),
        ("batch", known(e.batch)),
        ("learner at", known(e.version)),
        ("behind", behind),
        ("versions", " to ".join(dict.fromkeys(map(str, (e.version_min, e.version_max))))),
        ("tokens", str(t.header.response_tokens)),
        ("prompt tokens", str(t.header.prompt_tokens)),
        ("finish", str(t.header.finish_reason)),
        ("mean log-prob", f"{mean_logprob(t):.4g}"),
        ("actor", clean(e.actor)),
        ("lease", str(e.lease)),
    ]


def mean_logprob(t: Trajectory) -> float:
    """Of the tokens that carry loss and have one; NaN where none has."""
    kept = t.behaviour_logprobs[(t.loss_mask != 0) & np.isfinite(t.behaviour_logprobs)]
    return float(kept.mean(dtype=np.float64)) if kept.size else math.nan


def paint(t: Trajectory, by: By) -> list[Painted]:
    """Each response token's name in the legend, and its style."""
    if by == "logprob":
        return [_shade(x) for x in t.behaviour_logprobs.tolist()]
    versions = _versions(t)
    present = sorted(set(versions) - {None}, key=lambda v: v or Version(0, 0))
    styles = {v: VERSION_STYLES[k % len(VERSION_STYLES)] for k, v in enumerate(present)}
    return [("no version (no policy's)", "") if v is None else (str(v), styles[v])
            for v in versions]  # fmt: skip


def _shade(logprob: float) -> Painted:
    if not math.isfinite(logprob):
        return UNKNOWN
    p = math.exp(min(0.0, logprob))
    return next((name, style) for least, name, style in SHADES if p >= least)


def _versions(t: Trajectory) -> list[Version | None]:
    return [
        None if v == NO_VERSION else Version(i, v)
        for i, v in zip(t.incarnations.tolist(), t.versions.tolist(), strict=True)
    ]


def legend(s: Sample, painted: Sequence[Painted], by: By) -> Text:
    """What the colours of this sample mean, and how many tokens have each."""
    counts = Counter(painted)
    order = {n: k for k, (_, n, _) in enumerate(SHADES)}
    names = sorted(counts, key=lambda p: order.get(p[0], len(order))) if by == "logprob" else (
        sorted(counts)
    )  # fmt: skip
    what = "drawn by the engine with probability" if by == "logprob" else "version"
    out = Text(f"{what}: ")
    for k, entry in enumerate(names):
        out.append(", " if k else "")
        out.append(entry[0], entry[1])
        out.append(f" ({counts[entry]})")
    if not s.trajectory.loss_mask.all():
        out.append("; ")
        out.append("dim", NO_LOSS)
        out.append(f": not trained ({int((s.trajectory.loss_mask == 0).sum())})")
    return out


def tokens(s: Sample, texts: Texts) -> Iterator[str]:
    """A line for each response token: what the colours say, in figures."""
    t = s.trajectory
    split = pieces(texts.decode, t.response_ids.tolist())
    rows = zip(split, t.response_ids, t.behaviour_logprobs, _versions(t), t.loss_mask, strict=True)
    yield f"{'#':>5} {'id':>7} {'log-prob':>9} {'version':>8} loss text"
    for k, (piece, token, logprob, version, mask) in enumerate(rows):
        text = on_a_line(repr(piece), 60)
        yield f"{k:>5} {token:>7} {logprob:>9.4f} {known(version):>8} {mask:>4} {text}"


def beside(samples: Sequence[Sample], texts: Texts, width: int) -> RenderableType:
    """The samples of a group, a column each, as many beside each other as there is room for."""
    parts: list[RenderableType] = [
        Text("prompt", style="bold"),
        Text(clean(texts.prompt(samples[0].trajectory))),
    ]
    at_once = max(1, (width - 15) // COLUMN)
    for first in range(0, len(samples), at_once):
        some = samples[first : first + at_once]
        columns = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        columns.add_column("sample", no_wrap=True)
        for s in some:
            columns.add_column(Text(str(s.entry.id.sample)), width=COLUMN - 2, overflow="fold")
        for row in zip(*(facts(s) for s in some), strict=True):
            columns.add_row(row[0][0], *(Text(value) for _, value in row))
        columns.add_row()
        columns.add_row("response", *(Text(clean(texts.response(s.trajectory))) for s in some))
        parts += [Text(), columns]
    return Group(*parts)
