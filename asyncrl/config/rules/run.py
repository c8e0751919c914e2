"""The run itself: its names, its end, what it leaves."""

from __future__ import annotations

from collections.abc import Iterator

from asyncrl.config.rules.context import Context, Rule

BUILT_IN_MODELS = ("smollm2-135m", "tiny")


def _text(c: Context) -> Iterator[str]:
    for key, value in c.flat.items():
        if not isinstance(value, str):
            continue
        one_line = key.startswith("run.") or key.endswith((".path", ".name"))
        if "\0" in value or (one_line and not value.isprintable()):
            yield f"{key}={value!r} holds a character that is not printable: remove it"
    if not c.config.run.dir:
        yield "run.dir is empty: name a folder, or remove it for the default"


def _names(c: Context) -> Iterator[str]:
    name = c.config.run.name
    if name is not None and (
        name in ("", ".", "..") or len(name.encode(errors="replace")) > 200
        or any(ch in "/\\" or not ch.isprintable() for ch in name)
    ):  # fmt: skip
        yield (
            f"{c.named('run.name')!s} is not a folder name: use letters, digits, '-' and '_' "
            "(the folder above it is run.dir)"
        )
    if c.config.log.wandb == "off":
        yield from c.inactive(
            "log.wandb_project", why="with log.wandb=off", fix="set log.wandb=offline or online"
        )
    if c.config.model.name in BUILT_IN_MODELS and c.config.model.trust_remote_code:
        yield from c.inactive(
            "model.trust_remote_code", why=f"with the built-in model {c.config.model.name}",
            fix="name another model",
        )  # fmt: skip


def _ends(c: Context) -> Iterator[str]:
    stop = c.config.stop
    if stop.reward is None:
        yield from c.inactive(
            "stop.reward_batches", why="without stop.reward", fix="set stop.reward"
        )
        return
    built_in = ":" not in c.config.task.reward
    if built_in and not 0 < stop.reward <= 1:
        yield (
            f"{c.named('stop.reward')}: task.reward={c.config.task.reward} lies between 0 and 1, "
            f"so this is {'never reached' if stop.reward > 1 else 'reached at once'}: set it "
            "between 0 and 1, or remove it"
        )
    if stop.reward_batches > c.config.run.steps:
        yield (
            f"{c.named('stop.reward_batches')} is over run.steps={c.config.run.steps}: "
            "stop.reward could never be judged: lower it"
        )


def _record(c: Context) -> Iterator[str]:
    if not c.config.record.trajectories:
        yield from c.inactive(
            "record.max_gib", why="with record.trajectories=false",
            fix="set record.trajectories=true",
        )  # fmt: skip


RULES: tuple[Rule, ...] = (_text, _names, _ends, _record)
