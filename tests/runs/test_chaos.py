"""`make chaos`: everything of a run is killed or stopped at random, and it finishes all the same.

CHAOS_S seconds (600); the launcher alone is spared (it is killed in the tests of resuming).
"""

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter

import psutil
import pytest

from asyncrl import checkpoints
from asyncrl.launch.processes.reaper import processes_of
from tests.helpers.run_checks import check_law, check_lineage, check_replay

CHAOS_S = float(os.environ.get("CHAOS_S", "600"))
PAUSE_S = 6.0
"""Mean time between two blows."""
STOP_S = 20.0
"""A process that is stopped goes on after so long at most: some are ended before, as stuck."""
BACK_S = 300.0
"""By when the run trains again."""

pytestmark = [pytest.mark.run, pytest.mark.soak, pytest.mark.timeout(7200)]


class Chaos:
    """Deals blows to a run until the time is over."""

    def __init__(self, run, seed):
        self.run, self.random, self.blows = run, random.Random(seed), Counter()
        self.stopped = []  # (when it goes on, process)

    def step(self):
        return max((r["step"] for r in self.run.metrics("learner")), default=0)

    def victims(self):
        """One process of each kind that is there, as (kind, process)."""
        kinds = {}
        for process in processes_of(self.run.run_id()):
            with contextlib.suppress(psutil.Error):
                name = process.name()
                kind = "-".join(part for part in name.split("-") if not part.isdigit())
                if "asyncrl.actors.rewards.child" in process.cmdline():
                    kind = "reward"
                if kind in ("actor", "actor-core", "buffer", "learner", "relay", "reward"):
                    kinds.setdefault(kind, []).append(process)
        return [(kind, self.random.choice(found)) for kind, found in sorted(kinds.items())]

    def strike(self):
        kind, process = self.random.choice(self.victims())
        number = self.random.choice([signal.SIGKILL, signal.SIGSTOP])
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
            self.blows[f"{kind} {number.name}"] += 1
            if number == signal.SIGSTOP:
                self.stopped.append((time.monotonic() + self.random.random() * STOP_S, process))
        return kind

    def go_on(self, everybody=False):
        for until, process in list(self.stopped):
            if everybody or time.monotonic() > until:
                with contextlib.suppress(psutil.Error):
                    process.resume()
                self.stopped.remove((until, process))

    def pause(self, seconds):
        """Let the run be, for so long or until it ends; whether it goes on."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.run.process.wait(min(left, 0.5))
                return False
            self.go_on()
        return True

    def rage(self, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            before = self.step()
            self.strike()
            if not self.pause(self.random.expovariate(1 / PAUSE_S)):
                return
            if self.random.random() < 0.5:  # else another blow before it has recovered
                self.go_on(everybody=True)
                self.run.wait_for(lambda b=before: self.step() > b, f"step {before + 1}", BACK_S)


@pytest.mark.parametrize("strategy", ["broadcast", "relay"])
def test_a_run_finishes_although_its_parts_are_killed_and_stopped(start, strategy):
    seconds = CHAOS_S / 2
    run = start(
        "--actors", "3", "--learners", "2", "run.steps=1000000", "buffer.durability=process",
        "checkpoint.every=5", "checkpoint.keep=3", "cluster.max_restarts=100",
        "cluster.silent_after_s=6", "rollout.lease_timeout_s=10", "weights.timeout_s=10",
        f"weights.strategy={strategy}", "log.stall_warn_s=20", "eval.samples=0",
        f"stop.wall_s={seconds + 60}",
    )  # fmt: skip
    run.wait_for_step(2)
    chaos = Chaos(run, seed=len(strategy))
    try:
        chaos.rage(seconds)
    finally:
        chaos.go_on(everybody=True)
        print(strategy, dict(chaos.blows), "steps", chaos.step(), flush=True)
    assert run.wait(BACK_S + 120) == 0, run.output
    summary = run.summary()
    assert summary["ended"] == "stopped", run.output
    check_law(summary)
    check_lineage(run, summary)
    run.nothing_left()
    check_replay(run)
    oldest = checkpoints.list_checkpoints(run.folder)[0].meta.step
    check_replay(run, "--from-step", str(oldest))
