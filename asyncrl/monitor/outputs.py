"""Files that commands write where the user says: whole or not at all, and never a run's own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from asyncrl.config.paths import expand
from asyncrl.errors import UserError

FILES = frozenset({
    "config.yaml", "status.json", "summary.json", "metrics.jsonl", "events.jsonl", "lineage.json",
    "launcher.lock",
})  # fmt: skip
FOLDERS = frozenset({
    "trajectories", "checkpoints", "logs", "trace", "buffer", "exports", "tensorboard", "wandb",
})  # fmt: skip
"""What a run writes into its folder; a resumed one also keeps some as NAME.before-N.*"""


def target(text: str, option: str, runs: Iterable[Path]) -> Path:
    """Where a command may write.

    Args:
        text: as the user gave it.
        option: that names it.
        runs: folders of the runs that are read.

    Raises:
        UserError: it is a run's own file, or no path.
    """
    out = expand(text, option)
    real = Path(os.path.realpath(out))
    folders = {Path(os.path.realpath(run)) for run in runs}
    folders |= {place for place in real.parents if _is_run(place)}
    for folder in folders:
        if real.is_relative_to(folder) and _is_own(real.relative_to(folder)):
            raise UserError(
                f"{option} {text}: the run in {folder} keeps its own files there: name a file "
                "elsewhere"
            )
    return out


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / "metrics.jsonl").is_file()


def _is_own(inside: Path) -> bool:
    first = inside.parts[0] if inside.parts else ""
    return first in FILES | FOLDERS or ".before-" in first


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A path to write to: what lies there afterwards takes the place of `out`, which until then,
    and after an error, is what it was. A device or a pipe is written as it is."""
    real = Path(os.path.realpath(out))  # a link stays one
    if real.exists() and not real.is_file():
        yield real
        return
    part = real.with_name(f"{real.name}.part")
    try:
        yield part
        os.replace(part, real)
    finally:
        with suppress(OSError):
            part.unlink()
