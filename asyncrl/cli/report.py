"""`asyncrl report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[
        str, typer.Argument(metavar="[RUN]", help="A run's folder, its name in DIR, or latest.")
    ] = "latest",
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Default: NAME.html here.")
    ] = None,
    directory: Annotated[
        str, typer.Option("--dir", metavar="DIR", help="Folder of the runs: run.dir.")
    ] = "runs",
) -> None:
    """Write a run as one HTML file that needs no network: figures, settings, ledger, events."""
    from asyncrl.monitor.report.compare import load
    from asyncrl.monitor.report.html import write
    from asyncrl.monitor.status_reader import find

    runs = load([find(run, Path(directory))])
    out = Path(output).expanduser() if output else Path(f"{runs[0].name}.html")
    size = write(runs, out)
    print(f"{out}: {size / 2**20:.1f} MiB")
