"""The first page: how a run goes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from asyncrl.monitor.terminal.draw import Lines, Panel, pairs, table, wrapped
from asyncrl.monitor.terminal.pages.learning import ages
from asyncrl.monitor.terminal.pages.work import generated, times, waits
from asyncrl.monitor.terminal.view import View, series

HEADLINES = frozenset({"step", "version"})
"""Figures that the head of the screen has."""
FIRST = ("samples/s trained", "tokens/s generated", "learner waits", "actors wait")
"""Figures that the smallest screen shows without scrolling."""
WIDE, HIGH = 130, 40
"""A screen that has room for more."""


def overview(view: View) -> Sequence[Panel]:
    """How it goes: reward, loss, pace, staleness, figures, advice."""
    if not view.history.series("loss/tokens")[0]:
        return [Panel("starting", lambda width: _starting(view)), _events(view)]
    return [
        Panel("", lambda w: series(view, "reward", "reward/mean", w) + _held_out(view)),
        Panel("", lambda w: series(view, "loss", "loss/policy", w, form="{:.4f}", short=True)),
        Panel("", lambda w: pairs(_first(view), w)),
        Panel("advice", lambda w: _advice(view, w)),
        Panel("figures", lambda w: pairs(_figures(view), w)),
        Panel("", lambda w: _pace(view, w)),
        *(_more(view) if view.wanted.width >= WIDE and view.wanted.height >= HIGH else ()),
        _events(view),
    ]


def _more(view: View) -> list[Panel]:
    """What there is room for on a large screen: the heads of the other pages."""
    return [
        Panel("", lambda w: ages(view, "staleness/head", "samples by head staleness", w)),
        Panel("where the time goes: life | last minute", lambda w: times(view, w)),
        Panel("", lambda w: generated(view, w)),
        Panel("", lambda w: series(view, "effective sample size", "is/ess_frac", w, low=0.0)),
        Panel("", lambda w: series(view, "entropy, nats", "loss/entropy", w)),
        Panel("", lambda w: series(view, "groups whose rewards are all equal",
                                   "reward/zero_std_frac", w, low=0.0, short=True)),
        Panel("", lambda w: series(view, "responses truncated", "rollout/truncated_frac", w,
                                   low=0.0, short=True)),
        Panel("waits", lambda w: waits(view, w)),
    ]  # fmt: skip


def _starting(view: View) -> Lines:
    rows = [(r["name"], r["state"], r["waits"][0] if r["waits"] else "")
            for r in view.state["roles"]]  # fmt: skip
    if not rows:
        return [Text("the launcher has not said anything yet", "dim")]
    return table(("role", "state", "does"), rows, left=2)


def _held_out(view: View) -> Lines:
    lines = []
    for scores in view.history.scores().values():
        told = [f"{score:.3f} (version {at.version})" for at, score in scores]
        few = told if len(told) < 4 else [told[0], "...", *told[-2:]]
        lines.append(Text.assemble(("held out: ", "dim"), " ".join(few)))
    return lines


def _pace(view: View, width: int) -> Lines:
    return series(view, "samples/s trained", "throughput/samples_s", width, form="{:.2f}", low=0.0,
                  short=True)  # fmt: skip


def _first(view: View) -> list[tuple[str, str]]:
    found = {label: text for label, text in view.state["finals"]}
    return [(label, found[label]) for label in FIRST if label in found]


def _figures(view: View) -> list[tuple[str, str]]:
    shown = HEADLINES.union(FIRST)
    return [(label, text) for label, text in view.state["finals"] if label not in shown]


def _advice(view: View, width: int) -> Lines:
    if not view.advice:
        return [Text("none: nothing stands out, or it is too early to tell", "dim")]
    return [line for a in view.advice for line in wrapped(f"{a['kind']}: {a['line']}", width)]


def _events(view: View) -> Panel:
    def lines(width: int) -> Lines:
        newest = view.state["events"][-8:]
        return [
            Text.assemble((f"{e['at']:>6} ", "dim"), f"{e['role']} ", (e["event"], "bold"),
                          f" x {e['count']}" if e.get("count", 1) > 1 else "", f" {e['more']}")
            for e in newest
        ]  # fmt: skip

    return Panel("last events", lines)
