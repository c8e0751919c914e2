"""The benches' common part: figures, turns, the file, the command line. No engine runs here."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "bench"
MODULES = (
    "startup", "async_vs_sync", "peers", "buffer", "weights", "off_policy", "harness", "runs",
    "pinning", "buffer_raw", "buffer_sides", "learner_compare", "learner_meter",
    "off_policy_report",
)  # fmt: skip
BENCHES = (*MODULES[:6], "learner")


def start(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=120,
        check=False, cwd="/", env=os.environ | {"PYTHONPATH": str(FOLDER.parent)},
    )  # fmt: skip


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


@pytest.mark.parametrize("name", BENCHES)
def test_help_tells_of_the_common_interface(name):
    done = start(FOLDER / f"{name}.py", "--help")
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout
    assert "--json PATH" in done.stdout


@pytest.mark.parametrize("name", BENCHES)
def test_an_unknown_option_is_refused(name):
    done = start(FOLDER / f"{name}.py", "--fast")
    assert done.returncode == 2
    assert "--fast" in done.stderr


def test_a_value_is_median_spread_and_count():
    from harness import Value

    value = Value.of([3.0, 1.0, 2.5], "s", "lower", steps=4)
    assert (value.value, value.spread, value.n, value.unit) == (2.5, 2.0, 3, "s")
    assert value.params == {"steps": 4, "each": [3.0, 1.0, 2.5]}


def test_a_value_without_repeats_is_refused():
    from harness import BenchError, Report

    with pytest.raises(BenchError, match="help_s: a value without a single repeat"):
        Report("startup").add("help_s", [], "s", "lower")


def test_ratios_pair_the_repeats():
    from harness import ratios

    assert ratios([4.0, 9.0], [2.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError, match="shorter"):
        ratios([4.0, 9.0], [2.0])


def test_sides_take_turns_and_change_the_order():
    from harness import in_turns

    calls: list[str] = []

    def side(name):
        def run():
            calls.append(name)
            return len(calls)

        return run

    results = in_turns({"a": side("a"), "b": side("b")}, 3, say=lambda line: None)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert results == {"a": [1, 4, 5], "b": [2, 3, 6]}


def test_a_side_that_fails_is_named():
    from harness import BenchError, in_turns

    def fail():
        raise ValueError("no engine")

    with pytest.raises(BenchError, match="trl, repeat 1: no engine"):
        in_turns({"asyncrl": lambda: 1, "trl": fail}, 2, say=lambda line: None)


def script_with(tmp_path, body: str) -> Path:
    script = tmp_path / "some.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(FOLDER)!r})\n"
        "from harness import *\n"
        f"def measure(report, given):\n{body}\n"
        "sys.exit(run_bench('some', parser('x'), measure))\n"
    )
    return script


def test_the_file_has_the_shape_that_readers_rely_on(tmp_path):
    body = (
        "    n = 1 if given.quick else 3\n"
        "    report.row('side', 'rate')\n    report.row('a', 1.23456)\n"
        "    report.add('rate', [2.0] * n, 'samples/s', 'higher', cores=2)\n"
    )
    target = tmp_path / "results" / "some.json"
    done = start(script_with(tmp_path, body), "--json", str(target))
    assert done.returncode == 0, done.stderr
    found = json.loads(target.read_text())
    assert set(found) == {"bench", "hardware", "commit", "values"}
    assert found["bench"] == "some"
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["memory_gib"] > 0
    assert found["values"]["rate"] == {
        "value": 2.0, "unit": "samples/s", "better": "higher", "n": 3, "spread": 0.0,
        "params": {"cores": 2, "each": [2.0, 2.0, 2.0]},
    }  # fmt: skip
    assert "1.235" in done.stdout
    assert list(target.parent.iterdir()) == [target]
    assert start(script_with(tmp_path, body), "--quick", "--json", str(target)).returncode == 0
    assert json.loads(target.read_text())["values"]["rate"]["n"] == 1


def test_a_failed_side_exits_1_and_writes_nothing(tmp_path):
    body = (
        "    report.add('rate', [1.0], 'x', 'higher')\n    raise BenchError('trl: exit code 1')\n"
    )
    target = tmp_path / "some.json"
    done = start(script_with(tmp_path, body), "--json", str(target))
    assert done.returncode == 1
    assert "error: bench some: trl: exit code 1" in done.stderr
    assert not target.exists()


def test_commit_says_when_files_differ(tmp_path):
    from harness import commit

    def git(*arguments):
        identity = ("-c", "user.name=n", "-c", "user.email=e@x")
        subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, timeout=60,
            capture_output=True,
        )  # fmt: skip

    assert commit(tmp_path / "nowhere") == "unknown"
    git("init", "-q")
    (tmp_path / "f").write_text("1")
    git("add", "f")
    git("commit", "-q", "-m", "m")
    clean = commit(tmp_path)
    assert len(clean) == 40
    (tmp_path / "f").write_text("2")
    assert commit(tmp_path) == clean + "-dirty"


def test_a_tail_takes_whole_lines_only(tmp_path):
    from runs import Tail

    path = tmp_path / "m.jsonl"
    tail = Tail(path, began=0.0)
    tail.read()
    assert tail.lines == []
    path.write_text('{"step": 1}\n{"st')
    tail.read()
    assert [r["step"] for r in tail.lines] == [1]
    with path.open("a") as f:
        f.write('ep": 2}\n')
    tail.read()
    assert [r["step"] for r in tail.lines] == [1, 2]
    assert tail.lines[0]["seen_s"] <= tail.lines[1]["seen_s"]


def records(seconds_a_step: float, steps: int) -> list[dict]:
    """A run in which generation takes 1 s and training 2 s of each step of 8 samples."""
    out = []
    for k in range(1, steps + 1):
        made = {
            "time/generate_s": 0.75 * k, "time/reward_s": 0.25 * k, "actor/samples_pushed": 8 * k,
        }  # fmt: skip
        batch = {"time/train_s": 2.0 * k, "reward/mean": k / steps, "loss/tokens": 64.0}
        between = {"time/train_s": 2.0 * k, "time/idle_s": 1.0}
        for role, metrics in (("actor", made), ("learner", batch), ("learner", between)):
            out.append(
                {
                    "role": role, "rank": 0, "step": k, "version": k, "metrics": metrics,
                    "wall_s": k * seconds_a_step + (metrics is between),
                }
            )  # fmt: skip
    return out


def test_times_of_each_side_per_batch():
    from async_vs_sync import Plan, per_batch
    from runs import RunResult

    plan = Plan(staleness=(0, 2), steps=10, skip=4, repeats=1, rewards=True)
    result = RunResult(Path(), records(4.0, 10), [], {}, 40.0)
    rate, t_gen, t_train = per_batch(result, plan, batch_size=8)
    assert (rate, t_gen, t_train) == pytest.approx((0.25, 1.0, 2.0))


def test_an_actor_that_says_nothing_is_an_error():
    from async_vs_sync import Plan, per_batch
    from harness import BenchError
    from runs import RunResult

    silent = [r for r in records(4.0, 10) if r["role"] == "learner"]
    plan = Plan(staleness=(0, 2), steps=10, skip=4, repeats=1, rewards=True)
    with pytest.raises(BenchError, match="told of 0 samples"):
        per_batch(RunResult(Path(), silent, [], {}, 40.0), plan, batch_size=8)


def measured(rate: float):
    from async_vs_sync import Measured

    rewards = ((0.0, 0.1), (5.0, 0.2), (10.0, rate))
    return Measured(rate, t_gen=1.0, t_train=2.0, rewards=rewards, staleness=1.0, outside_cores=0.1)


def test_speed_up_is_over_turns_and_over_both_cores():
    from async_vs_sync import COLOCATED, FULL, QUICK, summarise
    from harness import Report

    report = Report("async_vs_sync")
    rates = {"S=0": 0.3, "S=2": 0.42, COLOCATED: 0.4}
    runs = {s: [measured(r)] for s, r in rates.items()}
    summarise(report, runs, FULL)
    values = {key: v.value for key, v in report.values.items()}
    assert values == pytest.approx({
        "speedup_s2": 1.4, "of_ideal_s2": 1.4 / 1.5, "speedup_vs_colocated": 1.05,
        "reward_at_equal_time": 0.42 - 0.3,
    }, rel=1e-4)  # fmt: skip
    assert report.values["speedup_s2"].params["ideal"] == 1.5
    assert "t_gen 1.00 s, t_train 2.00 s a batch, ratio 0.50" in report.table()
    quick = Report("async_vs_sync")
    summarise(quick, runs, QUICK)
    assert set(quick.values) == set(values) - {"reward_at_equal_time"}


def side(rewards, step_s: float):
    from peers import Side

    times = tuple(30.0 + step_s * k for k in range(1, len(rewards) + 1))
    return Side(times=times, rewards=tuple(rewards), samples=64)


def test_time_to_80_counts_from_exec_and_a_peer_that_was_late_is_a_bound(monkeypatch):
    import peers
    from harness import Report

    monkeypatch.setattr(peers, "trl_version", lambda: "1")
    fast, slow = side([0.1, 0.7, 0.9, 0.9], 4.0), side([0.1] * 5, 20.0)
    assert fast.samples_s == 16.0
    assert (fast.time_to_target(), fast.time_to_target(True)) == (42.0, 12.0)
    assert slow.time_to_target() == 130.0
    report = Report("peers")
    peers.summarise(report, {"asyncrl": [fast], "trl": [slow]}, peers.FULL, "autocast")
    assert report.values["run_samples_s_vs_trl"].value == 5.0
    late = report.values["time_to_80_vs_trl"]
    assert late.value == pytest.approx(42 / 130, rel=1e-4)
    assert late.params["upper_bound"] is True
    assert late.params["trl_reached"] == [False]
    assert "> 130.0" in report.table()


def test_a_quick_comparison_claims_no_time_to_80(monkeypatch):
    import peers
    from harness import Report

    monkeypatch.setattr(peers, "trl_version", lambda: "1")
    report = Report("peers")
    runs = {"asyncrl": [side([0.1] * 4, 4.0)], "trl": [side([0.1] * 4, 20.0)]}
    peers.summarise(report, runs, peers.QUICK, "autocast")
    assert set(report.values) == {"run_samples_s_vs_trl"}


def test_pinning_finds_a_role_by_its_log_and_what_it_starts(tmp_path):
    from pinning import Pinning

    (tmp_path / "logs").mkdir()
    cores = sorted(os.sched_getaffinity(0))
    code = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'],\n"
        "                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "open(sys.argv[1], 'w').write(str(p.pid))\n"
        "p.wait()\n"
    )
    with (tmp_path / "logs" / "actor-0.log").open("wb") as log:
        ready = tmp_path / "pid"
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(ready)], stdin=subprocess.PIPE, stdout=log, stderr=log
        )
    try:
        pinning = Pinning(tmp_path, {"actor": cores[-1], "learner": cores[0]})
        while not (ready.exists() and ready.read_text()):
            assert process.poll() is None
        child = int(ready.read_text())
        pinning.apply()
        assert pinning.pinned == {"actor": {process.pid, child}, "learner": set()}
        assert os.sched_getaffinity(child) == {cores[-1]}
        assert pinning.astray() == []
        os.sched_setaffinity(child, set(cores))
        assert len(pinning.astray()) == (1 if len(cores) > 1 else 0)
    finally:
        process.stdin.close()
        process.wait(30)


def test_a_run_that_cannot_start_is_an_error_with_its_words(tmp_path):
    from harness import BenchError
    from runs import launch

    with pytest.raises(BenchError, match=r"exit code 2: .*run\.steps"):
        launch(tmp_path, "r", "tiny", ["run.steps=0"], limit_s=120)


def test_trl_is_given_what_the_configuration_says(tmp_path):
    from trl_grpo import arguments_of, rows_of

    from asyncrl.config.load import load

    config = load("quickstart", ["eval.samples=0"]).config
    given = arguments_of(config, "autocast", tmp_path / "steps.jsonl")
    assert given["per_device_train_batch_size"] == config.learner.batch_size
    assert given["num_generations"] == config.rollout.group_size
    assert given["max_completion_length"] == config.rollout.max_new_tokens
    assert given["learning_rate"] == config.learner.optim.lr
    assert given["adam_beta2"] == config.learner.optim.betas[1]
    assert given["beta"] == 0.0
    rows = rows_of(config)
    assert len(rows) == config.run.steps * config.groups_per_batch
    assert set(rows[0]) == {"prompt", "answer"}


def test_breakdown_of_a_start_ends_with_the_first_step():
    from runs import RunResult
    from startup import breakdown

    common = {"role": "launcher", "rank": 0, "step": 0, "version": 0, "run_id": "r", "seen_s": 9.0}
    events = [
        common | {"event": "startup", "phase": "ray", "seconds": 2.5, "wall_s": 3.0},
        common | {"event": "publication", "wall_s": 5.0},
    ]
    result = RunResult(Path(), records(4.0, 1), events, {}, 40.0)
    assert breakdown(result) == [
        {"event": "startup", "phase": "ray", "seconds": 2.5, "wall_s": 3.0}
    ]
