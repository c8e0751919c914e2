"""Replayed samples in a batch: part of the loss, checked and counted apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncrl.config.schema import Config, ReplayConfig
from asyncrl.errors import StalenessError
from asyncrl.types import Trajectory, Version
from tests.helpers.metric_names import undocumented
from tests.helpers.tiny_model import make_batch, save_tiny_model
from tests.learner.trained import capture, learner_config

pytestmark = pytest.mark.usefixtures("one_rank")

V5 = Version(0, 5)
REPLAY = ("replay/", "samples/replayed")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


def config(max_staleness: int = 4, on_stale: str = "drop") -> Config:
    """Fresh samples may be 2 versions old."""
    base = learner_config()
    return base.model_copy(
        update={
            "replay": ReplayConfig(fraction=0.5, max_staleness=max_staleness),
            "buffer": base.buffer.model_copy(update={"on_stale": on_stale}),
        }
    )


def batch() -> list[Trajectory]:
    """Two fresh groups of version 4, then one of version 1."""
    fresh = make_batch(1, groups=2, group_size=4, version=Version(0, 4))
    old = make_batch(2, groups=1, group_size=4, version=Version(0, 1))
    return fresh + [
        replace(t, header=replace(t.header, id=t.header.id._replace(index=9))) for t in old
    ]


def test_replayed_samples_are_part_of_the_loss_like_any_other(model: Path) -> None:
    """The same weights come of it as if all were fresh, were these allowed to be as old."""
    wide = learner_config()
    wide = wide.model_copy(update={"buffer": wide.buffer.model_copy(update={"max_staleness": 9})})
    want = capture(wide, model, batch(), version=V5)
    got = capture(config(), model, batch(), version=V5, fresh=8)
    for name, value in want.arrays.items():
        np.testing.assert_array_equal(got.arrays[name], value)
    for name in ("loss/policy", "loss/tokens", "is/ess_frac", "is/by_staleness/4/count"):
        assert got.metrics[name] == want.metrics[name]
    assert got.result.tokens == want.result.tokens
    assert got.result.dropped == ()


def test_they_are_counted_apart(model: Path) -> None:
    got = capture(config(), model, batch(), version=V5, fresh=8)
    alone = capture(config(), model, batch()[:8], version=V5, fresh=8)
    assert got.result.samples == alone.result.samples == 8
    apart = ("staleness/", "reward/", "rollout/")
    assert {k: v for k, v in got.metrics.items() if k.startswith(apart)} == {
        k: v for k, v in alone.metrics.items() if k.startswith(apart)
    }
    assert got.metrics["staleness/head/max"] == got.metrics["staleness/token/max"] == 1
    assert got.metrics["replay/samples"] == 4
    assert got.metrics["replay/staleness/mean"] == got.metrics["replay/limit"] == 4
    assert got.metrics["replay/violations"] == 0
    assert got.result.hist["replay/staleness"]["counts"] == [0, 0, 0, 0, 4]
    assert undocumented(got.metrics) == []
    assert not any(name.startswith(REPLAY) for name in alone.metrics)


def test_their_own_bound_is_checked(model: Path) -> None:
    samples = batch()
    newer = [replace(t, header=replace(t.header, version_min=Version(0, 2))) for t in samples[8:10]]
    mixed = [*samples[:8], *newer, *samples[10:]]
    got = capture(config(max_staleness=3), model, mixed, version=V5, fresh=8)
    assert got.result.dropped == tuple(t.header.id for t in samples[10:])
    assert (got.metrics["replay/samples"], got.metrics["replay/violations"]) == (2, 2)
    assert got.metrics["staleness/violations"] == 0
    want = capture(config(max_staleness=3), model, mixed[:10], version=V5, fresh=8)
    for name, value in want.arrays.items():
        np.testing.assert_array_equal(got.arrays[name], value)
    with pytest.raises(StalenessError, match=r"4 of 4 samples exceed replay\.max_staleness=3"):
        capture(config(3, on_stale="raise"), model, samples, version=V5, fresh=8)


def test_a_fresh_sample_is_not_spared_by_the_bound_of_replay(model: Path) -> None:
    samples = batch()
    late = replace(samples[0], header=replace(samples[0].header, version_min=Version(0, 2)))
    got = capture(config(), model, [late, *samples[1:]], version=V5, fresh=8)
    assert got.result.dropped == (late.header.id,)
    assert got.metrics["staleness/violations"] == 1
