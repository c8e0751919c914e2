"""Returns, advantages and value targets of tokens: pure functions of flat packed tensors.

    rewards of sequences ─► token_rewards ─┬─► discounted_returns ─► whiten      (reinforce++)
                              minus KL     ├─► gae ─────► advantages, value targets
                                           └─► vtrace ──► advantages, value targets

[N] are the policy tokens of a microbatch: those of a sequence lie together and in order, and what
tools wrote between them is absent, so the next policy token is the next state. V_n is the value of
the state in which token n was sampled. After the last token the value is 0, also where the length
limit cut the response off: its reward judges what was written, and nothing follows.

A token without log mu is a state like any other (its log rho is 0); that it carries no loss is the
business of whoever sums the loss. Whatever is returned has no gradient. The recursions run in
float64 on the CPU; their results have the type and the device of what they were made from.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asyncrl.learner.maths.advantages import STD_EPS
from asyncrl.learner.maths.corrections import LOG_RATIO_CLAMP

NO_SPREAD = 1e-12
"""A variance below this share of the mean square is the rounding of equal float32 numbers."""


def token_rewards(sample: Tensor, rewards: Tensor, kl_penalty: Tensor | None = None) -> Tensor:
    """Reward of each token, [N]: its sequence's on the last one, minus the penalty on every one.

    Args:
        sample: [N] number of the token's sequence, an index into `rewards`.
        rewards: [Q] reward of each sequence.
        kl_penalty: [N] KL coefficient times the estimate at the token (arXiv 2501.03262).
    """
    out = rewards[sample].masked_fill(~_last(sample), 0.0)
    return out if kl_penalty is None else out - kl_penalty.detach()


def discounted_returns(reward: Tensor, sample: Tensor, gamma: float) -> Tensor:
    """G_t = sum_k gamma^k r_{t+k}, [N] from token rewards [N]; REINFORCE++ then whitens it."""
    step = _double(reward)
    out = _recursion(step, torch.full_like(step, gamma), _last(sample).cpu())
    return out.to(reward)


def gae(
    reward: Tensor, values: Tensor, sample: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438).

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = sum_k (gamma lambda)^k delta_{t+k}.

    Args:
        reward: [N] from `token_rewards`.
        values: [N] V of each token's state.
        sample: [N] number of the token's sequence.
        gamma: discount per policy token.
        lam: lambda.

    Returns:
        [N] advantages A, and [N] value targets A + V.
    """
    r, v, last = _double(reward), _double(values), _last(sample).cpu()
    delta = r + gamma * _next(v, last) - v
    advantage = _recursion(delta, torch.full_like(delta, gamma * lam), last)
    return advantage.to(values), (advantage + v).to(values)


def vtrace(
    reward: Tensor,
    values: Tensor,
    log_rho: Tensor,
    sample: Tensor,
    gamma: float,
    lam: float,
    rho_bar: float,
    c_bar: float,
    rho_bar_pg: float,
) -> tuple[Tensor, Tensor]:
    """V-trace (IMPALA, arXiv 1802.01561) over tokens.

    With rho = pi/mu and c_t = lambda min(c_bar, rho_t), the target is
    v_s = V_s + sum_{t >= s} gamma^{t-s} (prod_{s <= i < t} c_i) delta_t, where
    delta_t = min(rho_bar, rho_t) (r_t + gamma V_{t+1} - V_t). It is computed as
    v_s - V_s = delta_s + gamma c_s (v_{s+1} - V_{s+1}).

    The advantage carries its weight: plain REINFORCE with it is the paper's policy gradient, and a
    further correction would count rho twice.

    Args:
        reward: [N] from `token_rewards`.
        values: [N] V of each token's state.
        log_rho: [N] log pi - log mu, clamped here to +-LOG_RATIO_CLAMP; 0 where log mu is missing.
        sample: [N] number of the token's sequence.
        gamma: discount per policy token.
        lam: lambda.
        rho_bar: bound of rho in the temporal difference: decides which policy V is of.
        c_bar: bound of rho in the traces: decides only how fast V gets there.
        rho_bar_pg: bound of rho in the advantage.

    Returns:
        [N] advantages min(rho_bar_pg, rho_s) (r_s + gamma v_{s+1} - V_s), and [N] targets v_s.
    """
    r, v, last = _double(reward), _double(values), _last(sample).cpu()
    rho = _double(log_rho).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    delta = rho.clamp(max=rho_bar) * (r + gamma * _next(v, last) - v)
    target = v + _recursion(delta, gamma * lam * rho.clamp(max=c_bar), last)
    advantage = rho.clamp(max=rho_bar_pg) * (r + gamma * _next(target, last) - v)
    return advantage.to(values), target.to(values)


def moments(x: Tensor, counted: Tensor) -> Tensor:
    """[3] float64: how many of x [N] count, their sum, their sum of squares.

    Those of a batch are the sum over its microbatches and ranks.
    """
    kept = x.detach()[counted].to(torch.float64)
    return torch.stack([kept.new_tensor(float(kept.numel())), kept.sum(), (kept * kept).sum()])


def whiten(x: Tensor, moments: Tensor) -> Tensor:
    """(x - mean) / (std + eps) with the batch's `moments`, [N] to [N].

    The standard deviation is the sample one (ddof 1). Zeros if fewer than two tokens count, or if
    all are equal.
    """
    count, total, squares = (float(v) for v in moments.tolist())
    if count < 2:
        return torch.zeros_like(x)
    mean = total / count
    variance = (squares - total * mean) / (count - 1)
    if variance <= NO_SPREAD * squares / count:
        return torch.zeros_like(x)
    centred = x.detach().to(torch.float64) - mean
    return (centred / (math.sqrt(variance) + STD_EPS)).to(x.dtype)


def _last(sample: Tensor) -> Tensor:
    """[N] True for the last token of each sequence."""
    last = torch.ones_like(sample, dtype=torch.bool)
    last[:-1] = sample[1:] != sample[:-1]
    return last


def _next(x: Tensor, last: Tensor) -> Tensor:
    """[N] x of the next token of the same sequence; 0 after the last."""
    return x.roll(-1).masked_fill(last, 0.0)


def _recursion(step: Tensor, decay: Tensor, last: Tensor) -> Tensor:
    """y_n = step_n + decay_n y_{n+1} within each sequence, [N] float64 on the CPU.

    A loop over Python floats: quicker than a tensor operation per position, and exact whatever
    the lengths are.
    """
    out: list[float] = []
    following = 0.0
    backwards = (x.flip(0).tolist() for x in (step, decay, last))
    for own, share, is_last in zip(*backwards, strict=True):
        following = own if is_last else own + share * following
        out.append(following)
    return torch.tensor(out, dtype=torch.float64).flip(0)


def _double(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.float64)
