"""Actors that join and leave while a run trains: `asyncrl scale`."""

import random
import signal
import subprocess
import sys
from itertools import pairwise

import pytest

from asyncrl.security import write_keys
from tests.helpers.run_checks import batches, check_law, check_recording, reconcile, trained_by
from tests.runs.test_fleet import events_of, named, step_of

LEASE_S, WEIGHTS_S = 30, 60
"""Defaults of rollout.lease_timeout_s and weights.timeout_s: what a step may wait for."""

pytestmark = [pytest.mark.run, pytest.mark.timeout(900)]


def scale(run, actors, *options):
    """Exit code and output of the command."""
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", "scale", run.name, "--dir", str(run.base),
         "--actors", str(actors), *options],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def left(run):
    return {e["actor"] for e in events_of(run, "actor_left")}


def test_actors_join_and_leave_while_it_trains(start, tmp_path):
    keys = tmp_path / "keys"
    write_keys(keys)
    run = start("run.steps=100000", "security.curve=true", f"security.keys={keys}",
                "weights.strategy=relay")  # fmt: skip
    run.wait_for_step(1)
    code, out = scale(run, 3)
    expected = "actors 1 -> 3: actor-1, actor-2 start, and take work once they run the current"
    assert (code, out) == (0, f"{expected} version\n")
    run.wait_for(lambda: trained_by(run) == {"actor-0", "actor-1", "actor-2"}, "all three trained")
    loaded = {r["rank"] for r in run.metrics("actor") if "sync/load_s" in r["metrics"]}
    assert loaded == {0, 1, 2}, "joiners too load what their machine's relay has"
    assert events_of(run, "weights_joined") == [], "nobody was sent a version of its own"
    alive = {r["metrics"].get("actor/alive") for r in run.metrics("launcher")}
    assert {1.0, 3.0} <= alive
    code, out = scale(run, 1)
    expected = "actors 3 -> 1: actor-1, actor-2 take no more work and end with what they have\n"
    assert (code, out) == (0, expected)
    run.wait_for(lambda: left(run) == {"actor-1", "actor-2"}, "two left")
    run.wait_for(lambda: not named(run, "actor-1") + named(run, "actor-2"), "their processes ended")
    step = step_of(run)
    run.wait_for_step(step + 3)
    assert scale(run, 0)[0] == 2
    run.process.send_signal(signal.SIGINT)
    assert run.wait(120) == 0, run.output
    code, out = scale(run, 2)
    assert (code, out) == (2, f"error: {run.name} cannot be scaled: ended: interrupted\n")
    summary = run.summary()
    check_law(summary)
    reconcile(run, summary["steps"], 32)
    check_recording(run, summary)
    scaled = [(e["from"], e["to"], e["starting"], e["leaving"]) for e in events_of(run, "scaled")]
    both = ["actor-1", "actor-2"]
    assert scaled == [(1, 3, both, []), (3, 1, [], both)]
    assert [e for e in events_of(run, "actor_left") if "reason" in e] == []
    for what in ("actor_died", "actor_restarted", "actor_gone"):
        assert events_of(run, what) == []
    assert summary["ledger"]["dropped_stale"] == 0
    assert summary["ledger"]["requeued"] == 0, "who left had done all that it had taken"
    run.nothing_left()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("strategy", ["broadcast", "relay"])
def test_actors_join_and_leave_at_random_through_40_versions(start, strategy, seed):
    """One stays; none to four more come and go. Without staleness every token that is trained is of
    the learner's own version, so that one sampled from other weights shows in the mismatch."""
    generator = random.Random(seed)
    # Steps that take a while: who joins is to have something to do.
    run = start("run.steps=40", "buffer.max_staleness=0", "learner.batch_size=128",
                f"weights.strategy={strategy}")  # fmt: skip
    run.wait_for_step(1)
    asked, step = [], 1
    while step < 36:
        asked.append(generator.randrange(1, 6))
        code, out = scale(run, asked[-1])
        assert code == 0, out
        step = step_of(run) + generator.randrange(1, 4)
        run.wait_for_step(min(step, 40))
    assert run.wait(600) == 0, run.output
    summary = run.summary()
    assert (summary["ended"], summary["steps"], summary["version"]) == ("finished", 40, 40)
    check_law(summary)
    reconcile(run, 40, 128, killed=True)
    check_recording(run, summary)
    assert summary["ledger"]["dropped_stale"] == 0
    for what in ("actor_died", "actor_restarted", "actor_gone"):
        assert events_of(run, what) == []
    records = batches(run)
    assert max(r["metrics"]["kl/mismatch_k3"] for r in records) < 1e-6
    times = [r["wall_s"] for r in records]
    longest = max(b - a for a, b in pairwise(times))
    print(strategy, "actors:", asked, "trained:", sorted(trained_by(run)),
          f"longest step {longest:.1f} s;",
          sum(len(e["starting"]) for e in events_of(run, "scaled")), "joined,",
          len(events_of(run, "weights_cut_out")), "cut out,",
          len(events_of(run, "actor_left")), "left")  # fmt: skip
    assert longest < LEASE_S + WEIGHTS_S
    run.nothing_left()
