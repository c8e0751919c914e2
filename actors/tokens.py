"""Prompts to token ids, once, with the model's own tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.errors import DataError
from asyncrl.types import Prompt


def encode_prompt(tokenizer: Any, prompt: Prompt, chat: bool) -> list[int]:
    """The [P] token ids of a prompt.

    Chat turns go through the tokenizer's chat template, up to the point where the assistant
    answers. A plain text is tokenised as it stands, with the special tokens that the tokenizer
    adds by itself. A system turn is among the messages if the task has one.

    Args:
        tokenizer: of transformers.
        prompt: with `messages` or `text`.
        chat: `task.chat`; messages need it.

    Raises:
        DataError: messages without `chat`, a template that refuses the turns, or no tokens.
    """
    if prompt.messages is None:
        if prompt.text is None:
            raise DataError("prompt has neither messages nor text")
        ids = list(tokenizer.encode(prompt.text))
    elif not chat:
        raise DataError("prompt is a list of chat messages and task.chat=false: set task.chat=true")
    else:
        ids = _render(tokenizer, prompt.messages)
    if not ids:
        raise DataError(f"prompt has no tokens: {prompt.text!r}")
    return [int(i) for i in ids]


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    from jinja2 import TemplateError

    try:
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True
        )
    except (TemplateError, ValueError, TypeError, KeyError) as e:
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        raise DataError(f"the chat template refuses the prompt: {reason}") from e
    # transformers 5 returns a mapping, earlier ones the list itself.
    return list(rendered["input_ids"] if isinstance(rendered, Mapping) else rendered)
