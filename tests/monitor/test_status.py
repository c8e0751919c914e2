"""What the board knows of roles and waits, status.json, and its words."""

import itertools
import json
import os
import threading
import time

import pytest

from asyncrl.config.schema import Config, RunConfig
from asyncrl.errors import UserError
from asyncrl.monitor.board import Board
from asyncrl.monitor.fleet_view import FleetView
from asyncrl.monitor.reading import panels
from asyncrl.monitor.reading.history import RunHistory
from asyncrl.monitor.status_file import StatusFile, snapshot
from asyncrl.monitor.status_reader import describe, find, read
from asyncrl.wire import Stats

COUNTS = {"dispatched": 10, "trained": 6, "dropped_stale": 0, "filtered": 1, "failed": 0,
          "requeued": 1, "duplicate": 0, "held": 2, "leased": 2}  # fmt: skip


def record(role, rank=0, version=0, event=None, waits=None, metrics=None, step=0, pid=None):
    return {"role": role, "rank": rank, "step": step, "version": version, "incarnation": 0,
            "metrics": metrics or {}, "hist": {}, "event": event, "waits": waits,
            "pid": pid}  # fmt: skip


def wait(what, on, age_s, deadline_s=None):
    return {"what": what, "on": on, "age_s": age_s, "deadline_s": deadline_s}


# --- roles ------------------------------------------------------------------------------------


def test_waits_grow_on_while_a_role_is_silent():
    fleet = FleetView()
    fleet.heard(record("learner", waits=[wait("batch 3", "buffer-0", 2.0, 10.0),
                                         wait("x", "", 1.0)], pid=9), now=100.0)  # fmt: skip
    # One that speaks of neither waits nor pid.
    fleet.heard(record("learner", event={"event": "publication"}), now=100.0)
    view = fleet.roles["learner-0"]
    assert view.pid == 9
    assert [(w.what, w.age_s, w.deadline_s) for w in view.open_waits(130.0)] == [
        ("batch 3", 32.0, -20.0), ("x", 31.0, None),
    ]  # fmt: skip
    fleet.heard(record("learner", waits=[]), now=131.0)
    assert fleet.roles["learner-0"].open_waits(131.0) == []


def test_a_role_starts_lives_dies_and_comes_back():
    fleet = FleetView()
    fleet.update("actor-0", state="starting")
    assert [(p, n) for p, n, _ in fleet.loading(0.0)] == [("loading the engine", ["actor-0"])]
    assert fleet.alive() == 0
    event = {"event": "startup", "phase": "engine"}
    fleet.heard(record("actor", event=event, pid=11), now=9.0)
    assert fleet.loading(10.0) == [("engine done", ["actor-0"], 1.0)]
    pulse = record("actor", version=4, waits=[wait("leases", "buffer-0", 3.0)], pid=11)
    fleet.heard(pulse, now=11.0)
    view = fleet.roles["actor-0"]
    assert (view.state, view.version, view.pid, fleet.loading(11.0)) == ("alive", 4, 11, [])
    fleet.update("actor-0", state="restarting", restarts=1)
    died = fleet.roles["actor-0"]
    assert (died.open_waits(12.0), died.heard, died.pid, died.restarts) == ([], None, None, 1)
    fleet.heard(pulse, now=12.0)
    assert fleet.roles["actor-0"] == died, "a word of the process that died"
    assert [p for p, _, _ in fleet.loading(0.0)] == ["restarting"]
    fleet.heard(record("actor", event=event, pid=12), now=13.0)
    view = fleet.roles["actor-0"]
    assert (view.state, view.doing, view.pid) == ("restarting", "engine done", 12)
    fleet.update("actor-0", state="alive")
    assert fleet.roles["actor-0"].pid == 12
    assert (fleet.alive(), fleet.restarts(), fleet.loading(14.0)) == (1, 1, [])
    assert fleet.metrics() == {"actor/alive": 1.0, "actor/restarts": 1.0}
    fleet.update("actor-0", state="finished")
    fleet.heard(record("actor", waits=[wait("x", "y", 1.0)]), now=14.0)
    assert fleet.roles["actor-0"].open_waits(14.0) == []


def test_each_kind_of_role_says_what_it_loads():
    fleet = FleetView()
    for name in ("buffer-0", "learner-0", "learner-1", "actor-0"):
        fleet.update(name, state="starting")
    assert {p: n for p, n, _ in fleet.loading(0.0)} == {
        "starting": ["buffer-0"], "loading the model": ["learner-0", "learner-1"],
        "loading the engine": ["actor-0"],
    }  # fmt: skip


