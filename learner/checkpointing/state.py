"""All that training depends on, as named tensors: what trains, its moments, random numbers.

    param/NAME         sharded as the model is, float32
    optim/SLOT/NAME    moments likewise
    optim/steps        of each parameter, in the order of their names
    rng/RANK/KIND      of one rank alone

What is frozen is not in it: it comes from the model's folder, as at the start. Nor is what follows
from the batch's number, such as the learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from asyncrl import checkpoints
from asyncrl.errors import CheckpointError
from asyncrl.learner.checkpointing.rng import rng_state, set_rng_state

if TYPE_CHECKING:
    from asyncrl.learner.policy.optim import HasTrainable
    from asyncrl.learner.step import Trainer

PARAM, OPTIM, RNG = "param/", "optim/", "rng/"
STEPS = "optim/steps"
"""In one tensor: DCP spends as long on a number as on a matrix."""
NO_STEPS = -1.0
"""Of a parameter without moments."""


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """This rank's state. It shares memory with the trainer: copy what is to outlive a step."""
    params = parameters(trainer.policy)
    state: dict[str, Tensor] = {PARAM + name: p.detach() for name, p in params.items()}
    for name, p in params.items():
        for slot, value in trainer.optimizer.state.get(p, {}).items():
            if slot != "step":
                state[f"{OPTIM}{slot}/{name}"] = value
    state[STEPS] = _steps(params, trainer.optimizer.state)
    random = rng_state(trainer.device)
    return state | {f"{RNG}{trainer.rank}/{kind}": value for kind, value in random.items()}


def expected(trainer: Trainer) -> dict[str, Tensor]:
    """Tensors as large as those of `state_of` once all has been trained: to make room for them."""
    params = parameters(trainer.policy)
    moments = (f"{OPTIM}exp_avg/", f"{OPTIM}exp_avg_sq/")
    return {kind + name: p.detach() for kind in (PARAM, *moments) for name, p in params.items()}


def parameters(policy: HasTrainable) -> dict[str, nn.Parameter]:
    """What trains, by name: policy and critic."""
    return {**policy.trainable.policy, **policy.trainable.critic}


def load_state(folder: str | Path, trainer: Trainer, group: Any = None) -> None:
    """Make the trainer what it was when the checkpoint was taken, on any number of ranks.

    Collective. The random numbers of a rank that the checkpoint does not have stay as they are.

    Args:
        folder: of the checkpoint.
        trainer: as it was made, of the same model.
        group: a process group over host memory; None is the default one.

    Raises:
        CheckpointError: it is of another model, or damaged.
    """
    checkpoints.verify(checkpoints.read(folder), trainer.rank, trainer.world)
    saved = metadata(folder)
    state = _targets(Path(folder), saved, trainer)
    read(folder, state, group)
    _set_steps(state[STEPS], trainer)
    mine = f"{RNG}{trainer.rank}/"
    random = {name.removeprefix(mine): v for name, v in state.items() if name.startswith(mine)}
    if random:
        set_rng_state(random, trainer.device)


def metadata(folder: str | Path) -> dict[str, TensorStorageMetadata]:
    """Shape and type of each tensor of a checkpoint.

    Raises:
        CheckpointError: its index cannot be read.
    """
    try:
        # torch's DCP pickles its index: a file of the run's own folder (docs/security.md).
        found = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as e:  # its unpickling raises whatever the damage makes of it
        raise _unreadable(folder, e) from e
    return {name: m for name, m in found.items() if isinstance(m, TensorStorageMetadata)}


def read(folder: str | Path, state: dict[str, Tensor], group: Any = None) -> None:
    """Fill the tensors of `state` from a checkpoint; collective over `group`.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        load(state, storage_reader=FileSystemReader(folder), process_group=group)
    except (CheckpointException, RuntimeError, ValueError, OSError) as e:
        raise _unreadable(folder, e) from e


def _targets(
    folder: Path, saved: Mapping[str, TensorStorageMetadata], trainer: Trainer
) -> dict[str, Tensor]:
    """The tensors to fill; the optimizer gets the moments that were saved."""
    params = parameters(trainer.policy)
    names = {name.removeprefix(PARAM) for name in saved if name.startswith(PARAM)}
    if odd := sorted(names ^ params.keys()):
        whose = "only it has" if odd[0] in names else "it lacks"
        raise CheckpointError(
            f"{folder} is of another model than learner and model say, {whose} {odd[0]}: give the "
            "settings that it was made with (its config.yaml)"
        )
    if STEPS not in saved:
        raise CheckpointError(f"{folder} lacks {STEPS}: go on with the asyncrl that wrote it")
    for name, p in params.items():
        if (size := saved[PARAM + name].size) != p.shape:
            raise CheckpointError(
                f"{folder} is of another model: {name} has {tuple(size)} there and "
                f"{tuple(p.shape)} here: give the settings that it was made with (its config.yaml)"
            )
    state: dict[str, Tensor] = {PARAM + name: p.detach() for name, p in params.items()}
    trainer.optimizer.state.clear()
    for key, m in saved.items():
        if key == STEPS or key.startswith(f"{RNG}{trainer.rank}/"):
            state[key] = torch.zeros(m.size, dtype=m.properties.dtype)
        elif key.startswith(OPTIM):
            _, slot, name = key.split("/", 2)
            moment = torch.zeros_like(params[name])
            trainer.optimizer.state[params[name]][slot] = state[key] = moment
    return state


def _steps(params: Mapping[str, nn.Parameter], moments: Mapping[Tensor, Any]) -> Tensor:
    in_order = [params[name] for name in sorted(params)]
    return torch.stack([
        moments[p]["step"] if p in moments else torch.full((), NO_STEPS, device=p.device)
        for p in in_order
    ])  # fmt: skip


def _set_steps(steps: Tensor, trainer: Trainer) -> None:
    params = parameters(trainer.policy)
    for name, taken in zip(sorted(params), steps, strict=True):
        if taken != NO_STEPS:
            trainer.optimizer.state[params[name]]["step"] = taken.to(params[name].device, copy=True)


def _unreadable(folder: str | Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{folder} cannot be read ({reason(error)}): restore it, or remove it to go on from the "
        "one before"
    )


def reason(error: BaseException) -> str:
    """In one line; of a failure on several ranks, that of the lowest."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (inner, _) = min(error.failures.items())
        return f"learner-{rank}: {reason(inner)}"
    lines = (getattr(error, "strerror", None) or str(error)).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]
