"""A learner that goes on where another ended."""

from __future__ import annotations

import logging

import torch.distributed as dist

from asyncrl import checkpoints
from asyncrl.checkpoints import Meta
from asyncrl.errors import CheckpointError
from asyncrl.learner.checkpointing.saver import BASE_S, BYTES_PER_S
from asyncrl.learner.checkpointing.state import load_state
from asyncrl.learner.collectives import host_group
from asyncrl.learner.step import Trainer
from asyncrl.roles import RoleSettings
from asyncrl.waits import Waits

log = logging.getLogger(__name__)


def go_on(trainer: Trainer, settings: RoleSettings, waits: Waits) -> Meta | None:
    """Load the checkpoint of `settings.resume`; what it says. None if there is none. Collective.

    Raises:
        CheckpointError: it is missing, damaged, of another model or of another step.
    """
    resume = settings.resume
    if resume is None or resume.checkpoint is None:
        return None
    meta = checkpoints.read(resume.checkpoint).meta
    if meta.step != resume.step:
        raise CheckpointError(
            f"{resume.checkpoint} is of step {meta.step}, the run goes on from {resume.step}: name "
            "another"
        )
    limit_s = BASE_S + meta.nbytes / BYTES_PER_S
    group = host_group(settings.host, limit_s)
    with waits.on(f"the checkpoint of batch {meta.step} to be read", "the disk", limit_s):
        load_state(resume.checkpoint, trainer, group)
    dist.destroy_process_group(group)
    if (meta.world, meta.threads) != (settings.world, settings.threads):
        log.info(
            "the checkpoint is of %d ranks with %d threads each, this run has %d with %d: the same "
            "weights, sums may round otherwise",
            meta.world, meta.threads, settings.world, settings.threads,
        )  # fmt: skip
    return meta
