"""How long a user waits: from the command to the first training step, and for the help.

With --baseline, the same commands run with another checkout of asyncrl, in turns: before and after
in one go.
The caches are warm: every side runs once before anything counts.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from harness import (
    ROOT,
    BenchError,
    Report,
    commit,
    in_turns,
    parser,
    ratios,
    run_bench,
    significant,
)
from runs import RunResult, environment, launch

CONFIG = "quickstart"
OVERRIDES = ("run.steps=1", "eval.at_end=false", "learner.save_final=false")
"""Only what comes after the first step is left out."""
RUN_LIMIT_S = 400.0
HELP_LIMIT_S = 60.0
_COMMON = ("role", "rank", "step", "version", "incarnation", "run_id", "seen_s", "waits")


def help_s(tree: Path) -> float:
    """Seconds of `asyncrl --help`, from exec to exit.

    Raises:
        BenchError: it failed.
    """
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", "--help"],
        env=environment(tree), cwd=tempfile.gettempdir(),
        capture_output=True, text=True, timeout=HELP_LIMIT_S, check=False,
    )  # fmt: skip
    if done.returncode or "launch" not in done.stdout:
        raise BenchError(f"asyncrl --help: exit code {done.returncode}: {done.stderr[-300:]}")
    return time.monotonic() - began


def breakdown(result: RunResult) -> list[dict[str, Any]]:
    """Events up to the first step; `wall_s` counts from the start of the command."""
    until = result.steps[0]["wall_s"]
    early = [e for e in result.events if e["wall_s"] <= until]
    return [{k: v for k, v in e.items() if k not in _COMMON} for e in early]


def show(events: list[dict[str, Any]], report: Report) -> None:
    """The breakdown as a table."""
    report.row("event", "wall_s", "")
    for e in events:
        rest = {k: v for k, v in e.items() if k not in ("event", "wall_s")}
        report.row(e["event"], e["wall_s"], "  ".join(f"{k}={v}" for k, v in rest.items()))


def measure(report: Report, given: argparse.Namespace) -> None:
    """Both commands, both trees, in turns."""
    trees = {"here": ROOT}
    if given.baseline:
        trees["baseline"] = given.baseline.resolve()
        if not (trees["baseline"] / "asyncrl" / "__main__.py").is_file():
            raise BenchError(f"--baseline {given.baseline}: no asyncrl/__main__.py there")
    step_runs, help_runs = (1, 3) if given.quick else (3, 9)
    helps = in_turns({n: partial(help_s, tree) for n, tree in trees.items()}, help_runs + 1)
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        first_step = FirstStep(Path(scratch))
        runs = in_turns({n: partial(first_step, tree) for n, tree in trees.items()}, step_runs + 1)
    show(breakdown(runs["here"][-1]), report)
    steps = {n: [r.steps[0]["seen_s"] for r in each[1:]] for n, each in runs.items()}
    for name, tree in trees.items():
        suffix = "" if name == "here" else "_baseline"
        report.add(
            f"first_step_s{suffix}", steps[name], "s", "lower",
            config=CONFIG, overrides=OVERRIDES, commit=commit(tree),
            breakdown=breakdown(runs[name][-1]),
            to_exit_s=[significant(r.total_s) for r in runs[name][1:]],
        )  # fmt: skip
        report.add(f"help_s{suffix}", helps[name][1:], "s", "lower", commit=commit(tree))
    if given.baseline:
        both = ratios(steps["here"], steps["baseline"])
        report.add("first_step_vs_baseline", both, "ratio", "lower")


class FirstStep:
    """Launches a run of one step with a tree, each time under another name."""

    def __init__(self, base: Path) -> None:
        self._base, self._numbers = base, count()

    def __call__(self, tree: Path) -> RunResult:
        """One run."""
        name = f"startup-{next(self._numbers)}"
        return launch(self._base, name, CONFIG, OVERRIDES, RUN_LIMIT_S, tree)


def main() -> int:
    """Read the command line and measure."""
    p = parser(__doc__ or "")
    p.add_argument(
        "--baseline", type=Path, metavar="TREE", help="another checkout of asyncrl to compare with"
    )
    return run_bench("startup", p, measure)


if __name__ == "__main__":
    sys.exit(main())
