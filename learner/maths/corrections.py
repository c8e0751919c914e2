"""The behaviour weight w = pi_prox / mu: what is made of it, and what it says about the data.

mu is the engine at the moment of sampling, prox the learner's policy at the start of the update,
theta the one being trained. Everything is per token, logs are natural, ratios are float64. Nothing
here but `exp_clamped` and `log_ratio` has a gradient.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.config.learning import CorrectionConfig
from asyncrl.errors import AsyncRLError
from asyncrl.learner.maths.segments import segment_count, segment_mean, segment_sum

Bools = npt.NDArray[np.bool_]
Floats64 = npt.NDArray[np.float64]
Level = Literal["token", "sequence-product", "sequence-geometric"]

LOG_RATIO_CLAMP = 20.0
"""A log-ratio beyond this is cut off before exp, with gradient 0."""

MAX_MISSING = 0.5
"""Largest share of a batch's behaviour log-probabilities that may be missing."""


class Weight(NamedTuple):
    """What multiplies the surrogate of each token."""

    weight: Tensor
    """[N] float64; 0 where a mask rejects."""
    kept: Tensor
    """[N] bool: False where a mask rejects."""
    lowered: Tensor
    """[N] bool: True where the weight was truncated."""


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Difference of two log-probabilities, [N] float64; differentiable."""
    return numerator.double() - denominator.double()


def exp_clamped(log_ratio: Tensor) -> Tensor:
    """exp of the log-ratio clamped to +-LOG_RATIO_CLAMP; the gradient beyond is 0."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


@torch.no_grad()
def log_weight(level: Level, prox: Tensor, mu: Tensor, sample: Tensor, counted: Tensor) -> Tensor:
    """log w of each token at a level, before any clamp, [N] float64.

    * token: log pi_prox - log mu;
    * sequence-product: its sum over the sequence, the log-ratio of whole responses;
    * sequence-geometric: its mean over the sequence.

    A token that does not count has no influence, and 0 at token level.

    Args:
        level: `learner.correction.level`.
        prox: [N] log pi_prox.
        mu: [N] log mu; any value where it is missing.
        sample: [N] int64 sequence number of each token.
        counted: [N] bool, False where log mu is missing.
    """
    of_token = torch.where(counted, log_ratio(prox, mu), 0.0)
    if level == "sequence-product":
        return segment_sum(of_token, sample, segment_count(sample))[sample]
    if level == "sequence-geometric":
        return segment_mean(of_token, counted, sample, segment_count(sample))[sample]
    return of_token


@torch.no_grad()
def behaviour_weight(
    config: CorrectionConfig, prox: Tensor, mu: Tensor, sample: Tensor, counted: Tensor
) -> Weight:
    """sg(w), truncated or masked as the configuration says.

    truncate is min(w, C) (truncated importance sampling), mask is w within [a, b] and 0 outside
    (at token level IcePop); at a sequence level, all tokens of a sequence share one w. M2PO and
    OPSM are apart.

    Args:
        config: `learner.correction`.
        prox: [N] log pi_prox.
        mu: [N] log mu; any value where it is missing.
        sample: [N] int64 sequence number of each token.
        counted: [N] bool, False where log mu is missing.
    """
    everything = torch.ones_like(counted)
    if config.level == "off":
        return Weight(torch.ones_like(prox, dtype=torch.float64), everything, ~everything)
    weight = exp_clamped(log_weight(config.level, prox, mu, sample, counted))
    low, high = config.bounds
    if config.action == "truncate":
        return Weight(weight.clamp(max=high), everything, weight > high)
    if config.action == "none":
        return Weight(weight, everything, ~everything)
    kept = (weight >= low) & (weight <= high)
    return Weight(torch.where(kept, weight, 0.0), kept, ~everything)


def m2po_threshold(log_rho: Floats64, tau: float) -> float:
    """Where M2PO's mask begins: tokens with |log rho| at or over this are masked.

    Leaves out the tokens that deviate most until the mean of (log rho)^2 over the others is at most
    tau (arXiv 2510.01161), over all tokens, whatever their advantage; inf if nothing is to be
    masked. The order of the tokens does not matter, and equal ones are masked together. Compare the
    very numbers given here: others, rounded otherwise, may fall on the wrong side.

    Args:
        log_rho: [tokens of the batch, over all ranks] log(pi_theta/mu) before the update, which is
            log(pi_prox/mu).
        tau: bound of the second moment.
    """
    sizes = np.sort(np.abs(log_rho))
    moments = np.cumsum(sizes**2) / np.arange(1, len(sizes) + 1)
    over = np.flatnonzero(moments > tau)
    return float(sizes[over[0]]) if len(over) else math.inf


