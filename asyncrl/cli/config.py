"""`asyncrl config`: what would run, and what is shipped."""

from __future__ import annotations

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

app = typer.Typer(help="Show configurations.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def show(
    overrides: Overrides = None,
    config: ConfigOption = DEFAULT_CONFIG,
    actors: Actors = None,
    learners: Learners = None,
    run_name: RunName = None,
) -> None:
    """Print the resolved configuration, each value with where it came from."""
    from asyncrl.config.render import to_yaml

    resolved = resolve(config, overrides, actors, learners, run_name)
    print(to_yaml(resolved.config, resolved.sources), end="")


@app.command("list")
def list_() -> None:
    """List the shipped configurations."""
    from asyncrl.config.sources import shipped, summary

    names = shipped()
    width = max(map(len, names), default=0)
    for name, path in names.items():
        print(f"{name:<{width}}  {summary(path)}")


@app.command()
def reference() -> None:
    """Print every key with its type, default and meaning, as Markdown."""
    from asyncrl.config.reference import reference

    print(reference(), end="")
