"""`asyncrl trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl.cli.options import RunArgument, RunsDir


def trace(
    run: RunArgument = "latest",
    directory: RunsDir = "runs",
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Default: NAME.trace.json.gz here."),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option("--steps", metavar="FIRST:LAST", help="Only these batches, e.g. 10:20."),
    ] = None,
) -> None:
    """Write the timeline of all roles for ui.perfetto.dev or chrome://tracing."""
    from asyncrl.monitor.outputs import target
    from asyncrl.monitor.status_reader import find
    from asyncrl.monitor.trace.write import write_trace
    from asyncrl.monitor.words import say, text

    folder = find(run, Path(directory))
    if output is None:
        output = f"{text(folder.resolve().name)}.trace.json.gz"
    out = target(output, "--output", [folder])
    written = write_trace(folder, out, None if steps is None else _range(steps))
    left = f"; {written.malformed} lines could not be read" if written.malformed else ""
    say([
        f"{out}: {written.events} events, {written.seconds:.1f} s, {written.samples} samples from "
        f"lease to training{left}; open it at ui.perfetto.dev"
    ])  # fmt: skip


def _range(text: str) -> tuple[int, int]:
    from asyncrl.errors import UserError

    first, colon, last = text.partition(":")
    try:
        begin, end = int(first), int(last if colon else first)
    except ValueError:
        begin, end = 1, 0
    if not 1 <= begin <= end:
        raise UserError(f"--steps {text}: two batches are asked for, e.g. 10:20")
    return begin, end
