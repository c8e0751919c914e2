"""asyncrl's quick start against TRL's GRPOTrainer: same task, model, batch, optimizer and cores.

    asyncrl launch --config quickstart      (eval off)       ─┐ in turns, each a process of its own,
    TRL's GRPOTrainer with the same settings (trl_grpo.py)   ─┘ with both cores

Trained samples/s is the median over the steps after the first; time to 80 % counts from exec until
the mean share of right answers of two batches in a row is 0.8. TRL comes with `make bench-install`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from harness import BenchError, Report, in_turns, parser, ratios, run_bench, significant
from runs import POLL_S, START_LIMIT_S, LaunchedRun, Tail, environment

CONFIG = "quickstart"
WORKLOAD = ("eval.samples=0",)
TRL_PACKAGES = Path(sys.prefix) / "bench"
"""Where `make bench-install` puts TRL and what it lacks; asyncrl's environment stays as it is."""
TARGET = 0.8
"""Share of right answers, mean of the last LAST_BATCHES batches."""
LAST_BATCHES = 2
SKIP = 1
"""First steps that do not count for samples/s: caches and kernels warm up."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    steps: int
    """Steps of the schedule, for both sides."""
    cap_steps: dict[str, int]
    """Steps at which a side that has not reached TARGET is ended."""
    cap_s: float
    """The same in seconds from exec."""
    repeats: int
    to_target: bool


@dataclass(frozen=True, slots=True)
class Side:
    """One run of either."""

    times: tuple[float, ...]
    """Seconds from exec to the end of each step."""
    rewards: tuple[float, ...]
    samples: int
    """Samples of a step."""

    @property
    def samples_s(self) -> float:
        """Trained samples/s, median over the steps that count."""
        spans = [b - a for a, b in pairwise(self.times[SKIP - 1 :])]
        if not spans:
            raise BenchError(f"only {len(self.times)} steps: no steady state")
        return self.samples / statistics.median(spans)

    @property
    def reached(self) -> int | None:
        """Index of the step at which TARGET was reached; None if it was not."""
        return reached(self.rewards)

    def time_to_target(self, from_first_step: bool = False) -> float:
        """Seconds to TARGET, or all that was watched if it was not reached.

        `from_first_step` leaves out the start: it counts from one step before the first one's end.
        """
        at = self.times[-1 if self.reached is None else self.reached]
        if not from_first_step:
            return at
        return at - self.times[0] + self.samples / self.samples_s


def reached(rewards: Sequence[float]) -> int | None:
    """Index of the first step whose last LAST_BATCHES batches have TARGET as their mean.

    >>> reached([0.7, 0.85, 0.8, 0.9]), reached([0.9]), reached([0.1, 0.2])
    (2, None, None)
    """
    for i in range(LAST_BATCHES - 1, len(rewards)):
        if statistics.fmean(rewards[i + 1 - LAST_BATCHES : i + 1]) >= TARGET:
            return i
    return None


def enough(rewards: Sequence[float], cap_steps: int, to_target: bool) -> bool:
    """Whether a side may end."""
    return len(rewards) >= cap_steps or (to_target and reached(rewards) is not None)


def asyncrl_side(base: Path, numbers: Any, plan: Plan) -> Side:
    """The real command."""
    overrides = [*WORKLOAD, f"run.steps={plan.steps}"]
    run = LaunchedRun(base, f"asyncrl-{next(numbers)}", CONFIG, overrides)

    def seen_enough(steps: list[dict[str, Any]]) -> bool:
        late = time.monotonic() - run.began > plan.cap_s
        rewards = [r["metrics"]["reward/mean"] for r in steps]
        return late or enough(rewards, plan.cap_steps["asyncrl"], plan.to_target)

    result = run.follow(plan.cap_s + START_LIMIT_S, enough=seen_enough)
    steps = result.steps
    return Side(
        times=tuple(r["seen_s"] for r in steps),
        rewards=tuple(r["metrics"]["reward/mean"] for r in steps),
        samples=round(result.summary["ledger"]["trained"] / len(steps)),
    )


def trl_side(base: Path, numbers: Any, plan: Plan, variant: str) -> Side:
    """TRL in a process of its own.

    Raises:
        BenchError: it failed or never came to its second step.
    """
    out = base / f"trl-{next(numbers)}.jsonl"
    log = out.with_suffix(".log")
    command = [
        sys.executable, str(Path(__file__).with_name("trl_grpo.py")), str(out), "--config", CONFIG,
        "--variant", variant, *WORKLOAD, f"run.steps={plan.steps}",
    ]  # fmt: skip
    began = time.monotonic()
    with log.open("wb") as f:
        process = subprocess.Popen(
            command, stdout=f, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=base,
            env=with_trl(environment()), start_new_session=True,
        )  # fmt: skip
    tail, ended_by_us = Tail(out, began), False
    try:
        while process.poll() is None and not ended_by_us:
            tail.read()
            rewards = [r["reward"] for r in tail.lines]
            late = time.monotonic() - began > plan.cap_s
            ended_by_us = late or enough(rewards, plan.cap_steps["trl"], plan.to_target)
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    tail.read()
    if process.returncode and not ended_by_us:
        words = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise BenchError(f"TRL: exit code {process.returncode}: {' | '.join(words[-3:])}")
    if len(tail.lines) <= SKIP:
        raise BenchError(f"TRL: {len(tail.lines)} steps in {time.monotonic() - began:.0f} s")
    return Side(
        times=tuple(r["seen_s"] for r in tail.lines),
        rewards=tuple(r["reward"] for r in tail.lines), samples=tail.lines[0]["samples"],
    )  # fmt: skip


def with_trl(env: dict[str, str]) -> dict[str, str]:
    """The environment of TRL's process."""
    return env | {"PYTHONPATH": os.pathsep.join((env["PYTHONPATH"], str(TRL_PACKAGES)))}


