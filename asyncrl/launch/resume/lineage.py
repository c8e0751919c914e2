"""What a run is known by through all its launches: its id, its incarnations, who has its folder.

    new run ──► lock, lineage.json
    resume  ──► lock, lineage.json ──► incarnation + 1, on the disk before anybody uses it
                  └── another launcher is alive: refused

The lock is the system's (flock), so that it goes with its process. lineage.json is written whole or
not at all; what it lost would be found again in the events and the checkpoints.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from asyncrl.checkpoints import Checkpoint, ResumePoint
from asyncrl.disk import trouble, write_whole
from asyncrl.errors import DeadlineError, UserError
from asyncrl.launch.processes.reaper import is_guard_of, processes_of, sweep
from asyncrl.launch.resume.branches import Branches

LINEAGE_FILE = "lineage.json"
LOCK_FILE = "launcher.lock"
LEFTOVERS_S = 45.0
"""How long a former launcher's guard may take to end what it left."""
TAIL_BYTES = 1 << 16
"""Of a file's end, in which its last line is looked for."""


@dataclass(frozen=True, slots=True)
class Known:
    """What lineage.json says."""

    run_id: str
    incarnation: int = 0
    """The highest that was ever used."""
    launches: int = 1
    scratch: str = ""
    """Folder of the sockets of the launch that is alive, or was last."""
    since: int = 0
    """Incarnation that the last launch began as."""
    base: str = ""
    """Name of the checkpoint that it began from; empty: the initial model."""
    bases: list[list[int | None]] = field(default_factory=list)
    """Where each incarnation but 0 began, as `Branches.told` has it."""

    @property
    def branches(self) -> Branches:
        """Which checkpoints are of the run's line, and which of branches that it left."""
        return Branches.told(self.incarnation, self.bases)


class Lineage:
    """A run's folder in the hands of one launcher; made by `begin` or `take_up`."""

    def __init__(self, folder: Path, lock: BinaryIO, known: Known) -> None:
        self._folder, self._lock, self._known = folder, lock, known
        self.wall_s = 0.0
        """wall_s of the last record of former launches."""

    @classmethod
    def begin(cls, folder: Path, run_id: str) -> Lineage:
        """Of a folder that was just made.

        Raises:
            UserError: another launcher has it.
        """
        lineage = cls(folder, _lock(folder), Known(run_id))
        lineage._write()
        return lineage

    @classmethod
    def take_up(cls, folder: Path) -> Lineage:
        """Of a run that goes on: nothing of its former launch is left when this returns.

        Raises:
            UserError: another launcher has it, or it does not say which run it is.
            DeadlineError: what is left of the former launch does not end.
        """
        lock = _lock(folder)
        try:
            known = _known(folder)
            _clear(known)
        except BaseException:
            lock.close()
            raise
        lineage = cls(folder, lock, replace(known, launches=known.launches + 1))
        lines = (last_line(folder / name) for name in ("metrics.jsonl", "events.jsonl"))
        lineage.wall_s = max(_wall_s(line) for line in lines)
        return lineage

    @property
    def run_id(self) -> str:
        """The run's, through all launches."""
        return self._known.run_id

    @property
    def incarnation(self) -> int:
        """The highest that was ever used."""
        return self._known.incarnation

    def newest(self, checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
        """The one to go on from: this launch's last, else the one that it began from.

        Not simply the newest: the run may have gone back to an older one on purpose.
        """
        known = self._known
        own = [c for c in checkpoints if c.meta.incarnation >= known.since]
        base = [c for c in checkpoints if c.path.name == known.base]
        return next(reversed(own or base or checkpoints if known.since else checkpoints), None)

    def left_at(self, checkpoint: Checkpoint) -> int | None:
        """The batch at which the run left this checkpoint's branch; None: it is of its line."""
        meta = checkpoint.meta
        return self._known.branches.left_at(meta.incarnation, meta.step)

    def begins(self, checkpoint: Checkpoint | None) -> ResumePoint:
        """Where this launch goes on, as `goes_on`."""
        self._known = replace(
            self._known, since=self.incarnation + 1,
            base="" if checkpoint is None else checkpoint.path.name,
        )  # fmt: skip
        return self.goes_on(checkpoint)

    def goes_on(self, checkpoint: Checkpoint | None) -> ResumePoint:
        """Go on from a checkpoint (None: the initial model) as an incarnation that nobody has used;
        noted on the disk when this returns."""
        point = ResumePoint.at(checkpoint, self.incarnation + 1)
        of = None if checkpoint is None else checkpoint.meta.incarnation
        bases = [*self._known.bases, [point.incarnation, of, point.step]]
        self._known = replace(self._known, incarnation=point.incarnation, bases=bases)
        self._write()
        return point

    def uses(self, scratch: str) -> None:
        """Note where the sockets of this launch lie."""
        self._known = replace(self._known, scratch=scratch)
        self._write()

    def close(self) -> None:
        """Let others have the folder; safe to call twice."""
        self._lock.close()

    def _write(self) -> None:
        text = json.dumps(asdict(self._known), indent=1) + "\n"
        write_whole(self._folder / LINEAGE_FILE, text, durable=True)


def _lock(folder: Path) -> BinaryIO:
    path = folder / LOCK_FILE
    try:
        lock = open(path, "a+b")  # noqa: SIM115  # held until `close` or death
    except OSError as e:
        raise UserError(trouble(path, e)) from e
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read(20).decode(errors="replace")
        lock.close()
        raise UserError(
            f"{folder.name} is alive: its launcher is process {owner}; `asyncrl status "
            f"{folder.name}` shows it: end it first (Ctrl-C), or launch under another name"
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()).encode())
    lock.flush()
    return lock


