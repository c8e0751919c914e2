"""`asyncrl export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|FOLDER",
            help="A run's folder, its name in DIR, or latest; or a Hugging Face folder.",
        ),
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write; missing or empty.")],
    dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        typer.Option("--dtype", help="Type of the weights; default: as they were saved."),
    ] = None,
    directory: Annotated[
        str, typer.Option("--dir", metavar="DIR", help="Folder of the runs: run.dir.")
    ] = "runs",
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="Run code that the model's folder ships."),
    ] = False,
) -> None:
    """Write a run's final model as an ordinary Hugging Face folder, and check that it loads."""
    from asyncrl.config.paths import expand

    folder = _model_folder(source, directory)
    target = expand(out, "OUT")

    from asyncrl.learner.policy.export import export as write

    written = write(folder, target, dtype, trust_remote_code=trust_remote_code)
    print(f"{target}: {folder} in {str(written).removeprefix('torch.')}")


def _model_folder(source: str, directory: str) -> Path:
    """Where the weights are.

    Raises:
        UserError: neither a model nor a run, or a run that has no final model.
    """
    from asyncrl.config.paths import expand
    from asyncrl.errors import UserError
    from asyncrl.monitor.status_reader import find

    named = expand(source, "RUN")
    if (named / "config.json").is_file():
        return named
    run = find(source, Path(directory))
    final = run / "checkpoints" / "final"
    if (final / "config.json").is_file():
        return final
    if not (run / "summary.json").exists():
        raise UserError(
            f"run {run} has not finished, and its model is written at the end: asyncrl status "
            f"{run} says how far it is"
        )
    raise UserError(
        f"run {run} has no final model: it ended before its first step, or had "
        "learner.save_final=false"
    )
