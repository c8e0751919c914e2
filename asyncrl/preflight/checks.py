"""What can be known before any process starts: model, data, reward, room, placement.

config ─► devices ─► sense on that device ─► room ─► data, reward, folder ─► model (fetched last)
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from asyncrl import models
from asyncrl.config.check import REWARDS, check
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, MissingExtraError, ModelError, UserError
from asyncrl.launch.placement.machine import check_machine
from asyncrl.model_store.folder import context_length, has_chat_template, read_config
from asyncrl.user_function import try_load

if TYPE_CHECKING:
    from asyncrl.launch.placement import Placement

Say = Callable[[str], None]
T = TypeVar("T")

PROMPTS_LOOKED_AT = 64
"""Prompts whose length is checked against `rollout.max_prompt_tokens`."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """What was found; `describe` shows it."""

    config: Config
    placement: Placement
    model_path: Path
    model_type: str
    context: int | None
    """Positions of the model, in tokens; None if its config does not say."""
    reward: str
    """A built-in name or `module:function`."""
    train_prompts: int
    """Prompts of one epoch."""
    eval_prompts: int
    run_path: Path
    """Where the run's files will be."""


def preflight(
    config: Config,
    sources: Mapping[str, str] | None = None,
    name: str = "default",
    say: Say = lambda _: None,
    resumed: Path | None = None,
) -> Preflight:
    """Check everything that needs no role's process; a missing built-in model is fetched.

    Args:
        config: loaded, hence well typed.
        sources: where each value came from.
        name: of the configuration; the run's folder is named after it.
        say: hears progress of a fetch.
        resumed: folder of the run that is to go on.

    Raises:
        UserError: what was found, one problem a line; what to change.
    """
    from asyncrl.launch.data_plane import check_launcher, keys_of
    from asyncrl.launch.placement import place
    from asyncrl.preflight.room import check_relay

    placement = place(config)
    check(config, sources, placement.device)
    check_launcher(config)
    check_machine(config, placement)
    problems: list[UserError] = []

    def attempt(step: Callable[[], T]) -> T | None:
        try:
            return step()
        except UserError as e:
            problems.append(e)
            return None

    prompts = attempt(lambda: _prompts(config))
    reward = attempt(lambda: _reward(config))
    path = attempt(lambda: run_path(config, name, resumed))
    attempt(lambda: _extras(config))
    attempt(lambda: _shaping(config))
    attempt(lambda: keys_of(config))
    if problems or prompts is None or reward is None or path is None:
        raise _merge(problems)
    model_path = models.resolve(config.model.name, say)
    context = context_length(model_path)
    _fits(config, model_path, context)
    check_relay(config, placement, model_path)
    _some_prompt_fits(config, model_path)
    return Preflight(
        config, placement, model_path, str(read_config(model_path).get("model_type", "unknown")),
        context, reward, *prompts, path,
    )  # fmt: skip


def _merge(problems: list[UserError]) -> UserError:
    return type(problems[0])("\n".join(str(p) for p in problems))


def _prompts(config: Config) -> tuple[int, int]:
    from asyncrl.tasks import make_source

    source = make_source(config)
    return source.trainable(), config.eval.samples


def _extras(config: Config) -> None:
    log, rank = config.log, config.learner.lora.rank
    needed = (
        (log.wandb != "off", f"log.wandb={log.wandb}", "wandb", "wandb"),
        (log.tensorboard, "log.tensorboard=true", "tensorboard", "tensorboard"),
        # learner.lora.targets are for the learner to check: without torch no model has modules.
        (rank is not None, f"learner.lora.rank={rank}", "peft", "lora"),
    )
    missing = [
        f"{setting}: {package} is not installed; pip install 'asyncrl[{extra}]'"
        for asked, setting, package, extra in needed
        if asked and importlib.util.find_spec(package) is None
    ]
    if missing:
        raise MissingExtraError("\n".join(missing))


