"""`asyncrl launch`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from asyncrl.cli.options import (
    DEFAULT_CONFIG,
    Actors,
    ConfigOption,
    Learners,
    Overrides,
    RunName,
    resolve,
)


def launch(
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
) -> None:
    """Start a run: A engines generate while L ranks train."""
    resolved = resolve(config, overrides, actors, learners, run_name)

    from asyncrl.preflight import describe, preflight

    plan = preflight(resolved.config, resolved.sources, resolved.name, _say)
    if dry_run:
        print(f"{'config':<10} {' + '.join(config)}")
        print(describe(plan))
        return

    from asyncrl.launch import launch as start

    code = start(
        resolved.config,
        sources=resolved.sources,
        preset=resolved.name,
        model_path=str(plan.model_path),
        debug=debug,
    )
    raise typer.Exit(code)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