def trl_version() -> str:
    """What is compared with."""
    found = importlib.metadata.distributions(name="trl", path=[str(TRL_PACKAGES)])
    return next((d.version for d in found), "unknown")


FULL = Plan(steps=40, cap_steps={"asyncrl": 40, "trl": 40}, cap_s=1200.0, repeats=3, to_target=True)
QUICK = Plan(steps=40, cap_steps={"asyncrl": 10, "trl": 4}, cap_s=150.0, repeats=1, to_target=False)


def measure(report: Report, given: argparse.Namespace) -> None:
    """Both sides in turns."""
    from trl_grpo import VARIANTS

    if not TRL_PACKAGES.joinpath("trl").is_dir():
        raise BenchError("TRL is not installed: make bench-install")
    if given.variant not in VARIANTS:
        raise BenchError(f"--trl-variant {given.variant}: expected one of {', '.join(VARIANTS)}")
    plan = QUICK if given.quick else FULL
    plan = replace(plan, cap_s=given.cap_s or plan.cap_s)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        base, numbers = Path(scratch), count()
        runs = in_turns(
            {
                "asyncrl": partial(asyncrl_side, base, numbers, plan),
                "trl": partial(trl_side, base, numbers, plan, given.variant),
            },
            given.repeats or plan.repeats,
        )
    summarise(report, runs, plan, given.variant)


def summarise(report: Report, runs: dict[str, list[Side]], plan: Plan, variant: str) -> None:
    """Table and values."""
    report.row(
        "side", "samples/s", "s a step", "steps", "reward", f"s to {TARGET:.0%}", "without start"
    )
    for name, each in runs.items():
        for s in each:
            bound = "" if s.reached is not None else "> "
            report.row(
                name, s.samples_s, s.samples / s.samples_s, len(s.times),
                f"{s.rewards[0]:.3f} -> {statistics.fmean(s.rewards[-LAST_BATCHES:]):.3f}",
                f"{bound}{s.time_to_target():.1f}", f"{bound}{s.time_to_target(True):.1f}",
            )  # fmt: skip
    ours, theirs = runs["asyncrl"], runs["trl"]
    common = {
        "config": CONFIG, "overrides": WORKLOAD, "steps": plan.steps, "trl_variant": variant,
        "trl": trl_version(),
    }  # fmt: skip
    report.add(
        "run_samples_s_vs_trl", ratios([s.samples_s for s in ours], [s.samples_s for s in theirs]),
        "ratio", "higher", **common,
        asyncrl_samples_s=[significant(s.samples_s) for s in ours],
        trl_samples_s=[significant(s.samples_s) for s in theirs],
    )  # fmt: skip
    if not plan.to_target:
        return
    late = [s for s in ours if s.reached is None]
    if late:
        raise BenchError(f"asyncrl did not reach {TARGET:.0%} in {len(late[0].times)} steps")
    report.add(
        "time_to_80_vs_trl",
        ratios([s.time_to_target() for s in ours], [s.time_to_target() for s in theirs]),
        "ratio", "lower", **common, **_times("asyncrl", ours), **_times("trl", theirs),
        upper_bound=any(s.reached is None for s in theirs),
    )  # fmt: skip


def _times(name: str, each: Sequence[Side]) -> dict[str, Any]:
    return {
        f"{name}_s": [significant(s.time_to_target()) for s in each],
        f"{name}_without_start_s": [significant(s.time_to_target(True)) for s in each],
        f"{name}_steps": [len(s.times) for s in each],
        f"{name}_reached": [s.reached is not None for s in each],
        f"{name}_reward_at_end": [significant(statistics.fmean(s.rewards[-2:]), 3) for s in each],
    }


def main() -> int:
    """Read the command line and measure."""
    p = parser(__doc__ or "")
    p.add_argument(
        "--trl-variant", dest="variant", default="autocast", metavar="NAME",
        help="settings of TRL, from trl_grpo.py (default: the best on CPU)",
    )  # fmt: skip
    p.add_argument(
        "--cap-s", type=float, metavar="S",
        help="end a side that has not reached the target by then (default 1200)",
    )  # fmt: skip
    return run_bench("peers", p, measure)


if __name__ == "__main__":
    sys.exit(main())
