"""Each policy loss against a slow transcription of its formula, and its gradient by differences."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.config.learning import CorrectionConfig, LossConfig
from asyncrl.learner.maths.corrections import behaviour_weight, opsm_keep
from asyncrl.learner.maths.losses import Divergence, policy_term, ppo, two_way_divergence
from tests.learner.flat_tokens import CASES, Tokens, make_tokens

LOSSES = {
    "ppo": LossConfig(),
    "ppo, dual clip": LossConfig(clip_low=0.1, clip_high=0.4, dual_clip=1.3),
    "gspo": LossConfig(policy="gspo"),
    "gspo, wide": LossConfig(policy="gspo", clip_low=0.05, clip_high=0.1),
    "cispo": LossConfig(policy="cispo"),
    "cispo, narrow": LossConfig(policy="cispo", clip_low=0.2, clip_high=0.3),
    "cispo, e over 1": LossConfig(policy="cispo", clip_low=1.5, clip_high=0.3),
    "aipo": LossConfig(policy="aipo"),
    "aipo, low cap": LossConfig(policy="aipo", cap=1.1),
    "topr": LossConfig(policy="topr"),
    "dppo-tv": LossConfig(policy="dppo-tv"),
    "dppo-tv, uneven": LossConfig(policy="dppo-tv", clip_low=0.05, clip_high=0.3),
    "dppo-kl": LossConfig(policy="dppo-kl", clip_low=0.03, clip_high=0.05),
    "reinforce": LossConfig(policy="reinforce"),
}
BOTH = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])


def _clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def _exp(log_ratio: float) -> float:
    return math.exp(_clip(log_ratio, -20, 20))


def _sequence_ratios(t: Tokens, theta: list[float]) -> dict[int, float]:
    logs: dict[int, list[float]] = {}
    columns = zip(theta, t.prox.tolist(), t.sample.tolist(), t.counted.tolist(), strict=True)
    for new, old, sample, counted in columns:
        logs.setdefault(sample, [])
        if counted:
            logs[sample].append(new - old)
    return {s: _exp(math.fsum(v) / len(v)) if v else 1.0 for s, v in logs.items()}


def _two_way(p: float, q: float, kind: str) -> float:
    if kind == "tv":
        return abs(p - q)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def _literal_token(
    config: LossConfig, new: float, old: float, prox: float, mu: float, a: float, s: float
) -> tuple[float, bool]:
    """Surrogate, and whether a clip decided it; `old` is theta under stop-gradient."""
    low, high = config.clips
    r, rho = _exp(new - prox), _exp(old - mu)
    if config.policy in ("ppo", "gspo"):
        r = s if config.policy == "gspo" else r
        value = min(r * a, _clip(r, 1 - low, 1 + high) * a)
        if config.dual_clip is not None and a < 0:
            value = max(value, config.dual_clip * a)
        return value, value != r * a
    if config.policy == "cispo":
        r = _exp(old - prox)
        weight = _clip(r, max(0.0, 1 - low), 1 + high)
        return weight * a * new, weight != r
    if config.policy == "aipo":
        cap = 2.0 if config.cap is None else config.cap
        return min(rho, cap) * a * new, rho > cap
    if config.policy == "topr":
        weight = 1.0 if a >= 0 else _clip(rho, 0, 1)
        return weight * a * new, a < 0 and rho > 1
    if config.policy == "reinforce":
        return a * new, False
    moved = _two_way(math.exp(mu), math.exp(old), config.policy.removeprefix("dppo-"))
    masked = (a > 0 and old > mu and moved > high) or (a < 0 and old < mu and moved > low)
    return 0.0 if masked else _exp(new - mu) * a, masked


def _literal(config: LossConfig, t: Tokens, theta: list[float]) -> list[tuple[float, bool]]:
    """Surrogates at `theta`; what is under stop-gradient stays at t.theta."""
    s = _sequence_ratios(t, theta)
    columns = (x.tolist() for x in (t.theta, t.prox, t.mu, t.advantage, t.sample))
    return [
        _literal_token(config, new, old, prox, mu, a, s[sample])
        for new, old, prox, mu, a, sample in zip(theta, *columns, strict=True)
    ]


def _slope(config: LossConfig, t: Tokens, k: int) -> float:
    """d(sum coefficient * surrogate) / d theta[k] by central differences of the transcription."""
    step = 1e-5
    up: list[float] = t.theta.tolist()
    down = list(up)
    up[k] += step
    down[k] -= step
    columns = t.coefficient.tolist(), _literal(config, t, up), _literal(config, t, down)
    total = math.fsum(c * (u[0] - d[0]) for c, u, d in zip(*columns, strict=True))
    return total / (up[k] - down[k])


def _sum(config: LossConfig, t: Tokens, factor: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """sum of coefficient * factor * surrogate, and its gradient."""
    theta = t.theta.clone().requires_grad_()
    term = policy_term(config, theta, t.prox, t.mu, t.advantage, t.sample, t.counted)
    total = (t.coefficient * factor * term.surrogate).sum()
    (grad,) = torch.autograd.grad(total, theta)
    return total.detach(), grad


@BOTH
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("case", CASES)
def test_value_and_gradient(case: str, loss: str, dtype: torch.dtype) -> None:
    config, t = LOSSES[loss], CASES[case].to(dtype)
    term = policy_term(config, t.theta, t.prox, t.mu, t.advantage, t.sample, t.counted)
    expected = _literal(config, t, t.theta.tolist())
    values = torch.tensor([v for v, _ in expected], dtype=torch.float64)
    torch.testing.assert_close(term.surrogate, values, rtol=1e-6, atol=0)
    assert term.clipped.tolist() == [c for _, c in expected]
    _, grad = _sum(config, t)
    assert grad.dtype == dtype
    slopes = 12 if len(grad) < 100 else 3  # a slope costs two transcriptions of the whole
    for k in range(0, len(grad), max(1, len(grad) // slopes)):
        assert grad[k].item() == pytest.approx(_slope(config, t, k), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("loss", sorted(set(LOSSES) - {"reinforce"}))
def test_the_cases_meet_both_sides_of_every_clip(loss: str) -> None:
    t = make_tokens([9] * 60, seed=7, spread=1.0)
    term = policy_term(LOSSES[loss], t.theta, t.prox, t.mu, t.advantage, t.sample, t.counted)
    assert 0 < term.clipped.sum() < len(term.clipped)


@BOTH
@pytest.mark.parametrize("loss", LOSSES)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(loss: str, dtype: torch.dtype) -> None:
    t = make_tokens([5, 1, 9, 4096], seed=3, missing=0.2).to(dtype)
    t = replace(t, prox=t.theta, mu=t.theta)
    lengths = torch.bincount(t.sample[t.counted], minlength=4)
    coefficient = torch.where(t.counted, 1 / (4 * lengths[t.sample]), 0.0).to(dtype)
    t = replace(t, coefficient=coefficient)  # of one sequence all alike, as GSPO needs it
    term = policy_term(LOSSES[loss], t.theta, t.prox, t.mu, t.advantage, t.sample, t.counted)
    assert not term.clipped.any()
    _, grad = _sum(LOSSES[loss], t)
    torch.testing.assert_close(grad, t.coefficient * t.advantage, rtol=1e-6, atol=0)


@pytest.mark.parametrize("loss", LOSSES)
def test_tokens_that_do_not_count_have_no_influence(loss: str) -> None:
    t = CASES["ragged"]
    assert not t.counted.all()
    other = replace(
        t,
        theta=t.theta.where(t.counted, t.theta - 1.0),
        prox=t.prox.where(t.counted, -4.0),
        mu=t.mu.where(t.counted, -0.1),
    )
    total, grad = _sum(LOSSES[loss], t)
    moved_total, moved_grad = _sum(LOSSES[loss], other)
    assert torch.equal(total, moved_total)
    assert torch.equal(grad, moved_grad)
    assert not grad[~t.counted].any()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_ratios_beyond_the_clamp_have_no_gradient(advantage: float) -> None:
    a = torch.tensor([advantage], dtype=torch.float64)
    theta = torch.tensor([-0.5], dtype=torch.float64, requires_grad=True)
    one = torch.zeros(1, dtype=torch.long), torch.ones(1, dtype=torch.bool)
    for name in ("ppo", "gspo", "dppo-tv"):
        config = LOSSES[name]
        term = policy_term(config, theta, theta.detach() - 30, theta.detach() - 30, a, *one)
        (grad,) = torch.autograd.grad(term.surrogate.sum(), theta)
        assert grad.item() == 0
        if advantage < 0:  # the unbounded side of the clip
            assert term.surrogate.item() == -math.exp(20)
        assert term.clipped.item() == (advantage > 0)


@hypothesis_settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=7),
    seed=st.integers(0, 2**20),
    cuts=st.sets(st.integers(0, 7), max_size=3),
    missing=st.sampled_from([0.0, 0.3]),
)
def test_cutting_between_sequences_changes_no_sum(
    lengths: list[int], seed: int, cuts: set[int], missing: float
) -> None:
    t = make_tokens(lengths, seed=seed, missing=missing)
    borders = sorted({0, len(lengths), *(c for c in cuts if c < len(lengths))})
    parts = [
        t.at((t.sample >= low) & (t.sample < high))
        for low, high in zip(borders, borders[1:], strict=False)
    ]
    correction = CorrectionConfig(level="sequence-geometric", action="mask", low=0.8, high=1.2)
    for config in LOSSES.values():
        whole, whole_grad = _corrected(config, correction, t)
        sums, grads = zip(*(_corrected(config, correction, p) for p in parts), strict=True)
        torch.testing.assert_close(torch.stack(sums).sum(), whole, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.cat(grads), whole_grad, rtol=1e-12, atol=0)


def _corrected(
    config: LossConfig, correction: CorrectionConfig, t: Tokens
) -> tuple[Tensor, Tensor]:
    """Sum and gradient with a weight, its mask and OPSM's."""
    weight, kept, _ = behaviour_weight(correction, t.prox, t.mu, t.sample, t.counted)
    kept = kept & opsm_keep(t.theta, t.mu, t.advantage, t.sample, t.counted, 1e-4)
    return _sum(config, t, weight * kept)


