"""The critic's loss, and how much of its targets it explains."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def value_loss(
    values: Tensor,
    old_values: Tensor,
    targets: Tensor,
    coefficient: Tensor,
    clip: float | None,
) -> tuple[Tensor, Tensor]:
    """sum_n c 1/2 max((V - t)^2, (clip(V, V_old - e, V_old + e) - t)^2), clipped as in PPO.

    Clipping keeps a value from moving by more than e in one batch: beyond, and on the side of the
    target, its gradient is 0.

    Args:
        values: [N] V, with gradient.
        old_values: [N] V before the update.
        targets: [N] t.
        coefficient: [N] what each token's loss is multiplied by; tokens with 0 have no influence.
        clip: e; None turns clipping off.

    Returns:
        The loss, and [N] booleans: True where the clip decides the token's loss.
    """
    targets = targets.detach()
    plain = (values - targets).square()
    if clip is None:
        loss = 0.5 * (coefficient * plain).sum()
        return loss, torch.zeros_like(plain, dtype=torch.bool)
    old = old_values.detach()
    bounded = (old + (values - old).clamp(-clip, clip) - targets).square()
    loss = 0.5 * (coefficient * torch.maximum(plain, bounded)).sum()
    # Beyond e, not only by the rounding of old + (V - old).
    return loss, ((values - old).abs() > clip).detach() & (bounded > plain).detach()


def explained_variance(values: npt.ArrayLike, targets: npt.ArrayLike) -> float:
    """1 - Var(t - V) / Var(t) over the tokens given, [n] each.

    1 is perfect, 0 no better than a constant, below 0 worse; NaN where the targets do not vary.

    >>> explained_variance([0.0, 1.0], [0.0, 1.0])
    1.0
    """
    t = np.asarray(targets, np.float64)
    if t.size == 0 or np.all(t == t[0]):
        return math.nan
    residual = t - np.asarray(values, np.float64)
    return float(1 - residual.var() / t.var())
