"""AdamW, its schedule, and the step that clips, checks and applies a gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.config.learning import LearnerConfig, OptimConfig


class Trainable(NamedTuple):
    """Parameters by name."""

    policy: dict[str, nn.Parameter]
    critic: dict[str, nn.Parameter]
    """Of the value head, or of a critic's own model."""


class HasTrainable(Protocol):
    """What `make_optimizer` needs of a policy."""

    @property
    def trainable(self) -> Trainable:
        """What trains."""


def make_optimizer(model: HasTrainable, config: LearnerConfig) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101), fused, with weight decay on matrices only.

    Up to four groups: matrices and vectors of the policy (`optim.lr`) and of the critic
    (`critic.lr`). A parameter without a gradient is left alone, weight and moments.
    """
    optim = config.optim
    policy, critic = (list(part.values()) for part in model.trainable)
    groups = [
        *_groups(policy, optim.lr, optim.weight_decay),
        *_groups(critic, config.critic.lr or optim.lr, optim.weight_decay),
    ]
    return torch.optim.AdamW(groups, betas=optim.betas, eps=optim.eps, fused=True)


def _groups(params: list[nn.Parameter], lr: float, weight_decay: float) -> list[dict[str, Any]]:
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [g | {"lr": lr, "initial_lr": lr} for g in groups if g["params"]]


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


def ess_scale(ess_share: float, ess_ref: float) -> float:
    """What the learning rate of a batch is multiplied by for its effective sample size: VCPO.

    sqrt(ESS / ESS_ref), at most 1, with shares of the number of tokens in place of both sizes: the
    gradient's variance grows as 1 / ESS, a step in proportion keeps the noise of the update as it
    is at the reference. A batch without tokens (nan) has 1.

    >>> ess_scale(0.25, 1.0), ess_scale(0.9, 0.5)
    (0.5, 1.0)
    """
    return 1.0 if math.isnan(ess_share) else min(1.0, math.sqrt(ess_share / ess_ref))


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a gradient."""

    grad_norm: float
    """Global norm before clipping; not finite when the step was skipped."""
    skipped: bool
    """True if the gradient was not finite: parameters and moments are as before."""


def apply_gradient(
    optimizer: torch.optim.Optimizer, factor: float, grad_clip: float | None
) -> Applied:
    """Clip to the global norm over all ranks, step, and forget the gradient.

    Policy and critic are clipped together, by one norm over all that has a gradient: theirs is one
    loss. A gradient that is not finite is dropped whole; every rank sees the same norm and so
    decides alike.

    Args:
        optimizer: from `make_optimizer`.
        factor: multiplied into each group's learning rate for this step.
        grad_clip: largest norm; None does not clip.
    """
    params = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
    norm = global_norm(p.grad for p in params if p.grad is not None)
    skipped = not math.isfinite(norm)
    if not skipped:
        if grad_clip is not None and norm > grad_clip:
            torch._foreach_mul_([_local(p.grad) for p in params], grad_clip / norm)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Applied(norm, skipped)


def global_norm(grads: Iterable[Tensor]) -> float:
    """2-norm over all elements of all ranks' shards; 0.0 without any. All lie on one mesh."""
    grads = list(grads)
    if not grads:
        return 0.0
    norm = _norm_over_ranks(grads, torch.nn.utils.get_total_norm([_local(g) for g in grads]))
    if not math.isfinite(norm):  # it may be float32 that overflows; every rank sees the same
        parts = [torch.linalg.vector_norm(_local(g), dtype=torch.float64) for g in grads]
        norm = _norm_over_ranks(grads, torch.linalg.vector_norm(torch.stack(parts)))
    return norm


def _norm_over_ranks(grads: list[Tensor], norm: Tensor) -> float:
    norm = norm.double()
    if isinstance(grads[0], DTensor):
        mesh = grads[0].device_mesh
        # Offloaded shards lie in host memory, the ranks of GPUs speak NCCL.
        square = norm.square().to(mesh.device_type)
        dist.all_reduce(square, group=mesh.get_group())
        norm = square.sqrt()
    return norm.item()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
