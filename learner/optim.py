"""AdamW, its schedule, and the step that clips, checks and applies a gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.config.schema import OptimConfig


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101), fused, with weight decay on matrices only."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=True,
    )


def lr_factor(batch: int, config: OptimConfig, steps: int) -> float:
    """What `lr` is multiplied by for batch k (from 1) of `steps`; a pure function, so resumable.

    Linear warm-up reaches 1 with batch `warmup_steps`. The decay starts from 1 with the batch after
    that and reaches 0 only with batch `steps` + 1, which is not trained: the last batch still
    learns, at 1 / (steps - warmup_steps) of `lr` with the linear schedule.

    >>> [lr_factor(k, OptimConfig(schedule="linear", warmup_steps=2), 4) for k in (1, 2, 3, 4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if batch <= config.warmup_steps:
        return batch / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = (batch - 1 - config.warmup_steps) / max(1, steps - config.warmup_steps)
    progress = min(1.0, progress)
    if config.schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a gradient."""

    grad_norm: float
    """Global norm before clipping; not finite when the step was skipped."""
    skipped: bool
    """True if the gradient was not finite: parameters and moments are as before."""


def apply_gradient(optimizer: torch.optim.Optimizer, lr: float, grad_clip: float | None) -> Applied:
    """Clip to the global norm over all ranks, step, and forget the gradient.

    A gradient that is not finite is dropped whole; every rank sees the same norm and so
    decides alike.
    """
    params = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    norm = global_norm([p.grad for p in params])
    skipped = not math.isfinite(norm)
    if not skipped:
        if grad_clip is not None and norm > grad_clip:
            torch._foreach_mul_([_local(p.grad) for p in params], grad_clip / norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Applied(norm, skipped)


def global_norm(grads: Iterable[Tensor]) -> float:
    """2-norm over all elements of all ranks' shards; 0.0 without any."""
    grads = list(grads)
    if not grads:
        return 0.0
    norm = torch.nn.utils.get_total_norm(grads)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
