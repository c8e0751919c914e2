"""Behaviour weights and masks against slow transcriptions, and what they say about the data."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from asyncrl.config.learning import CorrectionConfig
from asyncrl.errors import AsyncRLError
from asyncrl.learner.maths.corrections import (
    Level,
    behaviour_weight,
    check_present,
    effective_sample_share,
    exp_clamped,
    k3,
    log_weight,
    m2po_threshold,
    opsm_keep,
    weight_statistics,
)
from asyncrl.learner.maths.segments import segment_count, segment_mean, segment_sum
from tests.learner.flat_tokens import CASES, Tokens, make_tokens

LEVELS: tuple[Level, ...] = ("token", "sequence-product", "sequence-geometric")
ACTIONS: tuple[Literal["truncate", "mask", "none"], ...] = ("truncate", "mask", "none")
CORRECTIONS = {
    "off": CorrectionConfig(level="off"),
    **{
        f"{level}, {action}": CorrectionConfig(level=level, action=action)
        for level in LEVELS
        for action in ACTIONS
    },
    "token, icepop": CorrectionConfig(level="token", action="mask", low=0.7, high=1.4),
    "geometric, wide": CorrectionConfig(
        level="sequence-geometric", action="mask", low=0.8, high=1.3
    ),
}
BOTH = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])


def _sequences(t: Tokens, of: list[float]) -> dict[int, list[float]]:
    """The counted tokens' numbers by sequence."""
    out: dict[int, list[float]] = {}
    for value, sample, counted in zip(of, t.sample.tolist(), t.counted.tolist(), strict=True):
        out.setdefault(sample, [])
        if counted:
            out[sample].append(value)
    return out


def _literal_weights(config: CorrectionConfig, t: Tokens) -> tuple[list[float], list[bool]]:
    logs = [p - m for p, m in zip(t.prox.tolist(), t.mu.tolist(), strict=True)]
    sums = {s: (math.fsum(values), len(values)) for s, values in _sequences(t, logs).items()}
    (low, high), weights, kept = config.bounds, [], []
    for log, sample, counted in zip(logs, t.sample.tolist(), t.counted.tolist(), strict=True):
        total, n = sums[sample]
        log_w = {
            "off": 0.0,
            "token": log if counted else 0.0,
            "sequence-product": total,
            "sequence-geometric": total / max(1, n),
        }[config.level]
        w = math.exp(min(max(log_w, -20), 20))
        keep = config.level == "off" or config.action != "mask" or low <= w <= high
        if config.level != "off" and config.action == "truncate":
            w = min(w, high)
        weights.append(w if keep else 0.0)
        kept.append(keep)
    return weights, kept


@BOTH
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("case", CASES)
def test_behaviour_weight(case: str, correction: str, dtype: torch.dtype) -> None:
    config, t = CORRECTIONS[correction], CASES[case].to(dtype)
    got = behaviour_weight(config, t.prox.clone().requires_grad_(), t.mu, t.sample, t.counted)
    weights, kept = _literal_weights(config, t)
    expected = torch.tensor(weights, dtype=torch.float64)
    torch.testing.assert_close(got.weight, expected, rtol=1e-6, atol=0)
    assert got.kept.tolist() == kept
    at_bound = (got.weight == config.bounds[1]) & (config.action == "truncate")
    assert torch.equal(got.lowered, at_bound)
    assert not got.weight.requires_grad


@pytest.mark.parametrize("correction", sorted(set(CORRECTIONS) - {"off"}))
def test_the_cases_meet_both_sides_of_every_bound(correction: str) -> None:
    config = CORRECTIONS[correction]
    spread = 0.02 if config.bounds == (0.99, 1.01) else 1.0
    t = make_tokens([3, 4, 2, 5] * 20, seed=6, spread=spread)
    weight, kept, _ = behaviour_weight(config, t.prox, t.mu, t.sample, t.counted)
    if config.action == "mask":
        assert 0 < kept.sum() < len(kept)
    elif config.action == "truncate":
        assert 0 < (weight == config.bounds[1]).sum() < len(weight)
    else:
        assert len(set(weight.tolist())) > 10


@BOTH
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_on_policy_every_correction_is_the_identity(correction: str, dtype: torch.dtype) -> None:
    t = CASES["on-policy"].to(dtype)
    weight, kept, _ = behaviour_weight(CORRECTIONS[correction], t.prox, t.mu, t.sample, t.counted)
    assert kept.all()
    assert (weight == 1).all()
    assert opsm_keep(t.theta, t.mu, t.advantage, t.sample, t.counted, 0.0).all()
    assert m2po_threshold((t.prox - t.mu).double().numpy(), 1e-9) == math.inf


