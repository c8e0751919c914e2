"""Group-relative advantages against literal transcriptions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from asyncrl.errors import DataError
from asyncrl.learner.maths.advantages import (
    Estimator,
    batch_advantages,
    group_advantages,
)
from tests.helpers.tiny_model import make_trajectory

REWARDS = [0.0, 1.0, 0.25, 1.0, 0.5]
ESTIMATORS = ["grpo", "dr_grpo", "rloo"]


def _literal_advantage(rewards: list[float], estimator: Estimator) -> list[float]:
    n = len(rewards)
    mean = sum(rewards) / n
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (n - 1))
    if estimator == "rloo":
        return [r - (sum(rewards) - r) / (n - 1) for r in rewards]
    scale = std + 1e-6 if estimator == "grpo" else 1.0
    return [(r - mean) / scale for r in rewards]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_of_a_group(estimator: Estimator) -> None:
    got = group_advantages(np.array(REWARDS), estimator)
    np.testing.assert_allclose(got, _literal_advantage(REWARDS, estimator), rtol=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_group_of_one_and_a_group_without_variance_have_advantage_0(estimator: Estimator) -> None:
    assert group_advantages(np.array([0.7]), estimator).tolist() == [0.0]
    assert group_advantages(np.full(3, 0.1), estimator).tolist() == [0.0] * 3
    assert group_advantages(np.full(7, 1e9 / 3), estimator).tolist() == [0.0] * 7


def test_a_manifest_uses_what_is_kept_of_each_group_and_the_shaped_rewards() -> None:
    rng = np.random.default_rng(0)
    batch = [make_trajectory(rng, g, k, [3, 4], 2, reward=9.0) for k in range(3) for g in range(2)]
    manifest = [t.header for t in batch]
    rewards = np.repeat(REWARDS[:3], 2)
    got = batch_advantages(rewards, manifest, [0, 2, 4, 1, 5], "dr_grpo")  # sample 1:1 is gone
    first = _literal_advantage(REWARDS[:3], "dr_grpo")
    second = _literal_advantage([REWARDS[0], REWARDS[2]], "dr_grpo")
    expected = [first[0], second[0], first[1], 0.0, first[2], second[1]]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_a_reward_that_is_not_finite_is_refused_where_it_is_trained() -> None:
    rng = np.random.default_rng(0)
    manifest = [make_trajectory(rng, 0, k, [3], 1).header for k in range(4)]
    rewards = np.array([1.0, math.nan, 0.0, -math.inf])
    assert np.isfinite(batch_advantages(rewards, manifest, [0, 2], "grpo")).all()
    with pytest.raises(DataError, match=r"'tiny', 0, 0, 1\) is nan"):
        batch_advantages(rewards, manifest, [0, 1, 2], "grpo")
    with pytest.raises(DataError, match=r"'tiny', 0, 0, 3\) is -inf"):
        batch_advantages(rewards, manifest, [3, 0], "grpo")
