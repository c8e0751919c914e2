"""One HTML file with everything in it: figures over three axes, figures of the run, its files.

It carries the page's own style and scripts, Plotly's once, and its content as JSON; a policy
in its head lets it load nothing from anywhere.
"""

from __future__ import annotations

import html
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, cast, get_args

import msgspec

from asyncrl import __version__
from asyncrl.errors import UserError
from asyncrl.monitor.figures.catalogue import FIGURES
from asyncrl.monitor.figures.kit import Figure, Run
from asyncrl.monitor.figures.themes import template
from asyncrl.monitor.outputs import replacing
from asyncrl.monitor.reading import panels
from asyncrl.monitor.reading.finals import finals
from asyncrl.monitor.reading.history import Axis
from asyncrl.monitor.report.compare import difference, figures_of
from asyncrl.monitor.web.plotly_js import plotly_js

POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)
MAX_EVENTS = 1_000
"""The newest that are in a report."""
WEB = "asyncrl.monitor.web"


def write(runs: Sequence[Run], path: Path) -> int:
    """Write the report of these runs; how many bytes it has.

    Raises:
        UserError: it cannot be written.
        MissingExtraError: plotly is not installed.
    """
    page = render(runs).encode()
    try:
        with replacing(path) as part:
            part.write_bytes(page)
    except OSError as e:
        raise UserError(
            f"{path} cannot be written ({(e.strerror or str(e)).lower()}): name another file"
        ) from e
    return len(page)


def render(runs: Sequence[Run]) -> str:
    """The whole file."""
    title = " · ".join(run.name for run in runs)
    scripts = [
        plotly_js(), _file(WEB, "theme.js"), _file(WEB, "panels.js"),
        _file(__package__, "report.js"),
    ]  # fmt: skip
    data = msgspec.json.encode(content(runs)).decode().replace("<", "\\u003c")
    parts = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="content-security-policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)} · asyncrl</title>\n"
        f"<style>\n{_file(WEB, 'page.css')}</style>\n</head>\n<body>\n",
        _file(__package__, "report.html"),
        f'<script type="application/json" id="data">{data}</script>\n',
        *(f"<script>\n{_inert(script)}\n</script>\n" for script in scripts),
        "</body>\n</html>\n",
    )
    return "".join(parts)


def content(runs: Sequence[Run]) -> dict[str, Any]:
    """What the report's script shows."""
    figures = {axis: _drawn(runs, cast(Axis, axis)) for axis in get_args(Axis)}
    return {
        "names": [run.name for run in runs],
        "written": time.strftime("%Y-%m-%d %H:%M %Z"),
        "by": f"asyncrl {__version__}",
        "states": {
            r.name: panels.state(r.history.folder, r.history, finals(r.history), MAX_EVENTS)
            for r in runs
        },
        "advice": {r.name: panels.advice(r.history.folder, r.history) for r in runs},
        "finals": figures_of(runs),
        "difference": difference(runs) if len(runs) > 1 else [],
        "config": {r.name: _text(r.history.folder / "config.yaml") for r in runs},
        "startup": panels.startup(runs[0].history.folder),
        "catalogue": [
            {"name": e.name, "section": e.section, "title": e.title, "tells": e.tells,
             "overlaid": e.overlaid}
            for e in FIGURES
        ],
        "figures": figures,
        "templates": {"light": template("light"), "dark": template("dark")},
    }  # fmt: skip


def _drawn(runs: Sequence[Run], axis: Axis) -> dict[str, Figure]:
    figures = ((entry.name, entry.draw(runs, axis)) for entry in FIGURES)
    return {name: figure for name, figure in figures if figure is not None}


def _file(package: str, name: str) -> str:
    return files(package).joinpath("static", name).read_text(encoding="utf-8")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _inert(script: str) -> str:
    """So that nothing in it ends the element it stands in; the same to JavaScript."""
    return script.replace("</script", "<\\/script")
