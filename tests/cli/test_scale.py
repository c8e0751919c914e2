"""`asyncrl scale` as a user runs it; the launcher is a socket and a status.json."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncrl import wire
from asyncrl.__main__ import main
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.control import Control
from asyncrl.monitor.board import Board
from asyncrl.monitor.status_file import StatusFile
from asyncrl.security import Keys, load_keys, write_keys
from tests.cli.test_cli import HEAVY, assert_runs


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


Edit = Callable[..., None]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "tiny-1"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("")
    board = Board(Config())
    StatusFile(str(folder / "status.json"), board, run_id="tiny-1-x", run="tiny-1").close()
    edit(folder, state="running")
    return folder


def edit(folder: Path, **fields: Any) -> None:
    path = folder / "status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


class Launcher:
    """Answers with what it was asked, or refuses."""

    def __init__(self, keys: Keys | None = None) -> None:
        self.asked: list[wire.Message] = []
        self.refusal = ""
        self._control, self._over = Control("127.0.0.1", keys), threading.Event()
        self.endpoint = self._control.endpoint
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def _loop(self) -> None:
        while not self._over.wait(0.01):
            self._control.serve(self._answer)
        self._control.close()

    def _answer(self, message: wire.Message) -> wire.Message:
        self.asked.append(message)
        if self.refusal:
            raise ConfigError(self.refusal)
        return wire.Scaled(before=2, actors=4, starting=("actor-2", "actor-3"))

    def close(self) -> None:
        self._over.set()
        self._thread.join(30)


@pytest.fixture
def launcher() -> Iterator[Callable[..., Launcher]]:
    made: list[Launcher] = []

    def start(keys: Keys | None = None) -> Launcher:
        made.append(Launcher(keys))
        return made[-1]

    yield start
    for one in made:
        one.close()


Start = Callable[..., Launcher]


def control(one: Launcher, **fields: Any) -> dict[str, Any]:
    return {"endpoint": one.endpoint, "curve": False, "keys": None} | fields


@pytest.mark.parametrize("where", [["tiny-1"], [], ["runs/tiny-1"], ["tiny-1", "--dir", "runs"]])
def test_what_will_happen_is_told(
    run: Path, launcher: Start, where: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    one = launcher()
    edit(run, control=control(one))
    assert main(["scale", *where, "--actors", "4"]) == 0
    assert capfd.readouterr().out == (
        "actors 2 -> 4: actor-2, actor-3 start, and take work once they run the current version\n"
    )
    assert one.asked == [wire.Scale(req=1, run_id="tiny-1-x", actors=4)]


def refused(capfd: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line on stderr of a command that ends with 2."""
    assert main(["scale", *args]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    return err


@pytest.mark.parametrize("number", ["0", "-3"])
def test_a_run_needs_an_actor(run: Path, number: str, capfd: pytest.CaptureFixture[str]) -> None:
    expected = f"error: --actors={number}: a run needs at least one: ask for 1 or more\n"
    assert refused(capfd, "tiny-1", "--actors", number) == expected


def test_no_such_run(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert refused(capfd, "tiny-2", "--actors", "2").startswith("error: no run tiny-2: ")


def test_a_run_that_is_over(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    edit(run, state="ended")
    expected = "error: tiny-1 cannot be scaled: ended, without a summary; "
    assert refused(capfd, "--actors", "2").startswith(expected)
    (run / "summary.json").write_text(json.dumps({"ended": "finished", "reason": ""}))
    expected = "error: tiny-1 cannot be scaled: ended: finished\n"
    assert refused(capfd, "--actors", "2") == expected


def test_a_launcher_that_died(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    edit(run, process_ticks=1)
    expected = f"error: tiny-1 cannot be scaled: launcher (pid {os.getpid()}) is not alive any more"
    assert refused(capfd, "--actors", "2").startswith(expected)


def test_a_run_that_is_still_starting(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    expected = "error: tiny-1 cannot be scaled yet: it is still starting"
    assert refused(capfd, "--actors", "2").startswith(expected)


def test_a_run_on_another_machine(
    run: Path, launcher: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    edit(run, control=control(launcher()), host=f"not-{socket.gethostname()}")
    expected = f"error: tiny-1 runs on not-{socket.gethostname()} and listens there alone"
    assert refused(capfd, "--actors", "2").startswith(expected)


def test_what_the_launcher_refuses(
    run: Path, launcher: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    one = launcher()
    one.refusal = "cluster: 9 actors + 1 learners need 10 GPUs, this machine has 8"
    edit(run, control=control(one))
    assert refused(capfd, "--actors", "9") == f"error: {one.refusal}\n"


def test_with_curve_the_keys_of_the_run_are_used_or_missed(
    run: Path, launcher: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    write_keys(folder)
    one = launcher(load_keys(folder, client_only=False))
    edit(run, control=control(one, curve=True))
    expected = "error: tiny-1 cannot be scaled: its keys were made for it and lie on no disk"
    assert refused(capfd, "--actors", "4").startswith(expected)
    assert main(["scale", "--actors", "4", "--keys", str(folder)]) == 0
    edit(run, control=control(one, curve=True, keys=str(folder)))
    assert main(["scale", "--actors", "4"]) == 0
    assert len(one.asked) == 2


def test_it_loads_nothing_heavy(run: Path) -> None:
    code = (
        "import sys, asyncrl.__main__ as m\n"
        "assert m.main(['scale', '--actors', '2']) == 2\n"
        "import asyncrl.launch.control, asyncrl.launch.scaling\n"
        f"print([n for n in {HEAVY!r} if n in sys.modules])\n"
    )
    assert assert_runs(code, Path.cwd()) == "[]\n"
