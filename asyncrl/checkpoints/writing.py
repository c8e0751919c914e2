"""How a checkpoint comes to be whole, and goes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from asyncrl.checkpoints.reading import (
    FOLDER,
    LEDGER,
    META,
    OWN,
    Checkpoint,
    Meta,
    best_of,
    meta_checksum,
    undamaged,
)
from asyncrl.disk import checksum, sync

_REMOVED = ".removed.tmp"


def partial(run_dir: str | Path, step: int, incarnation: int) -> Path:
    """The folder that a checkpoint is written in; the same for every rank."""
    return Path(run_dir) / FOLDER / f".step-{step:06d}.i{incarnation}.tmp"


def seal(folder: Path, meta: Meta, checksums: Mapping[str, str] | None = None) -> Checkpoint:
    """Make a whole checkpoint of what lies in `folder` (see `partial`), `latest` and `best` too.

    When this returns it survives the death of the machine; until then there is none.

    Args:
        checksums: of files that those who wrote them have told; the others are read.

    Raises:
        OSError: the disk did not take it.
    """
    sizes = _sizes(folder)
    told = checksums or {}
    sums = {
        name: told.get(name) or checksum(folder / name)
        for name in sizes
        if Path(name).parts[0] != LEDGER
    }
    content = asdict(meta) | {"files": sizes, "checksums": sums}
    meta = Meta(**content)
    text = json.dumps(content | {OWN: meta_checksum(content)}, indent=1)
    (folder / META).write_text(text + "\n", encoding="utf-8")
    for where, _, names in os.walk(folder, topdown=False):
        for name in (*names, "."):
            sync(os.path.join(where, name))
    target = folder.with_name(f"step-{meta.step:06d}")
    if target.exists():  # the run went back behind it, to another checkpoint
        _remove(target)
    os.rename(folder, target)
    sync(target.parent)
    _point_to(target.parent, "latest", target)
    made = Checkpoint(target, meta)
    if (top := best_of(undamaged(target.parent.parent))) is not None:
        _point_to(target.parent, "best", top.path)
    return made


def prune(
    run_dir: str | Path, keep: int, quota_bytes: float | None = None, spare: str | None = None
) -> list[Path]:
    """Remove the oldest until at most `keep` are left, and at most so many bytes.

    Never the latest, nor the best; both count. A damaged one is left to the user.

    Args:
        spare: folder of one that stays as well: a run that went back to it would lose its place.

    Returns:
        What was removed.

    Raises:
        OSError: it cannot be removed.
    """
    found, removed = undamaged(run_dir), []
    if not found:
        return []
    stays = {found[-1].path, *([Path(spare)] if spare else [])}
    if (top := best_of(found)) is not None:
        stays.add(top.path)
    left, nbytes = len(found), sum(c.meta.nbytes for c in found)
    for c in found:
        if left <= keep and (quota_bytes is None or nbytes <= quota_bytes):
            break
        if c.path not in stays:
            _remove(c.path)
            removed.append(c.path)
            left, nbytes = left - 1, nbytes - c.meta.nbytes
    return removed


def clean(run_dir: str | Path) -> list[Path]:
    """Remove what was half written or half removed when a process died.

    Raises:
        OSError: it cannot be removed.
    """
    folder = Path(run_dir) / FOLDER
    leftovers = [*folder.glob(".step-*.tmp"), *folder.glob(".*.link")]
    leftovers.sort(key=lambda path: not path.name.endswith(_REMOVED))
    for path in leftovers:
        if path.is_symlink():
            path.unlink()
        elif path.name.endswith(_REMOVED):
            shutil.rmtree(path)
        else:  # the buffer may still be writing into it, for a learner that is gone
            _remove(path)
    return leftovers


def _sizes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / META
    }


def _remove(path: Path) -> None:
    """Under another name first: a half removed one is never picked."""
    doomed = path.with_name(f".{path.name.lstrip('.')}{_REMOVED}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _point_to(folder: Path, name: str, target: Path) -> None:
    """Make `name` a relative link to `target`, at once."""
    temporary = folder / f".{name}.link"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    os.replace(temporary, folder / name)
    sync(folder)
