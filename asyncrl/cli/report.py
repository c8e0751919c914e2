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
    from asyncrl.monitor.outputs import target
    from asyncrl.monitor.report.compare import load
    from asyncrl.monitor.report.html import write
    from asyncrl.monitor.status_reader import find
    from asyncrl.monitor.words import say

    folder = find(run, Path(directory))
    given = None if output is None else target(output, "--output", [folder])
    runs = load([folder])
    out = given or target(f"{runs[0].name}.html", "--output", [folder])
    size = write(runs, out)
    say([f"{out}: {size / 2**20:.1f} MiB"])
