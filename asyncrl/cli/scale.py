"""`asyncrl scale`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncrl.cli.options import RunArgument, RunsDir

if TYPE_CHECKING:
    from asyncrl.security import Keys

ANSWER_S = 30.0
"""How long the launcher may take to answer: it may be busy with a buffer that hangs."""


def scale(
    run: RunArgument = "latest",
    *,
    actors: Annotated[
        int, typer.Option("--actors", metavar="N", help="How many actors the run is to have.")
    ],
    directory: RunsDir = "runs",
    keys: Annotated[
        str | None,
        typer.Option("--keys", metavar="FOLDER", help="Keys of the run: security.keys."),
    ] = None,
) -> None:
    """Change how many actors a running run has, while it trains.

    New ones start and take work once they run the current version. Those with the highest numbers
    leave: they take no more work, finish what they have, and end.
    """
    from asyncrl import wire
    from asyncrl.errors import UserError, WireError
    from asyncrl.launch.control import ask
    from asyncrl.launch.scaling import told
    from asyncrl.monitor.status_reader import find, read, why_over
    from asyncrl.monitor.words import say

    if actors < 1:
        raise UserError(f"--actors={actors}: a run needs at least one: ask for 1 or more")
    folder = find(run, Path(directory))
    status = read(folder)
    if why := why_over(folder, status):
        raise UserError(f"{folder.name} cannot be scaled: {why}")
    control = status.get("control")
    if not control:
        raise UserError(
            f"{folder.name} cannot be scaled yet: it is still starting (or runs with --debug, or "
            "was launched by an older asyncrl)"
        )
    _check_reachable(folder.name, status, control["endpoint"])
    reply = ask(
        control["endpoint"], wire.Scale(req=1, run_id=status["run_id"], actors=actors),
        timeout_s=ANSWER_S, keys=_keys(folder.name, control, keys),
    )  # fmt: skip
    if not isinstance(reply, wire.Scaled):
        raise WireError(f"the launcher answered with {type(reply).__name__}, expected Scaled")
    say([told(reply)])


def _check_reachable(run: str, status: dict[str, Any], endpoint: str) -> None:
    import socket

    from asyncrl.errors import UserError
    from asyncrl.weights import uses_loopback

    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    if uses_loopback(host) and status["host"] != socket.gethostname():
        raise UserError(
            f"{run} runs on {status['host']} and listens there alone: run this command there"
        )


def _keys(run: str, control: dict[str, Any], given: str | None) -> Keys | None:
    from asyncrl.config.paths import expand
    from asyncrl.errors import UserError
    from asyncrl.security import load_keys

    if not control["curve"]:
        return None
    folder = given or control["keys"]
    if folder is None:
        raise UserError(
            f"{run} cannot be scaled: its keys were made for it and lie on no disk: launch with "
            "security.keys=FOLDER (`asyncrl keys FOLDER` makes them)"
        )
    return load_keys(expand(folder, "--keys"))
