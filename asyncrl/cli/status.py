"""`asyncrl status`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def status(
    run: Annotated[
        str, typer.Argument(metavar="[RUN]", help="A run's folder, its name in DIR, or latest.")
    ] = "latest",
    directory: Annotated[
        str, typer.Option("--dir", metavar="DIR", help="Folder of the runs: run.dir.")
    ] = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print status.json as it is.")] = False,
) -> None:
    """Show what a run is doing, and who waits for whom."""
    from asyncrl.errors import UserError
    from asyncrl.monitor.status_reader import describe, find, read

    folder = find(run, Path(directory))
    content = read(folder)
    if as_json:
        json.dump(content, sys.stdout, indent=1)
        print()
        return
    try:
        lines = list(describe(folder, content))
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise UserError(
            f"{folder / 'status.json'} is not a run's status: {type(e).__name__}: {e}"
        ) from e
    print("\n".join(lines))
