"""`asyncrl launch`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncrl.cli.options import (
    DEFAULT_CONFIG,
    Actors,
    ConfigOption,
    Learners,
    Overrides,
    RunName,
    flags_of,
    resolve,
)
from asyncrl.config.load import Resolved
from asyncrl.errors import UserError

if TYPE_CHECKING:
    from asyncrl.launch.resume.plan import Resumption
    from asyncrl.launch.resume.weights import Origin


def launch(
    context: typer.Context,
    overrides: Overrides = None,
    config: ConfigOption = DEFAULT_CONFIG,
    actors: Actors = None,
    learners: Learners = None,
    run_name: RunName = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show the plan, start nothing.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="All roles in this process, without Ray: breakpoints work."),
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="[RUN|latest|PATH]",
            help="Go on with a run from its newest checkpoint, or from RUN@STEP or RUN@best, with "
            "its own configuration and what is set here.",
        ),
    ] = None,
    origin: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="RUN[@STEP|@best]",
            help="Start a new run from the weights of another: its final model or a checkpoint.",
        ),
    ] = None,
) -> None:  # fmt: skip
    """Start a run, or go on with one: A engines generate while L ranks train."""
    resumption = weights = None
    if resume is not None:
        refuse = [flag for flag, given in (("--debug", debug), ("--from", origin)) if given]
        if refuse:
            raise UserError(f"{refuse[0]} starts a new run: leave it or --resume out")
        resumption = _resumption(context, resume, config, overrides, actors, learners, run_name)
        resolved = resumption.config
    else:
        weights = None if origin is None else _weights(origin, overrides)
        more = {} if weights is None else {"--from": ("model.name", str(weights.model))}
        resolved = resolve(config, overrides, actors, learners, run_name, more)

    try:
        _launch(resolved, config, resumption, weights, dry_run=dry_run, debug=debug)
    finally:
        if resumption is not None:
            resumption.lineage.close()


def _launch(
    resolved: Resolved, config: list[str], resumption: Resumption | None, weights: Origin | None,
    *, dry_run: bool, debug: bool,
) -> None:  # fmt: skip
    from asyncrl.preflight import describe, preflight

    folder = None if resumption is None else Path(resumption.folder.path)
    plan = preflight(resolved.config, resolved.sources, resolved.name, _say, folder)
    if dry_run:
        print(f"{'config':<10} {' + '.join(config) if folder is None else folder.name}")
        for line in () if resumption is None else resumption.lines():
            print(f"{'resume':<10} {line}")
        print(describe(plan))
        return

    from asyncrl.launch import launch as start

    code = start(
        resolved.config,
        sources=resolved.sources if resumption is None else resumption.origins(),
        preset=resolved.name,
        model_path=str(plan.model_path),
        debug=debug,
        resumption=resumption,
        origin=None if weights is None else {"run": weights.run, "batch": weights.step},
    )
    raise typer.Exit(code)


def _resumption(
    context: typer.Context, resume: str, config: list[str], overrides: list[str] | None,
    actors: int | None, learners: int | None, run_name: str | None,
) -> Resumption:  # fmt: skip
    from asyncrl.launch.resume.plan import plan_resume

    given = context.get_parameter_source("config")
    on_top = [] if given is None or given.name == "DEFAULT" else config
    return plan_resume(resume, on_top, overrides or (), flags_of(actors, learners, run_name))


def _weights(origin: str, overrides: list[str] | None) -> Origin:
    from asyncrl.launch.resume.weights import weights_of

    places = [text.partition("=")[2] for text in overrides or () if text.startswith("run.dir=")]
    return weights_of(origin, Path(places[-1] if places else "runs"), _say)


def with_resumed(arguments: Sequence[str]) -> list[str]:
    """A command line where `--resume` without a run means the latest.

    >>> with_resumed(["launch", "--resume", "run.steps=40"])
    ['launch', '--resume', 'latest', 'run.steps=40']
    """
    found = list(arguments)
    if "--resume" in found:
        at = found.index("--resume") + 1
        following = found[at] if at < len(found) else "-"
        if following.startswith("-") or ("=" in following and not Path(following).exists()):
            found.insert(at, "latest")
    return found


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
