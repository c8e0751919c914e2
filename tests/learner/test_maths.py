"""The formulas against slow literal transcriptions in float64, and gradients by differences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asyncrl.config.schema import OptimConfig
from asyncrl.errors import AsyncRLError, DataError
from asyncrl.learner.advantages import Estimator, batch_advantages, group_advantages
from asyncrl.learner.corrections import (
    check_present,
    effective_sample_share,
    exp_clamped,
    k3,
    token_weight,
    weight_statistics,
)
from asyncrl.learner.losses import decoupled_ppo, token_coefficients
from asyncrl.learner.optim import apply_gradient, lr_factor, make_optimizer
from tests.helpers.tiny_model import make_trajectory

REWARDS = [0.0, 1.0, 0.25, 1.0, 0.5]


def _literal_advantage(rewards: list[float], estimator: Estimator) -> list[float]:
    n = len(rewards)
    mean = sum(rewards) / n
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (n - 1))
    if estimator == "rloo":
        return [r - (sum(rewards) - r) / (n - 1) for r in rewards]
    scale = std + 1e-6 if estimator == "grpo" else 1.0
    return [(r - mean) / scale for r in rewards]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_advantages(estimator: Estimator) -> None:
    got = group_advantages(np.array(REWARDS), estimator)
    np.testing.assert_allclose(got, _literal_advantage(REWARDS, estimator), rtol=1e-12)
    assert group_advantages(np.array([0.7]), estimator).tolist() == [0.0]
    assert group_advantages(np.full(3, 0.1), estimator).tolist() == [0.0] * 3


def test_advantages_of_a_manifest_use_what_is_kept_of_each_group() -> None:
    rng = np.random.default_rng(0)
    batch = [
        make_trajectory(rng, g, k, [3, 4], 2, reward=REWARDS[k]) for k in range(3) for g in range(2)
    ]
    manifest = [t.header for t in batch]
    got = batch_advantages(manifest, [0, 2, 4, 1, 5], "dr_grpo")  # sample 1 of group 1 is gone
    first = _literal_advantage(REWARDS[:3], "dr_grpo")
    second = _literal_advantage([REWARDS[0], REWARDS[2]], "dr_grpo")
    expected = [first[0], second[0], first[1], 0.0, first[2], second[1]]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    bad = [make_trajectory(rng, 0, 0, [3], 1, reward=math.nan).header]
    with pytest.raises(DataError, match="nan"):
        batch_advantages(bad, [0], "grpo")


def _random_tokens(n: int = 400) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(1)

    def draw(scale: float) -> torch.Tensor:
        return torch.randn(n, generator=g, dtype=torch.float64) * scale

    prox = draw(1.0) - 3
    return {
        "logprobs": prox + draw(0.3),
        "prox": prox,
        "behaviour": prox + draw(0.5),
        "advantage": draw(1.0),
        "coefficient": torch.rand(n, generator=g, dtype=torch.float64),
    }


def _literal_loss(
    t: dict[str, torch.Tensor], low: float, high: float, dual: float | None, cap: float | None
) -> float:
    total = 0.0
    for k in range(len(t["prox"])):
        values = {name: float(tensor[k]) for name, tensor in t.items()}
        r = math.exp(values["logprobs"] - values["prox"])
        w = math.exp(values["prox"] - values["behaviour"])
        w = w if cap is None else min(w, cap)
        a = values["advantage"]
        s = min(r * a, min(max(r, 1 - low), 1 + high) * a)
        if dual is not None and a < 0:
            s = max(s, dual * a)
        total -= values["coefficient"] * w * s
    return total


@pytest.mark.parametrize("dual", [None, 1.2])
@pytest.mark.parametrize("cap", [None, 1.5])
def test_decoupled_ppo(dual: float | None, cap: float | None) -> None:
    t = _random_tokens()

    def loss(logprobs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        w = token_weight(t["prox"], t["behaviour"], cap)
        a, c = t["advantage"], t["coefficient"]
        return decoupled_ppo(logprobs, t["prox"], w, a, c, 0.2, 0.28, dual)

    theta = t["logprobs"].clone().requires_grad_()
    value, clipped = loss(theta)
    assert value.item() == pytest.approx(_literal_loss(t, 0.2, 0.28, dual, cap), rel=1e-12)
    assert 0 < clipped.sum() < len(clipped)
    value.backward()  # type: ignore[no-untyped-call]
    assert theta.grad is not None
    step = 1e-6
    for k in range(0, len(theta), 7):
        moved = t["logprobs"].clone()
        moved[k] += step
        up = loss(moved)[0].item()
        moved[k] -= 2 * step
        slope = (up - loss(moved)[0].item()) / (2 * step)
        assert theta.grad[k].item() == pytest.approx(slope, abs=1e-6)


def test_log_ratios_beyond_the_clamp_have_no_gradient() -> None:
    x = torch.tensor([-25.0, -1.0, 25.0], requires_grad=True)
    exp_clamped(x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([0.0, math.exp(-1), 0.0]))


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_coefficients(aggregation: Any) -> None:
    sample = np.array([0, 0, 0, 2, 2, 3])
    counted = np.array([1, 0, 1, 1, 1, 0], bool)
    got = token_coefficients(aggregation, sample, counted, batch_tokens=10, batch_sequences=5)
    if aggregation == "token-mean":
        expected = [0.1, 0, 0.1, 0.1, 0.1, 0]
    else:
        expected = [1 / 10, 0, 1 / 10, 1 / 10, 1 / 10, 0]
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert token_coefficients(aggregation, sample[:0], counted[:0], 0, 0).tolist() == []


def test_weight_statistics() -> None:
    log_w = np.array([0.0, math.log(2), math.log(4), -1.0])
    w = [math.exp(v) for v in log_w]
    got = weight_statistics(log_w, truncate=2.5)
    assert got["ess_frac"] == pytest.approx(sum(w) ** 2 / (4 * sum(v * v for v in w)))
    assert got["chi2"] == pytest.approx(sum(v * v for v in w) / 4 - 1)
    assert got["clip_frac"] == 0.25
    assert got["ratio_raw/max"] == pytest.approx(4)
    assert got["ratio_used/max"] == 2.5
    assert got["ratio_used/mean"] == pytest.approx(sum(min(v, 2.5) for v in w) / 4)
    assert got["clamped"] == 0
    assert weight_statistics(np.array([30.0, 0.0]), 2.0)["clamped"] == 1
    assert effective_sample_share(np.array([900.0, 0.0])) == 0.5  # no overflow, before any clamp
    assert k3(log_w) == pytest.approx(sum(v - 1 - math.log(v) for v in w) / 4)


def test_the_truncated_weight() -> None:
    prox = torch.tensor([0.0, 0.0, 0.0], requires_grad=True)
    behaviour = torch.tensor([-math.log(3.0), math.log(3.0), -50.0])
    weight = token_weight(prox, behaviour, 2.0)
    assert not weight.requires_grad
    torch.testing.assert_close(weight, torch.tensor([2.0, 1 / 3, 2.0]))
    torch.testing.assert_close(token_weight(prox, behaviour, None)[0], torch.tensor(3.0))


def test_missing_behaviour_logprobs_are_refused_above_one_half() -> None:
    check_present(missing=5, total=10)
    with pytest.raises(AsyncRLError, match="6 of 10 behaviour log-probabilities"):
        check_present(missing=6, total=10)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedule(schedule: Any) -> None:
    config = OptimConfig(schedule=schedule, warmup_steps=4)
    got = [lr_factor(k, config, 12) for k in range(1, 14)]
    assert got[:4] == [0.25, 0.5, 0.75, 1.0]
    decay = {
        "constant": lambda x: 1.0,
        "linear": lambda x: 1 - x,
        "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    }[schedule]
    np.testing.assert_allclose(got[4:], [decay(i / 8) for i in range(9)], atol=1e-12)


def test_optimizer_decays_matrices_only_and_clips() -> None:
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(model, OptimConfig(weight_decay=0.1, lr=0.5))
    decays = {p.ndim: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert decays == {2: 0.1, 1: 0.0}
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    applied = apply_gradient(sgd, lr=1.0, grad_clip=0.5)
    assert applied.grad_norm == pytest.approx(2 * math.sqrt(8))
    moved = torch.cat(
        [(b - p.detach()).ravel() for b, p in zip(before, model.parameters(), strict=True)]
    )
    assert moved.norm().item() == pytest.approx(0.5)
    assert all(p.grad is None for p in model.parameters())


def test_a_gradient_that_is_not_finite_is_skipped() -> None:
    model = nn.Linear(3, 2)
    optimizer = make_optimizer(model, OptimConfig())
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.full_like(p, math.inf)
    assert apply_gradient(optimizer, 1e-3, 1.0).skipped
    assert all(torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
