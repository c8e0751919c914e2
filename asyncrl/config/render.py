"""A configuration as YAML, with where each value came from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from asyncrl.config import fields, reader
from asyncrl.config.interpolate import escape
from asyncrl.config.schema import Config

_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""What YAML does not allow as it stands, or reads as a line break."""

_COLUMN = 44
"""Comments are aligned here at most; a longer line has its comment right behind it."""


def to_yaml(config: Config, sources: Mapping[str, str] | None = None) -> str:
    """The whole configuration; `--config` reads it back to an equal one.

    With `sources`, each line ends with a comment that names the value's origin.
    """
    lines: list[tuple[str, str]] = []
    open_path: list[str] = []
    for key, value in fields.flatten(config).items():
        *path, name = key.split(".")
        shared = 0
        while shared < min(len(path), len(open_path)) and path[shared] == open_path[shared]:
            shared += 1
        for depth in range(shared, len(path)):
            lines.append(("  " * depth + path[depth] + ":", ""))
        open_path = path
        comment = sources.get(key, "") if sources else ""
        lines.append(("  " * len(path) + f"{name}: {_scalar(value)}", comment))
    width = min(max(len(text) for text, _ in lines), _COLUMN)
    return "".join(
        f"{text:<{width}}  # {comment}\n" if comment else text + "\n" for text, comment in lines
    )


def _scalar(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_scalar(v) for v in value) + "]"
    if isinstance(value, float):
        text = repr(value)
        mantissa, e, exponent = text.partition("e")
        # 2e-06 is text to a YAML 1.1 reader; 2.0e-06 is a number to all.
        return text if not e or "." in mantissa else f"{mantissa}.0e{exponent}"
    if not isinstance(value, str):
        return json.dumps(value)
    text = escape(value)
    if text.lower() in ("on", "off", "yes", "no", "y", "n"):  # booleans to a YAML 1.1 reader
        return f'"{text}"'
    plain = text and text.isascii() and all(c.isalnum() or c in "._-/" for c in text)
    if plain and text[0].isalnum() and reader.parse_value(text, "") == text:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda m: f"\\u{ord(m[0]):04x}", quoted)
