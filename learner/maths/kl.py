"""Estimates of KL(pi_theta || pi_ref) from sampled tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from asyncrl.learner.maths.corrections import exp_clamped, log_ratio

Estimator = Literal["k1", "k2", "k3", "k3-unbiased"]


def kl_estimate(
    estimator: Estimator, theta: Tensor, ref: Tensor, mu: Tensor, clamp: float | None = None
) -> Tensor:
    """An estimate per token, [N] float64, with gradient to `theta`.

    With d = log pi_theta - log pi_ref, of tokens sampled from mu:

    * k1: d;
    * k2: d^2 / 2;
    * k3: exp(-d) - 1 + d, never negative;
    * k3-unbiased: rho k3 with rho = pi_theta/mu, whose expectation under mu is the KL and whose
      gradient, rho's included, is the KL's gradient (DeepSeek-V3.2). The others are unbiased only
      where mu = pi_theta, and their gradient only for k2.

    rho is clamped as every importance ratio is; d is not, unless by `clamp`.

    Args:
        estimator: which of them.
        theta: [N] log pi_theta, in nats.
        ref: [N] log pi_ref.
        mu: [N] log mu; only k3-unbiased uses it.
        clamp: largest absolute value of an estimate, with gradient 0 beyond; None is off.
    """
    d = log_ratio(theta, ref.detach())
    if estimator == "k1":
        value = d
    elif estimator == "k2":
        value = d.square() / 2
    else:
        value = torch.expm1(-d) + d
        if estimator == "k3-unbiased":
            value = exp_clamped(log_ratio(theta, mu.detach())) * value
    return value if clamp is None else value.clamp(-clamp, clamp)
