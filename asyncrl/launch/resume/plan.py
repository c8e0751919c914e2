"""`--resume` and `--from` as the command line has them: which run, which checkpoint, what differs.

RUN | latest | PATH, @STEP | @best ─► the run's folder ─► locked, its leftovers gone
    ─► its config.yaml and the changes ─► each accepted or refused ─► the checkpoint
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl import checkpoints
from asyncrl.checkpoints import Checkpoint, ResumePoint
from asyncrl.config.load import Resolved, load
from asyncrl.config.schema import Config
from asyncrl.disk import set_aside, trouble
from asyncrl.errors import ConfigError, UserError
from asyncrl.launch.folder import RunFolder
from asyncrl.launch.resume.fields import Change, check_changes
from asyncrl.launch.resume.lineage import Lineage, lines_of
from asyncrl.launch.resume.origins import origins
from asyncrl.monitor.status_reader import find

STORE = "buffer"
"""Below a run's folder: what its buffer keeps."""
PLACE = ("run.dir", "run.name")
"""Settings that say where a run lies: a resumed one lies where it was found."""


class Named(NamedTuple):
    """What the user named."""

    folder: Path
    """Of the run."""
    which: str
    """latest, best, a step, or the name of a checkpoint's folder."""


@dataclass
class Resumption:
    """A run that is to go on; its folder is locked until `lineage.close`."""

    folder: RunFolder
    lineage: Lineage
    config: Resolved
    changes: list[Change]
    checkpoint: Checkpoint | None
    """None: there is none, the run begins again from its initial model."""
    left_at: int | None = None
    """The checkpoint is of a branch that the run left after this batch; None: of its line."""

    def point(self) -> ResumePoint:
        """Where it goes on, in an incarnation of its own; to be called once."""
        if self.left_at is not None:  # before anything says that the run goes on from there
            _set_store_aside(Path(self.folder.path))
        return self.lineage.begins(self.checkpoint)

    def origins(self) -> dict[str, str]:
        """Where each value comes from, for config.yaml; to be called before that is rewritten."""
        batch = 0 if self.checkpoint is None else self.checkpoint.meta.step
        path = Path(self.folder.path, "config.yaml")
        return origins(path, self.config.sources, self.changes, batch)

    def lines(self) -> list[str]:
        """What happens, in words."""
        where = f"its initial model ({_no_checkpoint(Path(self.folder.path))})"
        if self.checkpoint is not None:
            where = f"batch {self.checkpoint.meta.step} ({self.checkpoint.path.name})"
        lines = [f"goes on from {where}"]
        if self.left_at is not None:
            lines.append(
                f"it is of a branch that the run left at batch {self.left_at}: what was trained "
                "instead is left now, and the buffer goes on from the checkpoint's copy"
            )
        return [*lines, *(f"changed: {change}" for change in self.changes)]


def _no_checkpoint(folder: Path) -> str:
    """Whether a run without checkpoints ever had some, as its events tell."""
    events = lines_of(folder / "events.jsonl")
    had = [e.get("batch") for e in events if e.get("event") == "checkpoint"]
    if not had:
        return "it has no checkpoint yet"
    return f"its checkpoints are gone, the last one was of batch {had[-1]}"


def named(text: str, directory: Path) -> Named:
    """The run, and the checkpoint, that RUN, latest, a path, RUN@STEP or RUN@best names.

    Raises:
        UserError: there is no such run.
    """
    path = Path(text).expanduser()
    if (path / checkpoints.META).is_file():  # a checkpoint's own folder
        path = path.resolve()
        return Named(path.parents[1], path.name)
    run, at, which = text.rpartition("@")
    if not at or path.exists():
        run, which = text, ""
    return Named(find(run, directory).resolve(), which or "latest")


