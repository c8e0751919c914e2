"""What a run says at its end when its own last file cannot be written."""

from __future__ import annotations

import io
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.load import load
from asyncrl.launch.desk import Desk
from asyncrl.launch.folder import RunFolder
from asyncrl.launch.placement import place
from asyncrl.launch.run import Run

CONFIG = load("tiny", ["log.console=plain", "trace.enabled=false"]).config


class Stopped:
    """A run that is stopped while it starts."""

    def __init__(self, base: Path) -> None:
        self.folder = RunFolder(CONFIG, "tiny", base / "r")
        self.folder.create("")
        self.console = io.StringIO()
        self.desk = Desk(CONFIG, self.folder, "r-1", self.console, time.monotonic())

    def go(self, count: int = 1) -> int:
        run: Any = object.__new__(Run)
        run.desk, run.config, run.folder = self.desk, CONFIG, self.folder
        run.placement, run.ended, run.reason = place(CONFIG), "failed", ""
        run.interrupt = SimpleNamespace(count=count, mute=lambda: None)
        run.crew = SimpleNamespace(client=None, start=self._interrupted)
        code: int = run.go()
        return code

    def _interrupted(self) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize(("count", "code"), [(1, 2), (2, 130)])
def test_a_summary_that_cannot_be_written_is_said_and_is_no_success(
    tmp_path: Path, count: int, code: int
) -> None:
    run = Stopped(tmp_path)
    Path(f"{run.folder.summary}.tmp").symlink_to("/dev/full")
    assert run.go(count) == code
    *before, last = run.console.getvalue().splitlines()
    assert last.startswith(f"{run.folder.summary} cannot be written (no space left on device, ")
    assert last.endswith(" GiB are free): make room")
    command = f"asyncrl launch --resume {run.folder.path} goes on with it"
    assert command in before, "its checkpoints are not harmed"
    assert not list(Path(run.folder.path).glob("summary.json*"))


def test_a_summary_that_is_written_is_one(tmp_path: Path) -> None:
    run = Stopped(tmp_path)
    assert run.go() == 0
    assert Path(run.folder.summary).exists()
    assert "cannot be written" not in run.console.getvalue()
