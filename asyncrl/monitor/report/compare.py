"""Runs side by side: their final figures, and the settings in which they differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from asyncrl.errors import UserError
from asyncrl.monitor.figures.kit import Run
from asyncrl.monitor.reading.finals import finals
from asyncrl.monitor.reading.history import RunHistory
from asyncrl.monitor.reading.panels import status_of
from asyncrl.monitor.reading.plain import load as load_json
from asyncrl.monitor.reading.retired import Retired
from asyncrl.monitor.reading.settings import read_settings
from asyncrl.monitor.status_reader import why_over
from asyncrl.monitor.words import clean, run_name

ABSENT = "-"
OF_A_NAME = frozenset({"run.name", "run.dir"})
"""Settings that differ between any two runs, and say nothing."""
STEPS = "run.steps"
WIDEST = 36
"""Characters of a value in the terminal."""

Row = tuple[str, ...]
"""What it is, and its value in each run."""


def load(folders: Sequence[Path]) -> list[Run]:
    """Runs as far as they are written, each under a name of its own.

    Raises:
        UserError: a file of a run cannot be read.
    """
    runs: list[Run] = []
    for folder in folders:
        name = run_name(folder.resolve(), [r.name for r in runs])
        run = Run(name, RunHistory(folder), Retired(folder))
        try:
            run.history.update()
            if run.retired is not None:
                run.retired.update()
        except OSError as e:
            raise UserError(
                f"{e.filename or folder} cannot be read ({(e.strerror or str(e)).lower()}): "
                "restore it, or name another run"
            ) from e
        runs.append(run)
    return runs


def figures_of(runs: Sequence[Run]) -> list[Row]:
    """Their final figures, those that any of them has."""
    columns = [finals(run.history) for run in runs]
    return [
        (row[0].label, *(final.text for final in row))
        for row in zip(*columns, strict=True)
        if any(final.value is not None for final in row)
    ]


def difference(runs: Sequence[Run]) -> list[Row]:
    """The settings that are not the same in all of them, by dotted key; of `run.steps` also what a
    run that ended before has reached."""
    configs = [settings(run.history.folder) for run in runs]
    for run, config in zip(runs, configs, strict=True):
        if STEPS in config:
            config[STEPS] = _reached(run.history.folder, config[STEPS])
    keys = sorted({key for config in configs for key in config} - OF_A_NAME)
    rows = [(key, *(config.get(key, ABSENT) for config in configs)) for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _reached(folder: Path, steps: str) -> str:
    """`run.steps` as it came out, e.g. "12 of 30, stopped"; as it was set while the run lives."""
    done, how = _end(folder)
    return steps if done is None or str(done) == steps else f"{done} of {steps}, {how}"


def _end(folder: Path) -> tuple[int | None, str]:
    """Steps of a run that has ended, and how it ended."""
    try:
        summary = load_json(folder / "summary.json")
        done, how = summary["steps"], summary["ended"]
    except (OSError, ValueError, KeyError, TypeError):
        status = status_of(folder)
        if status is None or not why_over(folder, status):
            return None, ""
        done, how = status["step"], "without a summary"
    return (done if type(done) is int else None), str(how)


def settings(folder: Path) -> dict[str, str]:
    """A run's config.yaml, flat.

    Raises:
        UserError: it cannot be read.
    """
    return dict(_flat(read_settings(folder), ""))


def _flat(section: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def table(runs: Sequence[Run]) -> Iterator[str]:
    """Both as lines for a terminal."""
    names = ("", *(run.name for run in runs))
    yield from _aligned([names, *figures_of(runs)])
    rows = difference(runs)
    yield ""
    if rows:
        yield "settings in which they differ"
        yield from _aligned([names, *rows])
    else:
        yield "their settings are the same"


def _cell(text: str) -> str:
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."


def _aligned(rows: Sequence[Row]) -> Iterator[str]:
    cells = [[_cell(clean(c)) for c in row] for row in rows]
    widths = [max(len(row[k]) for row in cells) for k in range(len(cells[0]))]
    for first, *others in cells:
        line = [first.ljust(widths[0])]
        line += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join(line).rstrip()