def _shaping(config: Config) -> None:
    from asyncrl.learner.maths.shaping import ARGUMENTS, KEY

    if config.learner.shaping.function is not None:
        try_load(config.learner.shaping.function, KEY, ARGUMENTS)


def _some_prompt_fits(config: Config, model_path: Path) -> None:
    """Refuse a limit that no prompt can meet: such a run would fail prompts without end.

    Counts the text alone, without the chat template, of the first prompts: a lower bound.
    """
    from tokenizers import Tokenizer

    from asyncrl.tasks import make_prompts

    file = model_path / "tokenizer.json"
    if not file.exists():
        return
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as e:  # the library raises nothing narrower
        raise ModelError(f"model.name={config.model.name}: {file} cannot be read: {e}") from e
    limit = config.rollout.max_prompt_tokens
    # Each text once, and no more of it than can matter: a token has few characters.
    texts = {
        (prompt.text or " ".join(m["content"] for m in prompt.messages or ()))[: limit * 64]
        for _, prompt in itertools.islice(make_prompts(config), PROMPTS_LOOKED_AT)
    }
    lengths = [len(e.ids) for e in tokenizer.encode_batch(sorted(texts), add_special_tokens=False)]
    if min(lengths) > limit:
        raise ConfigError(
            f"rollout.max_prompt_tokens={limit} is smaller than each of the first prompts ("
            f"{min(lengths)} to {max(lengths)} tokens), so a batch can never fill: "
            f"raise it to {max(lengths)} and room for the chat template"
        )


def _reward(config: Config) -> str:
    """Import a user's function where it will run: in a child that may hang or crash."""
    from asyncrl.actors.rewards import RewardWorker, reward_spec

    if config.task.reward in REWARDS:
        return reward_spec(config.task)
    one = config.task.model_copy(update={"reward_workers": 1})  # the others would do the same

    async def start() -> str:
        worker = RewardWorker(one)
        try:
            await worker.start()
        finally:
            await worker.close()
        return worker.spec

    return asyncio.run(start())


def run_path(config: Config, name: str, resumed: Path | None = None) -> Path:
    """The run's folder, checked to be new and makeable, or the one that is resumed.

    Raises:
        ConfigError: it exists, or the folder above it cannot be written.
    """
    from asyncrl.launch.folder import RunFolder

    if resumed is not None:
        return resumed
    folder = RunFolder(config, name)
    path = Path(folder.path)
    try:
        exists = path.exists()
    except OSError as e:  # a name that is too long, say
        raise ConfigError(f"run.dir={config.run.dir}: {e.strerror}: set run.dir to a folder") from e
    if exists:
        raise ConfigError(
            f"run.name={folder.name}: {path} exists already; choose another name, remove it, or "
            f"go on with it: asyncrl launch --resume {folder.name}"
        )
    above = next(p for p in path.parents if p.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(
            f"run.dir={config.run.dir}: {above} is not a folder that can be written: "
            "set run.dir to one"
        )
    return path


def _fits(config: Config, model_path: Path, context: int | None) -> None:
    length = config.max_model_len
    if context is not None and length > context:
        rollout = config.rollout
        what = (
            f"engine.max_model_len={length}"
            if config.engine.max_model_len
            else f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} + "
            f"rollout.max_new_tokens={rollout.max_new_tokens} = {length} tokens"
        )
        raise ConfigError(
            f"{what} is longer than the context of {config.model.name} ({context}): lower "
            f"{'it' if config.engine.max_model_len else 'rollout.max_new_tokens'} to "
            f"{context if config.engine.max_model_len else _room(config, context)}"
        )
    if config.task.chat and not has_chat_template(model_path):
        raise ModelError(
            f"model.name={config.model.name}: its tokenizer has no chat template: "
            "set task.chat=false to send plain text, or name a chat model"
        )


def _room(config: Config, context: int) -> str:
    room = context - config.rollout.max_prompt_tokens
    return str(room) if room > 0 else f"fit, and rollout.max_prompt_tokens below {context}"
