"""A checkpoint's weights as an ordinary Hugging Face folder; no process group, no other rank."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from asyncrl import checkpoints, models
from asyncrl.checkpoints import Checkpoint
from asyncrl.config.load import load
from asyncrl.config.schema import Config
from asyncrl.errors import CheckpointError
from asyncrl.learner.checkpointing.saver import MODEL_PATH
from asyncrl.learner.checkpointing.state import PARAM, metadata, read
from asyncrl.learner.policy.export import check_free, write_new
from asyncrl.learner.policy.loading import cast_frozen, load_causal_lm
from asyncrl.learner.policy.lora import add_adapters, hf_parameters, merged

_TYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def export_checkpoint(folder: str | Path, out: str | Path, dtype: str | None = None) -> torch.dtype:
    """Write the policy of a checkpoint to `out`, adapters merged, and check that it loads.

    The same numbers as the run would have exported at that step.

    Args:
        folder: of the checkpoint.
        out: missing or empty.
        dtype: of the weights; None is float32, in which they are trained.

    Returns:
        The type of the weights written.

    Raises:
        UserError: `out` is there already, or cannot be written.
        CheckpointError: the checkpoint is missing or damaged.
        ModelError: the initial model, from which what is frozen comes, is not there.
    """
    checkpoint = checkpoints.read(folder)
    check_free(Path(out), checkpoint.path)
    checkpoints.verify(checkpoint)
    transformers_logging.disable_progress_bar()
    config = load(str(checkpoint.path / "config.yaml")).config
    origin, remote = _origin(checkpoint, config), config.model.trust_remote_code
    model = load_causal_lm(origin, trust_remote_code=remote)
    if config.learner.lora.rank is not None:
        add_adapters(model, config.learner.lora)
    cast_frozen(model, _TYPES[config.learner.dtype])  # merging starts from what training used
    _fill(model, checkpoint.path)
    target = _TYPES[dtype or "float32"]
    state: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, parameter, adapted in hf_parameters(model):
            whole = parameter if adapted is None else merged(parameter, adapted, target)
            state[name] = whole.detach().to(target)
    skeleton = _skeleton(origin, target, model.generation_config, trust_remote_code=remote)
    write_new(Path(out), skeleton, origin, state=state, trust_remote_code=remote)
    return target


def _origin(checkpoint: Checkpoint, config: Config) -> Path:
    """The folder of the initial model: where it was, or where its name leads here."""
    was = checkpoint.meta.state.get(MODEL_PATH)
    if was and (Path(was) / "config.json").is_file():
        return Path(was)
    return Path(models.resolve(config.model.name))


def _fill(model: Any, folder: Path) -> None:
    """Load what trains into a model that is not sharded; a critic is left out."""
    saved = metadata(folder)
    trains = {PARAM + n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    for name, p in trains.items():
        if name not in saved or saved[name].size != p.shape:
            raise CheckpointError(
                f"{folder}: its config.yaml names another model than it is of, it has no "
                f"{name.removeprefix(PARAM)} {tuple(p.shape)}: restore config.yaml or the model"
            )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        read(folder, dict(trains))


def _skeleton(
    origin: Path, dtype: torch.dtype, generation_config: Any, *, trust_remote_code: bool
) -> Any:
    """The model without weights, which knows how to save them."""
    config = AutoConfig.from_pretrained(origin, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code
        )
    skeleton.generation_config = generation_config
    return skeleton
