"""Whether it learns: reward, scores, loss; and how versions come about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncrl.monitor.figures.kit import (
    Figure,
    Line,
    Run,
    by_place,
    label_of,
    layout,
    lines,
    scale_of,
    trace,
)
from asyncrl.monitor.figures.themes import HUES
from asyncrl.monitor.reading.history import LEARNER, Axis, RunHistory, Source, source_name


def reward(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """Mean reward of each batch, and the scores of the held-out prompts as markers."""
    wanted = [Line("reward/mean", "reward"), Line("reward/shaped_mean", "shaped")]
    figure = lines(runs, axis, wanted, "reward") or {
        "data": [], "layout": layout(scale_of(runs, axis), "reward")
    }  # fmt: skip
    for i, run in enumerate(runs):
        for name, xs, ys in scores(run.history, axis):
            figure["data"].append(
                trace(
                    label_of(runs, run, f"held out: {name}"), xs, ys,
                    color=HUES[i % len(HUES) if len(runs) > 1 else 1], dash="dot",
                    unit=scale_of(runs, axis).unit, meta=f"eval/{name}/score", mode="lines+markers",
                    marker={"size": 9, "symbol": "diamond"},
                )
            )  # fmt: skip
    return figure if figure["data"] else None


def scores(history: RunHistory, axis: Axis) -> list[tuple[str, list[float], list[float]]]:
    """(task, places, scores) of the evaluations, each where its version was made."""
    found = []
    for task, told in history.scores().items():
        places = [
            _steps_before(history, at.version) if axis == "step" else float(getattr(at, axis))
            for at, _ in told
        ]
        order = sorted(range(len(places)), key=places.__getitem__)
        found.append((task, [places[k] for k in order], [told[k][1] for k in order]))
    return found


def _steps_before(history: RunHistory, version: float) -> float:
    """Batches trained when a version was made."""
    steps, _ = history.series("loss/tokens")
    versions, _ = history.series("loss/tokens", axis="version")
    later = [s for s, v in zip(steps, versions, strict=True) if v >= version]
    return min(later) - 1 if later else max(steps, default=0.0)


def loss(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """The terms of the loss."""
    return lines(
        runs, axis,
        [Line("loss/policy", "policy"), Line("loss/kl", "KL"), Line("loss/value", "value")], "loss",
    )  # fmt: skip


def policy(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """Entropy of the policy and the norm of its gradient."""
    return lines(
        runs, axis,
        [Line("loss/entropy", "entropy (nats)"), Line("loss/grad_norm", "gradient norm")], "",
        rangemode="tozero",
    )  # fmt: skip


def length(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """How long the responses are."""
    return lines(
        runs, axis,
        [Line("rollout/response_tokens/mean", "mean"),
         Line("rollout/response_tokens/max", "longest", "dot")],
        "tokens", rangemode="tozero",
    )  # fmt: skip


def signal(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """How much there is to learn from the rewards of a batch, and how many responses were cut."""
    return lines(
        runs, axis,
        [Line("reward/std", "std of the rewards"),
         Line("reward/zero_std_frac", "groups whose rewards are all equal", "dash"),
         Line("rollout/truncated_frac", "responses truncated", "dot")],
        "", rangemode="tozero",
    )  # fmt: skip


def rate(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """The learning rate."""
    return lines(runs, axis, [Line("loss/lr", "learning rate")], "", rangemode="tozero",
                 exponentformat="e")  # fmt: skip


def version(runs: Sequence[Run], axis: Axis) -> Figure | None:
    """What the learner has published and what each actor's engine runs."""
    scale = scale_of(runs, axis)
    data = []
    for i, run in enumerate(runs):
        for j, source in enumerate([LEARNER, *run.history.sources("actor")]):
            name = "loss/tokens" if source == LEARNER else "actor/in_flight"
            xs, _ = run.history.series(name, source, axis)
            versions, _ = run.history.series(name, source, "version")
            if source == LEARNER and axis != "version":
                versions = _published(run.history, versions)
            xs, ys = by_place(xs, versions)
            if xs:
                data.append(
                    trace(
                        label_of(runs, run, _whose(source, axis)), xs, ys,
                        color=HUES[(i if len(runs) > 1 else j) % len(HUES)],
                        dash="solid" if source == LEARNER else "dot", unit=scale.unit,
                        meta="version",
                    )
                )  # fmt: skip
    return {"data": data, "layout": layout(scale, "version")} if data else None


def _whose(source: Source, axis: Axis) -> str:
    if source != LEARNER:
        return source_name(source)
    return "learner, training" if axis == "version" else "learner, after the step"


def _published(history: RunHistory, trained_at: Sequence[float]) -> list[float]:
    """The newest version after each batch, from those at which the batches were trained.

    An engine may run it before the next batch is trained: beside the version of the batch itself
    it would seem ahead of training.
    """
    at = history.last_at(LEARNER)
    if not trained_at or at is None:
        return list(trained_at)
    told = (e for e in reversed(history.events) if e.get("event") == "publication")
    last: dict[str, Any] = next(told, {})
    version = last.get("version") if last.get("incarnation", 0) == at.incarnation else None
    newest = trained_at[-1]
    return [*trained_at[1:], max(newest, version) if isinstance(version, int) else newest]
