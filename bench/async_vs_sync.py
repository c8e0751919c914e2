"""What running both sides at once is worth: batches/s at S >= 1 over S = 0, one core a side.

    S = 0    generate │ train │ generate │ train      t_gen and t_train, each alone on its core
    S >= 2   generate ───────────────────────►
             train    ───────────────────────►        ideal: (t_gen + t_train) / max(t_gen, t_train)

The actor's processes are pinned to one core, the learner's to another. `colocated` is what somebody
without asyncrl would do: S = 0, and both cores for whichever side has its turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from harness import BenchError, Report, in_turns, parser, ratios, run_bench, significant
from pinning import Pinning, cpu_seconds
from runs import LaunchedRun, RunResult

CONFIG = "quickstart"
WORKLOAD = (
    "eval.samples=0", "learner.save_final=false", "learner.optim.schedule=constant",
)  # fmt: skip
"""The quick start without what is not training; a schedule would depend on the number of steps."""
COLOCATED = "colocated"
WIDEST = 2.0
"""Largest ratio of the two times at which the bench says anything."""
BUSY_ELSEWHERE = 0.5
"""Cores that processes of neither side may use; above, the pinning missed one."""
PIN_EVERY_S, CHECK_EVERY_S = 0.25, 2.0
LAST_BATCHES = 3
"""Batches whose mean is the reward at a time."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    staleness: tuple[int, ...]
    steps: int
    skip: int
    """First steps that do not count."""
    repeats: int
    rewards: bool
    """Whether it is long enough to compare rewards."""
    limit_s: float = 900.0
    """Longest life of a run."""


FULL = Plan(staleness=(0, 1, 2, 4, 8), steps=10, skip=3, repeats=3, rewards=True)
QUICK = Plan(staleness=(0, 2), steps=6, skip=2, repeats=1, rewards=False)


@dataclass(frozen=True, slots=True)
class Measured:
    """One run."""

    batches_s: float
    t_gen: float
    """Seconds of generation and reward per batch."""
    t_train: float
    """Seconds of training per batch."""
    rewards: tuple[tuple[float, float], ...]
    """(seconds since the first batch, mean reward of the last batches)."""
    staleness: float
    """Mean over the batches of the mean head staleness."""
    outside_cores: float
    """Cores used by the launcher, the buffer and Ray."""

    @property
    def ideal(self) -> float:
        """Speed-up if the shorter side vanished behind the longer one."""
        return (self.t_gen + self.t_train) / max(self.t_gen, self.t_train)


def per_batch(result: RunResult, plan: Plan, batch_size: int) -> tuple[float, float, float]:
    """(batches/s, t_gen, t_train) over the steps that count.

    Raises:
        BenchError: the actor's records do not cover them.
    """
    steps = [r for r in result.steps if r["step"] >= plan.skip]
    since, until = steps[0]["wall_s"], steps[-1]["wall_s"]
    rate = (len(steps) - 1) / (until - since)
    trained = [r["metrics"]["time/train_s"] for r in steps]
    actors = [r for r in result.metrics if r["role"] == "actor" and since <= r["wall_s"] <= until]
    told = [r["metrics"] for r in actors if "actor/samples_pushed" in r["metrics"]]
    samples = told[-1]["actor/samples_pushed"] - told[0]["actor/samples_pushed"] if told else 0
    if samples < batch_size:
        raise BenchError(f"the actor told of {samples} samples in {until - since:.0f} s")
    spent = generating(told[-1]) - generating(told[0])
    t_train = statistics.median(b - a for a, b in pairwise(trained))
    return rate, spent / samples * batch_size, t_train


def generating(metrics: dict[str, float]) -> float:
    """Seconds so far that an actor generated or scored."""
    return metrics.get("time/generate_s", 0.0) + metrics.get("time/reward_s", 0.0)


