"""What a stretch of a run's records comes to: where each side's time went, and some means.

records (live) ──► Meter ──► Window ──► advice
RunHistory (files) ──► of_history ─┘
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.metrics import STATES
from asyncrl.monitor.reading.finals import LAST
from asyncrl.monitor.reading.history import RunHistory, Source
from asyncrl.monitor.reading.totals import anew, growth

TIMES = {f"time/{s}_s": s for s in STATES}
LATELY = ("reward/zero_std_frac", "rollout/truncated_frac")
"""Of MEANS, those that change as a run learns: advice looks at the last LAST batches alone, as
the headlines do."""
MEANS = (
    "is/ess_frac", "rollout/response_tokens/mean", "rollout/response_tokens/max",
    *LATELY, "samples/len_bias", "queue/capacity", "actor/in_flight", "actor/scoring",
    "kl/mismatch_k3", "kl/drift_k3", "reward/shaped_mean",
)  # fmt: skip
"""Metrics that advice looks at, besides times."""
ROLES = ("actor", "learner")


@dataclass(frozen=True, slots=True)
class Window:
    """Shares of time of each side, and means over the window.

    >>> Window(10.0, {"actor": {"generate": 0.75}}, {}).share("actor", "generate", "reward")
    0.75
    """

    seconds: float
    shares: Mapping[str, Mapping[str, float]]
    """By role (actor, learner): the share of each state in the time of all its processes."""
    means: Mapping[str, float]
    """Of MEANS, those that were written."""
    lately: Mapping[str, float] = field(default_factory=dict)
    """Of LATELY, the means over the last batches."""

    def share(self, role: str, *states: str) -> float:
        """Share of these states together in the time of a role's processes."""
        return sum(self.shares.get(role, {}).get(s, 0.0) for s in states)


@dataclass(slots=True)
class _Times:
    """Cumulative seconds of one process's states; they begin anew with a restarted one."""

    last: dict[str, float] = field(default_factory=dict)
    grown: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, values: Mapping[str, float]) -> None:
        # A state that was never entered has no value: all of them together tell of a restart.
        fell = anew(sum(self.last.values()), sum(values.values()))
        if self.last:
            for name, value in values.items():
                self.grown[name] += growth(0.0 if fell else self.last.get(name, 0.0), value)
        self.last = dict(values) if fell else {**self.last, **values}


class Meter:
    """Adds records up to a Window; memory is that of the processes, not of the records."""

    def __init__(self) -> None:
        self._times: dict[Source, _Times] = defaultdict(_Times)
        self._sums: dict[str, tuple[float, int]] = {}
        self._last: dict[str, deque[float]] = {n: deque(maxlen=LAST) for n in LATELY}
        self._began: float | None = None
        self._ended = 0.0

    def add(self, record: Mapping[str, Any]) -> None:
        """Take a line of metrics.jsonl, or a record as the hub's listeners see it."""
        source, metrics = (str(record["role"]), int(record["rank"])), record["metrics"]
        self._ended = float(record.get("wall_s", 0.0))
        if self._began is None:
            self._began = self._ended
        if source[0] in ROLES and (times := {k: v for k, v in metrics.items() if k in TIMES}):
            self._times[source].add(times)
        for name in MEANS:
            if name in metrics and _speaks(source, name):
                total, n = self._sums.get(name, (0.0, 0))
                self._sums[name] = (total + metrics[name], n + 1)
                if name in self._last:
                    self._last[name].append(metrics[name])

    def window(self) -> Window:
        """All that was added."""
        spent = {role: dict.fromkeys(STATES, 0.0) for role in ROLES}
        for (role, _), mine in self._times.items():
            for name, grown in mine.grown.items():
                spent[role][TIMES[name]] += grown
        return Window(
            self._ended - (self._began or 0.0),
            {role: _shares(states) for role, states in spent.items()},
            {name: total / n for name, (total, n) in self._sums.items()},
            {name: sum(last) / len(last) for name, last in self._last.items() if last},
        )


def measure(records: Iterable[Mapping[str, Any]]) -> Window:
    """The window of some records, in order."""
    meter = Meter()
    for record in records:
        meter.add(record)
    return meter.window()


def of_history(history: RunHistory, seconds: float | None = None) -> Window:
    """The window of what was read of a run since training began, or of its last seconds."""
    began = max((e["wall_s"] for e in history.events_of(["training"])), default=0.0)
    ends = [last.wall_s for s in history.sources() if (last := history.last_at(s))]
    end = max(ends, default=0.0)
    if seconds is not None:
        began = max(began, end - seconds)
    lines: list[dict[str, Any]] = []
    for source in history.sources():
        names = [n for n in history.names(source) if n in TIMES or n in MEANS]
        by_time: dict[float, dict[str, float]] = defaultdict(dict)
        for name in names:
            for at, value in zip(*history.series(name, source, "wall_s"), strict=True):
                if at >= began:
                    by_time[at][name] = value
        lines += [
            {"role": source[0], "rank": source[1], "wall_s": at, "metrics": metrics}
            for at, metrics in by_time.items()
        ]
    return measure(sorted(lines, key=lambda line: line["wall_s"]))


def _speaks(source: Source, name: str) -> bool:
    """Whether a mean is of this writer: some metrics have the same name elsewhere."""
    if name.startswith("actor/"):
        return source[0] == "actor"
    return source in (("learner", 0), ("buffer", 0))


def _shares(states: Mapping[str, float]) -> dict[str, float]:
    whole = sum(states.values())
    return {s: v / whole for s, v in states.items() if v > 0} if whole > 0 else {}
