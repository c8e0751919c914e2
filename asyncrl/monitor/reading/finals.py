"""A run in a few figures: the tiles of the page, the head of the report, the table of compare."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import NamedTuple

from asyncrl.metrics import WAITING
from asyncrl.monitor.reading.history import BUFFER, LAUNCHER, RunHistory
from asyncrl.monitor.reading.totals import per_training_second, spent

LOST = ("dropped_stale", "filtered", "failed", "requeued", "duplicate")
"""Ends of a dispatch that are work for nothing."""
LAST = 10
"""Batches of which "last" is the mean."""


class Final(NamedTuple):
    """One figure of a run.

    >>> Final("reward, last 10", 0.8125, "{:.3f}").text
    '0.812'
    """

    label: str
    value: float | None
    form: str

    @property
    def text(self) -> str:
        """As it is shown; a dash without a value."""
        return "-" if self.value is None else self.form.format(self.value)


def finals(history: RunHistory) -> list[Final]:
    """The figures of a run as far as it is read, the same ones in the same order for each."""
    last, buffer = history.latest(), history.latest(BUFFER)
    at = history.last_at()
    scores = _scores(history)
    trained = buffer.get("samples/trained")
    clock = history.clock
    return [
        Final("step", None if at is None else at.step, "{:.0f}"),
        Final("version", None if at is None else at.version, "{:.0f}"),
        Final(f"reward, last {LAST}", _recent(history, "reward/mean"), "{:.3f}"),
        Final(f"reward std, last {LAST}", _recent(history, "reward/std"), "{:.3f}"),
        Final(f"groups all equal, last {LAST}", _recent(history, "reward/zero_std_frac"), "{:.0%}"),
        Final(f"truncated, last {LAST}", _recent(history, "rollout/truncated_frac"), "{:.0%}"),
        Final("held out, first", scores[0] if scores else None, "{:.3f}"),
        Final("held out, last", scores[-1] if scores else None, "{:.3f}"),
        Final("head staleness, mean", _mean(history, "staleness/head/mean"), "{:.2f}"),
        Final("head staleness, max", _most(history, "staleness/head/max"), "{:.0f}"),
        Final("staleness limit", last.get("staleness/limit"), "{:.0f}"),
        Final("samples/s trained", clock.samples_s, "{:.2f}"),
        Final("tokens/s generated",
              per_training_second(history, ["actor/generated_tokens"], history.sources("actor")),
              "{:,.0f}"),
        Final("tokens/s trained (+ prompts)", clock.train_tok_s, "{:,.0f}"),
        Final("learner waits", _waiting(history, "learner"), "{:.0%}"),
        Final("actors wait", _waiting(history, "actor"), "{:.0%}"),
        Final("effective samples", _of_tokens(history, "is/ess_frac"), "{:.1%}"),
        Final("weights cut off", _of_tokens(history, "is/clip_frac"), "{:.1%}"),
        Final("update pauses actors, s", _pause(history), "{:.3f}"),
        Final("dispatched in vain", _in_vain(buffer) if trained else None, "{:.1%}"),
        Final("length bias", buffer.get("samples/len_bias"), "{:.3f}"),
        Final("actor restarts", history.latest(LAUNCHER).get("actor/restarts"), "{:.0f}"),
        Final("first step after, s", clock.first_step_s, "{:.1f}"),
        Final("seconds in all", None if at is None else clock.elapsed_s, "{:.0f}"),
    ]  # fmt: skip


def _values(history: RunHistory, name: str) -> list[float]:
    return history.series(name)[1]


def _pause(history: RunHistory) -> float | None:
    """The engines' own, if they told it; else as the learner saw it."""
    own = [history.series("sync/pause_s", actor)[1] for actor in history.sources("actor")]
    values = [value for one in own for value in one] or _values(history, "sync/pause_s")
    return statistics.fmean(values) if values else None


def _recent(history: RunHistory, name: str) -> float | None:
    values = _values(history, name)[-LAST:]
    return statistics.fmean(values) if values else None


def _mean(history: RunHistory, name: str) -> float | None:
    values = _values(history, name)
    return statistics.fmean(values) if values else None


def _most(history: RunHistory, name: str) -> float | None:
    return max(_values(history, name), default=None)


def _scores(history: RunHistory) -> list[float]:
    first = next(iter(history.scores().values()), [])
    return [score for _, score in first]


def _of_tokens(history: RunHistory, name: str) -> float | None:
    """A share of the tokens of each batch, as that of all of them."""
    tokens = dict(zip(*history.series("loss/tokens"), strict=True))
    found = [(v, tokens.get(s, 0.0)) for s, v in zip(*history.series(name), strict=True)]
    whole = sum(n for _, n in found)
    return sum(v * n for v, n in found) / whole if whole else None


def _waiting(history: RunHistory, role: str) -> float | None:
    """Share of waiting in the time of a role's processes while the run trained."""
    found = spent(history, history.sources(role), history.clock.training())
    whole = sum(found.values())
    return sum(found.get(s, 0.0) for s in WAITING) / whole if whole > 0 else None


def _in_vain(counts: Mapping[str, float]) -> float | None:
    """Share of the dispatches that came to nothing; what was requeued is dispatched again."""
    dispatched = counts.get("samples/dispatched", 0.0)
    vain = sum(counts.get(f"samples/{term}", 0.0) for term in LOST)
    return vain / dispatched if dispatched else None
