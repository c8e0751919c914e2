"""Whole runs of the `tiny` preset: real Ray, vLLM, ZeroMQ, FSDP2 and gloo."""

import contextlib
import math
import os
import signal

import psutil
import pytest

from asyncrl.launch.processes.reaper import processes_of
from tests.helpers.run_checks import (
    batches,
    check_law,
    check_learning,
    check_recording,
    pss_gib,
    reconcile,
    trained_by,
)

pytestmark = [pytest.mark.run, pytest.mark.timeout(600)]


def test_six_actors_two_learners(start):
    run = start("--actors", "6", "--learners", "2", "log.wandb=offline", "log.tensorboard=true",
                "learner.save_final=true")  # fmt: skip
    run.wait_for_step(2)
    engines = {f"actor-{rank}-core" for rank in range(6)}

    def names():
        found = set()
        for process in processes_of(run.run_id()):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended since they were listed
                found.add(process.name())
        return found

    run.wait_for(lambda: engines <= names(), "six engines at once")
    processes = processes_of(run.run_id())
    assert {"learner-0", "learner-1"} <= names()
    assert pss_gib(processes) < 20
    assert run.wait() == 0, run.output
    summary = run.summary()
    assert (summary["ended"], summary["steps"], summary["version"]) == ("finished", 30, 30)
    check_law(summary)
    reconcile(run, 30, 32)
    assert summary["ledger"]["dropped_stale"] == 0
    records = batches(run)
    assert [r["step"] for r in records] == list(range(1, 31))
    for record in records:
        metrics = record["metrics"]
        assert metrics["staleness/head/max"] <= 2
        assert metrics["staleness/violations"] == 0
        assert math.isfinite(metrics["loss/policy"])
        assert 0 < metrics["is/ess_frac"] <= 1
        assert record["version"] == record["step"] - 1, "batch k is trained at V = k - 1"
    check_learning([r["metrics"]["reward/mean"] for r in records])
    assert trained_by(run) == {f"actor-{rank}" for rank in range(6)}
    scores = {r["version"]: r["metrics"] for r in run.metrics("launcher")
              if "eval/even_digits/prompts" in r["metrics"]}  # fmt: skip
    assert {v: m["eval/even_digits/prompts"] for v, m in scores.items()} == {0: 32, 30: 32}
    publications = [e["publication"] for e in run.events() if e["event"] == "publication"]
    assert publications == [f"0:{v}" for v in range(1, 31)]
    assert (run.folder / "checkpoints" / "final" / "config.json").exists()
    assert list((run.folder / "wandb").glob("offline-run-*"))
    assert list((run.folder / "tensorboard").glob("events*"))
    assert "ledger closed" in run.output
    assert [p["phase"] for p in summary["startup"]].count("engine") >= 1
    check_recording(run, summary)
    run.nothing_left()


def test_staleness_four_overlaps_both_sides(start):
    run = start("buffer.max_staleness=4", "run.steps=12", "rollout.max_new_tokens=48")
    assert run.wait() == 0, run.output
    summary = run.summary()
    assert summary["staleness"]["head_max"] <= 4
    assert summary["busy"]["learner"] + summary["busy"]["actors"] > 1
    assert max(r["metrics"]["staleness/head/max"] for r in batches(run)) >= 1


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)]
)
def test_a_signal_drains_and_leaves_nothing(start, number):
    run = start("run.steps=100000")
    run.wait_for_step(2)
    run.process.send_signal(number)
    assert run.wait(60) == 0, run.output
    summary = run.summary()
    assert summary["ended"] == "interrupted"
    check_law(summary)
    reconcile(run, summary["steps"], 32)
    run.nothing_left()


@pytest.mark.parametrize(
    "role",
    ["learner-0", pytest.param("buffer-0", marks=pytest.mark.soak)],
)
def test_a_death_ends_the_run_with_one_message(start, role):
    run = start("run.steps=100000")
    run.wait_for_step(1)
    pids = run.pids_of(role)
    assert pids, [p.info for p in psutil.process_iter(["pid", "name"])]
    os.kill(pids[0], signal.SIGKILL)
    assert run.wait(90) == 1
    errors = [line for line in run.output.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert role in errors[0]
    assert "Traceback" not in run.output
    assert run.summary()["ended"] == "failed"
    run.nothing_left()


def test_killing_the_launcher_leaves_nothing(start):
    run = start("run.steps=100000")
    run.wait_for_step(1)
    victims = [psutil.Process(p) for p in run.pids_of("")]
    assert len(victims) > 5
    run.process.kill()
    run.process.wait()
    _, alive = psutil.wait_procs(victims, timeout=30)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


GSM8K_LINE = (
    '{"question": "Anna has %d eggs and buys %d. How many?", '
    '"answer": "She has %d + %d = <<%d+%d=%d>>%d eggs.\\n#### %d"}'
)


def test_staleness_zero_on_a_file_of_prompts_with_a_user_s_reward(start, tmp_path, monkeypatch):
    rows = [GSM8K_LINE % (a, 7, a, 7, a, 7, a + 7, a + 7, a + 7) for a in range(40)]
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n")
    (tmp_path / "my_reward.py").write_text(
        "def by_length(prompt, response, finish_reason):\n"
        "    assert prompt.answer.count('#### ') == 1\n"
        "    return len(response) / 100\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = start(
        "task.kind=jsonl", f"task.path={tmp_path / 'train.jsonl'}",
        "task.reward=my_reward:by_length", "eval.samples=0",
        "buffer.max_staleness=0", "run.steps=5", "rollout.max_prompt_tokens=160",
    )  # fmt: skip
    assert run.wait() == 0, run.output
    check_law(run.summary())
    reconcile(run, 5, 32)
    assert run.summary()["reward"]["final"] > 0
    records = batches(run)
    assert len(records) == 5
    for record in records:
        assert record["metrics"]["staleness/head/max"] == 0
        assert record["metrics"]["staleness/token/max"] == 0
