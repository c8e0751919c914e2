"""Small JSON files that others wrote, as data that can be counted with and written again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from asyncrl.monitor.words import text


def load(path: Path) -> Any:
    """What a JSON file holds, `sane`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON.
    """
    try:
        return sane(json.loads(path.read_text(encoding="utf-8")))
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e


def sane(value: Any) -> Any:
    r"""Plain data in which a number that is none, or has over 64 bits, is null, and half a
    character is written out.

    >>> sane({"left_s": float("inf"), "host": ["a\ud800"], "pid": 10 ** 30, "step": 3})
    {'left_s': None, 'host': ['a\\ud800'], 'pid': None, 'step': 3}
    """
    if isinstance(value, str):
        return text(value)
    if isinstance(value, dict):
        return {text(key): sane(item) for key, item in value.items()}
    if isinstance(value, list):
        return [sane(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return None
    return value
