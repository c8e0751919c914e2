"""Policy losses, each a pure function of flat tokens.

    loss of a microbatch = - sum over tokens of coefficient * weight * kept * surrogate

with the coefficient from aggregation.py, weight and kept from corrections.py.
mu is the engine at the moment of sampling, prox the policy before the update, theta the one being
trained; r = pi_theta/pi_prox, rho = pi_theta/mu, A the advantage, sg stops the gradient.

Everything is per token, [N], logs in nats. Ratios are float64: beside the model it costs nothing,
and it keeps sums independent of the way a batch is cut. A token that does not count must come with
finite numbers and coefficient 0.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from asyncrl.config.learning import DEFAULT_CAP, LossConfig
from asyncrl.learner.maths.corrections import exp_clamped, log_ratio
from asyncrl.learner.maths.segments import segment_count, segment_mean

Divergence = Literal["tv", "kl"]


class Term(NamedTuple):
    """What a policy loss says of each token."""

    surrogate: Tensor
    """[N] float64, to be maximised; its gradient is the loss's meaning, not always its value."""
    clipped: Tensor
    """[N] bool: True where a clip, cap or mask of the loss decides the surrogate."""


def policy_term(
    config: LossConfig,
    theta: Tensor,
    prox: Tensor,
    mu: Tensor,
    advantage: Tensor,
    sample: Tensor,
    counted: Tensor,
) -> Term:
    """The loss that the configuration names.

    Args:
        config: `learner.loss`.
        theta: [N] log pi_theta, with gradient.
        prox: [N] log pi_prox.
        mu: [N] log mu; where it is missing, log pi_prox.
        advantage: [N] A.
        sample: [N] int64 sequence number of each token.
        counted: [N] bool, False where a token carries no loss.
    """
    low, high = config.clips
    match config.policy:
        case "ppo":
            return ppo(theta, prox, advantage, low, high, config.dual_clip)
        case "gspo":
            return gspo(theta, prox, advantage, sample, counted, low, high)
        case "cispo":
            return cispo(theta, prox, advantage, low, high)
        case "aipo":
            return aipo(theta, mu, advantage, DEFAULT_CAP if config.cap is None else config.cap)
        case "topr":
            return topr(theta, mu, advantage)
        case "dppo-tv":
            return dppo(theta, mu, advantage, low, high, "tv")
        case "dppo-kl":
            return dppo(theta, mu, advantage, low, high, "kl")
        case "reinforce":
            return reinforce(theta, advantage)


