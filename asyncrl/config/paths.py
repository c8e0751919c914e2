"""Paths as users write them."""

from __future__ import annotations

from pathlib import Path

from asyncrl.errors import ConfigError


def expand(text: str, setting: str) -> Path:
    """The path of a setting, `~` expanded.

    Raises:
        ConfigError: it is empty or cannot be a path, or names a user that does not exist.
    """
    if not text:  # as a path it would be the current folder
        raise ConfigError(f"{setting} is empty: name a path")
    if "\0" in text:
        raise ConfigError(f"{setting}={text!r}: a path cannot hold a NUL character")
    try:
        return Path(text).expanduser()
    except RuntimeError as e:
        raise ConfigError(f"{setting}={text}: {e}: write the folder out") from e
