"""`asyncrl export`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from asyncrl.cli.options import RunsDir


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STEP]|FOLDER",
            help="A run's folder, its name in DIR, or latest: its final model, or else its newest "
            "checkpoint; with @20, @best or @latest that checkpoint. Or a Hugging Face folder.",
        ),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write; missing or empty.")],
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        typer.Option(
            "--dtype", help="Type of the weights; default: as saved, float32 in a checkpoint."
        ),
    ] = None,
    directory: RunsDir = "runs",
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run code that the model's folder ships."),
    ] = False,
) -> None:
    """Write what a run trained as an ordinary Hugging Face folder, and check that it loads."""
    from asyncrl.config.paths import expand

    folder = _model_folder(source, directory)
    target = expand(out, "OUT")
    if (folder / "config.json").is_file():
        from asyncrl.learner.policy.export import export as write

        written = write(folder, target, dtype, trust_remote_code=trust_remote_code)
    else:
        from asyncrl.learner.checkpointing.export import export_checkpoint

        written = export_checkpoint(folder, target, dtype)
    print(f"{target}: {folder} in {str(written).removeprefix('torch.')}")


def _model_folder(source: str, directory: str) -> Path:
    """Where the weights are: a Hugging Face folder, or that of a checkpoint.

    Raises:
        UserError: neither a model nor a run, or a run that has no weights.
        CheckpointError: no such checkpoint, or a damaged one.
    """
    from asyncrl import checkpoints
    from asyncrl.config.paths import expand
    from asyncrl.errors import UserError
    from asyncrl.monitor.status_reader import find

    named = expand(source, "RUN")
    try:
        if any((named / file).is_file() for file in ("config.json", checkpoints.META)):
            return named
        name, _, which = source.partition("@")
        run = find(name or source, Path(directory))
    except OSError as e:  # a name that is too long, say
        raise UserError(f"no run {source}: {e.strerror}: name another") from e
    final = run / checkpoints.FOLDER / "final"
    if not which and (final / "config.json").is_file():
        return final
    if which or checkpoints.latest(run) is not None:
        return checkpoints.find(run, which or "latest").path
    raise UserError(f"run {run} {_why_no_model(run)}")


def _why_no_model(run: Path) -> str:
    import json

    import yaml

    settings = _read(run / "config.yaml", yaml.safe_load).get("learner")
    if isinstance(settings, dict) and settings.get("save_final") is False:
        return (
            "keeps no final model, it has learner.save_final=false: launch again with "
            "learner.save_final=true (the default)"
        )
    if not (run / "summary.json").exists():
        return (
            "has not finished, and its model is written at the end: asyncrl status "
            f"{run} says how far it is"
        )
    summary = _read(run / "summary.json", json.loads)
    why = summary.get("reason") or summary.get("ended") or "summary.json does not say why"
    if summary.get("steps") == 0:
        return f"has no final model, no step was trained ({why}): launch again"
    return f"has no final model, it ended before that was written ({why}): launch again"


def _read(path: Path, parse: Callable[[str], object]) -> dict[str, Any]:
    """What a file of a run says; nothing if it cannot be read."""
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except Exception:  # yaml's errors have no standard base; whatever it is, the file says nothing
        return {}
    return content if isinstance(content, dict) else {}