def test_the_dual_clip_bounds_negative_advantages_only() -> None:
    theta = torch.log(torch.tensor([0.9, 0.9], dtype=torch.float64))
    prox = torch.log(torch.tensor([0.1, 0.1], dtype=torch.float64))
    advantage = torch.tensor([-2.0, 2.0], dtype=torch.float64)
    term = ppo(theta, prox, advantage, 0.2, 0.2, dual_clip=3.0)
    torch.testing.assert_close(term.surrogate, torch.tensor([-6.0, 2.4], dtype=torch.float64))
    assert term.clipped.tolist() == [True, True]


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_two_way_divergence(divergence: Divergence) -> None:
    t = CASES["4096 tokens"]
    got = two_way_divergence(t.theta, t.mu, divergence)
    expected = [
        _two_way(math.exp(mu), math.exp(theta), divergence)
        for theta, mu in zip(t.theta.tolist(), t.mu.tolist(), strict=True)
    ]
    torch.testing.assert_close(
        got, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-12
    )
    half = math.log(0.5)
    theta = torch.tensor([0.0, half, 0.0], dtype=torch.float32)
    mu = torch.tensor([0.0, 0.0, half], dtype=torch.float32)
    sure = {"tv": [0.0, 0.5, 0.5], "kl": [0.0, math.log(2), math.inf]}[divergence]
    assert two_way_divergence(theta, mu, divergence).tolist() == pytest.approx(sure)
