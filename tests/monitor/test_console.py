"""What the console and the summary say, from records as the roles send them."""

import io
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

from asyncrl.config.schema import ClusterConfig, Config, EvalConfig, RunConfig
from asyncrl.monitor import board as board_module
from asyncrl.monitor import console as console_module
from asyncrl.monitor.board import Board
from asyncrl.monitor.console import ConsoleView, sparkline
from asyncrl.monitor.summary import evaluation_line, last_lines, ledger_line, summary_of
from asyncrl.wire import Stats

COUNTS = {"dispatched": 10, "trained": 6, "dropped_stale": 0, "filtered": 1, "failed": 0,
          "requeued": 1, "duplicate": 0, "held": 2, "leased": 2}  # fmt: skip


def record(role, rank=0, step=0, version=0, metrics=None, event=None, waits=None):
    return {"role": role, "rank": rank, "step": step, "version": version, "incarnation": 0,
            "metrics": metrics or {}, "hist": {}, "event": event, "waits": waits}  # fmt: skip


def panel(board, width=80):
    """The panel's lines, in a terminal of that width."""
    out = io.StringIO()
    view = ConsoleView(board, title="asyncrl · r", mode="off", file=out)
    view.console.width = width
    view.console.print(view._panel())
    lines = out.getvalue().splitlines()
    assert all(cell_len(line) == width for line in lines), lines
    return lines


