"""A run's config.yaml as plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from asyncrl.errors import UserError
from asyncrl.monitor.words import text


class _Loader(yaml.SafeLoader):
    """Without aliases, which no run writes: through them a file holds itself, or a thousand
    times what it has on the disk."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*name): write out what that stands for")
        return super().compose_node(parent, index)


def read_settings(folder: Path) -> dict[str, Any]:
    """Its sections and values, as JSON has them; an empty file has none.

    Raises:
        UserError: it cannot be read, or is no configuration.
    """
    path = folder / "config.yaml"
    try:
        content = _plain(yaml.load(path.read_text(encoding="utf-8"), _Loader))
        if content is not None and not isinstance(content, dict):
            raise TypeError("it has no sections")
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as e:
        raise UserError(f"{path} is not a run's configuration: {type(e).__name__}: {e}") from e
    return content or {}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {text(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return hex(value)
    known = value is None or isinstance(value, int | float)
    return value if known else text(str(value))  # a date is what it looks like
