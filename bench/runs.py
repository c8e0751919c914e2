"""One `asyncrl launch` as a bench needs it: watched from outside, by the clock of its exec.

    exec ─► metrics.jsonl grows, each line stamped when seen ─► exit, or Ctrl-C when that is enough

Every POLL_S the new lines are read and `tick` is called. A run that ends with another exit code,
or whose ledger does not close, or that takes longer than its limit, is a BenchError: no figure.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import ROOT, BenchError

POLL_S = 0.05
"""Resolution of the times that are seen from outside."""
START_LIMIT_S = 300.0
"""Longest time to the first training step."""
END_LIMIT_S = 90.0
"""Longest time from Ctrl-C, or from the last step, to the end of the process."""


def environment(tree: Path = ROOT) -> dict[str, str]:
    """The environment of a side: asyncrl from `tree`, nothing of a run or of threads preset."""
    dropped = ("ASYNCRL_RUN_ID", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    return kept | {"PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1"}


@dataclass
class Tail:
    """Complete lines of a JSONL file that others still write, each with when it was seen."""

    path: Path
    began: float
    lines: list[dict[str, Any]] = field(default_factory=list)
    _at: int = 0
    _rest: bytes = b""

    def read(self) -> None:
        """Take what is new; a line counts when its end is there."""
        try:
            with self.path.open("rb") as f:
                f.seek(self._at)
                new = f.read()
        except FileNotFoundError:
            return
        self._at += len(new)
        *whole, self._rest = (self._rest + new).split(b"\n")
        seen = round(time.monotonic() - self.began, 3)
        self.lines += [json.loads(line) | {"seen_s": seen} for line in whole if line.strip()]


@dataclass
class RunResult:
    """What a run left."""

    folder: Path
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]
    summary: dict[str, Any]
    total_s: float
    """From exec to exit."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Records of learner rank 0, one a batch."""
        return steps_of(self.metrics)


def steps_of(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records of learner rank 0 that belong to a batch; others tell of the time between two."""
    first = (r for r in metrics if r["role"] == "learner" and r["rank"] == 0)
    return [r for r in first if "loss/tokens" in r["metrics"]]


class LaunchedRun:
    """A running `asyncrl launch`."""

    def __init__(
        self, base: Path, name: str, config: str, overrides: Sequence[str], tree: Path = ROOT
    ) -> None:
        self.folder, self.out = base / name, base / f"{name}.out"
        command = [
            sys.executable, "-m", "asyncrl", "launch", "--config", config, f"run.dir={base}",
            f"run.name={name}", "log.console=plain", *overrides,
        ]  # fmt: skip
        self.began = time.monotonic()
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=base,
                env=environment(tree), start_new_session=True,
            )  # fmt: skip
        self.metrics = Tail(self.folder / "metrics.jsonl", self.began)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Records of the batches trained so far."""
        return steps_of(self.metrics.lines)

    def follow(
        self,
        limit_s: float,
        tick: Callable[[], None] = lambda: None,
        enough: Callable[[list[dict[str, Any]]], bool] = lambda steps: False,
    ) -> RunResult:
        """Watch it to its end.

        Args:
            limit_s: longest life, from exec.
            tick: called every POLL_S.
            enough: asked with the steps so far; True ends the run in order, with Ctrl-C.

        Raises:
            BenchError: it failed, or was too slow; its last lines are in the message.
        """
        try:
            self._watch(limit_s, tick, enough)
        finally:
            if self.process.poll() is None:  # its guard ends whatever it started
                self.process.kill()
                self.process.wait()
        total_s = time.monotonic() - self.began
        self.metrics.read()
        return self._result(total_s)

    def _watch(
        self, limit_s: float, tick: Callable[[], None],
        enough: Callable[[list[dict[str, Any]]], bool],
    ) -> None:  # fmt: skip
        deadline, asked = self.began + limit_s, False
        while self.process.poll() is None:
            self.metrics.read()
            tick()
            now, steps = time.monotonic(), self.steps
            if not steps and now - self.began > START_LIMIT_S:
                raise BenchError(f"no training step in {START_LIMIT_S:.0f} s: {self._last_words()}")
            if not asked and enough(steps):
                asked, deadline = True, min(deadline, now) + END_LIMIT_S
                self.process.send_signal(signal.SIGINT)
            if now > deadline:
                raise BenchError(f"still running after {limit_s:.0f} s: {self._last_words()}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(POLL_S)

    def _result(self, total_s: float) -> RunResult:
        if self.process.returncode:
            raise BenchError(f"exit code {self.process.returncode}: {self._last_words()}")
        events = Tail(self.folder / "events.jsonl", self.began)
        events.read()
        summary = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        if not summary["conserved"]:
            raise BenchError(f"the ledger did not close: {summary['ledger']}")
        if not self.steps:
            raise BenchError(f"no training step: {self._last_words()}")
        return RunResult(self.folder, self.metrics.lines, events.lines, summary, total_s)

    def _last_words(self) -> str:
        lines = self.out.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return " | ".join(lines[-3:]) or "it said nothing"


def launch(
    base: Path, name: str, config: str, overrides: Sequence[str], limit_s: float,
    tree: Path = ROOT,
) -> RunResult:  # fmt: skip
    """Launch and watch to the end."""
    return LaunchedRun(base, name, config, overrides, tree).follow(limit_s)
