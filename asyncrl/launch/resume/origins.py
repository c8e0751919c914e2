"""Where each value of a resumed run comes from: as its config.yaml told it, and what is new."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from asyncrl.config import reader
from asyncrl.launch.resume.fields import Change

_VALUES = (yaml.ScalarToken, yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken)
"""Tokens behind which the comment of a line may follow."""


def origins(
    path: Path, sources: Mapping[str, str], changes: Iterable[Change], batch: int
) -> dict[str, str]:
    """For each dotted key its origin, for the run's new config.yaml.

    Args:
        path: of the config.yaml of before, whose comments are kept.
        sources: of the resume's own command line, for what it changed.
        changes: what differs.
        batch: after which the run goes on.

    Raises:
        ConfigError: the file cannot be read.
    """
    told = {key: comment for key, comment in _comments(path).items() if comment}
    changed = {c.key: f"{sources[c.key]} (resumed at batch {batch})" for c in changes}
    return {**sources, **told, **changed}


def _comments(path: Path) -> dict[str, str]:
    """Of each key the comment on its line; "" where there is none."""
    entries = reader.read_file(path)
    text = path.read_text(encoding="utf-8-sig")
    ends: dict[int, int] = {}
    for token in yaml.scan(text):
        if isinstance(token, _VALUES):
            ends[token.end_mark.line] = token.end_mark.column
    lines = text.split("\n")
    rest = {line + 1: lines[line][column:].strip() for line, column in ends.items()}
    return {
        key: found.lstrip("# ") if (found := rest.get(entry.line, "")).startswith("#") else ""
        for key, entry in entries.items()
    }
