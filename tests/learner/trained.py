"""What the step tests look at: the gradient, the new weights and the metrics of one batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import asyncrl.learner.step as step_module
from asyncrl.config.schema import BufferConfig, Config, LearnerConfig, LossConfig, OptimConfig
from asyncrl.learner.optim import Applied
from asyncrl.learner.step import StepResult, Trainer
from asyncrl.types import Trajectory, Version
from tests.helpers.tiny_model import make_batch, make_part


@dataclass(frozen=True)
class Captured:
    arrays: dict[str, np.ndarray[Any, Any]]
    """`grad/NAME` (full, before clipping) and `param/NAME` after the step."""
    metrics: dict[str, float]
    result: StepResult


def learner_config(loss: dict[str, Any] | None = None, **learner: Any) -> Config:
    """A float32 learner with one optimizer step of plain size."""
    settings: dict[str, Any] = {"dtype": "float32", "optim": OptimConfig(lr=1e-2)} | learner
    return Config(
        buffer=BufferConfig(max_staleness=2),
        learner=LearnerConfig(loss=LossConfig(**(loss or {})), **settings),
    )


def partition_batch() -> list[Trajectory]:
    """Eight groups of unequal lengths, some without variance, some tokens without log mu."""
    batch = make_batch(11, groups=8, group_size=4, prefix=9)
    for t in batch[::5]:
        t.behaviour_logprobs[0] = np.nan
    for t in batch[3:30:9]:
        t.behaviour_logprobs[:] = -np.inf  # a sample that leaves altogether
    return batch


def capture(
    config: Config,
    model: Path,
    batch: list[Trajectory],
    rank: int = 0,
    world: int = 1,
    version: Version = Version(0, 0),  # noqa: B008
    fresh: int | None = None,
) -> Captured:
    """Train `batch` once and return the gradient of the last optimizer step.

    Samples from the one numbered `fresh` on are replayed ones.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    trainer = Trainer(config, model, rank=rank, world=world, device="cpu")
    apply = step_module.apply_gradient

    def spy(*args: Any, **kwargs: Any) -> Applied:
        for name, p in trainer.policy.module.named_parameters():
            arrays[f"grad/{name}"] = p.grad.full_tensor().numpy().copy()
        return apply(*args, **kwargs)

    step_module.apply_gradient = spy
    try:
        part = make_part(batch, rank, world)
        part = replace(part, fresh=len(batch) if fresh is None else fresh)
        result = trainer.train(part, version)
        for name, value in trainer.full_parameters(torch.float32):
            arrays[f"param/{name}"] = value.numpy().copy()
    finally:
        step_module.apply_gradient = apply
    return Captured(arrays, result.metrics, result)