def rewards_of(steps: Sequence[dict[str, Any]]) -> tuple[tuple[float, float], ...]:
    """(seconds since the first batch, mean reward of the last LAST_BATCHES) of each batch."""
    rewards = [r["metrics"]["reward/mean"] for r in steps]
    last = [rewards[max(0, i + 1 - LAST_BATCHES) : i + 1] for i in range(len(rewards))]
    began = steps[0]["wall_s"]
    return tuple(
        (r["wall_s"] - began, statistics.fmean(n)) for r, n in zip(steps, last, strict=True)
    )


def reward_at(rewards: Sequence[tuple[float, float]], seconds: float) -> float:
    """The reward that was reached by then.

    >>> reward_at([(0.0, 0.1), (5.0, 0.2), (9.0, 0.4)], 8.0)
    0.2
    """
    return [reward for at, reward in rewards if at <= seconds][-1]


class Watch:
    """Pins while the run goes on, and sees to it that everything that works is pinned."""

    def __init__(self, run: LaunchedRun, skip: int, cores: tuple[int, int]) -> None:
        self.run, self.skip = run, skip
        self.pinning = Pinning(run.folder, {"actor": cores[0], "learner": cores[1]})
        self._next = 0.0
        self._began: float | None = None
        self._last: dict[int, float] = {}
        self._outside_s = 0.0
        self.outside_cores = 0.0

    def __call__(self) -> None:
        """One tick.

        Raises:
            BenchError: a side was not found, or runs on another core.
        """
        now = time.monotonic()
        if now < self._next:
            return
        steps = len(self.run.steps)
        self._next = now + (CHECK_EVERY_S if steps else PIN_EVERY_S)
        if steps >= self.skip:
            self._check(now)
        self.pinning.apply()

    def _check(self, now: float) -> None:
        missing = [role for role, pids in self.pinning.pinned.items() if not pids]
        if missing:
            raise BenchError(f"no process of {' and '.join(missing)} was found to pin")
        if astray := self.pinning.astray():
            raise BenchError(f"not pinned: {astray[0]}")
        known = set().union(*self.pinning.pinned.values())
        spent = cpu_seconds(self.run.process.pid)
        outside = (pid for pid in spent.keys() & self._last.keys() if pid not in known)
        self._outside_s += sum(spent[pid] - self._last[pid] for pid in outside)
        self._last = spent
        if self._began is None:
            self._began = now
        else:
            self.outside_cores = self._outside_s / (now - self._began)


def overrides_of(setting: str, plan: Plan) -> list[str]:
    """`S=2` or `colocated` as settings of a run."""
    both = setting == COLOCATED
    s, threads = (0, 2) if both else (int(setting.removeprefix("S=")), 1)
    return [
        *WORKLOAD, f"run.steps={plan.steps}", f"buffer.max_staleness={s}",
        f"engine.threads={threads}", f"learner.threads={threads}",
    ]  # fmt: skip


def side(base: Path, numbers: Any, setting: str, plan: Plan, batch_size: int) -> Measured:
    """One run of a setting.

    Raises:
        BenchError: it failed, or at S = 0 the two times are too far apart to say anything.
    """
    name = f"{setting.replace('=', '')}-{next(numbers)}"
    run = LaunchedRun(base, name, CONFIG, overrides_of(setting, plan))
    watch = Watch(run, plan.skip, two_cores()) if setting != COLOCATED else None
    result = run.follow(plan.limit_s, tick=watch or (lambda: None))
    rate, t_gen, t_train = per_batch(result, plan, batch_size)
    outside = watch.outside_cores if watch else 0.0
    if outside > BUSY_ELSEWHERE:
        raise BenchError(f"{outside:.2f} cores went to processes that were not pinned")
    if setting == "S=0" and not 1 / WIDEST <= t_gen / t_train <= WIDEST:
        raise BenchError(
            f"t_gen {t_gen:.2f} s and t_train {t_train:.2f} s are further apart than 1:2: "
            "change the workload"
        )
    heads = [r["metrics"].get("staleness/head/mean", 0.0) for r in result.steps[plan.skip :]]
    return Measured(
        rate, t_gen, t_train, rewards_of(result.steps), statistics.fmean(heads), outside
    )


