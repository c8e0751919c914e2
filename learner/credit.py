"""Batch-wide numbers, after the first pass and before the update: the same on every rank.

start, mu of all tokens ─► ESS, M2PO's mask, denominators of what masks keep
rewards, values, KL     ─► advantages of tokens ─► whitening
"""

from __future__ import annotations

import numpy as np
import torch

from asyncrl.config.learning import LearnerConfig
from asyncrl.learner.collectives import gather_rows, sum_over_ranks
from asyncrl.learner.maths.corrections import effective_sample_share, m2po_threshold
from asyncrl.learner.maths.kl import kl_estimate
from asyncrl.learner.maths.returns import (
    discounted_returns,
    gae,
    moments,
    token_rewards,
    vtrace,
    whiten,
)
from asyncrl.learner.microbatch import Microbatch
from asyncrl.learner.objective import prox_of, treatment
from asyncrl.learner.samples import Ints
from asyncrl.learner.work import Work


@torch.no_grad()
def settle(learner: LearnerConfig, work: Work, device: torch.device) -> float:
    """Fill in what depends on the whole batch; returns its ESS share (nan if not asked for)."""
    share = float("nan")
    if learner.correction.m2po is not None or learner.optim.ess_ref is not None:
        log_weight = _log_weights(work, device)
        if learner.optim.ess_ref is not None and len(log_weight):
            share = effective_sample_share(log_weight)
        if learner.correction.m2po is not None:
            threshold = m2po_threshold(log_weight, learner.correction.m2po)
            for m in work.all():
                assert m.start is not None
                m.allowed = (m.start - m.mu).abs() < threshold
    if not learner.advantage.relative:
        _token_advantages(learner, work, device)
    if learner.loss.denominator == "kept":
        work.set_coefficients(_kept_tokens(learner, work, device))
    return share


def _log_weights(work: Work, device: torch.device) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """log pi_start/mu of the counted tokens of all ranks."""
    rows = [np.zeros((0, 1), np.float32)]
    for m in work.all():
        assert m.start is not None
        rows.append((m.start - m.mu)[m.counted].float().cpu().numpy()[:, None])
    return gather_rows(np.concatenate(rows), device)[:, 0].astype(np.float64)


def _kept_tokens(learner: LearnerConfig, work: Work, device: torch.device) -> Ints:
    """[manifest] tokens that count and that no mask rejects, over all ranks."""
    tokens = np.zeros(len(work.groups), np.int64)
    for m in work.all():
        assert m.start is not None
        kept = treatment(learner, m, prox_of(learner, m, m.start)).kept & m.counted
        np.add.at(tokens, work.local.index[m.numbers], kept.cpu().numpy())
    return sum_over_ranks(tokens, device)


def _token_advantages(learner: LearnerConfig, work: Work, device: torch.device) -> None:
    rewards = torch.from_numpy(work.rewards).to(device)
    total = torch.zeros(3, dtype=torch.float64, device=device)
    for m in work.trained():
        m.advantage, m.targets = _estimate(learner, m, rewards)
        total += moments(m.advantage, m.counted)
    if learner.advantage.whiten or learner.advantage.estimator == "reinforce++":
        total = torch.from_numpy(sum_over_ranks(total.cpu().numpy(), device)).to(device)
        for m in work.trained():
            m.advantage = whiten(m.advantage, total)


def _estimate(
    learner: LearnerConfig, m: Microbatch, rewards: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Advantages [N] of a microbatch and the targets of its values, if it has any."""
    config, kl, penalty = learner.advantage, learner.kl, None
    if kl.in_reward:
        assert m.start is not None
        assert m.reference is not None
        penalty = kl.coefficient * kl_estimate(kl.estimator, m.start, m.reference, m.mu, kl.clamp)
    rewarded = token_rewards(m.sample, rewards.to(m.mu.dtype), penalty)
    if config.estimator == "reinforce++":
        return discounted_returns(rewarded, m.sample, config.gamma), None
    assert m.values is not None
    if config.estimator == "gae":
        return gae(rewarded, m.values, m.sample, config.gamma, config.lam)
    assert m.start is not None
    return vtrace(
        rewarded, m.values, m.start - m.mu, m.sample, config.gamma, config.lam,
        config.rho_bar, config.c_bar, config.rho_bar_pg,
    )  # fmt: skip