def _known(folder: Path) -> Known:
    """What is known of a run, its highest incarnation from wherever one is told."""
    found = _object(folder / LINEAGE_FILE)
    usual = asdict(Known(""))  # what is of another type is as if it were not there
    found = {k: v for k, v in found.items() if type(v) is type(usual.get(k))}
    told_id = last_line(folder / "events.jsonl").get("run_id")
    known = Known(**usual | found)
    if not known.run_id and isinstance(told_id, str):
        known = replace(known, run_id=told_id)
    if not known.run_id:
        raise UserError(
            f"{folder} has neither {LINEAGE_FILE} nor events.jsonl, so nothing of it can go on: "
            "launch a new run"
        )
    told = [_incarnation(line) for line in lines_of(folder / "events.jsonl")]
    for meta in (folder / "checkpoints").glob("step-*/meta.json"):
        told.append(_incarnation(_object(meta)))
    return replace(known, incarnation=max([known.incarnation, *told]))


def branches_of(folder: Path) -> Branches:
    """A run's branches, as far as its lineage.json tells them; nobody need have its folder."""
    found = _object(folder / LINEAGE_FILE)
    newest, bases = found.get("incarnation"), found.get("bases")
    return Branches.told(
        newest if isinstance(newest, int) else 0, bases if isinstance(bases, list) else []
    )


def _object(path: Path) -> dict[str, Any]:
    """What a JSON file says; nothing if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    return {}


def _incarnation(line: dict[str, Any]) -> int:
    value = line.get("incarnation", 0)
    return value if isinstance(value, int) else 0


def _wall_s(line: dict[str, Any]) -> float:
    value = line.get("wall_s", 0.0)
    return float(value) if isinstance(value, int | float) and value < math.inf else 0.0


def _clear(known: Known) -> None:
    """Wait for the guard of a launcher that was killed, then end what it may have left."""
    guards = [p for p in psutil.process_iter() if is_guard_of(p, known.run_id)]
    _, alive = psutil.wait_procs(guards, timeout=LEFTOVERS_S)
    if alive:
        raise DeadlineError(
            f"the launcher waited {LEFTOVERS_S:.0f} s for process {alive[0].pid} to end what an "
            f"earlier launch of {known.run_id} left: end it, then try again"
        )
    if processes_of(known.run_id, known.scratch):
        sweep(known.run_id, scratch=known.scratch)
    if left := processes_of(known.run_id, known.scratch):
        raise DeadlineError(
            f"processes of an earlier launch of {known.run_id} do not end: "
            f"{', '.join(str(p.pid) for p in left)}: end them, then try again"
        )
    if os.path.basename(known.scratch).startswith("asyncrl-"):
        shutil.rmtree(known.scratch, ignore_errors=True)


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSONL file; none if it is not there."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                with contextlib.suppress(ValueError):
                    content = json.loads(line)
                    if isinstance(content, dict):
                        yield content


def last_line(path: Path) -> dict[str, Any]:
    """The last whole line of a JSONL file; empty if there is none."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        for line in reversed(file.read().split(b"\n")[:-1]):
            with contextlib.suppress(ValueError):
                content = json.loads(line)
                if isinstance(content, dict):
                    return content
    return {}
