"""Runs of which every process is killed, over and over, and that are resumed each time."""

import contextlib
import json
import os
import random
import re
import signal
import time
from collections import Counter

import psutil
import pytest

from asyncrl.launch.processes.reaper import is_guard_of, processes_of
from tests.helpers.run_checks import check_law, check_lineage, check_replay, reconcile

pytestmark = [pytest.mark.run, pytest.mark.soak, pytest.mark.timeout(3600)]

KILLS = 20
STEPS = 100_000
"""More than are trained until the last kill, however fast: then it is told to stop."""


def kill_everything(run):
    """SIGKILL: the launcher and its guard first, so that nobody tidies up."""
    run_id = run.run_id()
    guards = [p for p in psutil.process_iter() if is_guard_of(p, run_id)]
    victims = [*guards, *processes_of(run_id)]
    run.process.kill()
    run.process.wait()
    for victim in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)
    psutil.wait_procs(victims, timeout=30)


@pytest.mark.parametrize("durability", ["process", "none"])
def test_killed_at_random_moments_and_resumed_each_time(start, durability):
    """From before the first token to within a checkpoint: whatever is being done then."""
    generator = random.Random(durability)
    run = start(
        f"run.steps={STEPS}", f"buffer.durability={durability}", "checkpoint.every=3",
        "checkpoint.keep=3", "--learners", "2",
    )  # fmt: skip
    reached, hit = [], Counter()
    for kill in range(KILLS):
        run.wait_for(lambda k=kill: trainings(run) > k, "training again")
        await_moment(run, kill, generator)
        hit.update(doing(run))
        kill_everything(run)
        reached.append(max((r["step"] for r in run.metrics("learner")), default=0))
        print(f"kill {kill + 1} after step {reached[-1]}", flush=True)
        run.resume()
    run.wait_for_step(reached[-1] + 5)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 0, run.output
    summary = run.summary()
    assert summary["ended"] == "interrupted"
    check_law(summary)
    if durability == "process":  # else what was dispatched since a checkpoint is forgotten
        reconcile(run, summary["steps"], 32, killed=True)
    check_lineage(run, summary)
    check_replay(run)
    print(f"{len(reached)} kills, after the steps {reached}; what was being done: {dict(hit)}")
    run.nothing_left()


def await_moment(run, kill, generator):
    """Any moment; every fifth time while a checkpoint is written, every fifth one right after a
    step, when its weights leave: both are short."""
    if kill % 5 == 3:
        run.wait_for(lambda: writing(run), "a checkpoint")
    elif kill % 5 == 4:
        seen = len(run.metrics("learner"))
        run.wait_for(lambda: len(run.metrics("learner")) > seen, "a step")
    else:
        time.sleep(generator.uniform(0.0, 12.0))  # the moment is the point


def writing(run):
    """Whether a checkpoint is half written."""
    return any((run.folder / "checkpoints").glob(".step-*.tmp"))


def doing(run):
    """What each role last said that it waits for, and whether a checkpoint is being written."""
    roles = json.loads((run.folder / "status.json").read_text())["roles"]
    for role in roles:
        if role["name"] != "launcher":
            waits = [re.sub(r"\d+", "n", wait["what"]) for wait in role["waits"]]
            yield f"{role['name']}: {waits[0] if waits else 'at work'}"
    if writing(run):
        yield "checkpoint"


def trainings(run):
    """How often the run has begun to train, over all launches."""
    return sum(e["event"] == "training" for e in run.events())
