"""What the console and the summary say, from records as the roles send them."""

import io
import itertools
from types import SimpleNamespace

import pytest

from asyncrl.config.schema import Config, EvalConfig, RunConfig
from asyncrl.launch import board as board_module
from asyncrl.launch.board import Board
from asyncrl.launch.console import ConsoleView, sparkline
from asyncrl.launch.summary import last_lines, ledger_line, summary_of
from asyncrl.wire import Stats

COUNTS = {"dispatched": 10, "trained": 6, "dropped_stale": 0, "filtered": 1, "failed": 0,
          "requeued": 1, "duplicate": 0, "held": 2, "leased": 2}  # fmt: skip


def record(role, rank=0, step=0, version=0, metrics=None, event=None):
    return {"role": role, "rank": rank, "step": step, "version": version, "incarnation": 0,
            "metrics": metrics or {}, "hist": {}, "event": event}  # fmt: skip


@pytest.fixture
def board(monkeypatch):
    now = itertools.count(0.0, 0.5)
    monkeypatch.setattr(board_module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    board = Board(Config(run=RunConfig(steps=4), eval=EvalConfig(samples=8)))
    board.training_began = board.started
    for rank, total in ((0, 1.0), (1, 3.0)):
        event = {"event": "eval", "prompts": 4, "total": total}
        board.write(record("actor", rank, event=event))
    for k in (1, 2):
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
        "2/4   version 2", "0.500", "mean 0.50   max 1   limit 2", "100 tok/s   actors 1/1",
        "waiting 25 %", "900 tok/s", "3 of 24 samples queued   2 leased",
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
    summary = summary_of(board, board.stats, "finished", "r1")
    assert summary["eval"] == {"0": {"score": 0.5, "prompts": 8}}
    assert summary["reward"] == {"first": 0.25, "final": 0.5}
    assert summary["busy"] == {"learner": 0.25, "actors": 0.75}
    assert (summary["steps"], summary["version"], summary["ended"]) == (2, 2, "finished")
    assert ledger_line(board.stats) == (
        "ledger closed: 10 dispatched = 6 trained + 0 dropped_stale + 1 filtered + 0 failed"
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


def test_a_run_that_never_trained_has_nulls_and_no_zeros():
    board = Board(Config())
    summary = summary_of(board, None, "failed", "r")
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
    assert list(last_lines(board, None, "finished")) == ["finished: 1 steps, version 0"]


def test_sparkline_stands_what_floats_can_be():
    assert sparkline([1e308, -1e308]) != ""
    assert sparkline([float("nan"), float("inf")]) == ""
