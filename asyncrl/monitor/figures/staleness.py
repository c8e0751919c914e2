"""How stale what is trained is, where that comes from, and what it does to the weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from asyncrl.monitor import words
from asyncrl.monitor.figures.kit import Figure, Line, Run, layout, lines, scale_of
from asyncrl.monitor.figures.themes import HUES
from asyncrl.monitor.reading.history import Axis

BY_K = "is/by_staleness/"


def head(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """The bounded staleness, and its bound."""
    figure = lines(
        runs, axis,
        [Line("staleness/head/mean", "mean"), Line("staleness/head/p95", "95 %", "dot"),
         Line("staleness/head/max", "max", "dash"), Line("staleness/limit", "limit", "longdash")],
        "versions behind", rangemode="tozero",
    )  # fmt: skip
    for drawn in figure["data"] if figure and len(runs) == 1 else ():
        if drawn["meta"] == "staleness/limit":
            drawn["line"] = {"color": HUES[3], "width": 1.4, "dash": "longdash"}
            drawn["mode"] = "lines"
    return figure


def parts(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """Where staleness comes from: while it was generated, and while it waited."""
    return lines(
        runs, axis,
        [Line("staleness/in_flight/mean", "in flight"), Line("staleness/in_queue/mean", "queued"),
         Line("staleness/dispatch/mean", "since dispatch", "dash"),
         Line("staleness/span/mean", "span of one sample", "dot")],
        "versions", rangemode="tozero",
    )  # fmt: skip


def by_actor(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """The first run's actors: the share of their trained samples at each staleness."""
    retired = runs[0].retired
    if retired is None or not retired.trained:
        return None
    actors = sorted({actor for actor, _ in retired.trained}, key=words.by_number)
    data = []
    for k in sorted({k for _, k in retired.trained}):
        counts = [retired.trained[actor, k] for actor in actors]
        wholes = [sum(n for (a, _), n in retired.trained.items() if a == actor) for actor in actors]
        data.append({
            "type": "bar", "name": f"{k} behind", "meta": k, "orientation": "h",
            "x": [n / whole for n, whole in zip(counts, wholes, strict=True)], "y": actors,
            "customdata": counts, "marker": {"color": HUES[k % len(HUES)]},
            "hovertemplate": "%{x:.1%} (%{customdata} samples)",
        })  # fmt: skip
    drawn = layout(scale_of(runs, axis), "", type="category", autorange="reversed")
    drawn |= {"barmode": "stack", "hovermode": "y unified", "bargap": 0.35}
    drawn["xaxis"] = {"tickformat": ".0%", "range": [0, 1]}
    return {"data": data, "layout": drawn}


def ess(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """Effective sample size of all tokens, and of those of each staleness."""
    return _by_k(runs, axis, "ess_frac", Line("is/ess_frac", "all"), "effective share",
                 range=[0, 1.03])  # fmt: skip


def clipped(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """Tokens whose weight was cut off, by staleness."""
    return _by_k(runs, axis, "clip_frac", Line("is/clip_frac", "all"), "share of tokens")


def masked(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """Tokens left out by a mask, by staleness."""
    return _by_k(runs, axis, "mask_frac", Line("is/mask_frac", "all"), "share of tokens")


def _by_k(
    runs: Sequence[Run], axis: Axis, what: str, overall: Line, y: str, **y_axis: Any
) -> Figure | None:
    ages = ages_of(name for run in runs for name in run.history.names())
    return lines(
        runs, axis, [overall, *(Line(f"{BY_K}{k}/{what}", f"{k} behind") for k in ages)], y,
        tickformat=".2~%", rangemode="tozero", **y_axis,
    )  # fmt: skip


def ages_of(names: Iterable[str]) -> list[int]:
    """The stalenesses of which there is a weight among these metrics."""
    found = {words.whole(n.removeprefix(BY_K).split("/")[0]) for n in names if n.startswith(BY_K)}
    return sorted(k for k in found if k is not None)


def quantiles(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """Quantiles of the importance weight before any cut."""
    wanted = [
        Line(f"is/ratio_raw/{stat}", label, dash)
        for stat, label, dash in (
            ("max", "max", "dot"), ("p99", "99 %", "dash"), ("p95", "95 %", "solid"),
            ("p50", "median", "solid"), ("p05", "5 %", "solid"),
        )
    ]  # fmt: skip
    return lines(runs, axis, wanted, "weight")


def divergence(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """Engine against learner at the same version, drift between versions, and the reference."""
    figure = lines(
        runs, axis,
        [Line("kl/mismatch_k3", "mismatch, same version"), Line("kl/drift_k3", "drift, older"),
         Line("kl/ref_k3", "to the reference")],
        "nats", log=True,
    )  # fmt: skip
    for drawn in figure["data"] if figure else ():
        drawn["mode"] = "lines+markers"  # many a batch has no token of the learner's own version
    return figure


def sync(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """What a publication takes, and what of it holds anybody up."""
    wanted = [
        Line("sync/total_s", "in all"), Line("sync/pause_s", "actors paused"),
        Line("sync/transfer_s", "transfer"), Line("sync/blocked_s", "training held up"),
        Line("sync/gather_s", "gathering", "dot"), Line("sync/hash_s", "checksums", "dot"),
    ]  # fmt: skip
    return lines(runs, axis, wanted, "seconds", rangemode="tozero")


def lag(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """How far the slowest actor is behind, and what had to be sent again."""
    wanted = [
        Line("sync/version_lag", "slowest actor behind (versions)"),
        Line("sync/retries", "rounds repeated, in all", "dot"),
        Line("sync/checksum_fail", "copies refused, in all", "dash"),
    ]
    return lines(runs, axis, wanted, "", rangemode="tozero")


def replay(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """Staleness of what was trained again, and its bound."""
    wanted = [
        Line("replay/staleness/mean", "mean"), Line("replay/staleness/max", "max", "dash"),
        Line("replay/limit", "limit", "longdash"),
    ]  # fmt: skip
    return lines(runs, axis, wanted, "versions behind", rangemode="tozero")
