"""What the console shows: the newest value of each metric, gathered from the records."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.metrics import STATES
from asyncrl.wire import Stats


@dataclass
class Evaluation:
    """Scores of one version, gathered over the actors' shares."""

    prompts: int = 0
    total: float = 0.0
    told: bool = False
    """Whether its record is written."""

    @property
    def score(self) -> float:
        """Mean reward over what was evaluated so far."""
        return self.total / self.prompts if self.prompts else float("nan")


@dataclass
class Board:
    """A MetricSink that remembers what a reader of the console wants to know."""

    config: Config
    started: float = field(default_factory=time.monotonic)
    phase: str = "starting"
    stats: Stats | None = None
    learner: dict[str, float] = field(default_factory=dict)
    actors: dict[int, dict[str, float]] = field(default_factory=dict)
    step: int = 0
    version: int = 0
    rewards: list[float] = field(default_factory=list)
    staleness_mean: list[float] = field(default_factory=list)
    staleness_max: float = 0.0
    samples_s: list[float] = field(default_factory=list)
    evals: dict[int, Evaluation] = field(default_factory=dict)
    first_step_s: float | None = None
    training_began: float | None = None
    last_step_at: float = 0.0
    first: dict[tuple[str, int], Mapping[str, float]] = field(default_factory=dict)
    _generated: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=2))

    def write(self, record: Mapping[str, Any]) -> None:
        """Take one record of any role."""
        event = record["event"]
        if event is not None and event["event"] == "eval":
            entry = self.evals.setdefault(record["version"], Evaluation())
            entry.prompts += event["prompts"]
            entry.total += event["total"]
        if event is not None and event["event"] == "publication":
            self.version = record["version"]
        if record["metrics"]:
            self.first.setdefault((record["role"], record["rank"]), record["metrics"])
        if record["role"] == "actor" and record["metrics"]:
            self.actors[record["rank"]] = record["metrics"]
        if record["role"] == "learner" and record["rank"] == 0 and record["metrics"]:
            self._learner_step(record)

    def _learner_step(self, record: Mapping[str, Any]) -> None:
        metrics = record["metrics"]
        self.learner = metrics
        now = time.monotonic()
        if record["step"] <= self.step:
            return
        tokens = sum(a.get("actor/generated_tokens", 0.0) for a in self.actors.values())
        self._generated.append((now, tokens))
        if self.step:
            self.samples_s.append(self.config.learner.batch_size / (now - self.last_step_at))
        else:
            self.first_step_s = now - self.started
        self.step, self.last_step_at = record["step"], now
        if "reward/mean" in metrics:
            self.rewards.append(metrics["reward/mean"])
        if "staleness/head/mean" in metrics:
            self.staleness_mean.append(metrics["staleness/head/mean"])
            self.staleness_max = max(self.staleness_max, metrics["staleness/head/max"])

    def finished_evals(self, at_end: bool) -> list[tuple[int, Evaluation]]:
        """Evaluations whose shares are all in (at the end: any) and whose record is not written."""
        return [
            (version, e)
            for version, e in sorted(self.evals.items())
            if not e.told and (at_end or e.prompts >= self.config.eval.samples)
        ]

    def seconds_left(self) -> float | None:
        """Time to the last step at the pace of the last steps; None before the second step."""
        if not self.samples_s or self.training_began is None:
            return None
        recent = self.samples_s[-10:]
        pace = len(recent) / sum(1 / s for s in recent)
        return (self.config.run.steps - self.step) * self.config.learner.batch_size / pace

    def gen_tok_s(self) -> float:
        """Generated tokens/s over all actors since the last step but one; at first, of now."""
        if len(self._generated) < 2:
            return sum(a.get("throughput/gen_tok_s", 0.0) for a in list(self.actors.values()))
        (then, before), (now, after) = self._generated
        return (after - before) / (now - then)

    def actors_idle(self) -> float | None:
        """Mean share of the actors' last second spent waiting."""
        values = [a["idle/actors_frac"] for a in list(self.actors.values())
                  if "idle/actors_frac" in a]  # fmt: skip
        return sum(values) / len(values) if values else None

    def busy_shares(self) -> dict[str, float]:
        """Share of its own work in each side's time between its first and its last record."""
        actors = [
            _busy(self.first[("actor", rank)], last, ("generate", "reward"))
            for rank, last in list(self.actors.items())
        ]
        first = self.first.get(("learner", 0), {})
        return {
            "learner": _busy(first, self.learner, ("train",)),
            "actors": sum(actors) / len(actors) if actors else 0.0,
        }

    def close(self) -> None:
        """Nothing to end."""


def _busy(first: Mapping[str, float], last: Mapping[str, float], own: tuple[str, ...]) -> float:
    spent = {s: last.get(f"time/{s}_s", 0.0) - first.get(f"time/{s}_s", 0.0) for s in STATES}
    whole = sum(spent.values())
    return sum(spent[s] for s in own) / whole if whole > 0 else 0.0