def test_roles_come_in_order_and_the_longest_waits_first():
    fleet = FleetView()
    for name, age in (("actor-10", 5.0), ("actor-2", 9.0), ("actor-1", 0.2), ("actor-0", 7.0)):
        rank = int(name.split("-")[1])
        fleet.heard(record("actor", rank, waits=[wait("leases", "buffer-0", age)]), now=0.0)
    fleet.heard(record("learner", 0, waits=[wait("batch 1", "buffer-0", 2.0)]), now=0.0)
    fleet.heard(record("buffer"), now=0.0)
    fleet.heard(record("launcher", event={"event": "launch"}), now=0.0)
    assert [v.name for v in fleet.ordered()] == [
        "launcher", "buffer-0", "learner-0", "actor-0", "actor-1", "actor-2", "actor-10",
    ]  # fmt: skip
    assert [(w.role, w.age_s) for w in fleet.longest_waits(0.0)] == [
        ("learner-0", 2.0), ("actor-2", 9.0), ("actor-0", 7.0),
    ]  # fmt: skip


def test_two_threads_lose_nothing_of_a_role():
    fleet = FleetView()
    done = threading.Event()

    def hear():
        while not done.is_set():
            fleet.heard(record("actor", waits=[]), now=1.0)

    thread = threading.Thread(target=hear)
    thread.start()
    try:
        for k in range(2000):
            fleet.update("actor-0", restarts=k)
            assert fleet.roles["actor-0"].restarts == k
    finally:
        done.set()
        thread.join()


# --- the board with a pulse -----------------------------------------------------------------


def test_a_pulse_is_no_step_and_hides_no_value():
    board = Board(Config(run=RunConfig(steps=4)))
    board.write(record("learner", step=1, metrics={"reward/mean": 0.5, "loss/tokens": 9.0}))
    board.write(record("learner", step=2, metrics={"host/cpu_frac": 1.0}, waits=[]))
    assert (board.step, board.rewards) == (1, [0.5]), "the pulse came before the batch's record"
    assert board.learner["reward/mean"] == 0.5
    board.write(record("learner", step=2, metrics={"reward/mean": 0.75}))
    assert (board.step, board.rewards) == (2, [0.5, 0.75])
    assert board.position() == (2, (0, 0))


def test_totals_go_on_over_a_restart_of_an_actor(monkeypatch):
    clock = itertools.count(0.0, 1.0)
    monkeypatch.setattr("asyncrl.monitor.board.time.monotonic", lambda: next(clock))
    board = Board(Config())
    board.training_began = 0.0

    def actor(tokens, generate, idle, pid=11):
        board.write(record("actor", pid=pid, metrics={
            "actor/generated_tokens": tokens, "time/generate_s": generate, "time/idle_s": idle,
        }))  # fmt: skip

    actor(100.0, 10.0, 90.0)
    board.write(record("learner", step=1, metrics={"loss/tokens": 1.0}))
    actor(150.0, 20.0, 100.0)
    actor(5.0, 0.0, 2.0, pid=12)
    actor(25.0, 3.0, 3.0, pid=12)
    board.write(record("learner", step=2, metrics={"loss/tokens": 1.0}))
    (then, before), (now, after) = board._generated
    assert (before, after) == (100.0, 175.0)
    assert board.gen_tok_s() == 75.0 / (now - then)
    assert board.busy_shares()["actors"] == 13 / 26, "of 20 s of the one, and of 6 s of the other"


def test_steps_faster_than_the_actors_tell_do_not_show_a_standstill(monkeypatch):
    now = 0.0
    monkeypatch.setattr("asyncrl.monitor.board.time.monotonic", lambda: now)
    board = Board(Config())
    for step in range(1, 21):
        now = step / 2
        if step % 2:  # once a second
            board.write(record("actor", metrics={"actor/generated_tokens": 100.0 * now}))
        board.write(record("learner", step=step, metrics={"loss/tokens": 1.0}))
    assert 75.0 < board.gen_tok_s() < 125.0
    assert board._generated[0][0] <= now - 5.0 < board._generated[1][0], "no more than it needs"


# --- status.json ----------------------------------------------------------------------------


