"""The optimizer: groups, schedule, clipping, and what it leaves alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from asyncrl.config.learning import CriticConfig, LearnerConfig, OptimConfig
from asyncrl.learner.policy.optim import (
    Trainable,
    apply_gradient,
    ess_scale,
    lr_factor,
    make_optimizer,
)


class Model:
    """A policy and a critic of one linear layer each."""

    def __init__(self, *, critic: bool = True) -> None:
        torch.manual_seed(0)
        policy, value = nn.Linear(3, 2), nn.Linear(3, 1)
        self.trainable = Trainable(
            dict(policy.named_parameters()), dict(value.named_parameters()) if critic else {}
        )

    def parameters(self) -> list[nn.Parameter]:
        return [p for part in self.trainable for p in part.values()]

    def copy(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.parameters()]


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


@pytest.mark.parametrize(
    ("share", "ref", "expected"),
    [(0.09, 1.0, 0.3), (0.2, 0.8, 0.5), (0.8, 0.8, 1.0), (1.0, 0.5, 1.0), (math.nan, 0.5, 1.0)],
)
def test_ess_scale(share: float, ref: float, expected: float) -> None:
    assert ess_scale(share, ref) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("critic_lr", [None, 0.25])
def test_groups_have_their_own_rates_and_matrices_decay(critic_lr: float | None) -> None:
    model = Model()
    optim = OptimConfig(weight_decay=0.1, lr=0.5)
    optimizer = make_optimizer(model, LearnerConfig(optim=optim, critic=CriticConfig(lr=critic_lr)))
    of_critic = {id(p) for p in model.trainable.critic.values()}
    seen = []
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    apply_gradient(optimizer, 0.5, None)
    for group in optimizer.param_groups:
        for p in group["params"]:
            critic = id(p) in of_critic
            seen.append(id(p))
            assert group["weight_decay"] == (0.1 if p.ndim == 2 else 0.0)
            assert group["lr"] == 0.5 * ((critic_lr or 0.5) if critic else 0.5)
            assert group["fused"]
    assert sorted(seen) == sorted(id(p) for p in model.parameters())
    assert len(make_optimizer(Model(critic=False), LearnerConfig()).param_groups) == 2


def test_policy_and_critic_are_clipped_by_one_norm() -> None:
    model = Model()
    optimizer = torch.optim.SGD(
        [{"params": list(part.values()), "initial_lr": 2.0} for part in model.trainable], lr=7.0
    )
    before = model.copy()
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    applied = apply_gradient(optimizer, 0.5, grad_clip=0.5)
    assert applied.grad_norm == pytest.approx(2 * math.sqrt(8 + 4))
    moved = [b - p.detach() for b, p in zip(before, model.parameters(), strict=True)]
    assert torch.cat([m.ravel() for m in moved]).norm().item() == pytest.approx(0.5)
    assert len({round(m.abs().max().item(), 6) for m in moved}) == 1  # one factor for all
    assert all(p.grad is None for p in model.parameters())


def test_a_small_gradient_is_not_clipped() -> None:
    model = Model()
    optimizer = torch.optim.SGD([{"params": model.parameters(), "initial_lr": 1.0}], lr=1.0)
    before = model.copy()
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.01)
    apply_gradient(optimizer, 1.0, grad_clip=0.5)
    for old, p in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(old - p.detach(), torch.full_like(p, 0.01))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("part", [0, 1])
def test_a_gradient_that_is_not_finite_is_skipped_whole(bad: float, part: int) -> None:
    model = Model()
    optimizer = make_optimizer(model, LearnerConfig())
    before = model.copy()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    broken = next(iter(model.trainable[part].values()))
    assert broken.grad is not None
    broken.grad[0, 0] = bad
    applied = apply_gradient(optimizer, 1e-3, 1.0)
    assert applied.skipped
    assert not math.isfinite(applied.grad_norm)
    assert all(torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())


def test_parameters_without_a_gradient_keep_weights_and_moments() -> None:
    """While a critic warms up: no decay either, and no step from old moments."""
    model = Model()
    config = LearnerConfig(optim=OptimConfig(lr=0.1, weight_decay=0.5))
    optimizer = make_optimizer(model, config)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    apply_gradient(optimizer, 1.0, None)
    policy = list(model.trainable.policy.values())
    before = [p.detach().clone() for p in policy]
    moments = [optimizer.state[p]["exp_avg"].clone() for p in policy]
    critic = [p.detach().clone() for p in model.trainable.critic.values()]
    for p in model.trainable.critic.values():
        p.grad = torch.ones_like(p)
    apply_gradient(optimizer, 1.0, None)
    for p, old, moment in zip(policy, before, moments, strict=True):
        assert torch.equal(p, old)
        assert torch.equal(optimizer.state[p]["exp_avg"], moment)
    for p, old in zip(model.trainable.critic.values(), critic, strict=True):
        assert not torch.equal(p, old)


def test_nothing_to_apply_is_no_step() -> None:
    model = Model()
    before = model.copy()
    applied = apply_gradient(make_optimizer(model, LearnerConfig()), 1.0, 1.0)
    assert (applied.grad_norm, applied.skipped) == (0.0, False)
    assert all(torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True))
