"""What is held: the buffer's bytes, its store, what may be replayed, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.rules.context import Context, Rule
from asyncrl.config.sizes import buffer_limit, sample_bytes


def _bytes(c: Context) -> Iterator[str]:
    if c.config.buffer.durability == "none":
        yield from c.inactive(
            "buffer.store_gib", why="with buffer.durability=none",
            fix="set buffer.durability=process or disk",
        )  # fmt: skip
    limit, each = buffer_limit(c.config), sample_bytes(c.config)
    size, r = c.config.learner.batch_size, c.config.rollout
    if limit.bytes < size * each:
        gib = size * each / 2**30
        yield (
            f"{c.named(limit.key)} does not hold one batch at its longest (learner.batch_size="
            f"{size} x {each} bytes for rollout.max_prompt_tokens={r.max_prompt_tokens} and "
            f"max_new_tokens={r.max_new_tokens} = {gib:.4g} GiB), so no batch would be produced "
            f"while another is trained: raise it to {2 * gib:.2g} or more"
        )


def _replay(c: Context) -> Iterator[str]:
    replay, groups = c.config.replay, c.config.groups_per_batch
    if not replay.fraction:
        yield from c.inactive(
            "replay.max_staleness", "replay.by", why="with replay.fraction=0",
            fix="set replay.fraction",
        )  # fmt: skip
        return
    again = replay.fraction * groups
    if groups and abs(again - c.config.replay_groups) > 1e-6 * groups:
        low, high = int(again), int(again) + 1
        fix = f"{low / groups:.4g} or {high / groups:.4g}" if low else f"{high / groups:.4g}"
        yield (
            f"{c.named('replay.fraction')} of {groups} groups a batch (learner.batch_size / "
            f"rollout.group_size) is {again:.4g}, not whole groups: set it to {fix}"
        )


def _checkpoint(c: Context) -> Iterator[str]:
    checkpoint = c.config.checkpoint
    if checkpoint.every is None:
        keys = (f"checkpoint.{name}" for name in type(checkpoint).model_fields if name != "every")
        yield from c.inactive(
            *keys, why="with checkpoint.every=null", fix="set checkpoint.every, e.g. to 20"
        )
    elif checkpoint.score is not None and checkpoint.score.startswith(("eval/", "actor/")):
        yield (
            f"{c.named('checkpoint.score')} is no metric of the learner, which has only its own: "
            "name one of docs/metrics.md, such as reward/mean, or set checkpoint.score=null"
        )


RULES: tuple[Rule, ...] = (_bytes, _replay, _checkpoint)