@pytest.fixture
def board():
    board = Board(Config(run=RunConfig(steps=30)))
    board.phase = "training"
    board.write(record("learner", step=12, metrics={"reward/mean": 0.5}, version=11))
    board.write(record("learner", version=11, waits=[
        wait("batch 13", "buffer-0: 12 samples held by actor-1 (lease 812, 41 s)", 41.0, 19.0)
    ], pid=20))  # fmt: skip
    board.write(record("actor", 0, version=11, waits=[wait("a push", "buffer-0", 3.0)] * 7))
    board.fleet.update("learner-1", state="starting")
    board.fleet.update("actor-1", state="restarting", restarts=2)
    board.stats = Stats(counts=COUNTS, gauges={"queue/depth": 3.0}, conserved=True,
                        state="running", waiting_for="12 samples of batch 13")  # fmt: skip
    return board


@pytest.fixture
def run(tmp_path, board):
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("")
    status = StatusFile(str(folder / "status.json"), board, run_id="first-1", run="first")
    status.close()
    return folder


def edit(folder, **changes):
    path = folder / "status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_snapshot_has_roles_waits_and_ledger(board):
    s = snapshot(board)
    assert (s["phase"], s["step"], s["steps"], s["reward"]) == ("training", 12, 30, 0.5)
    learner, starting, actor, restarting = s["roles"]
    assert (learner["name"], learner["state"], learner["pid"], learner["version"]) == (
        "learner-0", "alive", 20, 11,
    )  # fmt: skip
    (w,) = learner["waits"]
    assert (w["what"], w["on"]) == (
        "batch 13", "buffer-0: 12 samples held by actor-1 (lease 812, 41 s)",
    )  # fmt: skip
    assert 41.0 <= w["age_s"] < 60.0
    assert w["deadline_s"] <= 19.0
    assert learner["record_age_s"] >= 0
    assert (starting["phase"], starting["pid"]) == ("loading the model", None)
    assert (actor["open_waits"], len(actor["waits"])) == (7, 5)
    assert (restarting["state"], restarting["restarts"], restarting["phase"]) == (
        "restarting", 2, "restarting",
    )  # fmt: skip
    assert (restarting["record_age_s"], restarting["pid"]) == (None, None)
    assert s["ledger"]["counts"] == COUNTS
    json.dumps(s)


@pytest.mark.parametrize(
    ("gauge", "value", "expected"),
    [("needs_version/actor-0", 12.0, "buffer-0: admission, it needs version 12"),
     ("needs_version/actor-1", 12.0, "buffer-0"),
     ("needs_bytes/actor-0", 2.0**30, "buffer-0: bytes, a group takes up to 1 GiB"),
     ("needs_prompts/actor-0", 1.0, "buffer-0: prompts, none is left")],
)  # fmt: skip
def test_why_an_actor_gets_no_leases_is_told(board, gauge, value, expected):
    board.write(record("actor", 0, waits=[wait("leases for 1 sample", "buffer-0", 3.0)]))
    board.stats = Stats(counts=COUNTS, gauges={gauge: value}, conserved=True, state="running")
    actor = next(r for r in snapshot(board)["roles"] if r["name"] == "actor-0")
    assert actor["waits"][0]["on"] == expected


def test_the_file_follows_the_board_until_it_is_closed(tmp_path, board):
    path = tmp_path / "status.json"
    status = StatusFile(str(path), board, run_id="r-1", run="r", every_s=0.01)
    first = json.loads(path.read_text())
    assert (first["run_id"], first["pid"], first["state"]) == ("r-1", os.getpid(), "running")
    board.write(record("learner", step=13, metrics={"loss/tokens": 1.0}))
    deadline = time.monotonic() + 30
    while (now := json.loads(path.read_text()))["step"] != 13:  # whole at every moment
        assert time.monotonic() < deadline
    assert now["updated_at"] > first["updated_at"]
    status.close()
    assert json.loads(path.read_text())["state"] == "ended"
    status.close()
    assert os.listdir(tmp_path) == ["status.json"]


def test_a_file_that_cannot_be_written_is_told_once(tmp_path, board, caplog):
    status = StatusFile(
        str(tmp_path / "gone" / "status.json"), board, run_id="r", run="r", every_s=0.01
    )
    status.close()  # which writes it a second time
    assert len(caplog.records) == 1
    assert "status.json cannot be written" in caplog.text


# --- in words -------------------------------------------------------------------------------


