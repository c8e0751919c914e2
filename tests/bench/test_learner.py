"""The learner's bench: the sides do the same work, and its figures from what they tell."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.bench.test_harness import FOLDER, start
from tests.helpers.tiny_model import VOCAB, save_tiny_model

GIB = 2**30


def spec_of(tmp_path: Path, **changes):
    from learner_batch import Workload
    from learner_sides import Spec

    model = tmp_path / "model"
    if not model.exists():
        save_tiny_model(model, "llama", tied=True)
    workload = Workload(groups=2, group_size=4, longest=24, prompt=(3, 6), vocabulary=(3, VOCAB))
    settings = {
        "model": str(model), "workload": workload, "behaviour": str(tmp_path / "mu.npy"),
        "dtype": "float32", "budget": 64, "threads": 1, "steps": 2, "checkpointing": False,
        "trl_variant": "fp32",
    }  # fmt: skip
    return Spec(**settings | changes)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_all_sides_of_ours_do_the_same_work(tmp_path, checkpointing):
    from learner_meter import Meter
    from learner_sides import SIDES, prepare

    spec = spec_of(tmp_path, checkpointing=checkpointing)
    prepare(spec)
    meters = {name: Meter() for name in SIDES}
    for name, meter in meters.items():
        SIDES[name](spec, meter)
        assert len(meter.seconds) == len(meter.loss) == spec.steps
        assert meter.rest > 0
    ours = meters["asyncrl"]
    for name in ("padded", "trimmed"):
        assert meters[name].loss == pytest.approx(ours.loss, rel=1e-4)
        assert meters[name].grad_norm == pytest.approx(ours.grad_norm, rel=1e-4)
    assert abs(ours.loss[0]) > 1e-3


def test_lengths_are_ragged_and_fit():
    from learner_batch import ragged

    for count, longest in ((8, 128), (32, 256), (64, 4096)):
        lengths = ragged(count, longest)
        assert lengths.max() == longest
        assert lengths.min() >= 1
        assert lengths.mean() == pytest.approx(longest / 4, rel=0.02)
        assert len(np.unique(lengths)) > count // 2


def test_the_batch_is_the_same_in_every_process():
    from learner_batch import Workload, make_samples

    workload = Workload(groups=2, group_size=4)
    mu = np.arange(8 * 64, dtype=np.float32)
    a, b = make_samples(workload, mu), make_samples(workload, mu)
    assert [t.header for t in a] == [t.header for t in b]
    assert np.concatenate([t.behaviour_logprobs for t in a]).tolist() == mu.tolist()
    by_group = [t.prompt_ids.tolist() for t in a]
    assert by_group[0] == by_group[3] != by_group[4] == by_group[7]


def test_what_a_side_is_told_survives_the_command_line(tmp_path):
    from learner_sides import Spec

    spec = spec_of(tmp_path)
    assert Spec.parse(json.dumps(dataclasses.asdict(spec))) == spec


def test_completions_are_handed_out_group_by_group():
    from learner_batch import Workload, make_samples
    from learner_trl import rollout_of

    samples = make_samples(Workload(groups=2, group_size=4))
    rollout = rollout_of(samples)
    for _ in range(2):  # every step gets the batch anew
        out = rollout(["1"] * 4 + ["0"] * 4, None)
        assert out["completion_ids"][0] == samples[4].response_ids.tolist()
        assert out["score"] == [t.header.reward for t in (*samples[4:], *samples[:4])]


def measured(seconds: float, gib: float, **changes):
    from learner_meter import Measured

    values = {
        "seconds": [9.0, seconds, seconds], "loss": [0.1] * 3, "grad_norm": [2.0] * 3,
        "before": GIB, "rest": 3 * GIB, "peak": int((1 + gib) * GIB),
    }  # fmt: skip
    return Measured(**values | changes)


def test_figures_come_from_steps_after_the_first(tmp_path):
    from harness import Report
    from learner_compare import summarise

    runs = {"asyncrl": [measured(1, 3)], "padded": [measured(4, 8)], "trimmed": [measured(2, 6)]}
    report = Report("learner")
    summarise(report, runs, spec_of(tmp_path, steps=3))
    values = {key: v.value for key, v in report.values.items()}
    assert values == {
        "tok_s_vs_padded": 4.0, "tok_s_vs_trimmed": 2.0, "peak_mem_vs_padded": 0.375,
    }  # fmt: skip
    assert report.values["peak_mem_vs_padded"].params["above_rest"] == [pytest.approx(1 / 6, 1e-2)]


@pytest.mark.parametrize("what", ["loss", "grad_norm"])
def test_other_work_gives_no_figures(tmp_path, what):
    from harness import BenchError
    from learner_compare import same_work

    other = measured(4, 8, **{what: [2.5] * 3})
    with pytest.raises(BenchError, match=f"{what} is .* not the same step"):
        same_work({"asyncrl": [measured(1, 3)], "padded": [other]}, spec_of(tmp_path))


def test_trl_is_held_to_the_loss_of_its_batch(tmp_path):
    from harness import BenchError
    from learner_batch import make_samples
    from learner_compare import same_work, summarise
    from learner_sides import advantages_of

    spec = spec_of(tmp_path, steps=3)
    samples = make_samples(spec.workload)
    n = np.array([t.header.response_tokens for t in samples])
    want = float(-(advantages_of(samples) * n).sum() / n.sum())
    runs = {name: [measured(1, 3)] for name in ("asyncrl", "padded")}
    same_work(runs | {"trl": [measured(1, 3, loss=[want] * 3)]}, spec)
    with pytest.raises(BenchError, match="TRL's loss"):
        same_work(runs | {"trl": [measured(1, 3, loss=[want + 0.1] * 3)]}, spec)
    with pytest.raises(BenchError, match="that of TRL"):
        same_work(runs | {"trl": [measured(1, 3, loss=[want], grad_norm=[4.0])]}, spec)
    from harness import Report

    report = Report("learner")
    summarise(report, runs | {"trl": [measured(3, 3, loss=[want] * 3)]}, spec)
    assert math.isclose(report.values["step_samples_s_vs_trl"].value, 3.0)


def test_a_side_that_fails_is_an_error_in_its_words(tmp_path):
    from harness import BenchError
    from learner_compare import side

    with pytest.raises(BenchError, match="no-such"):
        side("asyncrl", spec_of(tmp_path, behaviour="no-such.npy"))


@pytest.mark.parametrize("name", ["learner", "off_policy"])
def test_the_common_interface(name):
    done = start(FOLDER / f"{name}.py", "--help")
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout
    assert "--json PATH" in done.stdout
