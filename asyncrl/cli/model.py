"""`asyncrl model`: models by name."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

app = typer.Typer(help="Fetch and list models.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="A built-in name, a local folder, or a Hub name.")],
) -> None:
    """Bring a model onto this machine and print its folder."""
    from asyncrl.models import resolve

    print(resolve(name, lambda line: print(line, file=sys.stderr, flush=True)))


@app.command("list")
def list_() -> None:
    """List the built-in models and where they are."""
    from asyncrl.models import BUILT_IN

    for model in BUILT_IN.values():
        where = str(model.folder) if model.cached else "not here yet"
        print(f"{model.name:<14} {model.about}: {where}")