def ppo(
    theta: Tensor,
    prox: Tensor,
    advantage: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Term:
    """min(r A, clip(r, 1 - e, 1 + e_hi) A) (arXiv 1707.06347; asymmetric: 2503.14476).

    With the weight sg(pi_prox/mu) in front this is decoupled PPO (AReaL, arXiv 2505.24298).

    Args:
        theta: [N] log pi_theta, with gradient.
        prox: [N] log pi_prox.
        advantage: [N] A.
        clip_low: e.
        clip_high: e_hi.
        dual_clip: c, above 1: the surrogate of A < 0 is at least c A (arXiv 1912.09729).
    """
    ratio = exp_clamped(log_ratio(theta, prox.detach()))
    plain = ratio * advantage
    surrogate = torch.minimum(plain, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    if dual_clip is not None:
        bounded = torch.maximum(surrogate, dual_clip * advantage)
        surrogate = torch.where(advantage < 0, bounded, surrogate)
    return Term(surrogate, (surrogate != plain).detach())


def gspo(
    theta: Tensor,
    prox: Tensor,
    advantage: Tensor,
    sample: Tensor,
    counted: Tensor,
    clip_low: float,
    clip_high: float,
) -> Term:
    """min(s A, clip(s, 1 - e, 1 + e_hi) A), s = exp(mean over the sequence of log r).

    Every token carries its sequence's term, so that the mean over tokens, then over sequences, is
    the mean of the paper (arXiv 2507.18071).

    Args:
        theta: [N] log pi_theta, with gradient.
        prox: [N] log pi_prox.
        advantage: [N] A, the same for all tokens of a sequence.
        sample: [N] int64 sequence number of each token.
        counted: [N] bool; the mean is over the counted tokens.
        clip_low: e.
        clip_high: e_hi.
    """
    per_token = log_ratio(theta, prox.detach())
    mean = segment_mean(per_token, counted, sample, segment_count(sample))
    ratio = exp_clamped(mean)[sample]
    plain = ratio * advantage
    surrogate = torch.minimum(plain, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    return Term(surrogate, (surrogate != plain).detach())


def cispo(
    theta: Tensor, prox: Tensor, advantage: Tensor, clip_low: float, clip_high: float
) -> Term:
    """sg(clip(r, 1 - e, 1 + e_hi)) A log pi_theta (arXiv 2506.13585).

    The clip bounds the weight and leaves no token without gradient. With e >= 1, as in the paper,
    there is no lower bound.

    Args:
        theta: [N] log pi_theta, with gradient.
        prox: [N] log pi_prox.
        advantage: [N] A.
        clip_low: e.
        clip_high: e_hi.
    """
    ratio = exp_clamped(log_ratio(theta, prox).detach())
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return Term(weight * advantage * theta, weight != ratio)


def aipo(theta: Tensor, mu: Tensor, advantage: Tensor, cap: float) -> Term:
    """sg(min(rho, C)) A log pi_theta (LlamaRL, arXiv 2505.24034).

    Args:
        theta: [N] log pi_theta, with gradient.
        mu: [N] log mu.
        advantage: [N] A.
        cap: C.
    """
    rho = exp_clamped(log_ratio(theta, mu).detach())
    return Term(rho.clamp(max=cap) * advantage * theta, rho > cap)


def topr(theta: Tensor, mu: Tensor, advantage: Tensor) -> Term:
    """A log pi_theta, times sg(min(rho, 1)) where A < 0 (tapered, arXiv 2503.14286).

    The paper's rho is that of the whole response; here, as for every loss but GSPO, it is the
    token's, which does not vanish with length.

    Args:
        theta: [N] log pi_theta, with gradient.
        mu: [N] log mu.
        advantage: [N] A.
    """
    rho = exp_clamped(log_ratio(theta, mu).detach())
    negative = advantage < 0
    weight = torch.where(negative, rho.clamp(max=1.0), 1.0)
    return Term(weight * advantage * theta, negative & (rho > 1))


def reinforce(theta: Tensor, advantage: Tensor) -> Term:
    """A log pi_theta: no ratio, so only the behaviour weight corrects for mu.

    Args:
        theta: [N] log pi_theta, with gradient.
        advantage: [N] A.
    """
    return Term(advantage * theta.double(), torch.zeros_like(advantage, dtype=torch.bool))


def dppo(
    theta: Tensor,
    mu: Tensor,
    advantage: Tensor,
    low: float,
    high: float,
    divergence: Divergence = "tv",
) -> Term:
    """rho A, without the tokens that already moved too far in A's direction (arXiv 2602.04879).

    Too far is A > 0, rho > 1 and D > high, or A < 0, rho < 1 and D > low, with D the divergence
    of `two_way_divergence`: a rare token's ratio may be large while its probability hardly moved.

    Args:
        theta: [N] log pi_theta, with gradient.
        mu: [N] log mu.
        advantage: [N] A.
        low: largest divergence where A < 0.
        high: largest divergence where A > 0.
        divergence: which one.
    """
    log_rho = log_ratio(theta, mu.detach())
    moved = two_way_divergence(theta, mu, divergence)
    up = (advantage > 0) & (log_rho > 0) & (moved > high)
    down = (advantage < 0) & (log_rho < 0) & (moved > low)
    masked = up | down
    return Term(torch.where(masked, 0.0, exp_clamped(log_rho) * advantage), masked)


@torch.no_grad()
def two_way_divergence(theta: Tensor, mu: Tensor, divergence: Divergence) -> Tensor:
    """Divergence of the distributions over {the sampled token, any other}, [N] float64.

    * tv: total variation, |mu - pi_theta| of the token;
    * kl: KL(mu || pi_theta).

    Args:
        theta: [N] log pi_theta.
        mu: [N] log mu.
        divergence: which one.
    """
    log_q, log_p = theta.double(), mu.double()
    if divergence == "tv":
        return (log_p.exp() - log_q.exp()).abs()
    rest_p, rest_q = ((-torch.expm1(x)).clamp(min=0) for x in (log_p, log_q))
    # xlogy(0, 0) = 0: nothing is left over where a token has probability 1
    of_rest = torch.xlogy(rest_p, rest_p) - torch.xlogy(rest_p, rest_q)
    return log_p.exp() * (log_p - log_q) + of_rest
