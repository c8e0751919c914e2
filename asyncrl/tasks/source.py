"""What a source of prompts offers, and how its text becomes a Prompt."""

from __future__ import annotations

from typing import Any, Protocol

from asyncrl.config.schema import TaskConfig
from asyncrl.types import Prompt

Messages = list[dict[str, str]]


class Source(Protocol):
    """Rows 0 .. size - 1, some of which may be held out."""

    name: str
    """The `source` of its group ids."""
    size: int
    """Rows, held-out ones among them."""

    def held_out(self, index: int) -> bool:
        """True if the row is kept for evaluation."""

    def prompt(self, index: int) -> Prompt:
        """The row's prompt."""

    def eval_prompts(self) -> list[Prompt]:
        """`eval.samples` held-out prompts, in a fixed order."""

    def trainable(self) -> int:
        """Rows that are not held out."""


def build_prompt(
    task: TaskConfig,
    content: str | Messages,
    answer: str | None = None,
    extra: dict[str, Any] | None = None,
) -> Prompt:
    """A prompt from a row's text or chat turns, with the task's template and system turn.

    The template goes around the text, or around the last turn of a list.
    """
    if isinstance(content, str):
        text = task.prompt_template.replace("{prompt}", content)
        if not task.chat:
            return Prompt(text=text, answer=answer, extra=extra or {})
        messages = [{"role": "user", "content": text}]
    else:
        messages = [dict(turn) for turn in content]
        last = messages[-1]
        last["content"] = task.prompt_template.replace("{prompt}", last["content"])
    if task.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": task.system_prompt})
    return Prompt(messages=messages, answer=answer, extra=extra or {})
