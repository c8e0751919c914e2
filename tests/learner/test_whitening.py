"""Whitening over a batch whose tokens lie in several microbatches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from asyncrl.learner.maths.returns import moments, whiten


def test_whitening_is_by_the_counted_tokens_of_the_whole_batch() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(61, generator=g, dtype=torch.float64) * 3 + 10
    counted = torch.arange(len(x)) % 3 != 0
    total = moments(x[:20], counted[:20]) + moments(x[20:], counted[20:])
    assert total.dtype == torch.float64
    kept = [float(v) for v, c in zip(x, counted, strict=True) if c]
    mean = sum(kept) / len(kept)
    std = math.sqrt(sum((v - mean) ** 2 for v in kept) / (len(kept) - 1))
    expected = [(float(v) - mean) / (std + 1e-6) for v in x]
    np.testing.assert_allclose(whiten(x, total), expected, rtol=1e-9)
    narrow = whiten(x.float(), total)
    assert narrow.dtype == torch.float32
    np.testing.assert_allclose(narrow, expected, rtol=1e-5, atol=1e-6)
    x[~counted] = math.nan  # what does not count has no influence
    torch.testing.assert_close(moments(x, counted), total, rtol=1e-12, atol=0)


@pytest.mark.parametrize("value", [0.0, 0.1, -1e6 / 3])
def test_whitening_without_variance_or_with_a_single_token_gives_0(value: float) -> None:
    x = torch.full((1001,), value)
    everything = torch.ones(1001, dtype=torch.bool)
    parts = torch.stack([moments(x[k::7], everything[k::7]) for k in range(7)]).sum(0)
    assert not whiten(x, parts).any()
    spread = x + torch.arange(1001)
    single = everything.clone()
    single[1:] = False
    assert not whiten(spread, moments(spread, single)).any()
    assert not whiten(spread, moments(spread, ~everything)).any()
    whitened = whiten(spread, moments(spread, everything))
    assert whitened.std().item() == pytest.approx(1.0, rel=1e-4)


def test_numbers_that_differ_by_their_rounding_alone_are_not_blown_up_to_variance_1() -> None:
    x = torch.full((1001,), 1e6 / 3)
    x[::2] = torch.nextafter(x[::2], torch.tensor(0.0))
    everything = torch.ones(1001, dtype=torch.bool)
    assert x.double().std() > 0.01
    assert not whiten(x, moments(x, everything)).any()
