"""`--from`: the weights of another run as a model's folder, which a new run begins from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from asyncrl import checkpoints
from asyncrl.errors import DeadlineError, UserError
from asyncrl.launch.resume.lineage import branches_of
from asyncrl.launch.resume.plan import named

EXPORTS = "exports"
"""Below a run's folder: models made of its checkpoints, for the runs that began from them."""
EXPORT_S = 1800.0


class Origin(NamedTuple):
    """Where weights come from."""

    run: str
    step: int | None
    """None: the run's final model."""
    model: Path
    """A Hugging Face folder."""


def weights_of(text: str, directory: Path, say: Callable[[str], None]) -> Origin:
    """The model that RUN, RUN@STEP, RUN@best or a checkpoint's folder names, made if need be.

    RUN alone is its final model, or its newest checkpoint where there is none.

    Raises:
        UserError: there is no such run, or it has no weights.
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    run, which = named(text, directory)
    final = run / checkpoints.FOLDER / "final"
    bare = which == "latest" and not text.endswith("@latest")
    if bare and (final / "config.json").is_file():
        return Origin(run.name, None, final)
    if which.startswith("step-"):
        checkpoint = checkpoints.read(run / checkpoints.FOLDER / which)
    else:
        checkpoint = checkpoints.find(run, which)
    meta = checkpoint.meta
    if (left := branches_of(run).left_at(meta.incarnation, meta.step)) is not None:
        say(f"{checkpoint.path} is of a branch that {run.name} left at batch {left}")
    model = run / EXPORTS / f"{checkpoint.path.name}.{meta.incarnation}"
    if not (model / "config.json").is_file():
        say(f"exporting {checkpoint.path}")
        _export(checkpoint.path, model)
    return Origin(run.name, meta.step, model)


def _export(checkpoint: Path, model: Path) -> None:
    """In a process of its own, which loads torch; whole or not at all."""
    part = model.with_name(f".{model.name}.{os.getpid()}.tmp")
    shutil.rmtree(part, ignore_errors=True)
    part.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "asyncrl", "export", str(checkpoint), str(part)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=EXPORT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["it does not say why"]
            raise UserError(f"{checkpoint} cannot be exported: {lines[-1].removeprefix('error: ')}")
        os.replace(part, model)
    except subprocess.TimeoutExpired:
        raise DeadlineError(
            f"the launcher waited {EXPORT_S:.0f} s for the export of {checkpoint}: the disk is "
            f"too slow or stuck; try asyncrl export {checkpoint}"
        ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
