"""Prompts, their reward, and what is held out."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.rules.context import Context, Rule
from asyncrl.config.suggest import did_you_mean

REWARDS = ("auto", "last_number", "even_digits")
"""The names that `task.reward` knows besides a user's `module:function`."""
EVEN_DIGITS_PROMPTS = 256
"""Prompts of `task.kind: even_digits`."""
MAX_REWARD_WORKERS = 1024
"""More processes per actor than any machine has use for."""


def _task(c: Context) -> Iterator[str]:
    t = c.config.task
    if t.kind == "jsonl" and not t.path:
        yield "task.path is not set: task.kind=jsonl needs the file of prompts, task.path=FILE"
    if "{prompt}" not in t.prompt_template:
        yield (
            f"{c.named('task.prompt_template')} does not hold {{prompt}}, which stands for the "
            "prompt: all prompts would be the same: put it in"
        )
    if not t.chat:
        yield from c.inactive(
            "task.system_prompt", why="with task.chat=false (plain text has no turns)",
            fix="set task.chat=true",
        )  # fmt: skip
    if t.reward_workers > MAX_REWARD_WORKERS:
        yield (
            f"{c.named('task.reward_workers')} is that many processes per actor: lower it to "
            f"{MAX_REWARD_WORKERS} or less (one per core is plenty)"
        )
    yield from _reward(c)


def names_function(text: str) -> bool:
    """True if a text is written as `module:function`.

    >>> names_function("my.module:Some.function"), names_function("my.module")
    (True, False)
    """
    module, colon, function = text.partition(":")
    names = all(p.isidentifier() for p in (*module.split("."), *function.split(".")))
    return bool(colon) and names


def _reward(c: Context) -> Iterator[str]:
    t = c.config.task
    if c.config.rollout.reward_failure != "score":
        yield from c.inactive(
            "rollout.reward_failure_score", why="with rollout.reward_failure=drop",
            fix="set rollout.reward_failure=score",
        )  # fmt: skip
    if t.reward not in REWARDS:
        if not names_function(t.reward):
            yield (
                f"{c.named('task.reward')}: expected {', '.join(REWARDS)} or "
                f"module:function{did_you_mean(t.reward, REWARDS)}"
            )
        return
    compares = t.reward == "last_number" or (t.reward == "auto" and t.kind != "even_digits")
    if compares and (t.kind == "even_digits" or (t.kind == "jsonl" and t.answer_field is None)):
        yield (
            f"{c.named('task.reward')} compares with a ground truth, and there is none "
            f"(task.kind={t.kind}, task.answer_field=null): set task.answer_field or another reward"
            if t.kind == "jsonl"
            else f"{c.named('task.reward')} compares with a ground truth, and task.kind="
            "even_digits has none: set task.reward=auto"
        )


def _eval(c: Context) -> Iterator[str]:
    e, t = c.config.eval, c.config.task
    if e.samples == 0:
        keys = [k for k in ("eval.at_start", "eval.at_end") if c.flat[k]]
        keys += ["eval.path"] if t.kind == "jsonl" else []
        yield from c.inactive(*keys, why="with eval.samples=0", fix="set eval.samples")
        return
    if not (e.at_start or e.at_end):
        yield (
            f"{c.named('eval.samples')} has no effect with eval.at_start=false and "
            "eval.at_end=false: set one of them, or eval.samples=0"
        )
    if t.kind == "jsonl" and not e.path:
        yield (
            f"{c.named('eval.samples')} needs eval.path=FILE with task.kind=jsonl: give the "
            "file of held-out prompts, or set eval.samples=0"
        )
    sums = t.max_operand**2
    if t.kind == "arithmetic" and e.samples > sums * 2 // 3:
        yield (
            f"{c.named('eval.samples')} leaves less than a third of the {sums} sums up to "
            f"task.max_operand={t.max_operand} to train on: lower it to {sums * 2 // 3} or raise "
            "task.max_operand"
        )
    if t.kind == "even_digits" and e.samples > EVEN_DIGITS_PROMPTS // 2:
        yield (
            f"{c.named('eval.samples')} is more than half of the {EVEN_DIGITS_PROMPTS} prompts of "
            f"task.kind=even_digits: lower it to {EVEN_DIGITS_PROMPTS // 2}"
        )


RULES: tuple[Rule, ...] = (_task, _eval)
