"""Sums made on the spot: "What is a + b?", operands from 1 to `task.max_operand`."""

from __future__ import annotations

from asyncrl.config.schema import Config
from asyncrl.tasks.order import shuffled
from asyncrl.tasks.source import build_prompt
from asyncrl.types import Prompt


class Arithmetic:
    """Row a' * n + b' (from 0) is the sum (a' + 1) + (b' + 1), with n = max_operand.

    The held-out sums are drawn by a hash that knows no seed, and are kept out of training in
    both orders: with 3 + 8 held out, 8 + 3 is never trained (and is asked too).
    """

    name = "arithmetic"

    def __init__(self, config: Config) -> None:
        self._task = config.task
        self._n = config.task.max_operand
        self.size = self._n**2
        self._eval = self._draw(config.eval.samples)
        self._eval_pairs = {self._pair(index) for index in self._eval}

    def _draw(self, samples: int) -> list[int]:
        """Rows to ask: pairs in the order of the draw, each in both orders."""
        rows: dict[int, None] = {}
        if samples:
            for index in shuffled(self.size, seed=0, epoch=0, purpose="eval"):
                a, b = divmod(index, self._n)
                rows[index] = rows[b * self._n + a] = None
                if len(rows) >= samples:
                    break
        return list(rows)[:samples]

    def _operands(self, index: int) -> tuple[int, int]:
        a, b = divmod(index, self._n)
        return a + 1, b + 1

    def _pair(self, index: int) -> tuple[int, int]:
        a, b = self._operands(index)
        return min(a, b), max(a, b)

    def held_out(self, index: int) -> bool:
        """True if the sum is evaluated, in either order."""
        return self._pair(index) in self._eval_pairs

    def prompt(self, index: int) -> Prompt:
        """The question; its answer is the sum."""
        a, b = self._operands(index)
        text = f"What is {a} + {b}? Answer with the number only."
        return build_prompt(self._task, text, answer=str(a + b))

    def eval_prompts(self) -> list[Prompt]:
        """The held-out sums."""
        return [self.prompt(index) for index in self._eval]

    def trainable(self) -> int:
        """Sums that are not held out."""
        return self.size - sum(1 if a == b else 2 for a, b in self._eval_pairs)
