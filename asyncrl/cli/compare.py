"""`asyncrl compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.options import RunsDir


def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN RUN...", help="Runs' folders, or names in DIR.")
    ],
    html: Annotated[
        str | None,
        typer.Option("--html", metavar="FILE", help="Also write their figures, overlaid."),
    ] = None,
    directory: RunsDir = "runs",
) -> None:
    """Put runs side by side: their final figures, and the settings in which they differ."""
    from asyncrl.errors import UserError
    from asyncrl.monitor.outputs import target
    from asyncrl.monitor.report.compare import load, table
    from asyncrl.monitor.status_reader import find
    from asyncrl.monitor.words import say

    folders = [find(run, Path(directory)) for run in runs]
    if len({folder.resolve() for folder in folders}) < 2:
        raise UserError(f"{' '.join(runs)} is one run: name two or more")
    out = None if html is None else target(html, "--html", folders)
    loaded = load(folders)
    say(table(loaded))
    if out is not None:
        from asyncrl.monitor.report.html import write

        size = write(loaded, out)
        say(["", f"{html}: {size / 2**20:.1f} MiB"])
