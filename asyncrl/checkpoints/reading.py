"""What a checkpoint is, and which of them there are."""

from __future__ import annotations

import json
import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import xxhash

from asyncrl.disk import checksum
from asyncrl.errors import CheckpointError
from asyncrl.types import Version

FOLDER = "checkpoints"
"""Below the run's folder."""
LEDGER = "ledger"
"""Below a checkpoint: what the buffer held, written by the buffer."""
META = "meta.json"
"""Written last."""
OWN = "checksum"
"""In meta.json: that of all else in it."""
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
        if (told := content.pop(OWN, None)) is not None and told != meta_checksum(content):
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


def meta_checksum(content: dict[str, Any]) -> str:
    """Of all in meta.json but the checksum itself."""
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
    return best_of(list_checkpoints(run_dir))


def best_of(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """As `best`, of these."""
    scored = [(c.meta.score, c.age, c) for c in checkpoints if c.meta.score is not None]
    scored = [entry for entry in scored if not math.isnan(entry[0] or 0.0)]
    return max(scored, key=lambda entry: entry[:2])[2] if scored else None


def find(run_dir: str | Path, which: str = "latest") -> Checkpoint:
    """The checkpoint that `latest`, `best` or a step names.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    # One that is named by its step does not need the others.
    chosen = next((c for c in undamaged(run_dir) if str(c.meta.step) == which), None)
    if chosen is not None:
        return chosen
    found = list_checkpoints(run_dir)
    if which == "latest" and found:
        return found[-1]
    if which == "best" and (top := best_of(found)) is not None:
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


def undamaged(run_dir: str | Path) -> list[Checkpoint]:
    """Those that are not damaged, the newest last."""
    found = []
    for path in _folders(run_dir):
        with suppress(CheckpointError):
            found.append(read(path))
    return sorted(found, key=lambda c: c.age)
