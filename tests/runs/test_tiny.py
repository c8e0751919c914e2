"""Whole runs of the `tiny` preset: real Ray, vLLM, ZeroMQ, FSDP2 and gloo."""

import contextlib
import math

import psutil
import pytest

from asyncrl.launch.processes.reaper import processes_of
from tests.helpers.run_checks import (
    batches,
    check_drained,
    check_law,
    check_learning,
    check_recording,
    check_replay,
    kill_and_check_the_message,
    pss_gib,
    reconcile,
    trained_by,
)
from tests.helpers.samples_checks import check_samples
from tests.helpers.seen import (
    check_logs,
    check_metrics,
    check_recomputed,
    check_scraped,
    check_timeline,
    check_times,
)
from tests.helpers.terminal import check_ended, terminal, walk
from tests.helpers.web_page import watched

pytestmark = [pytest.mark.run, pytest.mark.timeout(600)]


def test_six_actors_two_learners(start):
    run = start("--actors", "6", "--learners", "2", "log.wandb=offline", "log.tensorboard=true",
                "learner.save_final=true", "log.prometheus=0")  # fmt: skip
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
    check_scraped(run)
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
    check_samples(run)
    check_metrics(run)
    check_times(run)
    check_recomputed(run)
    check_timeline(run, samples=30 * 32)
    check_logs(run)
    run.nothing_left()
    check_replay(run)


@pytest.mark.soak
def test_sigterm_drains_and_leaves_nothing(start):
    """As Ctrl-C does: test_fleet.py."""
    run = start("run.steps=100000")
    run.wait_for_step(2)
    run.process.terminate()
    check_drained(run)


@pytest.mark.soak
def test_a_death_of_the_buffer_ends_the_run_with_one_message(start):
    """As that of a learner does: test_fleet.py."""
    run = start("run.steps=100000")
    run.wait_for_step(1)
    kill_and_check_the_message(run, "buffer-0")


GSM8K_LINE = (
    '{"question": "Anna has %d eggs and buys %d. How many?", '
    '"answer": "She has %d + %d = <<%d+%d=%d>>%d eggs.\\n#### %d"}'
)


def test_staleness_zero_on_a_file_of_prompts_with_a_user_s_reward(start, tmp_path, monkeypatch):
    """Adapters train, on two ranks: what each engine makes of them is the learner's policy."""
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
        "--learners", "2", "learner.lora.rank=4", "learner.optim.lr=0.02",
    )  # fmt: skip
    with terminal("monitor", str(run.folder)) as screen:
        screen.wait("starting")
        run.wait_for_step(1)
        walk(screen)
        with watched(run, tmp_path / "monitor.log") as page:
            assert run.wait() == 0, run.output
            page.check(batches(run))
        check_ended(screen, batches(run))
    check_law(run.summary())
    reconcile(run, 5, 32)
    assert run.summary()["reward"]["final"] > 0
    records = batches(run)
    assert len(records) == 5
    for record in records:
        assert record["metrics"]["staleness/head/max"] == 0
        assert record["metrics"]["staleness/token/max"] == 0
        assert record["metrics"]["kl/mismatch_k3"] < 1e-6
    moved = [r["metrics"]["sync/bytes"] for r in records if "sync/bytes" in r["metrics"]]
    assert 0 < max(moved) < 0.05 * 12e6, "of the bytes of the model"


@pytest.mark.soak
def test_fifty_publications_of_adapters_by_two_ranks(start):
    """Under load: tokens of the learner's own version show whether an engine has its weights."""
    run = start(
        "--actors", "2", "--learners", "2", "run.steps=51", "buffer.max_staleness=1",
        "learner.lora.rank=4", "learner.optim.lr=2e-3",
    )  # fmt: skip
    assert run.wait(600) == 0, run.output
    records = [r["metrics"] for r in batches(run)]
    own = [m["kl/mismatch_k3"] for m in records if "kl/mismatch_k3" in m]
    assert len(own) > 25
    assert max(own) < 1e-6
    joined = [e for e in run.events() if e["event"].startswith("weights_")]
    assert joined == []
