"""Tasks: where prompts come from. Pure Python, no torch.

    make_prompts(config)  (GroupId, Prompt) by the epoch, a pure function of (run.seed, epoch)
    eval_prompts(config)  the held-out prompts, which training never sees

arithmetic.py, even_digits.py and jsonl.py are the kinds; order.py shuffles them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

from asyncrl.config.schema import Config
from asyncrl.tasks.arithmetic import Arithmetic
from asyncrl.tasks.even_digits import EvenDigits
from asyncrl.tasks.jsonl import Jsonl
from asyncrl.tasks.order import shuffled
from asyncrl.tasks.source import Source
from asyncrl.types import GroupId, Prompt

__all__ = ["Source", "eval_prompts", "make_prompts", "make_source", "prompts_end"]


def make_source(config: Config) -> Source:
    """The source of prompts that `task.kind` names.

    Raises:
        DataError: a file is missing or malformed (file and line are named).
        ConfigError: nothing is left to train on.
    """
    kinds: dict[str, Callable[[Config], Source]] = {
        "arithmetic": Arithmetic,
        "even_digits": EvenDigits,
        "jsonl": Jsonl,
    }
    return kinds[config.task.kind](config)


def make_prompts(config: Config) -> Iterator[tuple[GroupId, Prompt]]:
    """Training prompts, `stop.epochs` times or without end: each epoch has every row once, in an
    order of its own."""
    source = make_source(config)
    epochs = config.stop.epochs

    def rows() -> Iterator[tuple[GroupId, Prompt]]:
        for epoch in itertools.count() if epochs is None else range(epochs):
            for index in shuffled(source.size, config.run.seed, epoch):
                if not source.held_out(index):
                    yield GroupId(source.name, epoch, index), source.prompt(index)

    return rows()


def prompts_end(config: Config) -> str:
    """The setting that ends the training prompts, e.g. "stop.epochs=2"; empty if none does."""
    return "" if config.stop.epochs is None else f"stop.epochs={config.stop.epochs}"


def eval_prompts(config: Config) -> list[tuple[GroupId, Prompt]]:
    """`eval.samples` prompts held out from training, the same for every seed."""
    if config.eval.samples == 0:
        return []
    source = make_source(config)
    name = f"eval:{source.name}"
    return [(GroupId(name, 0, i), prompt) for i, prompt in enumerate(source.eval_prompts())]
