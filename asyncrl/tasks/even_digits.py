"""A toy: short requests for digits; the reward is the share of even ones."""

from __future__ import annotations

from itertools import islice, product

from asyncrl.config.schema import Config
from asyncrl.tasks.order import shuffled
from asyncrl.tasks.source import build_prompt
from asyncrl.types import Prompt

_VERBS = ("Write", "Give", "Name", "Print", "Show", "Type", "Say", "List")
_COUNTS = ("some", "many", "a few", *map(str, range(2, 31)))
TEXTS = tuple(f"{verb} {count} digits." for verb, count in product(_VERBS, _COUNTS))
"""The 256 requests."""


class EvenDigits:
    """Row i is TEXTS[i]; held-out ones are drawn by a hash that knows no seed."""

    name = "even_digits"

    def __init__(self, config: Config) -> None:
        self._task = config.task
        self.size = len(TEXTS)
        order = shuffled(self.size, seed=0, epoch=0, purpose="eval")
        self._eval = dict.fromkeys(islice(order, config.eval.samples))

    def held_out(self, index: int) -> bool:
        """True if the request is evaluated."""
        return index in self._eval

    def prompt(self, index: int) -> Prompt:
        """The request; there is no ground truth."""
        return build_prompt(self._task, TEXTS[index])

    def eval_prompts(self) -> list[Prompt]:
        """The held-out requests."""
        return [self.prompt(index) for index in self._eval]

    def trainable(self) -> int:
        """Requests that are not held out."""
        return self.size - len(self._eval)