def plan_resume(
    text: str, config: Sequence[str], overrides: Sequence[str],
    flags: dict[str, tuple[str, Any]],
) -> Resumption:  # fmt: skip
    """Everything that a resumed run needs; nothing of its former launch is alive then.

    Args:
        text: of `--resume`.
        config: configurations whose settings are to hold on top of the run's own.
        overrides, flags: of the command line.

    Raises:
        UserError: no such run, another launcher has it, or it is complete.
        ConfigError: a setting that may not differ.
        CheckpointError: the checkpoint is missing or damaged.
    """
    overrides, directory, name = _place(overrides, flags)
    folder, which = named(text, Path(directory))
    if name is not None and name != folder.name:
        raise ConfigError(
            f"run.name={name}: the run that goes on is {folder.name}, in {folder}: leave it out"
        )
    lineage = Lineage.take_up(folder)
    try:
        own = str(folder / "config.yaml")
        was = load(own).config
        resolved = load([own, *config], overrides, flags)
        changes = check_changes(was, resolved.config)
        if was.checkpoint.every is None:
            raise UserError(
                f"{folder.name} makes no checkpoints (checkpoint.every=null), so it cannot go on: "
                "launch a new run"
            )
        _check_incomplete(folder, which, resolved)
        chosen = _chosen(folder, which, lineage)
        if chosen is not None:
            _check_made_with(chosen, resolved.config)
        left_at = None if chosen is None else lineage.left_at(chosen)
        where = RunFolder(resolved.config, resolved.name, folder)
        return Resumption(where, lineage, resolved, changes, chosen, left_at)
    except BaseException:
        lineage.close()
        raise


def _place(
    overrides: Sequence[str], flags: dict[str, tuple[str, Any]]
) -> tuple[list[str], str, str | None]:
    """The overrides without those that say where the run lies; its directory and name."""
    given = {key: text.partition("=")[2] for text in overrides if (key := _key(text)) in PLACE}
    _, by_flag = flags.pop("--run-name", ("", None))
    rest = [text for text in overrides if _key(text) not in PLACE]
    return rest, given.get("run.dir", "runs"), by_flag or given.get("run.name")


def _key(override: str) -> str:
    return override.partition("=")[0].strip()


def _check_incomplete(folder: Path, which: str, resolved: Resolved) -> None:
    """Refuse to go on with a run that has done all it was asked for."""
    done, steps = None, resolved.config.run.steps
    with suppress(OSError, ValueError, KeyError, TypeError):
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        done = summary["steps"] if summary["ended"] == "finished" else None
    if which == "latest" and isinstance(done, int) and done >= steps:
        raise UserError(
            f"{folder.name} is complete: it finished after {done} of run.steps={steps} "
            f"batches: raise that to go on, e.g. run.steps={2 * done}"
        )


def _check_made_with(checkpoint: Checkpoint, now: Config) -> None:
    """Refuse what may not differ from what the checkpoint was made with.

    The run's own config.yaml may have been edited since; the checkpoint's has a checksum.
    """
    step, steps = checkpoint.meta.step, now.run.steps
    if step > steps:
        raise UserError(
            f"run.steps={steps}: {checkpoint.path} has trained {step} batches already: raise it, "
            "or name an older checkpoint"
        )
    if "config.yaml" not in checkpoint.meta.files:
        return
    was = load(str(checkpoint.path / "config.yaml")).config
    here = was.run.model_copy(update={"name": now.run.name, "dir": now.run.dir})
    check_changes(was.model_copy(update={"run": here}), now)


def _chosen(folder: Path, which: str, lineage: Lineage) -> Checkpoint | None:
    if which == "latest":
        return lineage.newest(checkpoints.list_checkpoints(folder))
    if which.startswith("step-"):
        return checkpoints.read(folder / checkpoints.FOLDER / which)
    return checkpoints.find(folder, which)


def _set_store_aside(folder: Path) -> None:
    """Keep the buffer's store under another name: it holds another branch, whose batches have the
    same numbers.

    Raises:
        ConfigError: the folder cannot be written.
    """
    store = folder / STORE
    try:
        if store.exists():
            set_aside(store)
    except OSError as e:
        raise ConfigError(trouble(store, e)) from e
