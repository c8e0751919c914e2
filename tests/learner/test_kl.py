"""KL estimates per token against their formulas, and what they are estimates of."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from asyncrl.learner.maths.kl import Estimator, kl_estimate
from tests.learner.flat_tokens import CASES

ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3", "k3-unbiased")
BOTH = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])


def _literal(
    estimator: str, theta: float, ref: float, mu: float, clamp: float | None = None
) -> float:
    d = theta - ref
    rho = math.exp(min(max(theta - mu, -20), 20))
    value = {
        "k1": d,
        "k2": d * d / 2,
        "k3": math.expm1(-d) + d,  # exp(-d) - 1 + d, to the last digit near 0
        "k3-unbiased": rho * (math.expm1(-d) + d),
    }[estimator]
    return value if clamp is None else min(max(value, -clamp), clamp)


@BOTH
@pytest.mark.parametrize("clamp", [None, 0.3])
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient(
    case: str, estimator: Estimator, clamp: float | None, dtype: torch.dtype
) -> None:
    t = CASES[case].to(dtype)
    theta = t.theta.clone().requires_grad_()
    got = kl_estimate(estimator, theta, t.prox, t.mu, clamp)
    rows = list(zip(t.theta.tolist(), t.prox.tolist(), t.mu.tolist(), strict=True))
    values = [_literal(estimator, *row, clamp) for row in rows]
    expected = torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-15)
    (grad,) = torch.autograd.grad(got.sum(), theta)
    assert grad.dtype == dtype
    step = 1e-5
    for k in range(0, len(rows), max(1, len(rows) // 40)):
        new, ref, mu = rows[k]
        up = _literal(estimator, new + step, ref, mu, clamp)
        down = _literal(estimator, new - step, ref, mu, clamp)
        rounding = 1e-8 + 1e-15 * abs(values[k]) / step
        assert grad[k].item() == pytest.approx((up - down) / (2 * step), rel=1e-6, abs=rounding)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_same_policy_has_no_divergence(estimator: Estimator) -> None:
    t = CASES["4096 tokens"]
    theta = t.theta.clone().requires_grad_()
    value = kl_estimate(estimator, theta, t.theta, t.mu)
    assert not value.any()
    (grad,) = torch.autograd.grad(value.sum(), theta)
    assert bool(grad.any()) == (estimator == "k1")


def _distributions() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, generator=g, dtype=torch.float64)
    return logits[0].requires_grad_(), logits[1].log_softmax(0), logits[2].log_softmax(0)


def _exact(logits: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    """KL(theta || ref) and its gradient."""
    theta = logits.log_softmax(0)
    value = (theta.exp() * (theta - ref)).sum()
    return value.detach(), torch.autograd.grad(value, logits)[0]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_expectation_under_the_policy(estimator: Estimator) -> None:
    """k1 and k3 have the KL as expectation, k2 its gradient, unbiased k3 both."""
    logits, ref, _ = _distributions()
    value, grad = _exact(logits, ref)
    theta = logits.log_softmax(0)
    estimate = (theta.detach().exp() * kl_estimate(estimator, theta, ref, theta.detach())).sum()
    (got,) = torch.autograd.grad(estimate, logits)
    assert torch.isclose(estimate, value, rtol=1e-12).item() == (estimator != "k2")
    assert torch.allclose(got, grad, rtol=1e-9) == (estimator in ("k2", "k3-unbiased"))


def test_the_unbiased_estimate_holds_under_any_behaviour_policy() -> None:
    logits, ref, mu = _distributions()
    value, grad = _exact(logits, ref)
    estimate = (mu.exp() * kl_estimate("k3-unbiased", logits.log_softmax(0), ref, mu)).sum()
    (got,) = torch.autograd.grad(estimate, logits)
    torch.testing.assert_close(estimate.detach(), value)
    torch.testing.assert_close(got, grad)


def test_estimates_are_not_clamped_unless_asked() -> None:
    theta, ref = torch.tensor([-31.0], dtype=torch.float64), torch.tensor([-1.0])
    value = kl_estimate("k3", theta.requires_grad_(), ref, ref)
    assert value.item() == pytest.approx(math.exp(30) - 31, rel=1e-12)
    bounded = kl_estimate("k3", theta, ref, ref, clamp=5.0)
    assert bounded.item() == 5.0
    (grad,) = torch.autograd.grad(bounded.sum(), theta)
    assert grad.item() == 0
    assert kl_estimate("k1", theta, ref, ref, clamp=5.0).item() == -5.0
