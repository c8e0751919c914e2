"""IMPALA's classical check: V-trace actor-critic on a token MDP whose optimal value is known.

Six tokens out of four words. The first decides: word 0 is paid at once and nothing follows; word 3
leads into a lock, where one word is right in each state and the others cost. With words drawn as
the data's policy draws them the lock loses, so a policy that is greedy about what the data's policy
would go on to get chooses word 0. Whoever learns to open the lock gets four times as much.

The data are of a fixed policy, whatever has been learnt; the value of what has been learnt is
computed by dynamic programming, not sampled.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from asyncrl.learner.maths.critic_loss import value_loss
from asyncrl.learner.maths.losses import reinforce
from asyncrl.learner.maths.returns import vtrace

WORDS, HORIZON, STATES = 4, 6, 4
START, SAFE, LOCK_A, LOCK_B = range(STATES)
NEXT = torch.tensor(
    [[SAFE, SAFE, SAFE, LOCK_A], [SAFE] * 4, [LOCK_A, LOCK_B, LOCK_A, LOCK_A], [LOCK_A] * 4]
)
"""[STATES, WORDS] the state after a word."""
REWARD = torch.tensor(
    [[0.3, 0.0, 0.0, 0.0], [0.0] * 4, [-0.1, 0.25, -0.1, -0.1], [-0.1, -0.1, 0.25, -0.1]],
    dtype=torch.float64,
)
"""[STATES, WORDS]"""
MU = torch.tensor([0.4, 0.2, 0.2, 0.2], dtype=torch.float64)
"""[WORDS] the data's policy, in every state."""
PLAIN = (1.0, 1.0, 1.0)
UNTRUNCATED = (5.0, 1.0, 5.0)
"""rho_bar of 1/min mu: rho is never above it."""


@dataclass
class Rollouts:
    """B responses, as flat tensors [B * HORIZON]."""

    time: Tensor
    state: Tensor
    word: Tensor
    sample: Tensor

    @classmethod
    def of(cls, words: Tensor) -> Rollouts:
        """From the words [B, HORIZON] of each."""
        states = [torch.full((len(words),), START)]
        for t in range(HORIZON - 1):
            states.append(NEXT[states[-1], words[:, t]])
        time = torch.arange(HORIZON).repeat(len(words))
        sample = torch.arange(len(words)).repeat_interleave(HORIZON)
        return cls(time, torch.stack(states, 1).ravel(), words.ravel(), sample)

    @property
    def reward(self) -> Tensor:
        return REWARD[self.state, self.word]


def _values(policy: Tensor) -> Tensor:
    """V of a policy [HORIZON, STATES, WORDS] in each state at each time, [HORIZON, STATES]."""
    values = torch.zeros(HORIZON + 1, STATES, dtype=torch.float64)
    for t in reversed(range(HORIZON)):
        values[t] = (policy[t] * (REWARD + values[t + 1][NEXT])).sum(-1)
    return values[:-1]


def _optimum() -> float:
    values = torch.zeros(STATES, dtype=torch.float64)
    for _ in range(HORIZON):
        values = (REWARD + values[NEXT]).amax(-1)
    return float(values[START])


def _train(bars: tuple[float, float, float], *, corrected: bool) -> float:
    """Exact value of the tabular softmax policy after training on the data's policy."""
    g = torch.Generator().manual_seed(0)
    logits = torch.zeros(HORIZON, STATES, WORDS, dtype=torch.float64, requires_grad=True)
    table = torch.zeros(HORIZON, STATES, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits, table], lr=0.05)
    batch = 128
    coefficient = torch.full((batch * HORIZON,), 1 / (batch * HORIZON), dtype=torch.float64)
    for _ in range(300):
        words = torch.multinomial(MU.expand(batch, -1), HORIZON, replacement=True, generator=g)
        data = Rollouts.of(words)
        theta = logits.log_softmax(-1)[data.time, data.state, data.word]
        values = table[data.time, data.state]
        log_rho = theta.detach() - MU.log()[data.word]
        log_rho = log_rho if corrected else torch.zeros_like(log_rho)
        advantage, targets = vtrace(
            data.reward, values, log_rho, data.sample, 1.0, 1.0, *bars
        )  # fmt: skip
        policy_loss = -(coefficient * reinforce(theta, advantage).surrogate).sum()
        critic_loss, _ = value_loss(values, values, targets, coefficient, None)
        optimizer.zero_grad()
        (policy_loss + critic_loss).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return float(_values(logits.detach().softmax(-1))[0, START])


def test_what_the_datas_policy_would_get_is_a_bad_guide() -> None:
    of_data = _values(MU.expand(HORIZON, STATES, WORDS))
    after_first = REWARD[START] + of_data[1][NEXT[START]]
    assert int(after_first.argmax()) == 0
    assert _optimum() == pytest.approx(5 * 0.25)
    assert float(after_first[0]) < 0.3 * _optimum()


@pytest.mark.parametrize("bars", [PLAIN, UNTRUNCATED])
def test_vtrace_learns_the_optimal_policy_from_data_of_another(
    bars: tuple[float, float, float],
) -> None:
    """With rho_bar >= 1/min mu nothing is truncated, and V is that of the policy itself.

    With rho_bar = 1, V is that of a policy between the data's and the learnt one, in proportion to
    min(mu, pi). As pi becomes deterministic so does that one, so the optimum is a fixed point of
    both. (c_bar may always be 1: it decides how fast V gets there, not where.)
    """
    assert _train(bars, corrected=True) > 0.98 * _optimum()


def test_without_correction_the_same_training_fails() -> None:
    assert _train(PLAIN, corrected=False) < 0.5 * _optimum()


@pytest.mark.parametrize("bars", [PLAIN, (2.0, 0.7, 1.0), UNTRUNCATED])
@pytest.mark.parametrize("lam", [0.5, 1.0])
def test_the_fixed_point_of_the_targets(bars: tuple[float, float, float], lam: float) -> None:
    """In expectation over the data V-trace leaves V alone iff V is that of pi_rho_bar.

    Theorem 1 of arXiv 1802.01561, exactly: over all responses, weighted by their probability.
    """
    g = torch.Generator().manual_seed(3)
    policy = torch.randn(HORIZON, STATES, WORDS, generator=g, dtype=torch.float64).softmax(-1)
    data = Rollouts.of(torch.tensor(list(itertools.product(range(WORDS), repeat=HORIZON))))
    weight = MU[data.word].view(-1, HORIZON).prod(1)[data.sample]
    log_rho = (policy[data.time, data.state, data.word] / MU[data.word]).log()
    where = data.time * STATES + data.state

    def expected_move(values: Tensor) -> Tensor:
        """Of the value of each state and time, times the probability to be there."""
        v = values[data.time, data.state]
        _, targets = vtrace(data.reward, v, log_rho, data.sample, 1.0, lam, *bars)
        zeros = torch.zeros(HORIZON * STATES, dtype=torch.float64)
        return zeros.index_add(0, where, weight * (targets - v))

    between = torch.minimum(bars[0] * MU, policy)
    between = between / between.sum(-1, keepdim=True)
    assert expected_move(_values(between)).abs().max() < 1e-12
    other = MU.expand_as(policy) if bars[0] > 1 else policy
    assert expected_move(_values(other)).abs().max() > 1e-3
