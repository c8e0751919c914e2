"""What a replaying learner rank is told, and what it tells: plain JSON on its pipes."""

from __future__ import annotations

from typing import Any

import msgspec


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A replay, as every rank gets it."""

    run: str
    """Folder of the run."""
    config: dict[str, Any]
    """The run's configuration with what is tried instead."""
    model_path: str
    checkpoint: str | None
    """The learner's checkpoint to start from; None is the initial model."""
    first: int
    """First batch."""
    last: int
    world: int
    """Learner ranks."""
    threads: tuple[int, ...]
    """CPU threads of each rank."""
    device: str
    """cpu or cuda."""
    scratch: str
    """Folder of the ranks' rendezvous."""
    model_out: str
    """Folder to write the weights to, as the run exports them; missing."""
    exact_out: str
    """Folder to write them to as they are, for the comparison with a checkpoint."""
    target: str
    """That checkpoint, of the run itself; empty: neither."""
    target_out: str
    """Folder to write its weights to."""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a rank: that it began, a step, its end, or why there is none."""

    rank: int
    what: str
    """ready, step, done or failed."""
    step: int = 0
    version: int = 0
    incarnation: int = 0
    metrics: dict[str, float] = {}
    """Of rank 0: those of the step."""
    hist: dict[str, dict[str, list[float]]] = {}
    error: str = ""
    """Class of asyncrl.errors."""
    message: str = ""
