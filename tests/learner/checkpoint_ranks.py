"""A process per rank: train, save, go on, and compare with a learner that was never stopped.

Run by test_checkpoint.py:

python -m tests.learner.checkpoint_ranks RANK STORE MODEL OUT ALONE

ALONE is a checkpoint that one rank wrote. Writes OUT/NUMBER.RANK.npz of each variant.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from asyncrl import checkpoints
from asyncrl.checkpoints import ResumePoint, writing
from asyncrl.config.schema import Config
from asyncrl.disk import checksum
from asyncrl.errors import DeadlineError
from asyncrl.learner.checkpointing.keeper import Keeper
from asyncrl.learner.checkpointing.resume import go_on
from asyncrl.learner.checkpointing.staging import local
from asyncrl.learner.checkpointing.state import state_of
from asyncrl.learner.step import Trainer
from asyncrl.metrics import TimeShares
from asyncrl.roles import RoleSettings
from asyncrl.types import BatchPart, Version
from asyncrl.waits import Waits
from tests.helpers.ranks import rank_of_two
from tests.helpers.tiny_model import make_batch, make_part
from tests.learner.trained import configured

L = "learner."
CALM = (L + "optim.lr=1e-3", L + "optim.eps=1e-3", "checkpoint.every=2", "checkpoint.keep=9")
"""With which rounding stays rounding: Adam blows up gradients that are nearly 0."""
VARIANTS: dict[str, tuple[str, ...]] = {
    "all weights": (L + "epochs=2", L + "minibatches=2", L + "optim.schedule=cosine"),
    "bfloat16, value head": (
        L + "dtype=bfloat16", L + "advantage.estimator=gae", L + "critic.warmup_steps=1",
    ),
    "own critic": (
        L + "advantage.estimator=gae", L + "critic.trunk=own", "checkpoint.background=false",
    ),
    "adapters": (L + "lora.rank=4", L + "kl.coefficient=0.1", L + "dtype=bfloat16"),
}  # fmt: skip
V2 = Version(0, 2)
Arrays = dict[str, np.ndarray[Any, Any]]


def variant(name: str, *more: str) -> Config:
    return configured(*CALM, *VARIANTS[name], *more)


def settings(
    model: Path, run: Path, rank: int, world: int, resume: ResumePoint | None = None
) -> RoleSettings:
    return RoleSettings(
        role="learner", rank=rank, world=world, model_path=str(model), device="cpu", threads=1,
        weight_backend="gloo", run_id="r", hub_endpoint="", run_dir=str(run), resume=resume,
    )  # fmt: skip


def part(k: int, rank: int, world: int) -> BatchPart:
    return replace(make_part(make_batch(20 + k, 8, 4, prefix=5), rank, world, k), fresh=32)


def keep(trainer: Trainer, config: Config, of: RoleSettings, **more: Any) -> Keeper:
    told: dict[str, Any] = {"tell": lambda **_: None, "rest": dict} | more
    waits, shares = Waits(of.name), TimeShares()
    return Keeper(trainer, config, of, waits=waits, shares=shares, **told)


class FailsAtFirst:
    """A buffer whose first answers are that the disk is slow."""

    def __init__(self, times: int) -> None:
        self.times = times

    def save_ledger(self, path: str | os.PathLike[str], batch: int) -> None:
        self.times -= 1
        if self.times >= 0:
            raise DeadlineError(f"the ledger of batch {batch} takes too long")

    def covered(self, batch: int) -> None:
        pass

    def close(self) -> None:
        pass


def full(state: dict[str, Tensor]) -> Arrays:
    """The sharded tensors of a state, whole; collective."""
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).numpy().copy()
        for name, t in state.items()
        if not name.startswith("rng/")
    }


def drawn() -> list[float]:
    """From every generator that a checkpoint has."""
    return [torch.rand(()).item(), np.random.rand(), random.gauss()]  # noqa: NPY002


def never_stopped(model: Path, run: Path, name: str, rank: int, world: int) -> tuple[Any, ...]:
    """Batches 1 to 4 with a checkpoint after 2; the arrays there and after 3, and the end."""
    config = variant(name)
    trainer = Trainer(config, model, rank=rank, world=world, device="cpu")
    for seeded in (torch.manual_seed, np.random.seed, random.seed):  # noqa: NPY002
        seeded(rank + 7)
    drawn()  # a normal number is kept for the next call
    keeper = keep(trainer, config, settings(model, run, rank, world))
    arrays: Arrays = {}
    metrics, numbers = [], []
    for k in range(1, 5):
        result = trainer.train(part(k, rank, world), V2)
        asked = k == 3 and rank == 0 and not config.checkpoint.background
        keeper.trained(result, asked=asked)  # the buffer tells rank 0 alone
        keeper.after_batch(k)
        metrics.append(result.metrics)
        if k == 2:
            arrays |= {f"saved:{n}": v for n, v in full(state_of(trainer)).items()}
            whole = trainer.full_parameters(torch.float32)
            arrays |= {f"model:{n}": v.detach().numpy().copy() for n, v in whole}
            numbers = drawn()
        if k == 3:
            arrays |= {f"then:{n}": v for n, v in full(state_of(trainer)).items()}
    keeper.finish()
    keeper.close()
    return arrays, metrics[2:], numbers, state_of(trainer)


def restored(
    model: Path, folder: Path, name: str, rank: int, world: int
) -> tuple[Trainer, RoleSettings]:
    """A new learner that goes on from a checkpoint."""
    point = ResumePoint.at(checkpoints.read(folder), incarnation=1)
    of = settings(model, folder.parents[1], rank, world, point)
    trainer = Trainer(variant(name), model, rank=rank, world=world, device="cpu")
    go_on(trainer, of, Waits(of.name))
    return trainer, of


def compare(model: Path, run: Path, name: str, rank: int) -> Arrays:
    arrays: Arrays
    arrays, metrics, numbers, end = never_stopped(model, run, name, rank, 2)
    step_2 = run / "checkpoints" / "step-000002"
    trainer, _ = restored(model, step_2, name, rank, 2)
    assert drawn() == numbers, "random numbers"
    for k, want in zip((3, 4), metrics, strict=True):
        assert trainer.train(part(k, rank, 2), V2).metrics == want, (name, k)
    got = state_of(trainer)
    assert got.keys() == end.keys()
    for key, value in got.items():
        if not key.startswith("rng/"):
            assert torch.equal(local(value), local(end[key])), (name, key)
    return arrays


def _reads_no_shards(path: Path) -> str:
    """Rank 0 is told their checksums, whoever's they are."""
    assert path.suffix != ".distcp"
    return checksum(path)


def main() -> None:
    writing.checksum = _reads_no_shards  # type: ignore[attr-defined]
    with rank_of_two() as (rank, (model, out, alone)):
        for number, name in enumerate(VARIANTS):
            arrays = compare(Path(model), Path(out) / str(number), name, rank)
            if number == 0:
                trainer, _ = restored(Path(model), Path(alone), name, rank, 2)
                arrays |= {f"alone:{n}": v for n, v in full(state_of(trainer)).items()}
                of = settings(Path(model), Path(out) / "again", rank, 2)
                keeper = keep(trainer, variant(name), of)
                if rank == 0:  # the other one does not hear of it
                    keeper.connect(lambda: FailsAtFirst(1))
                keeper.last(2)
                keeper.finish()
                keeper.close()
            np.savez(f"{out}/{number}.{rank}.npz", **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