def test_words_for_a_run_that_goes_on(run):
    edit(run, state="running")
    lines = list(describe(run, read(run)))
    assert lines[0] == f"run       first   {run}"
    assert lines[1] == "state     training"
    assert lines[2].startswith("step      12/30   version 0   reward 0.500   0:0")
    assert lines[3] == "actors    1 of 1 alive"
    lines.remove(lines[3])
    assert lines[3].split() == ["role", "state", "pid", "restarts", "version", "heard", "waits"]
    assert lines[4].startswith("learner-0  alive       20   0         11       ")
    assert (
        "41 s for batch 13 on buffer-0: 12 samples held by actor-1 (lease 812, 41 s), gives"
        in (lines[4])
    )
    assert lines[5].split()[:3] == ["learner-1", "starting", "-"]
    assert "loading the model" in lines[5]
    assert lines[6].endswith("s for a push on buffer-0 (and 6 more)")
    assert lines[7].startswith("actor-1    restarting  -    2         -        -")
    assert lines[8].startswith("ledger: 10 dispatched = 6 trained")
    assert len(lines) == 9


def test_words_for_a_run_that_stands_still(run):
    why = "learner-0 waits 64 s for batch 13 on buffer-0"
    passed = {"role": "actor-1", "what": "version 0:4", "on": "learner-0", "waited_s": 60.0}
    edit(
        run, state="running", stalled={"for_s": 64.2, "why": why},
        deadlines=[passed | {"ago_s": 130.0}],
    )  # fmt: skip
    lines = list(describe(run, read(run)))
    assert f"stalled   64 s: {why}" in lines
    assert "deadline  actor-1 gave up after 60 s for version 0:4 on learner-0, 2:10 ago" in lines
    edit(run, stalled=None, deadlines=[])
    assert not [line for line in describe(run, read(run)) if line.startswith(("stall", "dead"))]


def test_words_for_a_launcher_that_is_gone(run):
    edit(run, pid=2**22 + 12345, state="running")
    assert "is not alive any more; last told" in list(describe(run, read(run)))[1]
    assert "while training" in list(describe(run, read(run)))[1]
    edit(run, pid=os.getpid(), process_started=time.time() - 1e6)
    assert list(describe(run, read(run)))[1] == "state     training", "the system's clock was set"
    edit(run, process_ticks=1)
    assert "is not alive any more" in list(describe(run, read(run)))[1], "the pid is another's now"


def test_what_was_so_when_the_launcher_died_is_told_as_that(run, monkeypatch):
    edit(run, pid=2**22 + 12345, state="running", left_s=234.0, updated_at=time.time() - 300)
    told = "\n".join(lines := list(describe(run, read(run))))
    assert " left" not in told
    assert "gives up" not in told
    assert not [line for line in lines if line.startswith("go on")], "there is no checkpoint"
    assert "actors    1 of 1 alive, when last told" in lines
    assert [line.split()[-2:] for line in lines if line.startswith("role")] == [["waited", "then"]]
    for role, since in (("learner-0", "5:0"), ("actor-0", "5:0"), ("actor-1", "-")):
        row = next(line.split() for line in lines if line.startswith(role))
        assert row[1] == "unknown"
        assert row[5].startswith(since)
    (run / "checkpoints" / "step-000010").mkdir(parents=True)
    (run / "checkpoints" / "step-000010" / "meta.json").write_text("{}")
    assert f"go on     asyncrl launch --resume {run}" in list(describe(run, read(run)))
    monkeypatch.chdir(run.parent.parent)
    assert "go on     asyncrl launch --resume first" in list(describe(run, read(run)))

    found = panels.state(run, RunHistory(run), [])
    assert (found["left_s"], found["over"]) == (None, True)
    assert found["go_on"] == "asyncrl launch --resume first"
    assert found["unknown_s"] > 290
    assert [r["state"] for r in found["roles"]] == ["unknown"] * 4
    assert found["roles"][0]["heard_s"] > 290
    edit(run, pid=os.getpid(), updated_at=time.time())
    found = panels.state(run, RunHistory(run), [])
    assert (found["left_s"], found["unknown_s"], found["go_on"]) == (234.0, None, "")
    (run / "summary.json").write_text('{"ended": "interrupted"}')
    found = panels.state(run, RunHistory(run), [])
    assert (found["unknown_s"], found["go_on"]) == (None, "asyncrl launch --resume first")
    assert [r["state"] for r in found["roles"]] == ["ended"] * 4
    (run / "summary.json").write_text('{"ended": "finished"}')
    assert panels.state(run, RunHistory(run), [])["go_on"] == ""


