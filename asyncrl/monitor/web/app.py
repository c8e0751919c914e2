"""The server: a page and the JSON it lives on (docs/monitoring.md has the interface).

    browser ──GET, a token──► Gate ──► routes ──► Shelf ──► RunHistory ──► the runs' files
                                         └──► Revisions: of a figure only what is new

It only reads files. Work is done in threads of the server, a run's under the run's lock.
"""

from __future__ import annotations

import gzip
import logging
import os
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from asyncrl.monitor import words
from asyncrl.monitor.figures import recorded
from asyncrl.monitor.figures.catalogue import BY_NAME, FIGURES, Entry
from asyncrl.monitor.figures.themes import template
from asyncrl.monitor.reading import panels
from asyncrl.monitor.reading.budget import Budget
from asyncrl.monitor.reading.history import Axis
from asyncrl.monitor.web.access import App, Gate
from asyncrl.monitor.web.delta import Revisions
from asyncrl.monitor.web.plotly_js import plotly_js
from asyncrl.monitor.web.shelf import ServedRun, Shelf

log = logging.getLogger(__name__)

MOST_RUNS = 8
"""Compared at a time."""
DRAWING = 0.006
"""Share of a core that drawing again may take. What nobody has seen yet is drawn at once."""
CHUNK_BYTES = 4 << 20
"""Of a run's file in one answer, at most."""
STATIC = {
    "page.css": "text/css", "theme.js": "text/javascript", "page.js": "text/javascript",
    "panels.js": "text/javascript",
}  # fmt: skip
GROWING = {"metrics": "metrics.jsonl", "events": "events.jsonl"}
WHOLE = {"status": "status.json", "summary": "summary.json", "config": "config.yaml"}


def make_app(shelf: Shelf, first: list[str], token: str) -> App:
    """The server's application.

    Args:
        shelf: of the runs.
        first: names of those that a page shows until another is chosen.
        token: that requests must carry.
    """
    pages = Pages(shelf, first)
    routes = [
        Route("/", _static("page.html", "text/html")),
        *(Route(f"/static/{name}", _static(name, kind)) for name, kind in STATIC.items()),
        Route("/static/plotly.js", _plotly),
        Route("/api/runs", pages.runs),
        Route("/api/catalogue", pages.catalogue),
        Route("/api/figures", pages.figures),
        Route("/api/runs/{name}/state", pages.state),
        Route("/api/runs/{name}/log", pages.log),
        Route("/api/runs/{name}/samples", pages.samples),
        Route("/api/runs/{name}/advice", pages.advice),
        Route("/api/runs/{name}/names", pages.names),
        Route("/api/runs/{name}/lines/{what}", pages.lines),
        Route("/api/runs/{name}/{what}", pages.whole),
    ]
    app = Starlette(routes=routes, exception_handlers={OSError: _unreadable})
    return Gate(cast(App, app), token)


