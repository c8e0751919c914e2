"""Pages of the machinery: pace and time, buffer, processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from asyncrl.metrics import STATES
from asyncrl.monitor import words
from asyncrl.monitor.reading.history import BUFFER, Source, source_name
from asyncrl.monitor.status_reader import UNKNOWN
from asyncrl.monitor.terminal.draw import (
    LABEL,
    Lines,
    Panel,
    bar,
    chart,
    legend,
    pairs,
    size,
    stacked,
    table,
    wrapped,
)
from asyncrl.monitor.terminal.view import LATELY_S, View, over_time, series, shares, spent

NAMES = 12
"""Columns of a process's name."""
WAITS = 48
"""Columns that waits want beside their role; with less they go below it."""
ROLES = ("learner", "actor", "buffer", "relay", "launcher")


def _sources(view: View) -> list[Source]:
    return [s for role in ROLES for s in view.history.sources(role)]


# --- pace and time --------------------------------------------------------------------------------


def pace(view: View) -> Sequence[Panel]:
    """Tokens per second of both sides, and where each second of each process goes."""
    return [
        Panel("where the time goes: life | last minute", lambda w: times(view, w)),
        Panel("", lambda w: generated(view, w)),
        Panel("", lambda w: series(view, "tokens/s trained, prompts included",
                                   "throughput/train_tok_s", w, form="{:.0f}", low=0.0)),
        Panel("weights: last publication, seconds", lambda w: _publication(view, w)),
    ]  # fmt: skip


def times(view: View, width: int) -> Lines:
    """Where each process spends its time: its life as a bar of letters, and the last minute."""
    each = (width - NAMES - 2) // 2
    lines: Lines = []
    seen: set[str] = set()
    for source in _sources(view):
        life = shares(spent(view.history, source))
        if not life:
            continue
        lately = shares(spent(view.history, source, LATELY_S))
        seen |= life.keys()
        lines.append(Text.assemble(source_name(source).ljust(NAMES), stacked(life, each), "  ",
                                   stacked(lately, each)))  # fmt: skip
    if not lines:
        return [Text("no records yet", "dim")]
    return [*lines, *legend((s for s in STATES if s in seen), width)]


def generated(view: View, width: int) -> Lines:
    """Response tokens per second of all actors."""
    xs, values = over_time(view.history, "throughput/gen_tok_s", "actor", width - LABEL)
    return chart("tokens/s generated, responses only", xs, values, width, view.tall,
                 form="{:.0f}", axis="second", low=0.0, colour="green")  # fmt: skip


def _publication(view: View, width: int) -> Lines:
    found = []
    for name in ("total", "gather", "hash", "transfer", "pause", "blocked"):
        newest = view.history.newest(f"sync/{name}_s")
        if newest is not None:
            found.append((name, f"{newest[1]:.3f}"))
    lag = view.history.latest().get("sync/version_lag")
    if lag is not None:
        found.append(("slowest actor", f"{lag:.0f} behind"))
    return pairs(found, width) if found else [Text("none yet", "dim")]


# --- buffer ---------------------------------------------------------------------------------------


def buffer(view: View) -> Sequence[Panel]:
    """The ledger and its law, what is held, and who is waited for."""
    return [
        Panel("ledger: each dispatch ends in one term", lambda w: _ledger(view, w)),
        Panel("held", lambda w: _held(view, w)),
        Panel("", lambda w: _depth(view, w)),
        Panel("waits", lambda w: waits(view, w)),
    ]


def _ledger(view: View, width: int) -> Lines:
    ledger = view.state["ledger"]
    if ledger is None:
        return [Text("none yet", "dim")]
    whole = ledger["dispatched"]
    rows = [(term.replace("_", " "), f"{n}", f"{n / whole:.1%}" if whole else "-",
             bar(n / whole if whole else 0.0, max(8, width - 34)))
            for term, n in ledger["terms"]]  # fmt: skip
    law = ("the law holds", "green") if ledger["conserved"] else ("THE LAW IS BROKEN", "bold red")
    lines = table(("term", "samples", "share", ""), [("dispatched", f"{whole}", "", ""), *rows])
    lines.append(Text.assemble(law))
    if ledger["waiting_for"]:
        lines += wrapped(f"the next batch still lacks {ledger['waiting_for']}", width, "yellow")
    return lines