def test_words_for_a_launcher_that_is_silent_or_elsewhere(run):
    edit(run, state="running")
    assert list(describe(run, read(run)))[1] == "state     training"
    edit(run, updated_at=time.time() - 75)
    assert (
        f"nothing heard of the launcher (pid {os.getpid()} on "
        in (list(describe(run, read(run)))[1])
    )
    assert "last told 75 s ago" in list(describe(run, read(run)))[1]
    edit(run, updated_at=time.time(), host="another-machine", pid=2**22 + 12345)
    assert list(describe(run, read(run)))[1] == "state     training"


def test_words_for_a_run_that_ended(run):
    assert "ended, without a summary; last told" in list(describe(run, read(run)))[1]
    (run / "summary.json").write_text('{"ended": "finished"}')
    assert list(describe(run, read(run)))[1] == "state     ended: finished"


def test_words_before_anything_is_known(tmp_path):
    board = Board(Config())
    StatusFile(str(tmp_path / "status.json"), board, run_id="r", run="r").close()
    lines = list(describe(tmp_path, read(tmp_path)))
    assert lines[2].endswith("reward -   0:00 gone")
    assert len(lines) == 4
    edit(tmp_path, state="running")
    lines = list(describe(tmp_path, read(tmp_path)))
    assert "reward -   0:00 gone, - left" in lines[2]
    assert lines[3] == "actors    0 of 1 alive"
    assert len(lines) == 5


def test_a_run_is_found_by_folder_name_or_as_the_latest(run, tmp_path):
    directory = tmp_path / "runs"
    second = directory / "second"
    second.mkdir()
    (second / "config.yaml").write_text("")
    os.utime(second / "config.yaml", (1e9, 1e9))
    (directory / "notes").mkdir()
    assert find(str(run), tmp_path) == run
    assert find("first", directory) == run
    assert find("latest", directory) == run
    os.utime(second / "config.yaml", (4e9, 4e9))
    assert find("latest", directory) == second
    with pytest.raises(UserError, match=r"no run frst: .* \(did you mean first\?\)"):
        find("frst", directory)
    with pytest.raises(UserError, match="no run notes"):
        find("notes", directory)
    with pytest.raises(UserError, match="no run in "):
        find("latest", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "expected"),
    [(None, "has no status.json"), ("{", "JSONDecodeError"), ("[]", "TypeError"),
     ("{}", "KeyError"), ('{"schema": 2}', "schema 2, this asyncrl reads 1")],
)  # fmt: skip
def test_a_file_that_is_no_status_is_refused(run, content, expected):
    (run / "status.json").unlink()
    if content is not None:
        (run / "status.json").write_text(content)
    with pytest.raises(UserError, match=expected):
        read(run)


def test_actors_that_leave_are_told_apart_from_those_that_are_alive(tmp_path):
    board = Board(Config())
    path = tmp_path / "status.json"
    status = StatusFile(str(path), board, run_id="r", run="r")
    assert json.loads(path.read_text())["control"] is None
    for rank, state in enumerate(("alive", "leaving", "left")):
        board.fleet.update(f"actor-{rank}", state="alive")
        board.fleet.heard(record("actor", rank=rank, pid=20 + rank), 1.0)
        board.fleet.update(f"actor-{rank}", state=state)
    board.fleet.actors = 1
    board.control = {"endpoint": "tcp://127.0.0.1:5", "curve": False, "keys": None}
    status.close()
    content = json.loads(path.read_text())
    assert (content["actors"], content["control"]) == (1, board.control)
    assert [(r["state"], r["pid"]) for r in content["roles"]] == [
        ("alive", 20), ("leaving", 21), ("left", None),
    ]  # fmt: skip
    edit(tmp_path, state="running")
    assert "actors    1 of 1 alive, 1 leave" in describe(tmp_path, read(tmp_path))
    assert board.fleet.metrics()["actor/alive"] == 1


def test_who_has_left_counts_in_no_mean_and_its_last_words_wake_nobody(board):
    for rank, share in ((0, 0.5), (1, 0.1)):
        metrics = {"idle/actors_frac": share, "throughput/gen_tok_s": 10.0}
        board.write(record("actor", rank=rank, metrics=metrics))
    assert board.actors_idle() == pytest.approx(0.3)
    board.fleet.update("actor-1", state="left")
    board.write(record("actor", rank=1, metrics={}))
    assert board.fleet.roles["actor-1"].state == "left"
    assert (board.actors_idle(), board.gen_tok_s()) == (0.5, 10.0)
    board.fleet.update("actor-1", state="starting")
    assert board.fleet.roles["actor-1"].doing == "loading the engine"