class Pages:
    """Answers; each runs in a thread."""

    def __init__(self, shelf: Shelf, first: list[str]) -> None:
        self._shelf, self._first = shelf, first
        self._revisions = Revisions()
        self._budget = Budget(DRAWING)
        self._troubled: set[str] = set()
        """Runs of whose trouble the log has told."""

    def runs(self, request: Request) -> Response:
        """Which runs there are."""
        found = [self._listed(name) for name in self._shelf.names()]
        return _json({"runs": found, "first": self._first})

    def _listed(self, name: str) -> msgspec.Raw | dict[str, Any]:
        """A run in the list; whatever is wrong with one, the others are told of."""
        try:
            brief = panels.brief(self._shelf.open(name).folder)
            return msgspec.Raw(msgspec.json.encode({"name": name} | brief))
        except Exception as e:  # the page asks every few seconds: logged once
            if name not in self._troubled:
                self._troubled.add(name)
                log.exception("run %s cannot be listed", words.clean(name))
            return {"name": name} | panels.unread(f"cannot be read: {type(e).__name__}: {e}")

    def catalogue(self, request: Request) -> Response:
        """The figures there are, and what is to be theirs in light and dark."""
        entries = [
            {"name": e.name, "section": e.section, "title": e.title, "tells": e.tells,
             "overlaid": e.overlaid}
            for e in FIGURES
        ]  # fmt: skip
        return _json({
            "figures": entries, "templates": {"light": template("light"), "dark": template("dark")}
        })  # fmt: skip

    def figures(self, request: Request) -> Response:
        """Of the figures asked for, what the page does not have yet."""
        query = request.query_params
        names = list(dict.fromkeys(query.getlist("run")))[:MOST_RUNS]
        axis = query.get("axis", "step")
        if axis not in get_args(Axis) or not names:
            raise HTTPException(400, "run=NAME and axis=step|version|wall_s")
        runs = [self._open(name) for name in names]
        for run in runs:
            with run.lock:
                run.update()
        answer, fresh = {}, self._budget.allows()
        for asked in query.getlist("figure"):
            name, _, have = asked.partition(":")
            entry = BY_NAME.get(name) or recorded.entry(name)
            if entry is not None:
                of = runs if entry.overlaid else runs[:1]
                news = self._revisions.ask(
                    (name, axis, tuple(r.name for r in of)), tuple(r.revision for r in of),
                    self._drawing(of, entry, cast(Axis, axis)), _revision(have), fresh=fresh,
                )  # fmt: skip
                if news is not None:
                    answer[name] = news
        return _json(answer)

    def _drawing(self, runs: list[ServedRun], entry: Entry, axis: Axis) -> Callable[[], Any]:
        def draw() -> Any:
            # In order of their names, so that two pages never wait for each other.
            for run in sorted(runs, key=lambda r: r.name):
                run.lock.acquire()
            try:
                with self._budget.spend():
                    return entry.draw([r.drawn() for r in runs], axis)
            finally:
                for run in runs:
                    run.lock.release()

        return draw

    def state(self, request: Request) -> Response:
        """Tiles, roles, ledger, events."""
        run = self._named(request)
        with run.lock:
            run.update()
            return _json(panels.state(run.folder, run.history, run.finals()))

    def log(self, request: Request) -> Response:
        """The newest lines of all roles' logs, after those that the page has."""
        run, after = self._named(request), _number(request, "after")
        with run.lock:
            newest, lines = run.log(after)
        return _json({"next": newest, "lines": lines})

    def samples(self, request: Request) -> Response:
        """Some of the last samples, as text."""
        run, only = self._named(request), request.query_params.get("only", "")
        if only not in ("", "trained", "other"):
            raise HTTPException(400, "only=trained|other")
        return _json({"samples": panels.samples(run.folder, only)})

    def advice(self, request: Request) -> Response:
        """What would make the run faster or better."""
        run = self._named(request)
        with run.lock:
            run.update()
            return _json({"advice": run.advice()})

    def names(self, request: Request) -> Response:
        """The metrics that can be drawn one by one."""
        run = self._named(request)
        with run.lock:
            run.update()
            return _json({"names": recorded.names(run.history)})

    def lines(self, request: Request) -> Response:
        """Whole lines of metrics.jsonl or events.jsonl from a byte on."""
        run, what = self._named(request), request.path_params["what"]
        if what not in GROWING:
            raise HTTPException(404, f"no lines of {what}: {' or '.join(GROWING)}")
        data, at = b"", _number(request, "from")
        try:
            with open(run.folder / GROWING[what], "rb") as file:
                size = file.seek(0, 2)
                if at > size:  # another file by now
                    at = 0
                file.seek(at)
                data = file.read(CHUNK_BYTES)
        except OSError:
            at = 0
        data = data[: data.rfind(b"\n") + 1]
        headers = {"x-from": str(at), "x-next": str(at + len(data))}
        return Response(data, media_type="application/x-ndjson", headers=headers)

    def whole(self, request: Request) -> Response:
        """status.json, summary.json or config.yaml as it is."""
        run, what = self._named(request), request.path_params["what"]
        if what not in WHOLE:
            raise HTTPException(404, f"no {what}")
        try:
            data = (run.folder / WHOLE[what]).read_bytes()
        except OSError:
            raise HTTPException(404, f"{run.name} has no {WHOLE[what]} yet") from None
        kind = "text/plain" if what == "config" else "application/json"
        return Response(data, media_type=kind)

    def _named(self, request: Request) -> ServedRun:
        return self._open(request.path_params["name"])

    def _open(self, name: str) -> ServedRun:
        try:
            return self._shelf.open(name)
        except KeyError:
            raise HTTPException(404, "no such run") from None


def _revision(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 17 else None


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdecimal()) or len(text) > 15:
        raise HTTPException(400, f"{name}=NUMBER")
    return int(text)


def _unreadable(request: Request, e: Exception) -> Response:
    """A folder where a file belongs, a file that may not be read, a disk that fails."""
    assert isinstance(e, OSError)
    told = f"{Path(os.fsdecode(e.filename or 'a file')).name} cannot be read: {e.strerror or e}"
    return Response(words.text(told) + "\n", 503, media_type="text/plain")


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _static(name: str, kind: str) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        return Response(files(__package__).joinpath("static", name).read_bytes(), media_type=kind)

    return answer


@cache
def _packed() -> bytes:
    return gzip.compress(plotly_js().encode(), compresslevel=5)


def _plotly(request: Request) -> Response:
    headers = {"content-encoding": "gzip", "cache-control": "private, max-age=86400"}
    return Response(_packed(), media_type="text/javascript", headers=headers)
