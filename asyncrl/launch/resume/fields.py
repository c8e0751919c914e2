"""Which settings a resumed run may have otherwise than before, and why the others may not.

Every key of the schema is in one of the two tables; a test sees to that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from asyncrl.config import fields
from asyncrl.config.load import show
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError


class Change(NamedTuple):
    """A setting that is not what it was.

    >>> str(Change("run.steps", 10, 20))
    'run.steps: 10 -> 20'
    """

    key: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {show(self.was)} -> {show(self.now)}"


_ACCEPTED = """
    run.steps stop.wall_s stop.epochs stop.reward stop.reward_batches stop.nonfinite_losses
    model.trust_remote_code task.reward_timeout_s task.reward_workers
    rollout.temperature rollout.max_in_flight rollout.lease_timeout_s rollout.reward_failure
    rollout.reward_failure_score
    engine.dtype engine.max_model_len engine.kv_cache_gib engine.gpu_memory_utilization
    engine.tensor_parallel engine.enforce_eager engine.threads
    buffer.on_stale buffer.max_filtered_in_a_row buffer.memory_gib buffer.store_gib
    learner.epochs learner.minibatches learner.max_tokens_per_microbatch learner.dtype
    learner.gradient_checkpointing learner.cpu_offload learner.compile learner.attention
    learner.share_prompt learner.threads learner.save_final
    learner.optim.lr learner.optim.betas learner.optim.eps learner.optim.weight_decay
    learner.optim.schedule learner.optim.warmup_steps learner.optim.grad_clip
    learner.optim.ess_ref
    learner.advantage.estimator learner.advantage.gamma learner.advantage.lam
    learner.advantage.rho_bar learner.advantage.c_bar learner.advantage.rho_bar_pg
    learner.advantage.whiten
    learner.correction.prox learner.correction.level learner.correction.action
    learner.correction.low learner.correction.high learner.correction.m2po
    learner.correction.opsm
    learner.loss.policy learner.loss.clip_low learner.loss.clip_high learner.loss.dual_clip
    learner.loss.cap learner.loss.aggregation learner.loss.norm_tokens learner.loss.denominator
    learner.loss.entropy
    learner.kl.coefficient learner.kl.estimator learner.kl.apply learner.kl.clamp
    learner.shaping.overlong_tokens learner.shaping.overlong_penalty
    learner.shaping.length_normalise learner.shaping.function
    learner.critic.coefficient learner.critic.clip learner.critic.lr learner.critic.warmup_steps
    weights.strategy weights.backend weights.timeout_s weights.in_flight
    cluster.actors cluster.learners cluster.address cluster.device cluster.placement
    cluster.actor_places cluster.learner_places cluster.ready_timeout_s cluster.max_restarts
    cluster.restart_backoff_s cluster.silent_after_s
    security.curve security.keys security.allow_plaintext
    eval.at_start eval.at_end
    log.console log.wandb log.wandb_project log.tensorboard log.prometheus log.prometheus_host
    log.wait_warn_s log.stall_warn_s
    record.trajectories record.max_gib trace.enabled trace.max_mib
    checkpoint.every checkpoint.keep checkpoint.max_gib checkpoint.score checkpoint.at_end
    checkpoint.background
"""
ACCEPTED = frozenset(_ACCEPTED.split())
"""What comes is made with the new value; what is there stays good. `_LIMITS` has exceptions."""

_PROMPTS = "the prompts that were taken must come again, in the same order"
_ONE_GROUP = "the samples of a group must be alike, and some are there already"
_LEDGER = "what the ledger decided so far rests on it"
_STATE = "the checkpoint's weights and optimizer are of it"
_PLACE = "a run keeps its folder; it may be moved while it does not run"

REFUSED = {
    "run.seed": _PROMPTS, "task.kind": _PROMPTS, "task.path": _PROMPTS,
    "task.max_operand": _PROMPTS, "eval.samples": _PROMPTS, "eval.path": _PROMPTS,
    "task.prompt_field": _ONE_GROUP, "task.answer_field": _ONE_GROUP,
    "task.prompt_template": _ONE_GROUP, "task.system_prompt": _ONE_GROUP, "task.chat": _ONE_GROUP,
    "task.reward": _ONE_GROUP,
    "rollout.group_size": _LEDGER, "rollout.max_prompt_tokens": _LEDGER,
    "rollout.max_new_tokens": _LEDGER, "rollout.max_attempts": _LEDGER,
    "rollout.failed_member": _LEDGER, "rollout.quarantine_after": _LEDGER,
    "buffer.max_staleness": _LEDGER, "buffer.window": _LEDGER,
    "buffer.prior_incarnation": _LEDGER, "buffer.filter_zero_variance": _LEDGER,
    "replay.fraction": _LEDGER, "replay.max_staleness": _LEDGER, "replay.by": _LEDGER,
    "learner.batch_size": _LEDGER, "learner.batches_per_publication": _LEDGER,
    "buffer.durability": "what is there lies where it says",
    "model.name": _STATE, "learner.critic.trunk": _STATE, "learner.lora.rank": _STATE,
    "learner.lora.alpha": _STATE, "learner.lora.targets": _STATE,
    "run.name": _PLACE, "run.dir": _PLACE,
}  # fmt: skip
"""Why a setting must stay."""


def _critic(was: Config, now: Config) -> str:
    if was.learner.advantage.critic == now.learner.advantage.critic:
        return ""
    return f"one has a critic, the other has none, and {_STATE}"


def _checkpoints(_: Config, now: Config) -> str:
    return "" if now.checkpoint.every else "a run that goes on needs checkpoints"


_LIMITS: dict[str, Callable[[Config, Config], str]] = {
    "learner.advantage.estimator": _critic, "checkpoint.every": _checkpoints,
}  # fmt: skip
"""Of accepted settings: why a certain change is refused all the same, or nothing."""


def changes(was: Config, now: Config) -> list[Change]:
    """The settings that differ, where a run lies left out."""
    before, after = fields.flatten(was), fields.flatten(now)
    return [Change(k, before[k], after[k]) for k in after if before[k] != after[k]]


def check_changes(was: Config, now: Config) -> list[Change]:
    """The settings that differ, all of which may.

    Raises:
        ConfigError: naming those that may not, one a line, each with its reason.
    """
    found = changes(was, now)
    problems = [(c, reason) for c in found if (reason := _refusal(c.key, was, now))]
    if problems:
        lines = [f"{change}: {reason}: set it back" for change, reason in problems]
        more = ", or start a new run from its weights with --from"
        raise ConfigError("\n".join([*lines[:-1], lines[-1] + more]))
    return found


def _refusal(key: str, was: Config, now: Config) -> str:
    if key in ACCEPTED:
        limit = _LIMITS.get(key)
        return limit(was, now) if limit else ""
    return REFUSED[key]
