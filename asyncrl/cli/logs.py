"""`asyncrl logs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.options import RunArgument, RunsDir


def logs(
    run: RunArgument = "latest",
    directory: RunsDir = "runs",
    role: Annotated[
        str,
        typer.Option("--role", metavar="ROLE", help="One log, or all of a kind: actor-0, actor."),
    ] = "",
    level: Annotated[
        str,
        typer.Option("--level", metavar="LEVEL", help="debug, info, warning or error, or graver."),
    ] = "debug",
    since: Annotated[
        str, typer.Option("--since", metavar="AGE", help="Only the last time, e.g. 90s, 5m or 2h.")
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run is over, or Ctrl-C.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="An object a line: time, run_id, role, rank, level, ...")
    ] = False,
) -> None:
    """Show the logs of all roles as one, by time."""
    from asyncrl.monitor.log_view import show
    from asyncrl.monitor.status_reader import find

    show(find(run, Path(directory)), role=role, level=level, since=since, follow=follow,
         as_json=as_json)  # fmt: skip
