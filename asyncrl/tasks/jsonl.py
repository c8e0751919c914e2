"""Prompts from a file with one JSON object a line; every error names file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from asyncrl.config.paths import expand
from asyncrl.config.schema import Config, TaskConfig
from asyncrl.config.suggest import did_you_mean, short
from asyncrl.errors import ConfigError, DataError
from asyncrl.tasks.source import Messages, build_prompt
from asyncrl.types import Prompt


class Jsonl:
    """Row i is the i-th line that is not blank (from 0).

    Evaluation takes the first `eval.samples` rows of `eval.path`; a training row with the same
    prompt is held out, so that one file may serve as both.
    """

    def __init__(self, config: Config) -> None:
        task = config.task
        assert task.path is not None, "asyncrl.config.check asks for task.path"
        self.name = Path(task.path).name
        self._rows = read_prompts(task.path, "task.path", task)
        self.size = len(self._rows)
        self._eval: list[Prompt] = []
        if config.eval.samples:
            assert config.eval.path is not None, "asyncrl.config.check asks for eval.path"
            rows = read_prompts(config.eval.path, "eval.path", task)
            if len(rows) < config.eval.samples:
                raise ConfigError(
                    f"eval.samples={config.eval.samples}: eval.path={config.eval.path} has only "
                    f"{len(rows)} prompts: lower it to {len(rows)}"
                )
            self._eval = rows[: config.eval.samples]
        held = {_key(p) for p in self._eval}
        self._held = {i for i, p in enumerate(self._rows) if _key(p) in held}
        if len(self._held) == self.size:
            raise ConfigError(
                f"task.path={task.path}: all {self.size} prompts are held out for evaluation, none "
                "is left to train on: lower eval.samples or give another eval.path"
            )

    def held_out(self, index: int) -> bool:
        """True if the row's prompt is evaluated."""
        return index in self._held

    def prompt(self, index: int) -> Prompt:
        """The row's prompt."""
        return self._rows[index]

    def eval_prompts(self) -> list[Prompt]:
        """The first rows of `eval.path`."""
        return self._eval

    def trainable(self) -> int:
        """Rows that are not held out."""
        return self.size - len(self._held)


def _key(prompt: Prompt) -> bytes:
    return msgspec.msgpack.encode((prompt.messages, prompt.text))


def read_prompts(path: str, setting: str, task: TaskConfig) -> list[Prompt]:
    """All prompts of a file. Blank lines are skipped, a byte order mark is tolerated.

    Raises:
        DataError: the file is missing, unreadable or empty, or a line is malformed.
    """
    file = expand(path, setting)
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        where = f" (looked in {Path.cwd()})" if not file.is_absolute() else ""
        raise DataError(f"{setting}={path}: no such file{where}: give an existing one") from None
    except OSError as e:
        raise DataError(f"{setting}={path}: cannot be read: {e.strerror}") from e
    rows = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            try:
                rows.append(_prompt(line, task))
            except DataError as e:
                raise DataError(f"{path}:{number}: {e}") from e.__cause__
    if not rows:
        raise DataError(f"{setting}={path}: the file has no prompts: a batch could never fill")
    return rows


def _prompt(line: bytes, task: TaskConfig) -> Prompt:
    row = _parse(line)
    content = _content(_field(row, task.prompt_field, "task.prompt_field"), task)
    answer = None
    if task.answer_field is not None:
        answer = _answer(_field(row, task.answer_field, "task.answer_field"), task.answer_field)
    used = {task.prompt_field, task.answer_field}
    extra = {k: v for k, v in row.items() if k not in used}
    prompt = build_prompt(task, content, answer, extra)
    try:
        msgspec.msgpack.encode(prompt)
    except (OverflowError, UnicodeEncodeError, RecursionError) as e:
        raise DataError(f"holds a value that cannot be sent on: {e}") from e
    return prompt


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _parse(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as e:
        raise DataError(f"byte 0x{line[e.start]:02x} is not UTF-8") from e
    except json.JSONDecodeError as e:
        raise DataError(f"malformed JSON at column {e.colno}: {e.msg}") from e
    except (ValueError, RecursionError) as e:
        raise DataError(f"malformed JSON: {e}") from e
    if not isinstance(row, dict):
        raise DataError(f"expected a JSON object, got {short(json.dumps(row))}")
    return row


def _field(row: dict[str, Any], name: str, setting: str) -> Any:
    if name not in row:
        hint = did_you_mean(name, row) or f" (columns: {short(', '.join(row), 100)})"
        raise DataError(f"no column {name!r}, which {setting} names{hint}")
    return row[name]


def _content(value: Any, task: TaskConfig) -> str | Messages:
    name = task.prompt_field
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{name!r} is empty")
        return value
    if not isinstance(value, list) or not value:
        raise DataError(f"{name!r} is {short(json.dumps(value))}, expected text or chat messages")
    for turn in value:
        if not isinstance(turn, dict) or not all(
            isinstance(turn.get(key), str) for key in ("role", "content")
        ):
            raise DataError(f'{name!r}: each message must be {{"role": text, "content": text}}')
    if not task.chat:
        raise DataError(f"{name!r} is a list of chat messages, which task.chat=false cannot render")
    if task.system_prompt is not None and value[0]["role"] == "system":
        raise DataError(f"{name!r} has a system turn and task.system_prompt is set: keep one")
    return [{"role": turn["role"], "content": turn["content"]} for turn in value]


def _answer(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise DataError(f"{name!r} is {short(json.dumps(value))}, expected text or a number")