@pytest.fixture
def board(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(board_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    board = Board(Config(run=RunConfig(steps=4), eval=EvalConfig(samples=8)))
    board.training_began = board.started
    for rank, total in ((0, 1.0), (1, 3.0)):
        event = {"event": "eval", "prompts": 4, "total": total}
        board.write(record("actor", rank, event=event))
    for k in (1, 2):
        clock.now += 0.5
        board.write(record("actor", 0, k - 1, k - 1, {
            "throughput/gen_tok_s": 7.0, "actor/generated_tokens": 50.0 * k,
            "idle/actors_frac": 0.25,
            "time/generate_s": 3.0 * k, "time/idle_s": 1.0 * k}))  # fmt: skip
        board.write(record("learner", 0, k, k - 1, {
            "reward/mean": 0.25 * k, "staleness/head/mean": 0.5, "staleness/head/max": 1.0,
            "throughput/train_tok_s": 900.0, "time/train_s": 1.0 * k, "time/get_wait_s": 3.0 * k,
        }))  # fmt: skip
        board.write(
            record("learner", 0, k, k, event={"event": "publication", "publication": f"0:{k}"})
        )
    board.stats = Stats(counts=COUNTS, gauges={"queue/depth": 3, "queue/capacity": 24},
                        conserved=True, state="running",
                        waiting_for="2 samples of batch 3, held by actor-0")  # fmt: skip
    board.phase = "training"
    return board


def test_panel_shows_what_the_records_say(board):
    out = io.StringIO()
    view = ConsoleView(board, title="asyncrl · r", mode="off", file=out)
    view.console.width = 100
    view.console.print(view._panel())
    text = out.getvalue()
    for expected in (
        "2/4   version 2", "0.500", "mean 0.50   max 1   limit 2", "100 tok/s   actors 1/1 alive",
        "waiting 25 %", "900 tok/s with prompts", "2 of 24 samples alive   3 waiting   2 leased",
        "2 samples of batch 3, held by actor-0", "0.500 on 8 held out",
    ):  # fmt: skip
        assert expected in text


def test_plain_mode_says_each_step_once(board):
    out = io.StringIO()
    view = ConsoleView(board, title="t", mode="plain", file=out)
    view.refresh()
    view.refresh()
    assert out.getvalue().count("step 2/4") == 1


def test_summary_and_ledger_line(board):
    summary = summary_of(board, board.stats, "finished", "r1", "")
    assert summary["eval"] == {"0": {"score": 0.5, "prompts": 8, "asked": 8}}
    assert summary["reward"] == {"first": 0.25, "final": 0.5}
    assert summary["busy"] == {"learner": 0.25, "actors": 0.75}
    assert (summary["steps"], summary["version"], summary["ended"]) == (2, 2, "finished")
    assert ledger_line(board.stats) == (
        "ledger: 10 dispatched = 6 trained + 0 dropped_stale + 1 filtered + 0 failed"
        " + 1 requeued + 0 duplicate + 2 held"
    )
    broken = Stats(counts=COUNTS, gauges={}, conserved=False, state="done")
    assert ledger_line(broken).startswith("ledger NOT CLOSED: ")


def test_evaluations_are_told_once_when_all_shares_are_in(board):
    assert [v for v, _ in board.finished_evals(at_end=False)] == [0]
    board.evals[0].told = True
    board.write(record("actor", 0, version=2, event={"event": "eval", "prompts": 4, "total": 4.0}))
    assert board.finished_evals(at_end=False) == []
    assert [v for v, _ in board.finished_evals(at_end=True)] == [2]
    lines = [evaluation_line(v, e, 8) for v, e in board.evals.items()]
    assert lines == [
        "eval of version 0: 0.500 on 8 held out",
        "eval of version 2: 1.000 on 4 of 8 held out",  # an actor did not come to the end
    ]


def test_a_run_that_never_trained_has_nulls_and_no_zeros():
    board = Board(Config())
    summary = summary_of(board, None, "failed", "r", "")
    for key in ("ledger", "conserved", "samples_s", "first_step_s", "training_s"):
        assert summary[key] is None
    assert summary["staleness"]["head_max"] is None


def test_users_words_are_not_markup(board):
    waits = "batch 3; last failure: reward: ValueError: bad [/b] in [/tmp/x]"
    board.stats = Stats(
        counts=COUNTS, gauges={}, conserved=True, state="running", waiting_for=waits
    )
    out = io.StringIO()
    view = ConsoleView(board, title="asyncrl · run[bold]", mode="off", file=out)
    view.console.width = 120
    view.console.print(view._panel())
    assert waits in out.getvalue()
    assert "run[bold]" in out.getvalue()


def test_steps_without_a_reward_are_summed_up_too():
    board = Board(Config())
    board.write(record("learner", 0, 1, 0, {"loss/tokens": 5.0}))
    assert list(last_lines(board, None, "finished", ""))[-1] == "finished: 1 steps, version 0"


def test_sparkline_stands_what_floats_can_be():
    assert sparkline([1e308, -1e308]) != ""
    assert sparkline([float("nan"), float("inf")]) == ""


LONG = "buffer-0: 12 samples held by actor-3 (lease 812, 41 s), actor-11 (lease 813, 2 s)"


def test_the_longest_waits_are_shown_whole_in_80_columns(board):
    now = board_module.time.monotonic()
    board.write(record("learner", waits=[
        {"what": "batch 31", "on": LONG, "age_s": 41.0, "deadline_s": None}]))  # fmt: skip
    for rank, age in ((0, 3.0), (1, 30.0), (2, 0.5), (3, 8.0)):
        board.write(record("actor", rank, waits=[
            {"what": "leases", "on": "buffer-0", "age_s": age, "deadline_s": 9.0}]))  # fmt: skip
    console_time(board, now)
    lines = panel(board)
    text = " ".join(line.strip("│").strip() for line in lines)
    words = " ".join(text.split())
    assert f"waits learner-0 41 s for batch 31 on {LONG} waits actor-1 30 s" in words
    assert words.index("actor-1 30 s for leases on buffer-0") < words.index("actor-3 8.0 s for")
    assert "actor-0" not in words, "the two longest of a kind are enough"
    assert "2 samples of batch 3" not in words, "the learner says it itself"


def console_time(board, now):
    """Stop the clock: what was heard just now was heard now."""
    for name, view in board.fleet.roles.items():
        board.fleet.roles[name] = replace(view, heard=now)
    console_module.time.monotonic = lambda: now


@pytest.fixture(autouse=True)
def own_clock(monkeypatch):
    clock = SimpleNamespace(monotonic=time.monotonic)
    monkeypatch.setattr(console_module, "time", clock)
    return clock


STARTED = {"event": "startup", "seconds": 1.0}


def test_progress_of_each_role_while_engines_load():
    board = Board(Config(cluster=ClusterConfig(actors=6, learners=2)))
    board.phase = "starting 6 actor(s) and 2 learner rank(s)"
    for rank in range(6):
        board.fleet.update(f"actor-{rank}", state="starting")
    for rank in range(2):
        board.fleet.update(f"learner-{rank}", state="starting")
    for rank in (0, 1, 2):
        board.write(record("actor", rank, event=STARTED | {"phase": "engine"}))
    now = time.monotonic() + 3
    console_module.time.monotonic = lambda: now
    text = "\n".join(panel(board))
    assert "now  starting 6 actor(s) and 2 learner rank(s)" in text
    for expected in ("actor-0..2 engine done 3 s", "actor-3..5 loading the engine 3 s",
                     "learner-0,1 loading the model 3 s", "actors 0/6 alive"):  # fmt: skip
        assert expected in text
    for rank in range(3):
        board.fleet.update(f"actor-{rank}", state="alive")
    text = "\n".join(panel(board))
    assert "actors 3/6 alive" in text
    assert "engine done" not in text


def test_more_phases_than_rows_are_counted():
    board = Board(Config())
    for rank in range(8):
        board.write(record("actor", rank, event=STARTED | {"phase": f"phase {rank}"}))
    text = "\n".join(panel(board))
    assert "phase 4 done" in text
    assert "phase 5 done" not in text
    assert "and 3 more" in text


def test_restarts_are_shown_once_there_are_any(board):
    assert "restarts" not in "\n".join(panel(board))
    board.fleet.update("actor-1", restarts=2)
    assert "restarts 2" in "\n".join(panel(board))


def test_plain_lines_tell_now_and_then_what_loads(own_clock):
    own_clock.now = 100.0
    own_clock.monotonic = lambda: own_clock.now
    board = Board(Config())
    out = io.StringIO()
    view = ConsoleView(board, title="t", mode="plain", file=out)
    board.fleet.update("actor-0", state="starting")
    board.fleet.roles["actor-0"] = replace(board.fleet.roles["actor-0"], doing_since=98.0)
    for own_clock.now in (101.0, 109.0, 111.0, 112.0, 122.0):
        view.refresh()
    assert out.getvalue() == (
        "  actor-0 loading the engine 13 s\n  actor-0 loading the engine 24 s\n"
    )
    board.training_began = 123.0
    own_clock.now = 150.0
    view.refresh()
    assert out.getvalue().count("\n") == 2
