"""The learner's step against an ordinary padded loop and TRL's GRPO step, on the same batch.

    asyncrl   Trainer.train: packs without padding, a prompt once, no [tokens, vocab]   ─┐ in turns,
    padded    right-padded batch, full logits; trimmed: each micro-batch to its longest  │ a process
    trl       GRPOTrainer, its generation handing out the same completions               ─┘ each

Responses are ragged, their mean a quarter of the longest. Dtype, threads, optimizer and tokens of a
micro-batch are the same. The first step is warm-up. A side whose loss or gradient norm is another
one has done other work: then there are no figures. TRL comes with `make bench-install`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from harness import BenchError, Report, in_turns, parser, run_bench
from learner_batch import Workload
from learner_compare import TOLERANCE, child, side, summarise
from learner_meter import Measured
from learner_sides import Spec
from peers import TRL_PACKAGES

MODEL = "smollm2-135m"
NAMES = ("asyncrl", "padded", "trimmed", "trl")
TRL_VARIANT = {"float32": "fp32", "bfloat16": "autocast"}
"""Its fastest settings on CPU of each type (bench/README.md)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    workload: Workload
    steps: int
    """Of each process, warm-up included."""
    repeats: int
    sides: tuple[str, ...]


FULL = Plan(Workload(groups=4, group_size=8), steps=3, repeats=3, sides=NAMES)
QUICK = Plan(
    Workload(groups=2, group_size=4, longest=96, prompt=(12, 18)), steps=2, repeats=1,
    sides=("asyncrl", "padded", "trl"),
)  # fmt: skip
"""All samples are one micro-batch: nothing to trim."""


def plan_of(given: argparse.Namespace) -> Plan:
    """What the command line asks for."""
    plan = QUICK if given.quick else FULL
    left_out = given.without or ()
    return replace(
        plan, repeats=given.repeats or plan.repeats,
        sides=tuple(n for n in plan.sides if n not in left_out),
    )  # fmt: skip


def measure(report: Report, given: argparse.Namespace) -> None:
    """All sides in turns."""
    from asyncrl import models

    plan = plan_of(given)
    if "trl" in plan.sides and not TRL_PACKAGES.joinpath("trl").is_dir():
        raise BenchError("TRL is not installed: make bench-install, or --without trl")
    with tempfile.TemporaryDirectory(prefix="bench-learner-") as scratch:
        spec = Spec(
            model=str(models.resolve(MODEL)), workload=plan.workload,
            behaviour=str(Path(scratch) / "behaviour.npy"), dtype=given.dtype, budget=given.budget,
            threads=given.threads or len(os.sched_getaffinity(0)), steps=plan.steps,
            checkpointing=given.checkpointing,
            trl_variant=given.variant or TRL_VARIANT[given.dtype],
        )  # fmt: skip
        child("prepare", spec)
        sides: dict[str, Callable[[], Measured]] = {n: partial(side, n, spec) for n in plan.sides}
        runs = in_turns(sides, plan.repeats)
    summarise(report, runs, spec)


def main() -> int:
    """Read the command line and measure."""
    p = parser(__doc__ or "")
    p.add_argument("--dtype", choices=tuple(TOLERANCE), default="bfloat16")
    p.add_argument("--threads", type=int, metavar="N", help="of every side (default: all cores)")
    p.add_argument(
        "--budget", type=int, default=2048, metavar="TOKENS",
        help="tokens of a micro-batch: real ones for asyncrl, with padding for the padded loop",
    )  # fmt: skip
    p.add_argument(
        "--checkpointing", action="store_true", help="gradient checkpointing, on every side"
    )
    p.add_argument(
        "--without", action="append", choices=NAMES[2:], help="leave out a side; repeatable"
    )
    p.add_argument(
        "--trl-variant", dest="variant", metavar="NAME",
        help="settings of TRL, from trl_grpo.py (default: the best on CPU)",
    )  # fmt: skip
    return run_bench("learner", p, measure)


if __name__ == "__main__":
    sys.exit(main())
