"""Returns, GAE and V-trace against slow transcriptions of their definitions in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.learner.maths.returns import (
    discounted_returns,
    gae,
    moments,
    token_rewards,
    vtrace,
    whiten,
)

LENGTHS = (1, 7, 1, 40, 12)
BARS = [(1.0, 1.0, 1.0), (2.0, 1.3, 1.6), (0.5, 1.0, 3.0)]


@dataclass
class Tokens:
    """A microbatch: reward, V, log rho and sequence number of each token."""

    reward: Tensor
    values: Tensor
    log_rho: Tensor
    sample: Tensor

    def sequences(self) -> list[slice]:
        borders = [0, *(np.flatnonzero(np.diff(self.sample.numpy())) + 1), len(self.sample)]
        return [slice(int(a), int(b)) for a, b in zip(borders[:-1], borders[1:], strict=True)]

    def cut(self, where: slice) -> Tokens:
        return Tokens(
            self.reward[where], self.values[where], self.log_rho[where], self.sample[where]
        )


def _tokens(lengths: Sequence[int] = LENGTHS, seed: int = 0, scale: float = 0.7) -> Tokens:
    g = torch.Generator().manual_seed(seed)
    n = sum(lengths)

    def draw(scale: float) -> Tensor:
        return torch.randn(n, generator=g, dtype=torch.float64) * scale

    numbers = torch.arange(len(lengths)) * 2 + 1  # numbers may be skipped
    sample = numbers.repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    return Tokens(draw(1.0), draw(1.0), draw(scale), sample)


def _literal_returns(r: list[float], gamma: float) -> list[float]:
    return [sum(gamma ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))]


def _literal_gae(r: list[float], v: list[float], gamma: float, lam: float) -> list[float]:
    nexts = [*v[1:], 0.0]
    delta = [r[t] + gamma * nexts[t] - v[t] for t in range(len(r))]
    return [
        sum((gamma * lam) ** k * delta[t + k] for k in range(len(r) - t)) for t in range(len(r))
    ]


def _literal_vtrace_target(
    s: int, r: list[float], v: list[float], log_rho: list[float], gamma: float, lam: float,
    rho_bar: float, c_bar: float,
) -> float:  # fmt: skip
    """v_s as the paper writes it: a sum over t of products of traces."""
    total = v[s]
    product = 1.0
    for t in range(s, len(r)):
        following = v[t + 1] if t + 1 < len(r) else 0.0
        rho = math.exp(max(-20.0, min(20.0, log_rho[t])))
        total += gamma ** (t - s) * product * min(rho_bar, rho) * (r[t] + gamma * following - v[t])
        product *= lam * min(c_bar, rho)
    return total


def _check_vtrace(
    tokens: Tokens, gamma: float, lam: float, bars: tuple[float, float, float], every: int = 1
) -> None:
    rho_bar, c_bar, rho_bar_pg = bars
    got = vtrace(
        tokens.reward, tokens.values, tokens.log_rho, tokens.sample, gamma, lam, *bars
    )  # fmt: skip
    for where in tokens.sequences():
        one = tokens.cut(where)
        r, v, log_rho = one.reward.tolist(), one.values.tolist(), one.log_rho.tolist()
        advantage, target = got[0][where].tolist(), got[1][where].tolist()
        for s in range(0, len(r), every):
            args = (r, v, log_rho, gamma, lam, rho_bar, c_bar)
            assert target[s] == pytest.approx(_literal_vtrace_target(s, *args), rel=1e-9, abs=1e-9)
            after = _literal_vtrace_target(s + 1, *args) if s + 1 < len(r) else 0.0
            rho = min(rho_bar_pg, math.exp(max(-20.0, min(20.0, log_rho[s]))))
            expected = rho * (r[s] + gamma * after - v[s])
            assert advantage[s] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_token_rewards_lie_on_the_last_token() -> None:
    sample = torch.tensor([0, 0, 0, 2, 3, 3])
    rewards = torch.tensor([5.0, 6.0, 7.0, 8.0])
    assert token_rewards(sample, rewards).tolist() == [0, 0, 5, 7, 0, 8]
    penalty = torch.tensor([0.5, 0.25, 1.0, -1.0, 0.0, 2.0], requires_grad=True)
    got = token_rewards(sample, rewards, penalty)
    assert got.tolist() == [-0.5, -0.25, 4, 8, 0, 6]
    assert not got.requires_grad
    assert token_rewards(sample[:0], rewards, penalty[:0]).tolist() == []


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_discounted_returns(gamma: float) -> None:
    tokens = _tokens()
    got = discounted_returns(tokens.reward, tokens.sample, gamma)
    for where in tokens.sequences():
        expected = _literal_returns(tokens.reward[where].tolist(), gamma)
        np.testing.assert_allclose(got[where], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_gae(gamma: float, lam: float) -> None:
    tokens = _tokens()
    advantage, target = gae(tokens.reward, tokens.values, tokens.sample, gamma, lam)
    for where in tokens.sequences():
        r, v = tokens.reward[where].tolist(), tokens.values[where].tolist()
        expected = np.array(_literal_gae(r, v, gamma, lam))
        np.testing.assert_allclose(advantage[where], expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(target[where], expected + np.array(v), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bars", BARS)
@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_vtrace(gamma: float, lam: float, bars: tuple[float, float, float]) -> None:
    _check_vtrace(_tokens(), gamma, lam, bars)


@pytest.mark.parametrize("bars", [(1.0, 1.0, 1.0), (1e12, 1.0, 1e12)])
def test_vtrace_with_log_ratios_of_30(bars: tuple[float, float, float]) -> None:
    tokens = _tokens(scale=0.1)
    tokens.log_rho[::3] = 30.0
    tokens.log_rho[1::5] = -30.0
    _check_vtrace(tokens, 0.99, 1.0, bars)
    advantage, target = vtrace(
        tokens.reward, tokens.values, tokens.log_rho, tokens.sample, 0.99, 1.0, *bars
    )
    assert torch.isfinite(advantage).all()
    assert torch.isfinite(target).all()


@pytest.mark.parametrize("gamma", [1.0, 0.999])
def test_4096_tokens(gamma: float) -> None:
    tokens = _tokens((4096, 5))
    _check_vtrace(tokens, gamma, 0.999, (1.0, 1.0, 1.0), every=517)
    advantage, _ = gae(tokens.reward, tokens.values, tokens.sample, gamma, 0.95)
    following, slow = 0.0, []
    for t in reversed(range(4096)):
        nexts = float(tokens.values[t + 1]) if t < 4095 else 0.0
        delta = float(tokens.reward[t]) + gamma * nexts - float(tokens.values[t])
        following = delta + gamma * 0.95 * following
        slow.append(following)
    np.testing.assert_allclose(advantage[:4096], slow[::-1], rtol=1e-9, atol=1e-12)
    got = discounted_returns(tokens.reward, tokens.sample, gamma)
    first = math.fsum(gamma**k * float(tokens.reward[k]) for k in range(4096))
    assert float(got[0]) == pytest.approx(first, rel=1e-9)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("bars", [(1.0, 1.0, 1.0), (3.0, 2.0, 5.0)])
def test_on_policy_vtrace_targets_are_returns(
    gamma: float, bars: tuple[float, float, float]
) -> None:
    """mu = theta, bars of at least 1, lambda 1: the targets are those of Bellman (section 4.1)."""
    tokens = _tokens()
    same = torch.zeros_like(tokens.log_rho)
    advantage, target = vtrace(
        tokens.reward, tokens.values, same, tokens.sample, gamma, 1.0, *bars
    )  # fmt: skip
    returns = discounted_returns(tokens.reward, tokens.sample, gamma)
    torch.testing.assert_close(target, returns, rtol=1e-12, atol=1e-12)
    of_gae, gae_target = gae(tokens.reward, tokens.values, tokens.sample, gamma, 1.0)
    torch.testing.assert_close(advantage, of_gae, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(target, gae_target, rtol=1e-12, atol=1e-12)


def test_on_policy_vtrace_targets_with_lambda_are_those_of_gae() -> None:
    tokens = _tokens()
    same = torch.zeros_like(tokens.log_rho)
    args = (tokens.sample, 0.9, 0.7)
    _, target = vtrace(tokens.reward, tokens.values, same, *args, 1.0, 1.0, 1.0)
    _, expected = gae(tokens.reward, tokens.values, *args)
    torch.testing.assert_close(target, expected, rtol=1e-12, atol=1e-12)


def test_a_sequence_of_one_token() -> None:
    one = torch.tensor([2.0], dtype=torch.float64)
    values = torch.tensor([0.5], dtype=torch.float64)
    sample = torch.tensor([3])
    assert discounted_returns(one, sample, 0.5).tolist() == [2.0]
    assert [x.tolist() for x in gae(one, values, sample, 0.5, 0.5)] == [[1.5], [2.0]]
    log_rho = torch.tensor([math.log(3)], dtype=torch.float64)
    got = vtrace(one, values, log_rho, sample, 0.5, 1.0, 1.5, 1.0, 2.0)
    assert [x.tolist() for x in got] == [[2.0 * 1.5], [0.5 + 1.5 * 1.5]]


def test_nothing_at_all() -> None:
    none, sample = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert discounted_returns(none, sample, 1.0).shape == (0,)
    assert [x.shape for x in gae(none, none, sample, 1.0, 1.0)] == [(0,), (0,)]
    got = vtrace(none, none, none, sample, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert [x.shape for x in got] == [(0,), (0,)]
    total = moments(none, none.bool())
    assert total.tolist() == [0, 0, 0]
    assert whiten(none, total).shape == (0,)


def test_float32_in_float32_out_computed_in_float64() -> None:
    tokens = _tokens((3000,))
    reward, values, log_rho = tokens.reward.float(), tokens.values.float(), tokens.log_rho.float()
    values.requires_grad_()
    got = vtrace(reward, values, log_rho, tokens.sample, 1.0, 1.0, 1.0, 1.0, 1.0)
    wide = Tokens(reward.double(), values.detach().double(), log_rho.double(), tokens.sample)
    exact = vtrace(wide.reward, wide.values, wide.log_rho, wide.sample, 1.0, 1.0, 1.0, 1.0, 1.0)
    for narrow, expected in zip(got, exact, strict=True):
        assert narrow.dtype == torch.float32
        assert not narrow.requires_grad
        torch.testing.assert_close(narrow, expected.float(), rtol=0, atol=0)
    assert discounted_returns(reward, tokens.sample, 1.0).dtype == torch.float32


def test_a_value_that_is_not_finite_stays_in_its_sequence() -> None:
    tokens = _tokens((4, 5, 6))
    clean = vtrace(
        tokens.reward, tokens.values, tokens.log_rho, tokens.sample, 1.0, 1.0, 1.0, 1.0, 1.0
    )
    tokens.values[6] = math.inf
    got = vtrace(
        tokens.reward, tokens.values, tokens.log_rho, tokens.sample, 1.0, 1.0, 1.0, 1.0, 1.0
    )
    for with_inf, without in zip(got, clean, strict=True):
        assert not torch.isfinite(with_inf[4:9]).all()
        torch.testing.assert_close(with_inf[:4], without[:4], rtol=0, atol=0)
        torch.testing.assert_close(with_inf[9:], without[9:], rtol=0, atol=0)


Lengths = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@settings(max_examples=30, deadline=None)
@given(Lengths, st.integers(0, 99), st.data())
def test_a_cut_between_sequences_changes_nothing(lengths: list[int], seed: int, data: Any) -> None:
    tokens = _tokens(lengths, seed)
    counted = tokens.log_rho > -0.5
    numbers = st.sets(st.integers(0, len(lengths) - 1), max_size=3)
    cuts = [tokens.sequences()[k].start for k in data.draw(numbers, label="cuts")]
    borders = sorted({0, len(tokens.sample), *cuts})
    parts = [slice(a, b) for a, b in zip(borders[:-1], borders[1:], strict=True)]

    def all_of(t: Tokens) -> list[Tensor]:
        return [
            discounted_returns(t.reward, t.sample, 0.9),
            *gae(t.reward, t.values, t.sample, 0.9, 0.8),
            *vtrace(t.reward, t.values, t.log_rho, t.sample, 0.9, 0.8, 1.0, 1.1, 2.0),
        ]

    whole = all_of(tokens)
    pieces = zip(*(all_of(tokens.cut(part)) for part in parts), strict=True)
    for together, piece in zip(whole, pieces, strict=True):
        torch.testing.assert_close(torch.cat(piece), together, rtol=0, atol=0)
    total = torch.stack([moments(tokens.reward[p], counted[p]) for p in parts]).sum(0)
    torch.testing.assert_close(total, moments(tokens.reward, counted), rtol=1e-12, atol=1e-12)


def test_a_sequence_that_does_not_count_is_a_sequence_of_on_policy_states() -> None:
    """Without log mu, log rho is 0: its targets are returns, and whitening does not see it."""
    tokens = _tokens((6, 8))
    counted = tokens.sample != 1
    tokens.log_rho[~counted] = 0.0
    advantage, target = vtrace(
        tokens.reward, tokens.values, tokens.log_rho, tokens.sample, 0.9, 1.0, 1.0, 1.0, 1.0
    )
    returns = discounted_returns(tokens.reward, tokens.sample, 0.9)
    torch.testing.assert_close(target[:6], returns[:6], rtol=1e-12, atol=1e-12)
    alone = moments(advantage[6:], counted[6:])
    torch.testing.assert_close(moments(advantage, counted), alone, rtol=0, atol=0)
