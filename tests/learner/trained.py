"""What the step tests look at: the gradient, the new weights and the metrics of one batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asyncrl.learner.step as step_module
from asyncrl.config.learning import LearnerConfig, LossConfig, OptimConfig
from asyncrl.config.load import load
from asyncrl.config.schema import BufferConfig, Config
from asyncrl.learner.policy.optim import Applied
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


def configured(*overrides: str) -> Config:
    """The same, from the command line's words: every rule is applied."""
    base = ["learner.dtype=float32", "learner.optim.lr=1e-2", "rollout.group_size=4"]
    base += ["learner.batch_size=32", "rollout.max_new_tokens=12"]
    return load(None, [*base, *overrides]).config


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
        policy, critic = trainer.policy.trainable
        for name, p in (policy | critic).items():
            if p.grad is not None:
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


def assert_same_gradient(got: dict[str, Any], want: dict[str, Any], rtol: float = 1e-5) -> None:
    """Gradients relative to the largest entry of the whole gradient (cancellation is no error)."""
    assert got.keys() == want.keys()
    scale = max(float(np.abs(v).max()) for k, v in want.items() if k.startswith("grad/"))
    for name in want:
        if name.startswith("grad/"):
            np.testing.assert_allclose(got[name], want[name], rtol=rtol, atol=rtol * scale)


def assert_same_metrics(got: dict[str, float], want: dict[str, float], rel: float = 1e-4) -> None:
    """The same names, and values but for the order of float32 sums."""
    assert got.keys() == want.keys()
    for name in want:
        assert got[name] == pytest.approx(want[name], rel=rel, abs=1e-6), name
