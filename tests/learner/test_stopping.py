"""Stop rules: the reward that is enough, the loss that is lost."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.schema import Config
from asyncrl.learner.stopping import StopRules


def rules(**stop: float | None) -> StopRules:
    return StopRules(Config.model_validate({"stop": stop}))


def healthy(reward: float) -> dict[str, float]:
    return {
        "reward/mean": reward, "loss/tokens": 9.0, "loss/policy": 0.1, "loss/grad_norm": 1.0,
        "loss/skipped": 0.0,
    }  # fmt: skip


NO_SAMPLE = {"loss/tokens": 0.0, "loss/skipped": 0.0, "staleness/violations": 4.0}


def test_nothing_ends_a_healthy_run_by_default() -> None:
    r = rules()
    assert [r.after_batch(k, healthy(1.0)) for k in range(1, 50)] == [None] * 49


@given(
    rewards=st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), max_size=30),
    window=st.integers(1, 5),
    enough=st.sampled_from([0.25, 0.5, 0.7, 1.0]),
)
def test_the_mean_of_the_last_batches_ends_the_run(
    rewards: list[float], window: int, enough: float
) -> None:
    r = rules(reward=enough, reward_batches=window)
    for k in range(1, len(rewards) + 1):
        last = rewards[max(0, k - window) : k]
        met = len(last) == window and sum(last) / window >= enough
        assert (r.after_batch(k, healthy(rewards[k - 1])) is not None) == met


def test_the_reason_says_which_batches_and_what_they_came_to() -> None:
    r = rules(reward=0.8, reward_batches=3)
    for k, reward in enumerate((0.1, 0.7, 0.8), start=1):
        assert r.after_batch(k, healthy(reward)) is None
    assert r.after_batch(4, NO_SAMPLE) is None  # says nothing about the reward
    assert r.after_batch(5, healthy(0.95)) == (
        "stop.reward=0.8: the mean reward of batches 2 to 5 is 0.8167"
    )


def test_a_reward_without_a_value_is_never_enough() -> None:
    r = rules(reward=-5.0, reward_batches=1)
    assert r.after_batch(1, healthy(math.nan)) is None
    assert r.after_batch(2, NO_SAMPLE) is None


BAD = {
    "skipped": healthy(0.0) | {"loss/skipped": 1.0},
    "skipped without a norm": {"loss/tokens": 9.0, "loss/policy": 0.1, "loss/skipped": 2.0},
    "loss left out": {"loss/tokens": 9.0, "loss/skipped": 0.0},
    "loss": healthy(0.0) | {"loss/policy": math.inf},
    "norm": healthy(0.0) | {"loss/grad_norm": math.nan},
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_losses_that_are_not_finite_end_the_run_when_they_come_in_a_row(
    bad: dict[str, float],
) -> None:
    r = rules(nonfinite_losses=3)
    for k, metrics in enumerate((bad, bad, healthy(0.0), bad, NO_SAMPLE, bad, NO_SAMPLE), start=1):
        assert r.after_batch(k, metrics) is None
    reason = r.after_batch(8, bad)
    assert reason is not None
    assert reason.startswith(
        "stop.nonfinite_losses=3: no finite loss and gradient in batches 4 to 8: lower "
        "learner.optim.lr"
    )


def test_they_do_not_when_the_rule_is_off() -> None:
    r = rules(nonfinite_losses=None)
    assert [r.after_batch(k, BAD["loss"]) for k in range(1, 20)] == [None] * 19


def test_a_batch_whose_advantages_are_all_zero_is_healthy() -> None:
    r = rules(nonfinite_losses=1)
    assert r.after_batch(1, {"loss/tokens": 9.0, "loss/policy": 0.0, "loss/skipped": 0.0}) is None


def test_they_remember_across_a_checkpoint() -> None:
    settings = {"reward": 0.5, "reward_batches": 3, "nonfinite_losses": 3}
    batches = [healthy(0.2), BAD["norm"], healthy(0.6), BAD["loss"], BAD["norm"]]
    whole, before = rules(**settings), rules(**settings)
    for k, metrics in enumerate(batches, start=1):
        want = whole.after_batch(k, metrics)
        assert before.after_batch(k, metrics) == want
        after = rules(**settings)
        after.restore(json.loads(json.dumps(before.state())))
        before = after
        assert want is None
    assert before.after_batch(6, BAD["loss"]) == whole.after_batch(6, BAD["loss"]) is not None
    for k in (7, 8):
        assert before.after_batch(k, healthy(1.0)) == whole.after_batch(k, healthy(1.0))
    assert before.state() == whole.state()


def test_the_rules_load_no_torch() -> None:
    code = "import sys, asyncrl.learner.stopping; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
