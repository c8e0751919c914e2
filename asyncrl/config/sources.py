"""Where configurations are found: the shipped ones by name, any other by path."""

from __future__ import annotations

import os
from pathlib import Path

from asyncrl.config.paths import expand
from asyncrl.config.suggest import did_you_mean
from asyncrl.errors import ConfigError

SHIPPED = Path(__file__).parent.parent / "configs"
"""Folder of the shipped configurations (package data)."""


def shipped() -> dict[str, Path]:
    """Name (e.g. "quickstart" or "correction/x") and path of each shipped configuration."""
    found = {p.relative_to(SHIPPED).with_suffix("").as_posix(): p for p in SHIPPED.rglob("*.yaml")}
    return dict(sorted(found.items()))


def find(name: str) -> Path:
    """The file of `--config NAME|PATH`: a shipped name first, then a path.

    Raises:
        ConfigError: neither; the message lists the shipped names or the nearest one.
    """
    known = shipped()
    if name in known:
        return known[name]
    path = expand(name, "--config")
    if path.is_dir():
        raise ConfigError(f"--config {name}: is a folder, expected a YAML file or a shipped name")
    if path.exists():
        return path
    if path.suffix in (".yaml", ".yml") or os.sep in name:
        stem = path.with_suffix("").name
        hint = did_you_mean(stem, known) or f" (shipped: {', '.join(known)})"
        raise ConfigError(f"--config {name}: no such file in {Path.cwd()}{hint}")
    hint = did_you_mean(name, known)
    raise ConfigError(
        f"--config {name}: no shipped configuration of that name, nor a file{hint}; "
        f"shipped: {', '.join(known)}"
    )


def summary(path: Path) -> str:
    """The first comment line of a configuration, for lists."""
    with path.open(encoding="utf-8") as f:
        first = f.readline().strip()
    return first.lstrip("# ") if first.startswith("#") else ""


RESOLVED = "# Resolved by asyncrl: --config with this file runs it again."
"""First line of a run's config.yaml."""
RESOLVED_MARK = " (resolved)"
"""Follows the name of such a file where a value's origin is told."""


def is_resolved(path: Path) -> bool:
    """Whether a file holds every setting of a run, those without effect in it included."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.readline().startswith(RESOLVED)
