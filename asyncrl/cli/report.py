"""`asyncrl report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.options import RunArgument, RunsDir


def report(
    run: RunArgument = "latest",
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Default: NAME.html here.")
    ] = None,
    directory: RunsDir = "runs",
) -> None:
    """Write a run as one HTML file that needs no network: figures, settings, ledger, events."""
    from asyncrl.monitor.report.compare import load
    from asyncrl.monitor.report.html import write
    from asyncrl.monitor.status_reader import find

    runs = load([find(run, Path(directory))])
    out = Path(output).expanduser() if output else Path(f"{runs[0].name}.html")
    size = write(runs, out)
    print(f"{out}: {size / 2**20:.1f} MiB")
