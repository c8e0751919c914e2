"""Off-policy on purpose: what each correction is worth on data that is exactly k versions old.

    methods (configs/correction/*.yaml) x ages k x learning rates x seeds  ─► best rate of each
    methods x ages at its best rate x other seeds                          ─► mean, 95 % interval

A run trains a tiny model for a fixed number of batches on a task of its own (off_policy_task.py),
in one process without an engine; the result is the mean reward of what its last policies sample.
A finished run is a line of --runs: what stands there, from the same code, is not run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import off_policy_run as one
from harness import ROOT, BenchError, Report, parser, run_bench, significant
from off_policy_report import BASELINE, Cell, best_rate, cells, figure, sweeps, table
from off_policy_run import PRESETS, Run, Study

from asyncrl.config import sources
from asyncrl.errors import ConfigError

RUNS = ROOT / "runs" / "off_policy.jsonl"
SAY_S = 30.0
"""Time between two lines about the progress."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run."""

    study: Study
    methods: tuple[str, ...]
    ages: tuple[int, ...]
    rates: tuple[float, ...]
    sweep_seeds: range
    report_seeds: range
    """Others than the sweep's: the best of several rates is too good on the seeds that chose it."""

    def sweep(self) -> list[Run]:
        """Every method at every rate."""
        axes = product(self.sweep_seeds, self.ages, self.methods, self.rates)
        return [Run(method, k, lr, seed) for seed, k, method, lr in axes]

    def reported(self, rate: Callable[[str, int], float]) -> list[Run]:
        """Every method at its best rate."""
        axes = product(self.report_seeds, self.ages, self.methods)
        return [Run(method, k, rate(method, k), seed) for seed, k, method in axes]


RATES = (3e-4, 1e-3, 3e-3)
FULL = Plan(Study(), (), (0, 2, 8, 32), RATES, range(3), range(100, 105))
QUICK = Plan(
    Study(steps=12, judged=4), (BASELINE, "decoupled-ppo"), (0, 8), RATES[1:2], range(1),
    range(100, 102),
)  # fmt: skip


def presets() -> tuple[str, ...]:
    """Names of all methods."""
    return tuple(
        name.partition("/")[2] for name in sources.shipped() if name.startswith(f"{PRESETS}/")
    )


