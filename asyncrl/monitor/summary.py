"""What a run says at its end: summary.json and the last lines of the console."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from asyncrl.monitor.advice import advise, as_json
from asyncrl.monitor.board import Board, Evaluation
from asyncrl.wire import Stats

TERMS = ("trained", "dropped_stale", "filtered", "failed", "requeued", "duplicate", "held")
"""The ends of a dispatch (docs/architecture.md): they add up to `dispatched`."""


def ledger_line(stats: Stats) -> str:
    """The ledger's counts as one line, with the law they must obey."""
    parts = " + ".join(f"{stats.counts.get(term, 0)} {term}" for term in TERMS)
    closed = " closed" if stats.state == "done" else ""
    verdict = closed if stats.conserved else " NOT CLOSED"
    return f"ledger{verdict}: {stats.counts.get('dispatched', 0)} dispatched = {parts}"


def evaluation_line(version: int, evaluation: Evaluation, asked: int) -> str:
    """One evaluation, in words; `asked`: prompts held out, of which some may have no answer."""
    return f"eval of version {version}: {scored(evaluation, asked)}"


def scored(evaluation: Evaluation, asked: int) -> str:
    """An evaluation's score, and of how many prompts it is: an actor that did not come to the end
    leaves its share out.
    """
    of = "" if evaluation.prompts >= asked else f" of {asked}"
    return f"{evaluation.score:.3f} on {evaluation.prompts}{of} held out"


def startup_line(board: Board) -> str:
    """How the time to the first step was spent, in words; phases of one kind ran side by side."""
    if (seconds := board.first_step_s) is None:
        return ""
    launch = " of this launch" if board.lived_s else ""
    first = board.startup.first_token_s
    token = f", first token after {first:.1f} s" if first is not None else ""
    parts = [f"{name} {took:.1f}" for name, took in board.startup.longest().items()]
    side = f" ({', '.join(parts)}; side by side)" if parts else ""
    return f"first step{launch} after {seconds:.1f} s{token}{side}"


def last_lines(board: Board, stats: Stats | None, ended: str, reason: str) -> Iterator[str]:
    """The console's last lines but one."""
    if startup := startup_line(board):
        yield startup
    why = f" ({reason})" if reason and reason != ended else ""
    line = f"{ended}{why}: {board.step} steps, version {board.version}"
    if board.rewards:
        line += f", reward {board.rewards[0]:.3f} -> {board.rewards[-1]:.3f}"
    yield line
    if stats is not None:
        yield ledger_line(stats)
    for advice in advise(board.meter.window(), board.config):
        yield f"advice: {advice.line()}"


def summary_of(
    board: Board, stats: Stats | None, ended: str, run_id: str, reason: str
) -> dict[str, Any]:
    """The content of summary.json; null where there is no value.

    `training_s`, `samples_s` and `total_s` are of all launches (monitor/reading/clock.py); `busy`,
    `advice`, `startup`, `first_token_s` and `first_step_s` are of the last one.
    """

    def median(values: list[float]) -> float | None:
        return statistics.median(values) if values else None

    return {
        "run_id": run_id,
        "ended": ended,
        "reason": reason,
        "steps": board.step,
        "version": board.version,
        "ledger": stats.counts if stats else None,
        "conserved": stats.conserved if stats else None,
        "reward": {
            "first": board.rewards[0] if board.rewards else None,
            "final": board.rewards[-1] if board.rewards else None,
        },
        "eval": {
            str(v): {"score": e.score, "prompts": e.prompts, "asked": board.config.eval.samples}
            for v, e in sorted(board.evals.items())
        },
        "staleness": {
            "limit": board.config.buffer.max_staleness,
            "head_mean_p50": median(board.staleness_mean),
            "head_max": board.staleness_max if board.staleness_mean else None,
        },
        "samples_s": board.clock.samples_s,
        "busy": board.busy_shares(),
        "advice": as_json(advise(board.meter.window(), board.config)),
        "first_token_s": board.startup.first_token_s,
        "first_step_s": board.first_step_s,
        "startup": [
            {"role": p.role, "phase": p.name, "seconds": p.seconds, "ended_s": p.ended_s}
            for p in board.startup.phases
        ],
        "training_s": board.clock.training_s,
        "total_s": board.elapsed_s(),
    }