def two_cores() -> tuple[int, int]:
    """The actor's core and the learner's.

    Raises:
        BenchError: this process may use one core only.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise BenchError("needs two cores")
    return cores[0], cores[1]


def measure(report: Report, given: argparse.Namespace) -> None:
    """Every setting in turns."""
    from asyncrl.config.load import load

    plan = QUICK if given.quick else FULL
    batch_size = load(CONFIG, overrides_of("S=0", plan)).config.learner.batch_size
    settings = [*(f"S={s}" for s in plan.staleness), COLOCATED]
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        numbers = count()
        runs = in_turns(
            {s: partial(side, Path(scratch), numbers, s, plan, batch_size) for s in settings},
            given.repeats or plan.repeats,
        )
    summarise(report, runs, plan)


def summarise(report: Report, runs: dict[str, list[Measured]], plan: Plan) -> None:
    """Table and values."""
    sync, rates = runs["S=0"], {s: [r.batches_s for r in each] for s, each in runs.items()}
    t_gen, t_train = _median(sync, "t_gen"), _median(sync, "t_train")
    ideal = _median(sync, "ideal")
    alone = {
        "t_gen_s": significant(t_gen), "t_train_s": significant(t_train),
        "ideal": significant(ideal),
        "config": CONFIG, "overrides": WORKLOAD, "steps": plan.steps, "skip": plan.skip,
    }  # fmt: skip
    report.note(
        f"alone, one core each: t_gen {t_gen:.2f} s, t_train {t_train:.2f} s a batch, "
        f"ratio {t_gen / t_train:.2f}, ideal speed-up {ideal:.2f}"
    )
    report.row("setting", "batches/s", "over S=0", "of ideal", "t_gen", "t_train", "staleness")
    for setting, each in runs.items():
        rate = statistics.median(rates[setting])
        over = statistics.median(ratios(rates[setting], rates["S=0"]))
        t = [_median(each, name) for name in ("t_gen", "t_train", "staleness")]
        report.row(setting, rate, over, over / ideal, *t)
        if setting.startswith("S=") and setting != "S=0":
            report.add(
                f"speedup_s{setting[2:]}", ratios(rates[setting], rates["S=0"]), "ratio", "higher",
                **alone, batches_s=significant(rate),
                outside_cores=significant(_median(each, "outside_cores"), 3),
            )  # fmt: skip
    speedup = ratios(rates["S=2"], rates["S=0"])
    report.add("of_ideal_s2", ratios(speedup, [r.ideal for r in sync]), "ratio", "higher", **alone)
    report.add(
        "speedup_vs_colocated", ratios(rates["S=2"], rates[COLOCATED]), "ratio", "higher",
        **alone, colocated="S=0, both cores for either side, not pinned",
    )  # fmt: skip
    if not plan.rewards:
        return
    ends = [min(a.rewards[-1][0], b.rewards[-1][0]) for a, b in zip(runs["S=2"], sync, strict=True)]
    ours, theirs = (
        [reward_at(r.rewards, end) for r, end in zip(runs[s], ends, strict=True)]
        for s in ("S=2", "S=0")
    )
    report.add(
        "reward_at_equal_time", [a - b for a, b in zip(ours, theirs, strict=True)],
        "difference in mean reward", "higher", **alone, s2=ours, s0=theirs, seconds=ends,
    )  # fmt: skip


def _median(each: Sequence[Measured], name: str) -> float:
    return float(statistics.median(getattr(r, name) for r in each))


def main() -> int:
    """Read the command line and measure."""
    return run_bench("async_vs_sync", parser(__doc__ or ""), measure)


if __name__ == "__main__":
    sys.exit(main())
