"""Which run goes on, from which checkpoint, as which incarnation; who may have its folder."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from asyncrl.checkpoints import list_checkpoints
from asyncrl.cli.launch import with_resumed
from asyncrl.config.load import load
from asyncrl.errors import CheckpointError, ConfigError, UserError
from asyncrl.idlog import IdLog
from asyncrl.launch.processes.reaper import MARK, Guard
from asyncrl.launch.resume.lineage import last_line
from asyncrl.launch.resume.weights import weights_of
from asyncrl.monitor.board import Board
from asyncrl.sinks import JsonlSink
from asyncrl.types import SampleId, Version
from tests.helpers.former import RUN_ID, Former


def test_the_newest_checkpoint_and_an_incarnation_that_nobody_used(tmp_path: Path) -> None:
    former = Former(tmp_path, 10, 20)
    former.checkpoint(25, 1)  # a learner that was restarted in place
    former.write("events.jsonl", {"run_id": RUN_ID, "incarnation": 2, "wall_s": 80.0})
    resumption = former.resume()
    assert resumption.checkpoint is not None
    assert resumption.checkpoint.meta.step == 25
    assert resumption.lineage.wall_s == 80.0
    point = resumption.point()
    assert (point.step, point.version, point.incarnation) == (25, 25, 3)
    assert former.resume().point().incarnation == 4, "noted before anybody uses it"
    (former.folder / "lineage.json").unlink()
    assert former.resume().lineage.run_id == RUN_ID, "the events know it too"


def test_without_a_checkpoint_it_begins_again(tmp_path: Path) -> None:
    resumption = Former(tmp_path).resume()
    assert resumption.lines() == ["goes on from its initial model (it has no checkpoint yet)"]
    point = resumption.point()
    assert (point.checkpoint, point.step, point.incarnation) == (None, 0, 1)


def test_checkpoints_that_are_gone_are_said(tmp_path: Path) -> None:
    former = Former(tmp_path)
    former.write("events.jsonl", {"run_id": RUN_ID, "event": "checkpoint", "batch": 20})
    assert former.resume().lines() == [
        "goes on from its initial model (its checkpoints are gone, the last one was of batch 20)"
    ]


def test_one_that_went_back_on_purpose_stays_on_its_branch(tmp_path: Path) -> None:
    former = Former(tmp_path, 10, 20)
    resumption = former.resume(f"{former.folder}@10")
    assert resumption.point().step == 10
    again = former.resume()
    assert again.checkpoint is not None
    assert again.checkpoint.meta.step == 10, "nothing was reached since"
    former.checkpoint(15, 1)
    again = former.resume()
    assert again.checkpoint is not None
    assert again.checkpoint.meta.step == 15
    by_path = former.resume(str(former.folder / "checkpoints" / "step-000020"))
    assert by_path.checkpoint is not None
    assert by_path.checkpoint.meta.step == 20
    assert len(list_checkpoints(former.folder)) == 3


def test_best_and_what_is_not_there(tmp_path: Path) -> None:
    former = Former(tmp_path)
    former.checkpoint(10, 0, score=0.9)
    former.checkpoint(20, 0, score=0.5)
    best = former.resume(f"{former.folder}@best").checkpoint
    assert best is not None
    assert best.meta.step == 10
    with pytest.raises(CheckpointError, match="no checkpoint 15, it has those of steps 10, 20"):
        former.resume(f"{former.folder}@15")
    with pytest.raises(UserError, match="no run s: neither a run's folder nor a name in"):
        former.resume("s", f"run.dir={tmp_path}")
    assert former.resume("r", f"run.dir={tmp_path}", "run.name=r").folder.name == "r"
    assert former.resume("latest", f"run.dir={tmp_path}").folder.name == "r"
    with pytest.raises(ConfigError, match="run.name=other: the run that goes on is r"):
        former.resume("r", f"run.dir={tmp_path}", "run.name=other")


def test_a_complete_run_says_how_it_could_go_on(tmp_path: Path) -> None:
    former = Former(tmp_path, 30)
    (former.folder / "summary.json").write_text('{"ended": "finished", "steps": 30}')
    with pytest.raises(UserError) as e:
        former.resume()
    assert str(e.value) == (
        "r is complete: it finished after 30 of run.steps=30 batches: raise that to go on, e.g. "
        "run.steps=60"
    )
    resumption = former.resume("", "run.steps=40")
    assert [str(c) for c in resumption.changes] == ["run.steps: 30 -> 40"]
    assert resumption.lines()[1] == "changed: run.steps: 30 -> 40"


def test_a_run_without_checkpoints_cannot_go_on(tmp_path: Path) -> None:
    former = Former(tmp_path, **{"checkpoint.every": "null"})
    with pytest.raises(UserError, match=r"makes no checkpoints \(checkpoint.every=null\), so it c"):
        former.resume()


def test_two_launchers_cannot_have_one_run(tmp_path: Path) -> None:
    former = Former(tmp_path, 10)
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from asyncrl.launch.resume.lineage import Lineage\n"
        "lineage = Lineage.take_up(Path(sys.argv[1]))\n"
        "print('mine', flush=True)\n"
        "sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(former.folder)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "mine\n"
        with pytest.raises(UserError, match=f"r is alive: its launcher is process {other.pid};"):
            former.resume()
    finally:
        other.kill()
        other.communicate()
    assert former.resume().checkpoint is not None, "the lock went with its process"


def test_what_a_killed_launch_left_is_ended_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = Former(tmp_path, 10)
    monkeypatch.setenv(MARK, RUN_ID)
    sleeper = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
    left = subprocess.Popen(sleeper, stdout=subprocess.PIPE, text=True)
    monkeypatch.delenv(MARK)
    assert left.stdout is not None
    left.stdout.readline()
    reaper = threading.Thread(target=left.wait)  # a zombie would be waited for
    reaper.start()
    guard = Guard(RUN_ID, str(tmp_path / "asyncrl-scratch"))
    assert guard._process.stdin is not None
    guard._process.stdin.close()  # as when its launcher is killed
    try:
        former.resume()
        assert guard._process.poll() is not None, "it would end what the next launch starts"
        assert left.poll() is not None
    finally:
        left.kill()
        reaper.join()
        left.stdout.close()
        guard._process.kill()
        guard._process.wait()


def test_last_line_leaves_a_torn_one_out(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    assert last_line(path) == {}
    path.write_text('{"wall_s": 1}\n{"wall_s": 2}\n{"wall')
    assert last_line(path) == {"wall_s": 2}


def test_weights_of_a_final_model_are_where_they_are(tmp_path: Path) -> None:
    former = Former(tmp_path, 10)
    final = former.folder / "checkpoints" / "final"
    final.mkdir()
    (final / "config.json").write_text("{}")
    origin = weights_of("r", tmp_path, print)
    assert origin == ("r", None, final)
    exported = former.folder / "exports" / "step-000010.0"
    exported.mkdir(parents=True)
    (exported / "config.json").write_text("{}")
    assert weights_of("r@10", tmp_path, print) == ("r", 10, exported)
    assert weights_of("r@latest", tmp_path, print) == ("r", 10, exported)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["launch", "--resume"], ["launch", "--resume", "latest"]),
        (["launch", "--resume", "--dry-run"], ["launch", "--resume", "latest", "--dry-run"]),
        (["launch", "--resume", "a.b=1"], ["launch", "--resume", "latest", "a.b=1"]),
        (["launch", "--resume", "r", "a.b=1"], ["launch", "--resume", "r", "a.b=1"]),
    ],
)
def test_resume_alone_is_the_latest(given: list[str], meant: list[str]) -> None:
    assert with_resumed(given) == meant


def test_files_go_on_without_the_torn_line_of_a_process_that_was_killed(tmp_path: Path) -> None:
    metrics, events, ids = (tmp_path / name for name in ("metrics.jsonl", "events.jsonl", "i.tsv"))
    metrics.write_text('{"a":1}\n{"a":')
    events.write_text("x" * 200_000)  # no whole line at all
    ids.write_text("trained\tp\t0\t1\t2\t7\ntrai")
    sink = JsonlSink(str(metrics), str(events))
    line = {"run_id": "r", "role": "learner", "rank": 0, "metrics": {"m": 2.0}, "hist": {}}
    sink.write(line | {"event": {"event": "resumed"}})
    sink.close()
    log = IdLog(str(ids))
    log.add("trained", SampleId("p", 0, 1, 3), 7)
    log.close()
    assert metrics.read_text().splitlines()[0] == '{"a":1}'
    assert json.loads(metrics.read_text().splitlines()[1])["metrics"] == {"m": 2.0}
    assert [json.loads(x)["event"] for x in events.read_text().splitlines()] == ["resumed"]
    assert ids.read_text() == "trained\tp\t0\t1\t2\t7\ntrained\tp\t0\t1\t3\t7\n"


def batch(step: int, reward: float, incarnation: int = 0) -> dict[str, Any]:
    return {
        "role": "learner", "rank": 0, "step": step, "version": step, "incarnation": incarnation,
        "metrics": {"loss/tokens": 1.0, "reward/mean": reward}, "hist": {}, "event": None,
        "waits": None,
    }  # fmt: skip


def test_the_board_knows_the_batches_before_and_forgets_those_that_come_again() -> None:
    board = Board(load("tiny").config)
    past = [batch(1, 0.1), batch(2, 0.2), batch(3, 0.3), batch(2, 0.25, 1), batch(3, 0.35, 1)]
    board.remember(past, 2, Version(2, 2))
    assert board.rewards == [0.1, 0.25]
    assert board.position() == (2, Version(2, 2))
    for step in (3, 4, 5):
        board.write(batch(step, step / 10, 2))
    assert (board.step, board.rewards[-1]) == (5, 0.5)
    board.went_back(3, Version(3, 3))
    assert (board.position(), board.rewards) == ((3, Version(3, 3)), [0.1, 0.25, 0.3])
    board.write(batch(6, 0.9, 2))  # of the learner that is no more
    board.write(batch(4, 0.4, 3))
    assert (board.step, board.rewards) == (4, [0.1, 0.25, 0.3, 0.4])
