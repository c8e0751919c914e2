"""What a run will leave on the disk, for the plan: checkpoints, and a recording of its samples."""

from __future__ import annotations

from pathlib import Path

from asyncrl import checkpoints
from asyncrl.config.schema import Config
from asyncrl.errors import ModelError
from asyncrl.model_store.tensors import stored_tensors

STATE_BYTES = 3 * 4
"""Of a parameter that trains: itself and its two moments, float32."""


def checkpoint_lines(c: Config, run_path: Path, model_path: Path) -> list[str]:
    """When checkpoints are taken, which are kept, where, and how large they are."""
    settings = c.checkpoint
    if settings.every is None:
        return [
            "none (checkpoint.every=null): the run cannot be resumed, and a learner that dies "
            "ends it"
        ]
    every = "batch" if settings.every == 1 else f"{settings.every} batches"
    end = " and at the end" if settings.at_end else ""
    last = "one" if settings.keep == 1 else str(settings.keep)
    best = "" if settings.score is None else " and the best"
    limit = "no limit" if settings.max_gib is None else f"up to {settings.max_gib:g} GiB in all"
    return [
        f"every {every}{end}; kept: the last {last}{best}, {limit}",
        f"in {run_path / checkpoints.FOLDER}, {_size(c, model_path)}and what the buffer holds",
    ]


def replay_line(c: Config) -> str:
    """How much is trained again, on top of what is new."""
    if not c.replay_groups:
        return "none (replay.fraction=0)"
    return (
        f"up to {c.replay_groups} groups again with each batch, at most {c.replay.max_staleness} "
        "versions stale; asyncrl replay refuses such a run"
    )


def recording_line(c: Config) -> str:
    """What is kept of the samples, and what that is for."""
    if not c.record.trajectories:
        return "none (record.trajectories=false): nothing for asyncrl samples and asyncrl replay"
    return f"every sample, up to {c.record.max_gib:g} GiB (asyncrl samples, asyncrl replay)"


def _size(c: Config, model_path: Path) -> str:
    """Of the learner's part of one checkpoint; empty if it is not known."""
    if c.learner.lora.rank is not None:
        return "each the adapters with their moments, "
    try:
        numel = sum(stored.numel for stored in stored_tensors(model_path).values())
    except ModelError:
        return ""  # whoever loads it says what is wrong
    if c.learner.advantage.critic and c.learner.critic.trunk == "own":
        numel *= 2
    size = numel * STATE_BYTES
    text = f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"
    return f"each about {text} of weights and moments, "