@pytest.mark.parametrize("missing", [math.nan, -math.inf, -7.0])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_missing_log_probabilities_have_no_influence(correction: str, missing: float) -> None:
    t = CASES["ragged"]
    config, mu = CORRECTIONS[correction], t.mu.where(t.counted, missing)
    kept = behaviour_weight(config, t.prox, t.mu, t.sample, t.counted)
    without = behaviour_weight(config, t.prox, mu, t.sample, t.counted)
    assert torch.equal(kept.weight, without.weight)
    assert torch.equal(kept.kept, without.kept)
    rejected = [opsm_keep(t.theta, m, t.advantage, t.sample, t.counted, 0.0) for m in (t.mu, mu)]
    assert torch.equal(*rejected)


def test_log_weights_are_of_the_level_before_any_clamp() -> None:
    t = CASES["log-ratio 30"]
    every = [t.prox, t.mu, t.sample, t.counted]
    assert log_weight("token", *every).tolist() == [0.0, -30.0, 0.0, 30.0] * 3
    shifted = [t.prox + 10, t.mu, t.sample, t.counted]
    assert log_weight("sequence-product", *shifted).tolist() == [40.0] * 12
    assert log_weight("sequence-geometric", *shifted).tolist() == [10.0] * 12


def test_log_ratios_beyond_the_clamp_have_no_gradient() -> None:
    x = torch.tensor([-30.0, -1.0, 30.0], requires_grad=True)
    value = exp_clamped(x)
    torch.testing.assert_close(value, torch.tensor([math.exp(-20), math.exp(-1), math.exp(20)]))
    (grad,) = torch.autograd.grad(value.sum(), x)
    torch.testing.assert_close(grad, torch.tensor([0.0, math.exp(-1), 0.0]))


def _literal_m2po(log_rho: list[float], tau: float) -> list[bool]:
    """Take out the largest, all equal ones at once, until the mean of the rest is at most tau."""
    kept = sorted(abs(x) for x in log_rho)
    while kept and math.fsum(x * x for x in kept) / len(kept) > tau:
        largest = kept[-1]
        while kept and kept[-1] == largest:
            kept.pop()
    rest = set(kept)
    return [abs(x) in rest for x in log_rho]


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    quarters=st.lists(st.integers(-8, 8), max_size=25),
    tau=st.sampled_from([0.01, 0.04, 0.3, 1.0]),
    order=st.randoms(use_true_random=False),
)
def test_m2po(quarters: list[int], tau: float, order: Any) -> None:
    log_rho = np.array(quarters, np.float64) / 4  # many ties
    threshold = m2po_threshold(log_rho, tau)
    kept = (np.abs(log_rho) < threshold).tolist()
    assert kept == _literal_m2po(log_rho.tolist(), tau)
    assert (threshold == math.inf) == all(kept)
    shuffled = log_rho.tolist()
    order.shuffle(shuffled)
    assert m2po_threshold(np.array(shuffled), tau) == threshold


@pytest.mark.parametrize("case", ["4096 tokens", "log-ratio 30", "length 1", "ragged", "no tokens"])
def test_m2po_of_the_cases(case: str) -> None:
    t = CASES[case]
    log_rho = (t.prox - t.mu).numpy()
    threshold = m2po_threshold(log_rho, 0.04)
    kept = np.abs(log_rho) < threshold
    assert kept.tolist() == _literal_m2po(log_rho.tolist(), 0.04)
    assert kept.all() == (threshold == math.inf)
    if case == "4096 tokens":
        assert 0.035 < np.mean(log_rho[kept] ** 2) <= 0.04


@BOTH
@pytest.mark.parametrize("delta", [0.0, 1e-4, 0.05])
@pytest.mark.parametrize("case", CASES)
def test_opsm(case: str, delta: float, dtype: torch.dtype) -> None:
    t = CASES[case].to(dtype)
    got = opsm_keep(t.theta, t.mu, t.advantage, t.sample, t.counted, delta)
    logs = [m - p for m, p in zip(t.mu.tolist(), t.theta.tolist(), strict=True)]
    away = {s: math.fsum(v) / len(v) if v else 0.0 for s, v in _sequences(t, logs).items()}
    expected = [
        not (a < 0 and away[s] > delta)
        for a, s in zip(t.advantage.tolist(), t.sample.tolist(), strict=True)
    ]
    assert got.tolist() == expected


def test_opsm_meets_every_combination() -> None:
    t = make_tokens([3] * 40, seed=8)
    kept = opsm_keep(t.theta, t.mu, t.advantage, t.sample, t.counted, 1e-4)
    assert not kept[t.advantage < 0].all()
    assert kept[t.advantage < 0].any()
    assert kept[t.advantage >= 0].all()


