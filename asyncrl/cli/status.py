"""`asyncrl status`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.options import RunArgument, RunsDir


def status(
    run: RunArgument = "latest",
    directory: RunsDir = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print status.json as it is.")] = False,
) -> None:
    """Show what a run is doing, and who waits for whom."""
    from asyncrl.monitor.status_reader import describe, find, read
    from asyncrl.monitor.words import say

    folder = find(run, Path(directory))
    content = read(folder)
    if as_json:
        json.dump(content, sys.stdout, indent=1)
        print()
        return
    say(describe(folder, content))
