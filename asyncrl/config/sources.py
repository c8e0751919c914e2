"""Where configurations are found: the shipped ones by name, any other by path."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

from asyncrl.config.paths import expand
from asyncrl.errors import ConfigError

SHIPPED = Path(__file__).parent.parent / "configs"
"""Folder of the shipped configurations (package data)."""


def shipped() -> dict[str, Path]:
    """Name (e.g. "quickstart" or "correction/x") and path of each shipped configuration.

    Those of a whole run come first.
    """
    found = {p.relative_to(SHIPPED).with_suffix("").as_posix(): p for p in SHIPPED.rglob("*.yaml")}
    return dict(sorted(found.items(), key=lambda item: ("/" in item[0], item[0])))


def find(name: str) -> Path:
    """The file of `--config NAME|PATH`: a shipped name first, then a path.

    Raises:
        ConfigError: neither; the message lists the nearest shipped names, or all of them.
    """
    known = shipped()
    if name in known:
        return known[name]
    path = expand(name, "--config")
    if path.is_dir():
        raise ConfigError(f"--config {name}: is a folder, expected a YAML file or a shipped name")
    if path.exists():
        return path
    hint = _near(name, known)
    folder = f"{name.partition('/')[0]}/"
    in_shipped = any(k.startswith(folder) for k in known)
    if path.suffix in (".yaml", ".yml") or (os.sep in name and not in_shipped):
        raise ConfigError(f"--config {name}: no such file in {Path.cwd()}{hint}")
    raise ConfigError(f"--config {name}: no shipped configuration of that name, nor a file{hint}")


def _near(name: str, known: Iterable[str]) -> str:
    """Shipped names like `name`, whatever their folders; all of them if none is."""
    leaves = {k.rpartition("/")[2]: k for k in known}
    leaf = name.lower().rpartition("/")[2].removesuffix(".yaml").removesuffix(".yml")
    near = [leaves[m] for m in difflib.get_close_matches(leaf, list(leaves), n=3, cutoff=0.7)]
    if near:
        return f" (did you mean {' or '.join(near)}?)"
    return f"; shipped: {', '.join(leaves.values())}"


def shown(path: Path) -> str:
    """A configuration file as messages name it: a shipped one without the folder it lies in."""
    return path.relative_to(SHIPPED).as_posix() if path.is_relative_to(SHIPPED) else str(path)


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
