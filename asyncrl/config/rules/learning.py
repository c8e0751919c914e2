"""Batches and their parts, staleness, lengths, the optimizer; what is trained, and where."""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from asyncrl.config.rules.context import Context, Rule

MAX_LR = 10.0
"""A learning rate above it is a slip of the pen."""


def _batch(c: Context) -> Iterator[str]:
    batch, n = c.config.learner.batch_size, c.config.rollout.group_size
    if batch % n:
        low, high = batch // n * n, (batch // n + 1) * n
        fix = f"{low} or {high}" if low else f"{high}"
        yield (
            f"{c.named('learner.batch_size')} is not whole groups of "
            f"rollout.group_size={n}: set it to {fix}"
        )
    learners = c.config.cluster.learners
    if batch < learners:
        yield (
            f"{c.named('learner.batch_size')} leaves some of cluster.learners={learners} ranks "
            f"without a sample: raise it to {-(-learners // n) * n} or lower cluster.learners"
        )
    groups, parts = c.config.groups_per_batch, c.config.learner.minibatches
    if not batch % n and groups % parts:
        small = [m for m in range(1, isqrt(groups) + 1) if not groups % m]
        fits = sorted({*small, *(groups // m for m in small)})
        near = [max(m for m in fits if m < parts), *[m for m in fits if m > parts][:1]]
        yield (
            f"{c.named('learner.minibatches')} does not divide the {groups} groups of a batch "
            f"(learner.batch_size / rollout.group_size): set it to {' or '.join(map(str, near))}"
        )


def _admission(c: Context) -> Iterator[str]:
    """docs/architecture.md: position p is leased iff p + W <= (v_a + S + 1) * G * n."""
    s, w = c.config.buffer.max_staleness, c.config.buffer.window
    n = c.config.learner.batches_per_publication
    per_version = max(1, c.config.groups_per_batch) * n
    if w - 1 > s * per_version:
        yield (
            f"{c.named('buffer.window')} deadlocks: window - 1 = {w - 1} is over max_staleness x "
            f"groups per batch x batches_per_publication = {s} x {c.config.groups_per_batch} x "
            f"{n} = {s * per_version}, so the last groups of a batch could never be leased: "
            f"lower it to {s * per_version + 1} or raise buffer.max_staleness to "
            f"{-(-(w - 1) // per_version)}"
        )
    if n > c.config.run.steps:
        yield (
            f"{c.named('learner.batches_per_publication')} is over run.steps="
            f"{c.config.run.steps}: no weights would ever be published: lower it"
        )


def _lengths(c: Context) -> Iterator[str]:
    r = c.config.rollout
    longest = r.max_prompt_tokens + r.max_new_tokens
    parts = f"(prompt {r.max_prompt_tokens} + response {r.max_new_tokens} = {longest} tokens)"
    if c.config.learner.max_tokens_per_microbatch < longest:
        yield (
            f"{c.named('learner.max_tokens_per_microbatch')} is smaller than the longest sample "
            f"it can receive {parts}: raise it to {longest} or lower rollout.max_new_tokens"
        )
    length = c.config.engine.max_model_len
    if length is not None and length < longest:
        yield (
            f"{c.named('engine.max_model_len')} is smaller than the longest sample {parts}: "
            f"raise it to {longest}, remove it, or lower rollout.max_new_tokens"
        )


def _optim(c: Context) -> Iterator[str]:
    optim = c.config.learner.optim
    if optim.lr > MAX_LR:
        yield (
            f"{c.named('learner.optim.lr')} destroys the weights in one step: lower it to "
            "1e-3 or less (1e-6 to 2e-5 are usual)"
        )
    critic_lr = c.config.learner.critic.lr
    if critic_lr is not None and critic_lr > MAX_LR:
        yield (
            f"{c.named('learner.critic.lr')} destroys the critic in one step: lower it to 1e-2 or "
            "less"
        )
    if optim.lr * optim.weight_decay >= 1:
        yield (
            f"{c.named('learner.optim.weight_decay')} times learner.optim.lr={optim.lr:g} takes "
            "all of a weight away in one step: lower it (0 to .1 is usual)"
        )
    if optim.warmup_steps > c.config.run.steps:
        yield (
            f"{c.named('learner.optim.warmup_steps')} is over run.steps={c.config.run.steps}: "
            "the peak learning rate would never be reached: lower it"
        )


def _model(c: Context) -> Iterator[str]:
    learner = c.config.learner
    if learner.lora.rank is None:
        yield from c.inactive(
            "learner.lora.alpha", "learner.lora.targets", why="without learner.lora.rank",
            fix="set learner.lora.rank",
        )  # fmt: skip
    elif learner.lora.targets == ():
        yield (
            f"{c.named('learner.lora.targets')} names no layer, so nothing would be trained: name "
            "linear layers, e.g. [q_proj,v_proj], or remove it for all but the head"
        )
    flash = learner.attention == "flash"
    if flash and learner.dtype != "bfloat16":
        yield (
            f"{c.named('learner.attention')} needs learner.dtype=bfloat16, and "
            f"{c.named('learner.dtype')}: set one of them, or learner.attention=auto"
        )
    if c.device != "cpu":
        return
    on = "on device cpu" + (" (cluster.device=auto)" if c.config.cluster.device == "auto" else "")
    if learner.cpu_offload:
        yield (
            f"{c.named('learner.cpu_offload')} needs GPUs and runs {on}, where all is in host "
            "memory: set it to false"
        )
    if flash:
        yield (
            f"{c.named('learner.attention')} needs GPUs and runs {on}: set learner.attention=auto"
        )


def _groups(c: Context) -> Iterator[str]:
    if not c.config.buffer.filter_zero_variance:
        yield from c.inactive(
            "buffer.max_filtered_in_a_row", why="with buffer.filter_zero_variance=false",
            fix="set buffer.filter_zero_variance=true",
        )  # fmt: skip
    if c.config.stop.epochs == 1:
        yield from c.inactive(
            "rollout.quarantine_after", why="with stop.epochs=1 (no prompt comes again)",
            fix="raise stop.epochs",
        )  # fmt: skip
    size = c.config.rollout.group_size
    if size <= 2:
        yield from c.inactive(
            "rollout.failed_member",
            why=f"with rollout.group_size={size} (what is left is one sample at most: dropped)",
            fix="raise rollout.group_size",
        )


RULES: tuple[Rule, ...] = (_groups, _batch, _admission, _lengths, _optim, _model)
