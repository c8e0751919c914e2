"""A run that stands still says why; one that only takes long does not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from asyncrl import wire
from asyncrl.config.schema import Config
from asyncrl.hub import Hub
from asyncrl.monitor.board import Board
from asyncrl.monitor.fleet_view import RoleView
from asyncrl.monitor.status_file import snapshot
from asyncrl.monitor.watchdog import Watchdog
from tests.helpers.eventually import eventually

LIMIT_S = 60.0
WAIT = {"what": "batch 3", "on": "buffer-0: 2 samples held by actor-1", "age_s": 0.0,
        "deadline_s": None}  # fmt: skip


class Watched:
    """A board of a run that trains since 0, and a clock that the test moves."""

    def __init__(self):
        self.now, self.board = 0.0, Board(Config(), started=0.0)
        self.board.phase, self.board.training_began = "training", 0.0
        self.dog = Watchdog(self.board, LIMIT_S, clock=lambda: self.now)
        self.learner_waits = (WAIT,)
        self.at(0.0)

    def at(self, seconds, silent=()):
        """Look then; roles say where they are, but for those that are `silent`."""
        self.now = seconds
        for name, waits in (("learner-0", self.learner_waits), ("actor-0", ()), ("buffer-0", ())):
            if name not in silent:
                self.board.fleet.roles[name] = RoleView(
                    name, state="alive", heard=seconds, waits=waits
                )  # fmt: skip
        return self.dog.look()


def test_whom_a_run_without_progress_waits_for_ever_more_rarely():
    run, told = Watched(), {}
    for second in range(1, 301):
        if (event := run.at(float(second))) is not None:
            told[second] = event
    assert list(told) == [61, 122, 244]
    what, fields = told[61]
    assert (what, fields["for_s"], fields["silent"]) == ("stalled", 61.0, [])
    run.board.step, run.board.last_step_at = 1, 301.0
    assert run.at(301.0) == ("resumed_progress", {"after_s": 301.0})
    assert run.board.stalled is None
    assert run.at(302.0) is None
    assert run.at(362.0)[0] == "stalled"


def test_tokens_and_a_learner_that_computes_are_progress_for_a_while():
    run = Watched()
    for second in range(1, 600):  # long responses: tokens, no samples
        run.board._tokens += 1
        assert run.at(float(second)) is None, second
    assert run.at(601.0)[0] == "stalled", "for ten times the limit"
    run = Watched()
    run.learner_waits = ()
    for second in range(1, 600):  # a long step
        run.board.learner["time/train_s"] = float(second)
        assert run.at(float(second)) is None, second
    run.learner_waits = (WAIT,)  # it has computed just now, and waits
    assert run.at(600.5)[0] == "stalled"


def test_a_silent_role_is_told_of_whatever_the_others_do():
    run = Watched()
    for second in range(1, 62):
        run.board.step, run.board.last_step_at = second, float(second)
        event = run.at(float(second), silent=["actor-0"])
        assert (event is not None) == (second == 61), second
    assert event[1]["silent"] == ["actor-0"]
    assert event[1]["why"].startswith("actor-0 has said nothing for 61 s")
    run.board.last_step_at = 62.0
    assert run.at(62.0) == ("resumed_progress", {"after_s": 62.0})


@pytest.mark.parametrize(("phase", "began"), [("training", None), ("last evaluation", 0.0)])
def test_start_and_end_have_deadlines_of_their_own(phase, began):
    run = Watched()
    run.board.phase, run.board.training_began = phase, began
    assert run.at(1000.0) is None


ROLE = """
import sys, time
from asyncrl.hub import HubClient
from asyncrl.pulse import Pulse
from asyncrl.types import Version
from asyncrl.waits import Waits
waits = Waits("learner-0")
with waits.on("batch 12", "buffer-0: 2 samples held by actor-3 (lease 8, 41 s)", 0.3):
    client = HubClient(sys.argv[1], "learner")
    pulse = Pulse(client, waits=waits, position=lambda: (0, Version(0, 0)), every_s=0.05)
    sys.stdin.read()
"""


def test_a_role_that_waits_and_one_that_is_stopped_are_told_apart():
    board = Board(Config(), started=time.monotonic())
    hub = Hub([], run_id="r", listeners=[board.write])
    role = subprocess.Popen([sys.executable, "-c", ROLE, hub.endpoint], stdin=subprocess.PIPE)
    dog = Watchdog(board, limit_s=0.5)

    def told(what, condition=lambda fields: True):
        found = []

        def look():
            event = dog.look()
            if event is not None and event[0] == what and condition(event[1]):
                found.append(event[1])
            return found

        eventually(look, what)
        return found[0]

    try:
        eventually(lambda: "learner-0" in board.fleet.roles and board.deadlines)
        board.fleet.update("learner-0", state="alive")
        board.phase, board.training_began = "training", time.monotonic()
        fields = told("stalled")
        assert "for batch 12 on buffer-0: 2 samples held by actor-3" in fields["why"]
        assert fields["silent"] == []
        role.send_signal(signal.SIGSTOP)
        fields = told("stalled", lambda fields: fields["silent"] == ["learner-0"])
        assert "learner-0 has said nothing for" in fields["why"]
        shown = snapshot(board)
        assert shown["stalled"]["why"].startswith("learner-0 has said nothing")
        assert (shown["deadlines"][0]["role"], shown["deadlines"][0]["what"]) == (
            "learner-0", "batch 12",
        )  # fmt: skip
        role.send_signal(signal.SIGCONT)
        hub.write(wire.Record(
            role="learner", rank=0, step=1, version=0, incarnation=0, metrics={"loss/tokens": 1.0},
        ))  # fmt: skip
        told("resumed_progress")
    finally:
        role.kill()
        role.communicate()
        hub.close()
