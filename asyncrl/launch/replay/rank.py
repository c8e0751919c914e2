"""One learner rank of a replay: recorded parts instead of pulled ones, nothing else is there.

    recording ──part of batch k──► Trainer, at the version of the run ──► Told(step) ─► parent
                                      └── after the last: the weights, as the run exports them

Waits for the other ranks (collectives); the parent has the deadline, and ends every rank when it
passes, or when one of them ends early.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec

from asyncrl.config.schema import Config
from asyncrl.errors import AsyncRLError
from asyncrl.launch.replay.job import Job, Told
from asyncrl.launch.replay.plan import read_batches
from asyncrl.roles import end_with, name_process

COLLECTIVE_S = 1800.0
"""The parent's deadline is there before."""


def train(job: Job, rank: int) -> Iterator[Told]:
    """Train the recorded batches; every rank iterates to the end.

    Raises:
        AsyncRLError: as `Trainer`; or the recording cannot be read.
    """
    import torch
    import torch.distributed as dist

    from asyncrl.learner.checkpointing.export import export_checkpoint
    from asyncrl.learner.checkpointing.state import load_state
    from asyncrl.learner.step import Trainer

    config = Config.model_validate_json(msgspec.json.encode(job.config))
    batches = read_batches(Path(job.run), job.first, job.last)
    device = "cuda:0" if job.device == "cuda" else "cpu"
    torch.set_num_threads(job.threads[rank])
    store = dist.FileStore(os.path.join(job.scratch, "store"), job.world)  # type: ignore[attr-defined]
    dist.init_process_group(
        "nccl" if job.device == "cuda" else "gloo", store=store, rank=rank, world_size=job.world,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )  # fmt: skip
    try:
        trainer = Trainer(config, job.model_path, rank=rank, world=job.world, device=device)
        if job.checkpoint is not None:
            load_state(job.checkpoint, trainer)
        yield Told(rank=rank, what="ready")
        for recorded in batches:
            result = trainer.train(recorded.part(rank, job.world), recorded.version)
            yield Told(
                rank=rank, what="step", step=recorded.batch,
                version=recorded.version.version, incarnation=recorded.version.incarnation,
                metrics=dict(result.metrics) if rank == 0 else {},
                hist=dict(result.hist) if rank == 0 else {},
            )  # fmt: skip
        trainer.save_hf(job.model_out)
        if job.target:
            trainer.policy.save_hf(job.exact_out)
    finally:
        dist.destroy_process_group()
    if job.target and rank == 0:  # without a group: within one it would be collective
        export_checkpoint(job.target, job.target_out)
    yield Told(rank=rank, what="done")


def main() -> None:
    """Be the rank that the job on stdin is for (arguments: rank, the parent's pid)."""
    rank, parent = int(sys.argv[1]), int(sys.argv[2])
    end_with(parent)
    name_process(f"replay-{rank}")
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print is no answer

    def tell(told: Told) -> None:
        out.write(msgspec.json.encode(told) + b"\n")

    try:
        for told in train(msgspec.json.decode(sys.stdin.buffer.read(), type=Job), rank):
            tell(told)
    except AsyncRLError as e:
        tell(Told(rank=rank, what="failed", error=type(e).__name__, message=str(e)))
        sys.exit(1)


if __name__ == "__main__":
    main()
