"""Sums and means over the sequences of a microbatch, whose tokens lie flat one after another."""

from __future__ import annotations

import torch
from torch import Tensor


def segment_count(sample: Tensor) -> int:
    """How many sequence numbers there are: one more than the largest, 0 without tokens.

    Args:
        sample: [N] int64 sequence number of each token, from 0; numbers may be skipped.
    """
    return int(sample.max()) + 1 if sample.numel() else 0


def segment_sum(x: Tensor, sample: Tensor, n: int) -> Tensor:
    """Sum of `x` over each sequence, [n]; 0 for a number without tokens. Differentiable.

    Args:
        x: [N] a number per token.
        sample: [N] int64 sequence number of each token, below `n`.
        n: how many sequence numbers there are.
    """
    return torch.zeros(n, dtype=x.dtype, device=x.device).index_add(0, sample, x)


def segment_mean(x: Tensor, counted: Tensor, sample: Tensor, n: int) -> Tensor:
    """Mean of `x` over the counted tokens of each sequence, [n]. Differentiable.

    0 for a sequence of which nothing counts. What does not count has no influence, NaN included.

    Args:
        x: [N] a number per token.
        counted: [N] bool.
        sample: [N] int64 sequence number of each token, below `n`.
        n: how many sequence numbers there are.
    """
    total = segment_sum(torch.where(counted, x, 0.0), sample, n)
    return total / segment_sum(counted.to(x.dtype), sample, n).clamp(min=1)
