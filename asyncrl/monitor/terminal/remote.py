"""A run on another machine, through the JSON of its `asyncrl monitor --web`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import httpx

from asyncrl.errors import UserError
from asyncrl.monitor.reading.history import RunHistory
from asyncrl.monitor.reading.open_run import LOG_LINES
from asyncrl.monitor.reading.tail import Decoder

TIMEOUT_S = 10.0
REFUSED = (401, 403)


class UnreachableError(UserError):
    """The page's server does not answer; it may again."""


class Server:
    """A page's server, asked with the token of its URL."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        self.shown = f"{parts.scheme}://{parts.netloc}"
        self.run = query.get("run", [""])[0]
        self._client = httpx.Client(
            base_url=self.shown, timeout=TIMEOUT_S, trust_env=False,
            headers={"authorization": f"Bearer {query.get('token', [''])[0]}"},
        )  # fmt: skip

    def get(self, path: str, **query: str | int) -> httpx.Response:
        """An answer.

        Raises:
            UnreachableError: there is none.
            UserError: the token is not the server's, or it has no such run.
        """
        try:
            answer = self._client.get(path, params=query)
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise UnreachableError(f"{self.shown} cannot be reached: {e}") from e
        if answer.status_code in REFUSED:
            raise UserError(
                f"{self.shown} refuses the token of the URL: take the whole line that "
                "asyncrl monitor --web printed"
            )
        if answer.status_code != 200:
            raise UnreachableError(f"{self.shown}{path} answers {answer.status_code}")
        return answer

    def json(self, path: str, **query: str | int) -> Any:
        """An answer's content (raises as `get`)."""
        answer = self.get(path, **query)
        try:
            return answer.json()
        except ValueError as e:
            raise UnreachableError(f"{self.shown}{path} answers no JSON: {e}") from e


class UrlLines(Decoder):
    """The lines of a run's file, each once."""

    def __init__(self, server: Server, path: str) -> None:
        super().__init__()
        self._server, self._path, self._at = server, path, 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """What was written since the last call (raises as `Server.get`)."""
        while True:
            answer = self._server.get(self._path, **{"from": self._at})
            if not answer.content:
                return
            try:
                self._at = int(answer.headers["x-next"])
            except (KeyError, ValueError) as e:
                shown = f"{self._server.shown}{self._path}"
                raise UnreachableError(f"{shown} is answered by something else: {e}") from e
            yield from self.feed(answer.content)


class UrlFeed:
    """A run of a page's server: the one that the URL names, or the first that it shows."""

    def __init__(self, url: str) -> None:
        self._server = Server(url)
        listed = self._server.json("/api/runs")
        names = [r["name"] for r in listed["runs"]]
        first = self._server.run or next(iter(listed["first"] or names), "")
        if first not in names:
            known = ", ".join(names) or "none"
            raise UnreachableError(f"{self._server.shown} has no run {first}; it has {known}")
        self.name, self.revision = first, 0
        self._path = f"/api/runs/{quote(first, safe='')}"
        self.history = RunHistory(
            Path(first), metrics=UrlLines(self._server, f"{self._path}/lines/metrics"),
            events=UrlLines(self._server, f"{self._path}/lines/events"),
        )  # fmt: skip
        self._lines: deque[Mapping[str, str]] = deque(maxlen=LOG_LINES)
        self._told = 0

    def update(self) -> None:
        """Read on (raises as `Server.get`)."""
        self.revision += self.history.update()

    def state(self) -> dict[str, Any]:
        """Figures, roles, ledger, events."""
        return dict(self._server.json(f"{self._path}/state"))

    def log(self) -> Sequence[Mapping[str, str]]:
        """The newest lines of all logs."""
        news = self._server.json(f"{self._path}/log", after=self._told)
        self._told = news["next"]
        self._lines.extend(news["lines"])
        return list(self._lines)

    def samples(self, only: str) -> Sequence[Mapping[str, str]]:
        """The last samples."""
        return list(self._server.json(f"{self._path}/samples", only=only)["samples"])

    def advice(self) -> Sequence[Mapping[str, Any]]:
        """What would make the run faster or better."""
        return list(self._server.json(f"{self._path}/advice")["advice"])
