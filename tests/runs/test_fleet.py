"""Actors that die or stand still, three runs at once, two machines, one process."""

import contextlib
import os
import random
import signal
import subprocess
import sys

import psutil
import pytest

from asyncrl.checkpoints import list_checkpoints
from asyncrl.launch.processes.reaper import processes_of
from asyncrl.recording import read_recording
from tests.helpers.run_checks import (
    batches,
    check_drained,
    check_law,
    check_lineage,
    check_recording,
    kill_and_check_the_message,
    reconcile,
    trained_by,
)
from tests.helpers.runs import read_lines

pytestmark = [pytest.mark.run, pytest.mark.timeout(900)]


def events_of(run, kind):
    return [e for e in run.events() if e["event"] == kind]


def named(run, name):
    found = []
    for process in processes_of(run.run_id()):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended since they were listed
            if process.name() == name:
                found.append(process)
    return found


def step_of(run):
    return max((r["step"] for r in batches(run)), default=0)


def pid_of(run, name):
    found = named(run, name)
    return min(found, key=lambda p: p.create_time()).pid  # a fork bears its parent's name at first


def test_actors_that_die_are_restarted_and_the_run_loses_nothing(start):
    run = start("--actors", "2", "run.steps=40")  # by relay
    run.wait_for_step(2)
    os.kill(pid_of(run, "relay-0"), signal.SIGKILL)
    os.kill(pid_of(run, "actor-0-core"), signal.SIGKILL)
    run.wait_for(lambda: events_of(run, "actor_died"), "the death of an engine noticed")
    os.kill(pid_of(run, "actor-1"), signal.SIGKILL)
    run.wait_for(lambda: len(events_of(run, "actor_restarted")) == 2, "both restarted")
    assert run.wait() == 0, run.output
    assert "weights: relay over gloo, 1 receiver for 2 actors" in run.output
    (died,) = events_of(run, "relay_died")
    assert died["relay"] == "relay-0"
    assert "killed" in died["reason"], "by SIGKILL, once the fork server has said so in its log"
    assert [e["relay"] for e in events_of(run, "relay_restarted")] == ["relay-0"]
    assert {r["rank"] for r in run.metrics("actor") if "sync/load_s" in r["metrics"]} == {0, 1}
    assert max(r["metrics"]["sync/held_bytes"] for r in run.metrics("relay")) > 1e6
    assert [e["actor"] for e in events_of(run, "actor_died")] == ["actor-0", "actor-1"]
    summary = run.summary()
    check_law(summary)
    reconcile(run, 40, 32, killed=True)
    check_recording(run, summary)
    assert summary["ledger"]["dropped_stale"] == 0
    run.nothing_left()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_a_random_actor_is_killed_at_a_random_moment(start, seed):
    """Whatever it does then: starting, generating, pushing, taking weights."""
    generator = random.Random(seed)
    run = start("--actors", "3", "--learners", "2", "run.steps=40")
    run.wait_for(run.events, "the first event")
    part = generator.choice(["actor-{}", "actor-{}-core"]).format(generator.randrange(3))
    run.wait_for(lambda: named(run, part), part)
    step = generator.randrange(12)
    run.wait_for(lambda: step_of(run) >= step, f"step {step}")
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(generator.random() * 2)
    os.kill(pid_of(run, part), signal.SIGKILL)
    assert run.wait() == 0, run.output
    summary = run.summary()
    assert (summary["ended"], summary["steps"]) == ("finished", 40)
    check_law(summary)
    reconcile(run, 40, 32, killed=True)
    check_recording(run, summary)
    assert len(events_of(run, "actor_died")) == 1
    run.nothing_left()


@pytest.mark.soak
@pytest.mark.parametrize("part", ["actor-1", "actor-1-core"])
def test_the_others_go_on_while_one_stands_still_for_a_minute(start, part):
    run = start("--actors", "3", "run.steps=100000", "rollout.lease_timeout_s=10")
    run.wait_for_step(5)
    stopped = psutil.Process(pid_of(run, part))
    stopped.suspend()
    seen = []
    for _ in range(6):
        with pytest.raises(subprocess.TimeoutExpired):
            run.process.wait(10)
        seen.append(step_of(run))
    stopped.resume()
    print("steps every 10 s while it stood still:", seen)
    assert seen[-1] > seen[3] > seen[2], "from half a minute on there is no doubt"
    back = step_of(run)
    run.wait_for_step(back + 20)
    run.process.send_signal(signal.SIGINT)
    assert run.wait(120) == 0, run.output
    summary = run.summary()
    check_law(summary)
    reconcile(run, summary["steps"], 32, killed=True)
    run.nothing_left()


def test_three_runs_at_once_do_not_meet_and_end_each_in_its_way(start):
    """One loses its launcher and is resumed, one its learner and may not restart it; one restarts
    it, and Ctrl-C drains it."""
    headless, dead, drained = runs = [
        start("run.steps=100000", f"run.seed={seed}", "checkpoint.every=2", *more)
        for seed, more in enumerate(
            [["buffer.durability=process"], ["cluster.max_restarts=0"], []], start=1
        )
    ]
    for run in runs:
        run.wait_for_step(3)
        run.wait_for(lambda run=run: list_checkpoints(run.folder), "a checkpoint")
    assert len({run.run_id() for run in runs}) == 3
    left = [psutil.Process(p) for p in headless.pids_of("")]
    assert len(left) > 5
    headless.process.kill()
    headless.process.wait()
    _, alive = psutil.wait_procs(left, timeout=30)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    kill_and_check_the_message(dead, "learner-0")
    assert f"asyncrl launch --resume {dead.folder} goes on with it" in dead.output
    os.kill(drained.pids_of("learner-0")[0], signal.SIGKILL)
    drained.wait_for(lambda: events_of(drained, "learner_restarted"), "a restarted learner")
    first = events_of(drained, "learner_died")[0]
    assert (first["next_incarnation"], first["batch"] % 2) == (1, 0)
    drained.wait_for_step(step_of(drained) + 2)
    drained.process.send_signal(signal.SIGINT)
    check_drained(drained)
    assert list_checkpoints(drained.folder)[-1].meta.step == drained.summary()["steps"]
    check_resumed(headless)


