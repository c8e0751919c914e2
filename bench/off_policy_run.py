"""One run of bench/off_policy.py: train on data that is exactly k versions old.

    snapshot V - k ─► sample ─► Trainer.train at V ─► snapshot V + 1           V = 0, 1, 2, ...
    (version 0 until V = k)

Importing this loads no torch: the pool's processes do, in `enter`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import statistics
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from asyncrl.config.load import load
from asyncrl.config.schema import Config
from asyncrl.types import Version

PRESETS = "correction"
"""Folder of configs/ whose files are the methods."""
EXACT = 1e-3
"""Largest mean distance from 1 of pi_prox/mu on data of the learner's own version."""


@dataclass(frozen=True, slots=True)
class Study:
    """What all runs have in common."""

    steps: int = 100
    """Batches; a version each."""
    groups: int = 8
    """Prompts of a batch."""
    group_size: int = 8
    minibatches: int = 2
    """Optimizer steps of a batch, so that pi_theta/pi_prox is not always 1."""
    judged: int = 10
    """Last policies whose mean true reward is the result: one alone is noise at a high rate."""
    evaluated: int = 256
    """Samples of a policy that tell its true reward."""
    watched: int = 10
    """Batches between two points of the curve."""


@dataclass(frozen=True, slots=True)
class Run:
    """One of them.

    >>> str(Run("icepop", 8, 1e-3, 0))
    'icepop k=8 lr=0.001 seed=0'
    """

    method: str
    """Name of a preset."""
    k: int
    """Age of the data, in versions."""
    lr: float
    seed: int

    def __str__(self) -> str:
        return f"{self.method} k={self.k} lr={self.lr:g} seed={self.seed}"


def config_of(study: Study, run: Run) -> Config:
    """The preset, with what all methods have in common.

    Raises:
        ConfigError: the preset cannot be combined with it.
    """
    common = {
        "run.steps": study.steps, "run.seed": run.seed, "buffer.max_staleness": run.k,
        "buffer.on_stale": "raise", "rollout.group_size": study.group_size,
        "learner.batch_size": study.groups * study.group_size,
        "learner.minibatches": study.minibatches, "learner.dtype": "float32",
        "learner.optim.lr": run.lr,
    }  # fmt: skip
    preset = f"{PRESETS}/{run.method}"
    config = load(preset, [f"{k}={v}" for k, v in common.items()]).config
    if config.learner.advantage.estimator not in ("gae", "vtrace"):
        return config
    # A preset's rate of the value head is for large models: here it follows the sweep as well.
    common["learner.critic.lr"] = run.lr
    return load(preset, [f"{k}={v}" for k, v in common.items()]).config


def fingerprint(study: Study, run: Run) -> str:
    """Changes with whatever a run's result depends on: configuration, learner, task."""
    digest = hashlib.sha256(config_of(study, run).model_dump_json().encode())
    digest.update(json.dumps(asdict(study)).encode())
    digest.update(_code())
    return digest.hexdigest()[:16]


@functools.cache
def _code() -> bytes:
    import asyncrl.learner

    beside = (Path(__file__).with_name(n) for n in ("off_policy_run.py", "off_policy_task.py"))
    sources = [*Path(asyncrl.learner.__path__[0]).rglob("*.py"), *beside]
    return b"".join(path.read_bytes() for path in sorted(sources))


def make_model(folder: str) -> None:
    """See off_policy_task; for a process of its own."""
    from off_policy_task import make_model

    make_model(Path(folder))


def enter() -> None:
    """What a process of the pool does first: one thread, a process group of one."""
    import torch
    import torch.distributed as dist
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


def execute(study: Study, run: Run, folder: str) -> dict[str, Any]:
    """Train and judge; what is kept of the run. A policy that breaks has reward 0.

    Raises:
        RuntimeError: log-probabilities of sampler and learner differ.
    """
    from off_policy_task import BrokenPolicy

    began = time.monotonic()
    told = Told()
    try:
        _train(study, run, folder, told)
    except BrokenPolicy:
        told.last = [0.0]
    return asdict(run) | {
        "reward": round(statistics.fmean(told.last), 5),
        "curve": [round(x, 4) for x in told.curve],
        "ess_frac": round(statistics.fmean(told.ess), 4) if told.ess else None,
        "wall_s": round(time.monotonic() - began, 2),
    }


@dataclass(slots=True)
class Told:
    """What a run tells while it goes on."""

    curve: list[float] = field(default_factory=list)
    """True reward before every `Study.watched`-th batch."""
    last: list[float] = field(default_factory=list)
    """The same of the last `Study.judged` policies."""
    ess: list[float] = field(default_factory=list)
    """Share of the effective sample size of each batch."""


def _train(study: Study, run: Run, folder: str, told: Told) -> None:
    import torch
    from learner_batch import make_part
    from off_policy_task import Sampler

    from asyncrl.learner.step import Trainer

    config = config_of(study, run)
    recomputed = config.learner.correction.prox == "recompute"  # else the ratio is another one
    trainer = Trainer(config, folder, rank=0, world=1, device="cpu")
    sampler = Sampler(Path(folder), seed=1000 + run.seed)

    def snapshot() -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in trainer.full_parameters(torch.float32)}

    def true_reward() -> float:
        sampler.load(kept[-1])
        return float(sampler.sample(study.evaluated, 1).rewards.mean())

    kept = deque([snapshot()], maxlen=run.k + 1)
    for version in range(study.steps):
        if version % study.watched == 0:
            told.curve.append(true_reward())
        sampler.load(kept[0])
        sampled = sampler.sample(study.groups, study.group_size)
        of = Version(0, max(0, version - run.k))
        batch = sampled.trajectories(study.group_size, version * study.groups, of)
        metrics = trainer.train(make_part(batch, version + 1), Version(0, version)).metrics
        if run.k == 0 and recomputed and abs(metrics.get("is/ratio_raw/mean", 1.0) - 1) > EXACT:
            raise RuntimeError(f"pi_prox/mu is {metrics['is/ratio_raw/mean']} on-policy")
        if "is/ess_frac" in metrics:
            told.ess.append(metrics["is/ess_frac"])
        kept.append(snapshot())
        if version >= study.steps - study.judged:
            told.last.append(true_reward())
