"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from asyncrl.config.load import Resolved, load

DEFAULT_CONFIG = ["quickstart"]

ConfigOption = Annotated[
    list[str],
    typer.Option(
        "--config", "-c", metavar="NAME|PATH",
        help="A shipped configuration (`asyncrl config list`) or a YAML file; given again, what "
        "that sets on top, e.g. -c quickstart -c correction/icepop.",
    ),
]  # fmt: skip
Actors = Annotated[
    int | None, typer.Option("--actors", metavar="A", help="Engines: cluster.actors.")
]
Learners = Annotated[
    int | None, typer.Option("--learners", metavar="L", help="FSDP ranks: cluster.learners.")
]
RunName = Annotated[
    str | None, typer.Option("--run-name", metavar="N", help="Name of the run's folder: run.name.")
]
RunArgument = Annotated[
    str, typer.Argument(metavar="[RUN]", help="A run's folder, its name in DIR, or latest.")
]
RunsDir = Annotated[str, typer.Option("--dir", metavar="DIR", help="Folder of the runs: run.dir.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Settings by dotted key, e.g. learner.optim.lr=2e-6."
    ),
]


def one_of(option: str, text: str, names: Sequence[str]) -> None:
    """Refuse what is none of the names.

    Raises:
        UserError: it is none.
    """
    from asyncrl.config.suggest import did_you_mean
    from asyncrl.errors import UserError

    if text not in names:
        raise UserError(
            f"{option} {text}: one of {', '.join(names)} is asked for{did_you_mean(text, names)}"
        )


def flags_of(
    actors: int | None, learners: int | None, run_name: str | None
) -> dict[str, tuple[str, Any]]:
    """The options that stand for settings: their keys and values."""
    return {
        "--actors": ("cluster.actors", actors),
        "--learners": ("cluster.learners", learners),
        "--run-name": ("run.name", run_name),
    }


def resolve(
    config: list[str],
    overrides: list[str] | None,
    actors: int | None,
    learners: int | None,
    run_name: str | None,
    more: Mapping[str, tuple[str, Any]] | None = None,
) -> Resolved:
    """The configuration that the options of a command line ask for."""
    flags = flags_of(actors, learners, run_name) | dict(more or {})
    return load(config, overrides or (), flags)
