"""Pages of what is learned from: staleness, importance weights."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from asyncrl.monitor import words
from asyncrl.monitor.figures.staleness import BY_K, ages_of
from asyncrl.monitor.reading.history import Histogram
from asyncrl.monitor.terminal.draw import Lines, Panel, bar, heat, table
from asyncrl.monitor.terminal.view import View, series

BATCHES = 20
"""The newest, where "lately" is meant."""
BINS = 24
PARTS = (
    ("head", "bounded by the limit"), ("tail", "youngest token"), ("span", "within a sample"),
    ("dispatch", "since it was dispatched"), ("in_flight", "while generated"),
    ("in_queue", "while queued"), ("token", "of each token"), ("steps", "head, in batches"),
)  # fmt: skip
BY_ACTOR = "staleness/by_actor/"


# --- staleness ------------------------------------------------------------------------------------


def staleness(view: View) -> Sequence[Panel]:
    """How many versions behind what is trained is, over time and by actor."""
    return [
        Panel("", lambda w: ages(view, "staleness/head", "samples by head staleness", w)),
        Panel(f"by actor, last {BATCHES} batches", lambda w: _by_actor(view, w)),
        Panel("staleness of the last batch, in versions", lambda w: _parts(view)),
        Panel("", lambda w: ages(view, "staleness/token", "tokens by staleness", w)),
        Panel("", lambda w: series(view, "mean of head", "staleness/head/mean", w, form="{:.2f}",
                                   low=0.0, short=True)),
        Panel("replayed samples", lambda w: _replayed(view)),
    ]  # fmt: skip


def _parts(view: View) -> Lines:
    last = view.history.latest()
    rows = []
    for part, meaning in PARTS:
        if f"staleness/{part}/mean" in last:
            found = [last.get(f"staleness/{part}/{s}") for s in ("mean", "p50", "p95", "max")]
            forms = ("{:.2f}", "{:.0f}", "{:.0f}", "{:.0f}")
            rows.append([part, *("-" if v is None else f.format(v)
                                 for f, v in zip(forms, found, strict=True)), meaning])  # fmt: skip
    if not rows:
        return [Text("nothing trained yet", "dim")]
    limit, over = last.get("staleness/limit"), last.get("staleness/violations", 0.0)
    told = Text.assemble(("limit ", "dim"), "-" if limit is None else f"{limit:.0f}")
    told.append("   over it ", "dim").append(f"{over:.0f}", "bold red" if over else "")
    return [told, *table(("", "mean", "p50", "p95", "max", ""), rows)]


def ages(view: View, metric: str, label: str, width: int) -> Lines:
    """How many are how far behind, over the batches."""
    hists = view.history.hists(metric)
    if not hists:
        return []
    highest = max(h.edges[k] for h in hists for k, n in enumerate(h.counts) if n or k == 0)
    ages = range(int(highest) + 1)[-8:]
    rows: dict[str, list[float]] = {f"{k}": [] for k in ages}
    for hist in hists:
        whole = sum(hist.counts) or 1.0
        by_age = {int(edge): n / whole for edge, n in zip(hist.edges, hist.counts, strict=False)}
        for k in ages:
            rows[f"{k}"].append(by_age.get(k, 0.0))
    return heat(label, rows, [float(h.at.step) for h in hists], width)


def _by_actor(view: View, width: int) -> Lines:
    history = view.history
    names = {n.removeprefix(BY_ACTOR).rpartition("/")[0] for n in history.names()
             if n.startswith(BY_ACTOR)}  # fmt: skip
    rows = []
    for actor in sorted(names, key=words.by_number):
        means, counts, highest = (
            _lately(view, f"{BY_ACTOR}{actor}/{s}") for s in ("mean", "count", "max")
        )
        if (mean := _mean(means, counts)) is not None and highest:
            rows.append((actor, f"{sum(counts.values()):.0f}", mean, max(highest.values())))
    limit = max(1.0, history.latest().get("staleness/limit", 1.0))
    return table(
        ("actor", "samples", "mean", "max", ""),
        [(actor, n, f"{mean:.2f}", f"{most:.0f}", bar(mean / limit, max(8, width - 40)))
         for actor, n, mean, most in rows],
    ) if rows else [Text("none yet", "dim")]  # fmt: skip


def _replayed(view: View) -> Lines:
    last = view.history.latest()
    if "replay/samples" not in last:
        return []
    names = ("replay/samples", "replay/staleness/mean", "replay/staleness/max", "replay/limit")
    return [Text(f"{n.removeprefix('replay/')} {last[n]:.2f}") for n in names if n in last]


# --- importance weights ---------------------------------------------------------------------------


def weights(view: View) -> Sequence[Panel]:
    """What the weights of old samples do: effective sample size, cuts, by staleness."""
    return [
        Panel(f"importance weights by staleness, last {BATCHES} batches", lambda w: _by_k(view, w)),
        Panel("", lambda w: series(view, "effective sample size", "is/ess_frac", w, low=0.0)),
        Panel("", lambda w: series(view, "cut off", "is/clip_frac", w, form="{:.4f}", low=0.0,
                                   short=True)),
        Panel("raw weight, last batch", lambda w: _quantiles(view)),
        Panel(f"raw weight, last {BATCHES} batches, share of tokens", lambda w: _ratios(view, w)),
        Panel("divergence, nats (k3)", lambda w: _divergence(view)),
    ]  # fmt: skip


def _by_k(view: View, width: int) -> Lines:
    ages = ages_of(view.history.names())
    rows: list[list[str | Text]] = []
    for label, prefix in [("all", "is/"), *((f"{k} behind", f"{BY_K}{k}/") for k in ages)]:
        counts = _lately(view, "loss/tokens" if label == "all" else f"{prefix}count")
        ess, cut, masked = (
            _mean(_lately(view, f"{prefix}{s}_frac"), counts) for s in ("ess", "clip", "mask")
        )
        if ess is not None:
            rows.append([
                label, f"{sum(counts.values()):.0f}" if counts else "-", _share(ess), _share(cut),
                _share(masked), bar(ess, max(8, width - 46)),
            ])  # fmt: skip
    if not rows:
        return [Text("none yet", "dim")]
    return table(("tokens", "count", "effective", "cut", "masked", ""), rows)


def _lately(view: View, metric: str) -> dict[float, float]:
    """A metric of the last BATCHES batches, by step."""
    at = view.history.last_at()
    first = (at.step if at else 0) - BATCHES
    xs, values = view.history.series(metric)
    return {x: v for x, v in zip(xs, values, strict=True) if x > first}


def _mean(values: dict[float, float], counts: dict[float, float]) -> float | None:
    """Their mean, each step with its count of tokens, or all alike where that is not known."""
    weights = {x: counts.get(x, 0.0) if counts else 1.0 for x in values}
    whole = sum(weights.values())
    return sum(v * weights[x] for x, v in values.items()) / whole if whole else None


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _quantiles(view: View) -> Lines:
    last = view.history.latest()
    stats = ("p05", "p50", "mean", "p95", "p99", "max")
    row = ["raw", *(_weight(last.get(f"is/ratio_raw/{s}")) for s in stats)]
    used = ["used", *(_weight(last.get(f"is/ratio_used/{s}")) for s in stats)]
    return table(("", *stats), [row, used], left=1) if row[3] != "-" else []


def _weight(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _ratios(view: View, width: int) -> Lines:
    hists = view.history.hists("is/ratio_raw", last=BATCHES)
    if not hists or any(h.edges != hists[-1].edges for h in hists):
        hists = hists[-1:]
    if not hists:
        return []
    edges, counts = _joined(hists)
    whole = sum(counts) or 1.0
    kept = [k for k, n in enumerate(counts) if n]
    if not kept:
        return []
    most = max(counts) / whole
    rows = [
        (f"{edges[k]:.2f} to {edges[k + 1]:.2f}", f"{counts[k] / whole:.1%}",
         bar(counts[k] / whole / most, max(8, width - 26)))
        for k in range(kept[0], kept[-1] + 1)
    ]  # fmt: skip
    return table(("weight", "", ""), rows)


def _joined(hists: Sequence[Histogram]) -> tuple[list[float], list[float]]:
    """Their sum, with neighbouring bins put together until there are at most BINS that matter."""
    edges = list(hists[-1].edges)
    counts = [sum(column) for column in zip(*(h.counts for h in hists), strict=True)]
    while sum(1 for n in counts if n) > BINS:
        counts = [sum(counts[k : k + 2]) for k in range(0, len(counts), 2)]
        edges = edges[:-1:2] + edges[-1:]
    return edges, counts


def _divergence(view: View) -> Lines:
    rows = []
    for name, meaning in (("mismatch", "engine against learner, same version"),
                          ("drift", "older versions: what training changed"),
                          ("ref", "policy against the reference")):  # fmt: skip
        found = view.history.newest(f"kl/{name}_k3")
        if found is not None:
            rows.append((name, f"{found[1]:.2e}", f"step {found[0].step}", meaning))
    return table(("", "", "of", ""), rows) if rows else [Text("none yet", "dim")]