@torch.no_grad()
def opsm_keep(
    theta: Tensor, mu: Tensor, advantage: Tensor, sample: Tensor, counted: Tensor, delta: float
) -> Tensor:
    """False for the tokens of sequences that off-policy sequence masking rejects, [N] bool.

    Rejected is A < 0 where the mean of log(mu/pi_theta) over the sequence is over delta: what went
    wrong, and is no longer what the policy does (DeepSeek-V3.2).

    Args:
        theta: [N] log pi_theta.
        mu: [N] log mu; any value where it is missing.
        advantage: [N] A.
        sample: [N] int64 sequence number of each token.
        counted: [N] bool, False where log mu is missing.
        delta: bound of the mean.
    """
    away = segment_mean(log_ratio(mu, theta), counted, sample, segment_count(sample))
    return ~((advantage < 0) & (away[sample] > delta))


def check_present(missing: int, total: int) -> None:
    """Refuse a batch in which most behaviour log-probabilities are not finite.

    Raises:
        AsyncRLError: with the numbers and what to look at.
    """
    if missing > MAX_MISSING * total:
        raise AsyncRLError(
            f"{missing} of {total} behaviour log-probabilities of the batch are not finite, so its "
            "importance weights mean nothing: check that the engine returns log-probabilities of "
            "the sampled tokens (logprobs_mode=processed_logprobs) and that its weights are finite"
        )


def weight_statistics(
    log_weight: Floats64, used: Floats64, kept: Bools, lowered: Bools
) -> dict[str, float]:
    """Diagnostics of the weights of at least one token.

    `ess_frac`, `chi2` and `ratio_raw/*` are of the raw weights, before any clamp: ESS is
    (sum w)^2 / (n sum w^2), a share of n; chi2 is E_mu[w^2] - 1. `ratio_used/*` are of what
    multiplied the loss. `mask_frac` is the share rejected, `clip_frac` the share of the rest whose
    weight was lowered, `clamped` the number of log-weights beyond LOG_RATIO_CLAMP.

    Args:
        log_weight: [n] log w of each token.
        used: [n] weights in use, 0 where masked.
        kept: [n] False where masked.
        lowered: [n] True where truncated.

    >>> weight_statistics(np.zeros(4), np.ones(4), np.ones(4, bool), np.zeros(4, bool))["ess_frac"]
    1.0
    """
    out = {"ess_frac": effective_sample_share(log_weight)}
    # An overflow to inf is what the raw weight is; the learner writes no metric that isn't finite.
    with np.errstate(over="ignore", invalid="ignore"):
        raw = np.exp(log_weight)
        out["chi2"] = float(np.mean(raw**2) - 1)
        out |= _spread("ratio_raw", raw, {"p05": 0.05, "p50": 0.5, "p95": 0.95, "p99": 0.99})
    out |= _spread("ratio_used", used, {"p95": 0.95})
    out["clip_frac"] = float(lowered[kept].mean()) if kept.any() else 0.0
    out["mask_frac"] = float(np.mean(~kept))
    out["clamped"] = float(np.sum(np.abs(log_weight) > LOG_RATIO_CLAMP))
    return out


def _spread(name: str, values: Floats64, quantiles: dict[str, float]) -> dict[str, float]:
    return {
        f"{name}/mean": float(values.mean()),
        **{f"{name}/{stat}": float(np.quantile(values, q)) for stat, q in quantiles.items()},
        f"{name}/max": float(values.max()),
    }


def effective_sample_share(log_weight: Floats64) -> float:
    """(sum w)^2 / (n sum w^2), between 1/n and 1; scale-free, hence exact for any log-weights."""
    scaled = np.exp(log_weight - log_weight.max())
    return float(scaled.sum() ** 2 / (len(scaled) * (scaled**2).sum()))


def k3(log_weight: Floats64) -> float:
    """Estimate of KL(mu || prox) from tokens of mu: mean of w - 1 - log w, never negative."""
    with np.errstate(over="ignore"):
        return float(np.mean(np.expm1(log_weight) - log_weight))
