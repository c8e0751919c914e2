"""Starting `asyncrl launch` as a user does, and looking at what it left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from asyncrl.launch.processes.reaper import MARK, processes_of, sweep

START_S = 240
"""Longest time for a run to begin training on a busy machine."""


class LaunchedRun:
    """One `asyncrl launch` process and its folder."""

    def __init__(self, base: Path, *arguments: str, config: str = "tiny", name: str = "r") -> None:
        self.base, self.name = base, name
        self.folder = base / name
        self.out = base / f"{name}.out"
        self._launch(
            "--config", config, f"run.dir={base}", f"run.name={name}", "log.console=plain",
            *arguments,
        )  # fmt: skip

    def resume(self, *arguments: str) -> None:
        """Go on with it in another launcher; `output` is that one's from here on."""
        self.out = self.base / f"{self.name}.resumed.out"
        self._launch("--resume", self.name, f"run.dir={self.base}", *arguments)

    def _launch(self, *arguments: str) -> None:
        env = {k: v for k, v in os.environ.items() if k != MARK}
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "asyncrl", "launch", *arguments],
                stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True,
            )  # fmt: skip

    @property
    def output(self) -> str:
        return self.out.read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        return read_lines(self.folder / "events.jsonl")

    def metrics(self, role: str) -> list[dict[str, Any]]:
        return [r for r in read_lines(self.folder / "metrics.jsonl") if r["role"] == role]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def run_id(self) -> str:
        return self.events()[0]["run_id"]

    def wait_for(self, condition, what: str, timeout_s: float = START_S) -> None:
        """Poll until `condition()`; fails with the output when the run ends first or is late."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {what} in {timeout_s} s:\n{self.output}"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(
            lambda: any(r["step"] >= step for r in self.metrics("learner")), f"step {step}"
        )

    def wait(self, timeout_s: float = START_S) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output}") from None

    def pids_of(self, role: str) -> list[int]:
        """Pids of the run's processes whose command line or Ray name says `role`."""
        found = []
        for process in processes_of(self.run_id()):
            with contextlib.suppress(Exception):
                if role in " ".join(process.cmdline()) or role in process.name():
                    found.append(process.pid)
        return found

    def nothing_left(self) -> None:
        """Assert that no process of the run is alive, and that its folder for sockets is gone."""
        left = processes_of(self.run_id())
        assert left == [], left
        scratch = json.loads((self.folder / "lineage.json").read_text())["scratch"]
        assert not os.path.exists(scratch), os.listdir(scratch)

    def close(self) -> None:
        """End whatever is left; for the end of a test that may have failed."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(Exception):
            sweep(self.run_id())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Complete lines of a JSONL file that may still be written; none if it is not there."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


def read_ids(path: Path) -> list[tuple[str, tuple[str, int, int, int], str]]:
    """(what, sample id, detail) of an ids file."""
    rows = [line.split("\t") for line in path.read_text().splitlines()]
    return [(r[0], (r[1], int(r[2]), int(r[3]), int(r[4])), r[5]) for r in rows]