def _held(view: View, width: int) -> Lines:
    last = view.history.latest(BUFFER)
    if "queue/depth" not in last:
        return [Text("nothing committed yet", "dim")]
    depth, most = last["queue/depth"], last.get("queue/capacity", 0.0)
    alive = last.get("samples/held", depth)
    used, limit = last.get("queue/bytes", 0.0), last.get("queue/limit_bytes", 0.0)
    aside = last.get("queue/reserved_bytes", 0.0)
    room = max(8, width - 50)
    rows = [
        ("samples alive", f"{alive:.0f} of {most:.0f}", bar(alive / most if most else 0.0, room)),
        ("of them waiting", f"{depth:.0f}", bar(depth / most if most else 0.0, room)),
        ("bytes", f"{size(used)} of {size(limit)}", bar(used / limit if limit else 0.0, room)),
        ("set aside", size(aside), bar(aside / limit if limit else 0.0, room)),
    ]
    if "queue/age_s" in last:
        rows.append(("oldest", words.age(last["queue/age_s"]), Text()))
    return table(("", "", ""), rows)[1:]


def _depth(view: View, width: int) -> Lines:
    xs, values = view.history.series("queue/depth", BUFFER)
    return chart("samples waiting for a batch", xs, values, width, view.tall, form="{:.0f}",
                 low=0.0)  # fmt: skip


def waits(view: View, width: int) -> Lines:
    """Who waits for what."""
    lines = [line for role in view.state["roles"] for wait in role["waits"]
             for line in wrapped(f"{role['name']}: {wait}", width)]  # fmt: skip
    return lines or [Text("no process waits at the moment", "dim")]


# --- processes ------------------------------------------------------------------------------------


def processes(view: View) -> Sequence[Panel]:
    """Every process: whether it lives, what it takes, what it waits for now."""
    return [Panel("", lambda w: _unknown(view, w) + _roles(view, w))]


def _unknown(view: View, width: int) -> Lines:
    """That the table is old, and how the run goes on."""
    lines: Lines = []
    since = view.state.get("unknown_s")
    if since is not None:
        lines += wrapped(f"as it was {words.age(since)} ago, when the launcher was last heard of",
                         width, "bold red")  # fmt: skip
    if view.state.get("go_on"):
        lines += wrapped(f"it goes on with: {view.state['go_on']}", width)
    return lines


def _roles(view: View, width: int) -> Lines:
    roles = view.state["roles"]
    if not roles:
        return [Text("the launcher has not said anything yet", "dim")]
    rows = [_role(view, role) for role in roles]
    waits = "waits" if view.state.get("unknown_s") is None else "waited then"
    head = ("role", "state", "ver", "re", "heard", "cpu", "memory", "flight")
    lines = table((*head, ""), [[*row, ""] for row in rows], left=2)
    beside = max(cell_len(line.plain) for line in lines) + 2
    if width - beside < WAITS:  # they go below their role, whole
        for at, role in reversed(list(enumerate(roles, start=1))):
            told = [line for wait in role["waits"][:3]
                    for line in wrapped(f"{waits} {wait}", width - 2)]  # fmt: skip
            lines[at + 1 : at + 1] = [Text.assemble("  ", line) for line in told]
        return lines
    made: Lines = [_beside(lines[0], Text(waits, "dim"), beside)]
    for line, role in zip(lines[1:], roles, strict=True):
        told = [one for wait in role["waits"][:3] or ["-"] for one in wrapped(wait, width - beside)]
        made.append(_beside(line, told[0], beside))
        made += [_beside(Text(), one, beside) for one in told[1:]]
    return made


def _beside(left: Text, right: Text, at: int) -> Text:
    return Text.assemble(left, " " * (at - cell_len(left.plain)), right)


def _role(view: View, role: Mapping[str, Any]) -> list[str | Text]:
    kind, rank = words.numbered(role["name"])
    last = view.history.latest((kind, rank or 0))
    heard, cpu = role["heard_s"], last.get("host/cpu_frac")
    style = {"dead": "bold red", UNKNOWN: "red"}.get(role["state"], "")
    return [
        role["name"], Text(role["state"], style),
        "-" if role["version"] is None else f"{role['version']}", f"{role['restarts']}",
        "-" if heard is None else words.age(heard), "-" if cpu is None else f"{cpu:.2f}",
        "-" if "host/rss_bytes" not in last else size(last["host/rss_bytes"]), _under_way(last),
    ]  # fmt: skip


def _under_way(last: Mapping[str, float]) -> str:
    return f"{last['actor/in_flight']:.0f}" if "actor/in_flight" in last else ""
