"""`asyncrl replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.options import Overrides, RunsDir


def replay(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's folder, its name in DIR, or latest.")
    ],
    overrides: Overrides = None,
    directory: RunsDir = "runs",
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="OUT", help="Folder for model and metrics; a new one."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Compare with the run's own weights; exit 1 if they differ."),
    ] = False,
    learners: Annotated[
        int | None,
        typer.Option(
            "--learners", min=1, metavar="L", help="Ranks; default: as many as the run had."
        ),
    ] = None,
    from_step: Annotated[
        int | None,
        typer.Option(
            "--from-step", min=0, metavar="N", help="Start from the run's checkpoint of step N."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", min=1, metavar="N", help="Last batch; default: the last of the run."
        ),
    ] = None,
) -> None:
    """Train a run's recorded batches once more, without actors: the same weights, bit for bit.

    With KEY=VALUE of learner.* another loss is tried on the same data.
    """
    from asyncrl.launch.replay import Wish, replay
    from asyncrl.monitor.status_reader import find

    wish = Wish(
        overrides=tuple(overrides or ()), out=out, check=check, learners=learners,
        from_step=from_step, steps=steps,
    )  # fmt: skip
    raise typer.Exit(replay(find(run, Path(directory)), wish, print))