def test_segments() -> None:
    x = torch.tensor([1.0, 2.0, 4.0, math.nan, 8.0], requires_grad=True)
    sample = torch.tensor([0, 0, 2, 2, 3])
    counted = torch.tensor([True, True, True, False, False])
    assert segment_count(sample) == 4
    assert segment_count(sample[:0]) == 0
    mean = segment_mean(x, counted, sample, 5)
    assert mean.tolist() == [1.5, 0.0, 4.0, 0.0, 0.0]
    (grad,) = torch.autograd.grad(mean.sum(), x)
    assert grad.tolist() == [0.5, 0.5, 1.0, 0.0, 0.0]
    assert segment_sum(x[:3], sample[:3], 4).tolist() == [3.0, 0.0, 4.0, 0.0]


def _literal_quantile(values: list[float], q: float) -> float:
    ordered, at = sorted(values), q * (len(values) - 1)
    low = math.floor(at)
    high = min(low + 1, len(values) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def test_weight_statistics() -> None:
    t = make_tokens([50], seed=9, spread=1.0)
    log_w = (t.prox - t.mu).tolist()
    w = [math.exp(x) for x in log_w]
    kept = [0.4 <= x <= 3 for x in w]
    used = [min(x, 2.0) if k else 0.0 for x, k in zip(w, kept, strict=True)]
    cut = [x > 2 for x in w]
    got = weight_statistics(*(np.array(x) for x in (log_w, used, kept, cut)))
    lowered = [c for c, k in zip(cut, kept, strict=True) if k]
    assert 0 < sum(lowered) < len(lowered) < 50
    expected = {
        "ess_frac": sum(w) ** 2 / (50 * sum(x * x for x in w)),
        "chi2": sum(x * x for x in w) / 50 - 1,
        "clip_frac": sum(lowered) / len(lowered),
        "mask_frac": 1 - sum(kept) / 50,
        "clamped": 0.0,
        "ratio_raw/mean": sum(w) / 50,
        "ratio_raw/max": max(w),
        "ratio_used/mean": sum(used) / 50,
        "ratio_used/p95": _literal_quantile(used, 0.95),
        "ratio_used/max": max(used),
        **{f"ratio_raw/p{q:02}": _literal_quantile(w, q / 100) for q in (5, 50, 95, 99)},
    }
    assert got == pytest.approx(expected, rel=1e-12)


def test_statistics_of_hard_weights() -> None:
    every = np.ones(2, bool)
    one = weight_statistics(np.zeros(1), np.ones(1), every[:1], ~every[:1])
    assert (one["ess_frac"], one["chi2"], one["clip_frac"], one["mask_frac"]) == (1, 0, 0, 0)
    none = weight_statistics(np.array([9.0, 9.0]), np.zeros(2), ~every, every)
    assert (none["mask_frac"], none["clip_frac"], none["ess_frac"]) == (1, 0, 1)
    first = np.array([True, False])
    far = weight_statistics(np.array([30.0, 0.0]), np.array([2.0, 1.0]), every, first)
    assert (far["clamped"], far["clip_frac"], far["ratio_raw/max"]) == (1, 0.5, math.exp(30))
    beyond = weight_statistics(np.array([900.0, 0.0]), np.array([2.0, 1.0]), every, first)
    assert beyond["ratio_raw/max"] == math.inf
    assert beyond["ess_frac"] == effective_sample_share(np.array([900.0, 0.0])) == 0.5


def test_k3() -> None:
    log_w = [0.0, 0.7, -1.3, 2.0]
    expected = sum(math.exp(x) - 1 - x for x in log_w) / 4
    assert k3(np.array(log_w)) == pytest.approx(expected, rel=1e-12)
    assert k3(np.zeros(3)) == 0


def test_missing_behaviour_logprobs_are_refused_above_one_half() -> None:
    check_present(missing=5, total=10)
    with pytest.raises(AsyncRLError, match="6 of 10 behaviour log-probabilities"):
        check_present(missing=6, total=10)


@hypothesis_settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=2, max_size=6),
    seed=st.integers(0, 2**20),
    cut=st.integers(1, 5),
)
def test_cutting_between_sequences_changes_no_weight(
    lengths: list[int], seed: int, cut: int
) -> None:
    t = make_tokens(lengths, seed=seed, missing=0.2)
    parts = [t.at(t.sample < cut), t.at(t.sample >= cut)]
    parts[1] = replace(parts[1], sample=parts[1].sample - cut)  # numbered from 0 again
    for config in CORRECTIONS.values():
        whole = behaviour_weight(config, t.prox, t.mu, t.sample, t.counted)
        cuts = [behaviour_weight(config, p.prox, p.mu, p.sample, p.counted) for p in parts]
        weight = torch.cat([c.weight for c in cuts])
        torch.testing.assert_close(weight, whole.weight, rtol=1e-12, atol=0)
        assert torch.equal(torch.cat([c.kept for c in cuts]), whole.kept)
