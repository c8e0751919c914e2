"""The loss of one microbatch: policy, KL, entropy and value terms over its tokens.

    theta (this pass) ─┐
    start, mu ─────────┼─► prox ─► behaviour weight w, masks ─┐
    advantage ─────────┘              policy term (r or rho) ─┴─► -sum c w kept surrogate
    log pi_ref ──► KL      entropy      values, targets ──► value loss

A sum over tokens with coefficients fixed by the whole batch: parts of a batch add up to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from asyncrl.config.learning import LearnerConfig
from asyncrl.learner.maths.corrections import Weight, behaviour_weight, opsm_keep
from asyncrl.learner.maths.critic_loss import value_loss
from asyncrl.learner.maths.kl import kl_estimate
from asyncrl.learner.maths.losses import policy_term
from asyncrl.learner.microbatch import Microbatch
from asyncrl.learner.policy.packed import Scores


def ratio_moves(config: LearnerConfig) -> bool:
    """Whether the ratio that the loss clips or masks by can be another number than 1."""
    by_mu = config.loss.policy in ("aipo", "topr", "dppo-tv", "dppo-kl")
    return by_mu or config.updates > 1 or config.correction.prox != "recompute"


@dataclass(slots=True)
class Sums:
    """What the passes of a batch add up to, on this rank."""

    terms: dict[str, Tensor] = field(default_factory=dict)
    """Each term as its gradient was taken, over all passes; and tokens seen and clipped. They stay
    on the device until the batch is over: to read one waits for it."""
    lr_factor: float = 1.0
    """What the learning rate was multiplied by."""

    def add(self, name: str, value: Tensor) -> None:
        """Add a scalar to a term."""
        value = value.detach().double()
        self.terms[name] = self.terms[name] + value if name in self.terms else value


def prox_of(config: LearnerConfig, m: Microbatch, theta: Tensor) -> Tensor:
    """log pi_prox, without gradient (see `learner.correction.prox`).

    interpolate: log mu + a (log theta - log mu), a = (V - v)/(V + 1 - v) for a token of version v
    (A-3PO); theta is V + 1 in the making.
    """
    assert m.start is not None
    if config.correction.prox == "recompute":
        return m.start
    if config.correction.prox == "behaviour":
        return m.mu
    share = m.staleness / (m.staleness + 1)
    return m.mu + share * (theta.detach() - m.mu)


def treatment(config: LearnerConfig, m: Microbatch, prox: Tensor) -> Weight:
    """The behaviour weight of each token, and which of them the masks before the update keep."""
    weight = behaviour_weight(config.correction, prox, m.mu, m.sample, m.counted)
    return weight._replace(kept=weight.kept & m.allowed)


def loss_of(
    config: LearnerConfig, m: Microbatch, scores: Scores, sums: Sums, *, warming_up: bool
) -> Tensor:
    """The microbatch's part of the batch's loss; the value term alone while the critic warms up."""
    if m.start is None:  # the only pass: the policy has not moved, start is theta
        m.set_start(scores.logprobs, scores.entropy)
    total = scores.logprobs.new_zeros(())
    if not warming_up:
        total = total + _policy_loss(config, m, scores.logprobs, sums)
        total = total + _regularisers(config, m, scores, sums)
    if scores.values is not None and m.targets is not None:
        assert m.values is not None
        value, clipped = value_loss(
            scores.values, m.values, m.targets, m.coefficient, config.critic.clip
        )
        sums.add("value", value)
        sums.add("value_clipped", (clipped & m.counted).sum())
        total = total + config.critic.coefficient * value
    sums.add("seen", m.counted.sum())
    return total


def _policy_loss(config: LearnerConfig, m: Microbatch, theta: Tensor, sums: Sums) -> Tensor:
    prox = prox_of(config, m, theta)
    weight, kept, lowered = treatment(config, m, prox)
    delta = config.correction.opsm
    if delta is not None:
        kept = kept & opsm_keep(theta, m.mu, m.advantage, m.sample, m.counted, delta)
    if m.used is None:
        m.used, m.kept, m.lowered = weight * kept, kept, lowered
    term = policy_term(config.loss, theta, prox, m.mu, m.advantage, m.sample, m.counted)
    loss = -(m.policy_coefficient * weight * kept * term.surrogate).sum()
    sums.add("policy", loss)
    if config.loss.policy != "reinforce":
        sums.add("clipped", (term.clipped & m.counted).sum())
    return loss


def _regularisers(config: LearnerConfig, m: Microbatch, scores: Scores, sums: Sums) -> Tensor:
    total = scores.logprobs.new_zeros(())
    kl = config.kl
    if kl.in_loss:
        assert m.reference is not None
        estimate = kl_estimate(kl.estimator, scores.logprobs, m.reference, m.mu, kl.clamp)
        penalty = (m.coefficient * estimate).sum()
        sums.add("kl", penalty)
        total = total + kl.coefficient * penalty
    if config.loss.entropy:
        total = total - config.loss.entropy * (m.coefficient * scores.entropy).sum()
    return total


@torch.no_grad()
def note_treatment(config: LearnerConfig, m: Microbatch) -> None:
    """What the weight would be of tokens that are not trained."""
    assert m.start is not None
    weight, m.kept, m.lowered = treatment(config, m, prox_of(config, m, m.start))
    m.used = weight * m.kept