def check_resumed(run):
    """It goes on from its last checkpoint: what it had trained since then comes again, the same."""
    former = read_lines(run.folder / "metrics.jsonl")
    trained = batches(run)[-1]["step"]
    base = list_checkpoints(run.folder)[-1].meta.step
    assert base <= trained
    steps = trained + 2
    run.resume(f"run.steps={steps}")
    assert run.wait() == 0, run.output
    summary = run.summary()
    assert (summary["ended"], summary["steps"]) == ("finished", steps)
    check_law(summary)
    resumed = events_of(run, "resumed")[-1]
    now = resumed["incarnation"]
    assert (resumed["batch"], now > 0) == (base, True)
    assert [c["field"] for c in resumed["changes"]] == ["run.steps"]
    reconcile(run, steps, 32, killed=True)
    check_lineage(run, summary)
    lines = read_lines(run.folder / "metrics.jsonl")
    assert lines[: len(former)] == former, "what was there is as it was"
    times = [line["wall_s"] for line in lines]
    assert times[len(former)] >= max(times[: len(former)])
    again = [b for b in batches(run) if b["incarnation"] == now]
    assert [b["step"] for b in again] == list(range(base + 1, steps + 1))
    ids = {}
    for r in read_recording(run.folder / "trajectories"):
        if r.entry.batch is not None and base < r.entry.batch <= trained:
            ids.setdefault((r.entry.incarnation, r.entry.batch), []).append(r.entry.id)
    for batch in range(base + 1, trained + 1):
        assert sorted(ids[0, batch]) == sorted(ids[now, batch]), "the same samples"
    run.nothing_left()


# Ray takes 127.0.0.1 for "this machine's address in the network": 127.0.0.2 is loopback too.
TWO_NODES = """
import sys
from ray.cluster_utils import Cluster
here = {"num_cpus": 2, "node_ip_address": "127.0.0.2"}
cluster = Cluster(initialize_head=True, head_node_args=here | {"resources": {"trains": 1}})
cluster.add_node(**here, resources={"generates": 1})
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def two_nodes():
    process = subprocess.Popen(
        [sys.executable, "-c", TWO_NODES], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env=os.environ | {"RAY_worker_niceness": "0"},
    )  # fmt: skip
    address = process.stdout.readline().strip()
    assert address.startswith("127.0.0.2:"), address
    below = psutil.Process(process.pid).children(recursive=True)
    yield address
    process.stdin.close()
    process.wait(120)
    process.stdout.close()
    for left in psutil.wait_procs(below, timeout=30)[1]:
        left.kill()


def test_a_cluster_of_two_nodes_with_actors_on_one_and_learners_on_the_other(start, two_nodes):
    """With staleness enough that both sides work at the same time."""
    run = start(
        "--actors", "2", "--learners", "2", "run.steps=8", f"cluster.address={two_nodes}",
        "buffer.max_staleness=4", "rollout.max_new_tokens=48",
        "cluster.device=cpu", "cluster.placement=explicit",
        "cluster.actor_places=[generates]", "cluster.learner_places=[trains]",
    )  # fmt: skip
    assert run.wait() == 0, run.output
    summary = run.summary()
    check_law(summary)
    reconcile(run, 8, 32)
    assert summary["staleness"]["head_max"] <= 4
    assert max(r["metrics"]["staleness/head/max"] for r in batches(run)) >= 1
    assert summary["busy"]["learner"] + summary["busy"]["actors"] > 1
    assert trained_by(run) == {"actor-0", "actor-1"}
    placed = {e["name"]: e["node"] for e in events_of(run, "placed")}
    assert placed["learner-0"] == placed["learner-1"] == placed["buffer-0"]
    assert placed["actor-0"] == placed["actor-1"] != placed["learner-0"]
    run.nothing_left()


def test_all_roles_in_one_process(start):
    run = start("--debug", "run.steps=4", "--actors", "2")
    assert run.wait() == 0, run.output
    check_law(run.summary())
    reconcile(run, 4, 32)
    assert run.summary()["eval"]["4"]["prompts"] == 32
    run.nothing_left()


@pytest.mark.parametrize("durability", ["process"])
def test_a_killed_buffer_goes_on_where_it_was(start, durability):
    run = start("--actors", "2", f"buffer.durability={durability}", "run.steps=16")
    for step in (3, 8):
        run.wait_for_step(step)
        os.kill(pid_of(run, "buffer-0"), signal.SIGKILL)
    assert run.wait() == 0, run.output
    summary = run.summary()
    assert (summary["ended"], summary["steps"]) == ("finished", 16)
    check_law(summary)
    reconcile(run, 16, 32)
    check_recording(run, summary)
    assert [e["event"] for e in run.events()].count("buffer_restarted") == 2
    assert "buffer-0 is back" in run.output
    run.nothing_left()
