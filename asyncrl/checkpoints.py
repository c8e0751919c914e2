"""The checkpoints of a run: one folder each, whole or not there.

    write into .step-000010.i0.tmp ─► meta.json ─► fsync of every file ─► rename ─► step-000010
                                                                            └─► latest, best

What is half written has a name that nobody reads, and is removed when a learner starts again
(`clean`). The newest checkpoint is that of the highest incarnation, and in it of the highest step:
a run that went back to an older one may have left some of higher steps behind.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import xxhash

from asyncrl.disk import checksum, sync
from asyncrl.errors import CheckpointError
from asyncrl.types import Version

FOLDER = "checkpoints"
"""Below the run's folder."""
LEDGER = "ledger"
"""Below a checkpoint: what the buffer held, written by the buffer."""
META = "meta.json"
"""Written last."""

_OWN = "checksum"
"""In meta.json: that of all else in it."""
_REMOVED = ".removed.tmp"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True, slots=True)
class Meta:
    """What meta.json says.

    >>> Meta(step=10, version=5, incarnation=1, world=2, run_id="r").applied
    Version(incarnation=1, version=5)
    """

    step: int
    """Last batch that is trained in it."""
    version: int
    """v at which batch `step` + 1 is trained."""
    incarnation: int
    """Of the learner that wrote it."""
    world: int
    """Learner ranks that wrote it."""
    run_id: str
    score: float | None = None
    """What `best` goes by, the higher the better; None: there was no such metric."""
    samples: int = 0
    """Fresh samples trained, of the whole lineage."""
    wall_s: float = 0.0
    """Seconds that learners have run, of the whole lineage."""
    threads: int = 0
    """CPU threads of each rank: sums may round otherwise with another number."""
    torch: str = ""
    """Version of torch."""
    state: dict[str, Any] = field(default_factory=dict)
    """What else the learner goes on with (learner/checkpointing/)."""
    files: dict[str, int] = field(default_factory=dict)
    """Bytes of each other file, by its path below the checkpoint."""
    checksums: dict[str, str] = field(default_factory=dict)
    """xxh3_64 of each of them but the ledger's, whose values have their own."""

    @property
    def applied(self) -> Version:
        """Version of its weights, in the incarnation that wrote it."""
        return Version(self.incarnation, self.version)

    @property
    def nbytes(self) -> int:
        """Bytes of all files but meta.json."""
        return sum(self.files.values())


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint."""

    path: Path
    meta: Meta

    @property
    def ledger(self) -> Path:
        """Folder of what the buffer held."""
        return self.path / LEDGER

    @property
    def age(self) -> tuple[int, int]:
        """Sorts checkpoints, the newest last."""
        return self.meta.incarnation, self.meta.step


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a learner goes on, and as what.

    >>> ResumePoint(None, incarnation=1, step=0, version=0).applied
    Version(incarnation=1, version=0)
    """

    checkpoint: str | None
    """Folder of the checkpoint; None is the initial model, after batch 0."""
    incarnation: int
    """Higher than any that was used in the run."""
    step: int
    """Last batch that is trained in it."""
    version: int
    """v at which batch `step` + 1 is trained."""

    @property
    def applied(self) -> Version:
        """What the learner publishes before it trains."""
        return Version(self.incarnation, self.version)

    @classmethod
    def at(cls, checkpoint: Checkpoint | None, incarnation: int) -> ResumePoint:
        """Go on from a checkpoint, or from the initial model."""
        if checkpoint is None:
            return cls(None, incarnation, 0, 0)
        meta = checkpoint.meta
        return cls(str(checkpoint.path), incarnation, meta.step, meta.version)


# --- reading -------------------------------------------------------------------------------


def read(path: str | Path) -> Checkpoint:
    """The checkpoint in this folder.

    Raises:
        CheckpointError: there is none, or it is damaged; names the file.
    """
    path = Path(path).resolve()  # `latest` may soon lead somewhere else
    try:
        content = json.loads((path / META).read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError("it is no JSON object")
        if (told := content.pop(_OWN, None)) is not None and told != _of_meta(content):
            raise ValueError("its checksum is wrong")
        known = {f.name for f in fields(Meta)}
        meta = Meta(**{k: v for k, v in content.items() if k in known})
        numbers = (meta.step, meta.version, meta.incarnation, meta.world)
        if not all(isinstance(n, int) for n in numbers) or not isinstance(meta.files, dict):
            raise TypeError("step, version, incarnation, world or files have other types")
    except FileNotFoundError as e:
        raise CheckpointError(f"{path} is no checkpoint, it has no {META}: name another") from e
    except (OSError, ValueError, TypeError, RecursionError) as e:
        raise _damaged(path, META, str(getattr(e, "strerror", None) or e)) from e
    for name, size in meta.files.items():
        try:
            found = os.stat(path / name).st_size
        except OSError as e:
            raise _damaged(path, name, e.strerror or str(e)) from e
        if found != size:
            raise _damaged(path, name, f"it has {found} bytes, {size} were written")
    return Checkpoint(path, meta)


def verify(checkpoint: Checkpoint, rank: int = 0, world: int = 1) -> None:
    """Compare the files with their checksums: this rank's share of them.

    Raises:
        CheckpointError: a file is not what was written; names it.
    """
    for name, told in list(checkpoint.meta.checksums.items())[rank::world]:
        try:
            found = checksum(checkpoint.path / name)
        except OSError as e:
            raise _damaged(checkpoint.path, name, e.strerror or str(e)) from e
        if found != told:
            raise _damaged(checkpoint.path, name, "its checksum is wrong")


def _of_meta(content: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content).encode())