class Log:
    """Finished runs, in a file of one JSON object a line."""

    def __init__(self, path: Path, study: Study) -> None:
        self.path, self.study = path, study
        self.known: dict[str, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                record = json.loads(line)
                self.known[record["mark"]] = record

    def get(self, run: Run) -> dict[str, Any] | None:
        """What is known of a run; None if it must be run."""
        return self.known.get(self.mark(run))

    def add(self, run: Run, record: dict[str, Any]) -> None:
        """Keep a run that has finished."""
        record = record | {"mark": self.mark(run)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(record) + "\n")
        self.known[record["mark"]] = record

    def mark(self, run: Run) -> str:
        """Tells it from other runs, and from the same one of other code."""
        return f"{run} {one.fingerprint(self.study, run)}"


@contextmanager
def pool(processes: int) -> Iterator[Executor]:
    """Processes with one thread each; what waits is dropped when the block is left by an error."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before they import torch
    executor = ProcessPoolExecutor(
        processes, mp_context=multiprocessing.get_context("spawn"), initializer=one.enter
    )
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def finish(runs: Sequence[Run], log: Log, executor: Executor, folder: str) -> list[dict[str, Any]]:
    """The records of `runs`, in order; those that are not in the log are run.

    Raises:
        BenchError: a run failed.
    """
    open_runs = [r for r in dict.fromkeys(runs) if log.get(r) is None]
    futures = {executor.submit(one.execute, log.study, r, folder): r for r in open_runs}
    began = said = time.monotonic()
    for done, future in enumerate(as_completed(futures), 1):
        run = futures[future]
        try:
            log.add(run, future.result())
        except Exception as e:
            raise BenchError(f"{run}: {type(e).__name__}: {e}") from e
        now = time.monotonic()
        if now - said > SAY_S or done == len(futures):
            said, left = now, (now - began) / done * (len(futures) - done)
            print(f"{done} of {len(futures)} runs, {left / 60:.0f} min left", flush=True)
    return [log.known[log.mark(r)] for r in runs]


def plan_of(given: argparse.Namespace) -> Plan:
    """What the command line asks for.

    Raises:
        BenchError: there is no such preset.
    """
    plan = QUICK if given.quick else FULL
    plan = replace(plan, methods=tuple(given.method or plan.methods or presets()))
    unknown = sorted(set(plan.methods) - set(presets()))
    if unknown:
        raise BenchError(f"no preset {', '.join(unknown)}; there are {', '.join(presets())}")
    plan = replace(plan, ages=tuple(given.age or plan.ages), rates=tuple(given.rate or plan.rates))
    if given.sweep_seeds:
        plan = replace(plan, sweep_seeds=range(given.sweep_seeds))
    if given.repeats:
        plan = replace(plan, report_seeds=range(100, 100 + given.repeats))
    if given.steps:
        plan = replace(plan, study=replace(plan.study, steps=given.steps))
    return plan


def check(plan: Plan) -> None:
    """Refuse a method that cannot run before hours have passed.

    Raises:
        BenchError: its preset does not go with what all runs have in common.
    """
    for method, k in product(plan.methods, plan.ages):
        try:
            one.config_of(plan.study, Run(method, k, plan.rates[0], 0))
        except ConfigError as e:
            raise BenchError(f"{method} at k = {k}: {e}") from e


def measure(report: Report, given: argparse.Namespace) -> None:
    """Sweep, then report at the best rates."""
    plan = plan_of(given)
    check(plan)
    log = Log(given.runs, plan.study)
    with tempfile.TemporaryDirectory() as folder, pool(given.processes) as executor:
        executor.submit(one.make_model, folder).result()
        swept = finish(plan.sweep(), log, executor, folder)
        by_cell = sweeps(swept)
        runs = plan.reported(lambda method, k: best_rate(by_cell[method, k]))
        reported = finish(runs, log, executor, folder)
    found = cells(swept, reported)
    summarise(report, found, plan)
    print(f"\n{table(found)}")
    if given.table:
        given.table.write_text(table(found) + "\n", encoding="utf-8")
    if given.figure:
        start = sum(r["curve"][0] for r in swept) / len(swept)
        given.figure.write_text(figure(found, start), encoding="utf-8")


def summarise(report: Report, found: Sequence[Cell], plan: Plan) -> None:
    """A value for each method and age; every run's reward is in its params."""
    report.note(
        f"{plan.study.steps} batches of {plan.study.groups} x {plan.study.group_size} samples, "
        f"{len(plan.sweep_seeds)} seeds for the rate, {len(plan.report_seeds)} others for the value"
    )
    for c in found:
        report.add(
            f"reward_k{c.k}_{c.method}", c.rewards, "reward", "higher", method=c.method, k=c.k,
            mean=significant(c.mean),
            half_width_95=significant(c.half) if len(c.rewards) > 1 else None,
            lr=c.lr, lr_at_edge=c.at_edge, steps=plan.study.steps,
            sweep={f"{lr:g}": list(rewards) for lr, rewards in c.sweep.items()},
        )  # fmt: skip


def main() -> int:
    """Read the command line and measure."""
    p = parser(__doc__ or "")
    p.add_argument(
        "--method", action="append", metavar="NAME", help="preset; repeatable (default: all)"
    )
    p.add_argument("--age", action="append", type=int, metavar="K", help="default: 0, 2, 8, 32")
    p.add_argument("--rate", action="append", type=float, metavar="LR", help="of the sweep")
    p.add_argument("--steps", type=int, metavar="N", help="batches of a run")
    p.add_argument("--sweep-seeds", type=int, metavar="N", help="of each rate (default: 3)")
    p.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), metavar="N")
    p.add_argument(
        "--runs", type=Path, default=RUNS, metavar="PATH", help="where finished runs are kept"
    )
    p.add_argument("--table", type=Path, metavar="PATH", help="write the table here, as Markdown")
    p.add_argument("--figure", type=Path, metavar="PATH", help="write the figure here, as SVG")
    return run_bench("off_policy", p, measure)


if __name__ == "__main__":
    sys.exit(main())
