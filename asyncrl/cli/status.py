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
    from asyncrl.errors import UserError
    from asyncrl.monitor.status_reader import describe, find, read
    from asyncrl.monitor.words import clean

    folder = find(run, Path(directory))
    content = read(folder)
    if as_json:
        json.dump(content, sys.stdout, indent=1)
        print()
        return
    try:
        lines = [clean(line) for line in describe(folder, content)]
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise UserError(
            f"{folder / 'status.json'} is not a run's status: {type(e).__name__}: {e}"
        ) from e
    print("\n".join(lines))