def _damaged(path: Path, name: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path / name}: the checkpoint is damaged ({why}): restore it, or remove {path} to go on "
        "from the one before"
    )


def list_checkpoints(run_dir: str | Path) -> list[Checkpoint]:
    """All whole checkpoints of a run, the newest last.

    Raises:
        CheckpointError: one is damaged.
    """
    found = []
    for path in _folders(run_dir):
        try:
            found.append(read(path))
        except CheckpointError:
            if path.exists():  # else a learner that is alive has just removed it
                raise
    return sorted(found, key=lambda c: c.age)


def latest(run_dir: str | Path) -> Checkpoint | None:
    """The newest checkpoint of a run.

    Raises:
        CheckpointError: one is damaged.
    """
    found = list_checkpoints(run_dir)
    return found[-1] if found else None


def best(run_dir: str | Path) -> Checkpoint | None:
    """The checkpoint of the highest score, of equals the newest; None if none has a score.

    Raises:
        CheckpointError: one is damaged.
    """
    return _best(list_checkpoints(run_dir))


def _best(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    scored = [(c.meta.score, c.age, c) for c in checkpoints if c.meta.score is not None]
    scored = [entry for entry in scored if not math.isnan(entry[0] or 0.0)]
    return max(scored, key=lambda entry: entry[:2])[2] if scored else None


def find(run_dir: str | Path, which: str = "latest") -> Checkpoint:
    """The checkpoint that `latest`, `best` or a step names.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    # One that is named by its step does not need the others.
    chosen = next((c for c in _whole(run_dir) if str(c.meta.step) == which), None)
    if chosen is not None:
        return chosen
    found = list_checkpoints(run_dir)
    if which == "latest" and found:
        return found[-1]
    if which == "best" and (top := _best(found)) is not None:
        return top
    if not found:
        raise CheckpointError(f"{run_dir} has no checkpoints: name another run")
    have = ", ".join(str(c.meta.step) for c in found)
    raise CheckpointError(
        f"{run_dir} has no checkpoint {which}, it has those of steps {have}: name another"
    )


def _folders(run_dir: str | Path) -> list[Path]:
    try:
        with os.scandir(Path(run_dir) / FOLDER) as entries:
            found = [e for e in entries if _NAME.fullmatch(e.name)]
    except FileNotFoundError:
        return []
    return [Path(e.path) for e in found if e.is_dir(follow_symlinks=False)]


# --- writing -------------------------------------------------------------------------------


def partial(run_dir: str | Path, step: int, incarnation: int) -> Path:
    """The folder that a checkpoint is written in; the same for every rank."""
    return Path(run_dir) / FOLDER / f".step-{step:06d}.i{incarnation}.tmp"


def seal(folder: Path, meta: Meta) -> Checkpoint:
    """Make a whole checkpoint of what lies in `folder` (see `partial`), `latest` and `best` too.

    When this returns it survives the death of the machine; until then there is none.

    Raises:
        OSError: the disk did not take it.
    """
    sizes = _sizes(folder)
    sums = {name: checksum(folder / name) for name in sizes if Path(name).parts[0] != LEDGER}
    content = asdict(meta) | {"files": sizes, "checksums": sums}
    meta = Meta(**content)
    text = json.dumps(content | {_OWN: _of_meta(content)}, indent=1)
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
    if (top := _best(_whole(target.parent.parent))) is not None:
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
    found, removed = _whole(run_dir), []
    if not found:
        return []
    stays = {found[-1].path, *([Path(spare)] if spare else [])}
    if (top := _best(found)) is not None:
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


def _whole(run_dir: str | Path) -> list[Checkpoint]:
    """Those that are not damaged, the newest last."""
    found = []
    for path in _folders(run_dir):
        with suppress(CheckpointError):
            found.append(read(path))
    return sorted(found, key=lambda c: c.age)


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
