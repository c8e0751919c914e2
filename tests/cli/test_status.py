"""`asyncrl status` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from asyncrl.__main__ import main
from asyncrl.config.schema import Config
from asyncrl.monitor.board import Board
from asyncrl.monitor.status_file import StatusFile
from tests.cli.test_cli import HEAVY, ROOT, assert_runs


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "tiny-1"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("")
    board = Board(Config())
    board.phase = "training"
    board.fleet.update("actor-0", state="alive")
    StatusFile(str(folder / "status.json"), board, run_id="tiny-1-x", run="tiny-1").close()
    return folder


def test_text_of_others_cannot_steer_the_terminal(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = run / "status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"phase": "a\x1b[2Jb"}))
    assert main(["status"]) == 0
    assert "while a\\x1b[2Jb" in capfd.readouterr().out


@pytest.mark.parametrize(
    "args", [[], ["tiny-1"], ["latest"], ["runs/tiny-1"], ["tiny-1", "--dir", "runs"]]
)
def test_the_table(run: Path, args: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["status", *args]) == 0
    out = capfd.readouterr().out.splitlines()
    assert out[0].startswith("run       tiny-1")
    assert "while training" in out[1]
    assert out[-1].split() == ["actor-0", "ended", "-", "0", "-", "-", "-"]


def test_json_is_the_file(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == json.loads((run / "status.json").read_text())


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["tiny-2"], "no run tiny-2: neither a run's folder nor a name in runs (did you mean tiny"),
        (["x", "--dir", "nowhere"], "no run x: neither a run's folder nor a name in nowhere"),
        (["--dir", "nowhere"], "no run in nowhere"),
    ],
)
def test_an_unknown_run_is_one_line_and_code_2(
    run: Path, args: list[str], expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", *args]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"error: {expected}")
    assert len(err.splitlines()) == 1


LAUNCHER = """
    import sys
    from asyncrl.config.schema import Config
    from asyncrl.monitor.board import Board
    from asyncrl.monitor.status_file import StatusFile
    StatusFile(sys.argv[1], Board(Config()), run_id="r", run="r")
    print("up", flush=True)
    sys.stdin.read()
"""


def test_a_killed_launcher_is_told_by_a_command_that_loads_nothing_heavy(run: Path) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(LAUNCHER), str(run / "status.json")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert launcher.stdout is not None
    try:
        assert launcher.stdout.readline() == "up\n"
        assert "state     starting\n" in status()
    finally:
        launcher.kill()
        launcher.communicate()
    assert f"launcher (pid {launcher.pid}) is not alive any more; last told " in status()


def status() -> str:
    code = (
        "import sys, asyncrl.__main__ as m\n"
        "assert m.main(['status']) == 0\n"
        f"assert not [n for n in {HEAVY!r} if n in sys.modules]\n"
    )
    return assert_runs(code, Path.cwd())
