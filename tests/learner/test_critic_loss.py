"""The value loss against its formula, its gradient by differences, and explained variance."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.learner.maths.critic_loss import explained_variance, value_loss

N = 200


def _inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """V, V before the update, targets, coefficients."""
    g = torch.Generator().manual_seed(2)
    old = torch.randn(N, generator=g, dtype=torch.float64)
    values = old + 0.4 * torch.randn(N, generator=g, dtype=torch.float64)
    targets = torch.randn(N, generator=g, dtype=torch.float64)
    coefficient = torch.rand(N, generator=g, dtype=torch.float64)
    coefficient[::10] = 0.0
    return values, old, targets, coefficient


def _literal_loss(
    values: Tensor, old: Tensor, targets: Tensor, coefficient: Tensor, clip: float | None
) -> float:
    total = 0.0
    rows = zip(*(x.tolist() for x in (values, old, targets, coefficient)), strict=True)
    for v, o, t, c in rows:
        error = (v - t) ** 2
        if clip is not None:
            error = max(error, (min(max(v, o - clip), o + clip) - t) ** 2)
        total += c * 0.5 * error
    return total


@pytest.mark.parametrize("clip", [None, 0.3])
def test_value_loss_and_its_gradient(clip: float | None) -> None:
    values, old, targets, coefficient = _inputs()
    v = values.clone().requires_grad_()
    loss, clipped = value_loss(v, old, targets, coefficient, clip)
    expected = _literal_loss(values, old, targets, coefficient, clip)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    loss.backward()  # type: ignore[no-untyped-call]
    assert v.grad is not None
    step = 1e-6
    for n in range(N):
        moved = values.clone()
        moved[n] += step
        up = _literal_loss(moved, old, targets, coefficient, clip)
        moved[n] -= 2 * step
        down = _literal_loss(moved, old, targets, coefficient, clip)
        assert v.grad[n].item() == pytest.approx((up - down) / (2 * step), abs=1e-6)
    if clip is None:
        assert not clipped.any()
    else:
        assert 0 < clipped.sum() < N
        assert not v.grad[clipped].any()
        assert ((values - old).abs()[clipped] > clip).all()


def test_before_the_values_move_clipping_has_no_effect() -> None:
    values, _, targets, coefficient = _inputs()
    grads = []
    for clip in (None, 0.3):
        v = values.clone().requires_grad_()
        loss, clipped = value_loss(v, values, targets, coefficient, clip)
        loss.backward()  # type: ignore[no-untyped-call]
        assert not clipped.any()
        grads.append(v.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=0)


def test_targets_and_old_values_get_no_gradient_and_nothing_gives_0() -> None:
    values, old, targets, coefficient = (x.requires_grad_() for x in _inputs())
    value_loss(values, old, targets, coefficient.detach(), 0.3)[0].backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None
    assert old.grad is None
    assert targets.grad is None
    none = torch.zeros(0, requires_grad=True)
    for clip in (None, 0.3):
        loss, clipped = value_loss(none, none, none, none, clip)
        assert loss.item() == 0.0
        assert clipped.shape == (0,)


def test_a_value_loss_adds_up_over_parts() -> None:
    values, old, targets, coefficient = _inputs()
    whole, _ = value_loss(values, old, targets, coefficient, 0.3)
    parts = [
        value_loss(values[k], old[k], targets[k], coefficient[k], 0.3)[0]
        for k in (slice(0, 1), slice(1, 90), slice(90, N))
    ]
    assert sum(p.item() for p in parts) == pytest.approx(whole.item(), rel=1e-12)


def test_explained_variance() -> None:
    values, _, targets, _ = _inputs()
    t, v = targets.tolist(), values.tolist()
    mean_t = sum(t) / N
    residual = [a - b for a, b in zip(t, v, strict=True)]
    mean_r = sum(residual) / N
    expected = 1 - sum((x - mean_r) ** 2 for x in residual) / sum((x - mean_t) ** 2 for x in t)
    assert explained_variance(values.numpy(), targets.numpy()) == pytest.approx(expected, rel=1e-12)
    assert explained_variance(targets.numpy() + 3, targets.numpy()) == pytest.approx(1.0)
    assert explained_variance(np.zeros(N), targets.numpy()) == pytest.approx(0.0, abs=1e-12)
    assert math.isnan(explained_variance(values.numpy(), np.full(N, 0.1)))
    assert math.isnan(explained_variance([], []))
