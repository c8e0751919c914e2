"""The off-policy study: exact behaviour, exact age of the data, resumed runs, honest intervals."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import math
from concurrent.futures import Executor, Future
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import torch.distributed as dist

MODULES = ("off_policy_run", "off_policy_task", "off_policy_report", "learner_batch")


@pytest.fixture
def one_rank():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def model(tmp_path, monkeypatch):
    import off_policy_task

    monkeypatch.setattr(off_policy_task, "_SHOWN_STEPS", 3)
    folder = tmp_path / "model"
    off_policy_task.make_model(folder)
    return folder


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def test_behaviour_is_what_was_sampled_from(model):
    from off_policy_task import LONGEST, SHORTEST, Sampler, rewards

    sampler = Sampler(model, seed=1)
    weights = {n: p + 0.1 * torch.randn_like(p) for n, p in sampler._model.named_parameters()}
    sampler.load(weights)
    sampled = sampler.sample(groups=3, group_size=4)
    ids = torch.from_numpy(np.concatenate([sampled.prompts, sampled.responses], axis=1))
    with torch.no_grad():
        full = torch.log_softmax(sampler._model(input_ids=ids).logits[:, 2:-1], -1)
    want = full.gather(-1, ids[:, 3:, None])[..., 0].numpy()
    np.testing.assert_allclose(sampled.logprobs, want, atol=1e-5)
    trajectories = sampled.trajectories(group_size=4, first=5, version=_version(2))
    assert [t.header.id.index for t in trajectories] == [5] * 4 + [6] * 4 + [7] * 4
    for t, n, reward in zip(trajectories, sampled.lengths, sampled.rewards, strict=True):
        assert SHORTEST <= n <= LONGEST
        assert t.header.response_tokens == n
        assert t.header.reward == reward
    again = rewards(sampled.prompts, sampled.responses, sampled.lengths)
    assert again.tolist() == sampled.rewards.tolist()


def _version(v: int):
    from asyncrl.types import Version

    return Version(0, v)


@pytest.mark.parametrize("k", [0, 2])
def test_every_batch_is_k_versions_old(model, one_rank, monkeypatch, k):
    import off_policy_run

    from asyncrl.learner.step import Trainer

    seen = []
    train = Trainer.train

    def spy(self, part, version):
        seen.append(version.version - part.manifest[0].version_min.version)
        return train(self, part, version)

    monkeypatch.setattr(Trainer, "train", spy)
    study = off_policy_run.Study(steps=5, groups=2, group_size=4, judged=2, evaluated=32, watched=2)
    run = off_policy_run.Run("decoupled-ppo", k, 1e-2, 0)
    record = off_policy_run.execute(study, run, str(model))
    assert seen == [min(v, k) for v in range(5)]
    assert 0 <= record["reward"] <= 1
    assert len(record["curve"]) == 3
    assert record["ess_frac"] == pytest.approx(1.0, abs=1e-3) if k == 0 else record["ess_frac"] > 0
    if k == 2:  # a run depends on nothing but what it is told
        assert off_policy_run.execute(study, run, str(model))["curve"] == record["curve"]


def test_a_policy_that_breaks_has_reward_0(model, one_rank, monkeypatch):
    import off_policy_run

    from asyncrl.learner.step import Trainer

    whole = Trainer.full_parameters

    def broken(self, dtype):
        return ((name, value * torch.nan) for name, value in whole(self, dtype))

    monkeypatch.setattr(Trainer, "full_parameters", broken)
    study = off_policy_run.Study(steps=2, groups=2, group_size=4, evaluated=8)
    record = off_policy_run.execute(study, off_policy_run.Run("tis", 0, 1e-3, 0), str(model))
    assert record["reward"] == 0.0
    assert record["ess_frac"] is None


class Here(Executor):
    """Runs what is submitted at once, in this process."""

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as e:
            future.set_exception(e)
        return future


def plan_of(**changes):
    from off_policy import QUICK

    return dataclasses.replace(QUICK, **changes)


def test_a_finished_run_is_not_run_again(tmp_path, monkeypatch):
    import off_policy_run
    from off_policy import Log, finish

    executed = []

    def execute(study, run, folder):
        executed.append(run)
        return dataclasses.asdict(run) | {"reward": run.lr}

    monkeypatch.setattr(off_policy_run, "execute", execute)
    plan, path = plan_of(), tmp_path / "runs.jsonl"
    runs = plan.sweep()
    records = finish(runs, Log(path, plan.study), Here(), "")
    assert [r["method"] for r in records] == [r.method for r in runs]
    assert finish(runs, Log(path, plan.study), Here(), "") == records
    assert executed == runs
    longer = dataclasses.replace(plan.study, steps=13)
    finish(runs[:1], Log(path, longer), Here(), "")
    assert executed == [*runs, runs[0]]


def test_a_run_that_fails_is_named(tmp_path, monkeypatch):
    import off_policy_run
    from harness import BenchError
    from off_policy import Log, finish

    def execute(study, run, folder):
        raise RuntimeError("broken")

    monkeypatch.setattr(off_policy_run, "execute", execute)
    plan = plan_of()
    with pytest.raises(BenchError, match="naive-ppo k=0 .*broken"):
        finish(plan.sweep()[:1], Log(tmp_path / "x", plan.study), Here(), "")


def test_an_unknown_preset_is_refused(tmp_path):
    from tests.bench.test_harness import FOLDER, start

    done = start(FOLDER / "off_policy.py", "--method", "no-such", "--runs", str(tmp_path / "x"))
    assert done.returncode == 1
    assert "no preset no-such" in done.stderr


def record(method: str, k: int, lr: float, reward: float):
    return {"method": method, "k": k, "lr": lr, "reward": reward}


def study_of_two():
    """icepop is best at the middle rate, naive-ppo at the lowest, on data of two ages."""
    swept, reported = [], []
    for k in (0, 8):
        for lr, good, bad in ((1e-3, 0.5, 0.6), (3e-3, 0.8, 0.3), (1e-2, 0.2, 0.1)):
            swept += [record("icepop", k, lr, good), record("naive-ppo", k, lr, bad)]
        for noise in (-0.01, 0.0, 0.01):
            reported.append(record("icepop", k, 3e-3, 0.7 + noise))
            reported.append(record("naive-ppo", k, 1e-3, 0.5 + noise))
    return swept, reported


def test_rates_are_chosen_by_the_sweep_and_judged_on_other_seeds():
    from off_policy_report import cells, ranked, table

    found = cells(*study_of_two())
    assert {(c.method, c.k): c.lr for c in found} == {
        ("icepop", 0): 3e-3, ("icepop", 8): 3e-3, ("naive-ppo", 0): 1e-3, ("naive-ppo", 8): 1e-3,
    }  # fmt: skip
    first = found[0]
    assert first.mean == pytest.approx(0.7)
    assert first.half == pytest.approx(4.303 * 0.01 / math.sqrt(3), rel=1e-3)
    assert ranked(found) == ["icepop", "naive-ppo"]
    lines = table(found).splitlines()
    assert lines[2] == "| `icepop` | 0.700 ± 0.025 (0.003) | 0.700 ± 0.025 (0.003) |"
    assert lines[3].endswith("0.500 ± 0.025 (0.001*) |")


def test_seeds_of_sweep_and_report_are_apart():
    from off_policy import FULL, QUICK

    for plan in (FULL, QUICK):
        assert not set(plan.sweep_seeds) & set(plan.report_seeds)
    assert len(FULL.rates) >= 3
    assert min(len(FULL.sweep_seeds), len(FULL.report_seeds)) >= 3
    assert FULL.ages == (0, 2, 8, 32)


def test_the_figure_shows_every_cell_within_its_frame():
    from off_policy_report import cells, figure

    found = cells(*study_of_two())
    root = ElementTree.fromstring(figure(found, start=0.2))
    space = "{http://www.w3.org/2000/svg}"
    dots = root.findall(f"{space}circle")
    assert len(dots) == len(found)
    assert all(0 < float(d.get("cx")) < float(root.get("width")) for d in dots)
    words = [t.text for t in root.findall(f"{space}text")]
    assert {"icepop", "naive-ppo", "k = 0", "k = 8"} <= set(words)


def test_every_preset_goes_with_the_study():
    from off_policy import FULL, check, presets

    assert "naive-ppo" in presets()
    check(dataclasses.replace(FULL, methods=presets()))
