"""`asyncrl monitor`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.options import RunsDir


def monitor(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="A run's folder, its name in DIR, latest, or a page's URL; several with --web.",
        ),
    ] = None,
    web: Annotated[bool, typer.Option("--web", help="As a page: prints its URL.")] = False,
    port: Annotated[
        int, typer.Option("--port", metavar="N", help="Of --web; 0 takes a free one.")
    ] = 0,
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="That --web binds.")
    ] = "127.0.0.1",
    directory: RunsDir = "runs",
    wait: Annotated[
        float,
        typer.Option("--wait", metavar="SECONDS", min=0, help="For a run that is not there yet."),
    ] = 300.0,
) -> None:
    """Watch a run in the terminal, or several as a page: live, or as they were."""
    from asyncrl.errors import UserError

    if not math.isfinite(wait):
        raise UserError(f"--wait {wait}: seconds are asked for, e.g. 86400 for a day")
    if web:
        _web(runs or ["latest"], Path(directory), host, port)
        return
    if len(runs or ()) > 1:
        raise UserError("the terminal shows one run: name one, or compare them with --web")
    from asyncrl.monitor.terminal.attach import watch

    watch((runs or ["latest"])[0], Path(directory), wait)


def _web(runs: list[str], directory: Path, host: str, port: int) -> None:
    from asyncrl.monitor.status_reader import find
    from asyncrl.monitor.web.serve import serve

    folders = list(dict.fromkeys(find(run, directory).resolve() for run in runs))
    serve(folders, directory, host=host, port=port, tell=lambda line: print(line, flush=True))
