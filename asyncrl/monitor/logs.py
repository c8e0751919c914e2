"""The logs of all roles as one: read while they grow, merged by time.

    logs/actor-0.log ──► lines ──► entries (ours, vLLM's, Ray's, raw) ─┐
    logs/learner-0.log ──► ...                                        ─┴─► by time

An entry has the same fields whoever printed it: what no format fits (a library's print, a crash) is
wrapped as an entry of its own, with the time of the one before it.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from asyncrl.monitor import words
from asyncrl.monitor.log_file import Entry, LogFile
from asyncrl.monitor.words import clean


def _time(entry: Entry) -> float:
    return entry.time


class LogReader:
    """All logs of a run; `update` gives what was written since, in order of time.

    Args:
        folder: of the run.
        role: only the logs whose name begins so, e.g. "actor" or "actor-0".
        tail: begin with the end of each log.
        since: what is older, in seconds since 1970, may be left out.
    """

    def __init__(
        self, folder: Path, role: str = "", *, tail: bool = False, since: float | None = None
    ) -> None:
        self._folder, self._role, self._tail, self._since = folder / "logs", role, tail, since
        self._files: dict[Path, LogFile] = {}

    def update(self, *, whole: bool = False) -> list[Entry]:
        """New entries. One that may still grow (a traceback) comes with the next call, or now if
        `whole`."""
        return sorted(self._entries(whole), key=_time)

    def stream(self, *, whole: bool = False) -> Iterator[Entry]:
        """As `update`, one by one: of each log a piece is in memory. Within a log the order of its
        lines counts."""
        self._look()
        return heapq.merge(
            *(self._named(f, f.read(whole)) for f in self._files.values()), key=_time
        )

    def _entries(self, whole: bool) -> Iterator[Entry]:
        self._look()
        for file in self._files.values():
            yield from self._named(file, file.read(whole))

    def _look(self) -> None:
        for path in sorted(self._folder.glob("*.log")):
            if path not in self._files and self._wanted(path.stem):
                role, rank = words.numbered(path.stem)
                file = LogFile(path, words.text(role), rank or 0)
                if self._tail:
                    file.skip_to_tail()
                elif self._since is not None:
                    file.skip_older(self._since)
                self._files[path] = file

    def _named(self, file: LogFile, entries: Iterator[Entry]) -> Iterator[Entry]:
        """With the run in what was printed before a log's first line, or where none has one."""
        known: str | None = None
        for entry in entries:
            if not entry.run_id:
                if known is None:
                    ids = {f.first_run_id() for f in self._files.values()} - {""}
                    known = file.first_run_id() or (ids.pop() if len(ids) == 1 else "")
                entry = replace(entry, run_id=known)
            yield entry

    def _wanted(self, stem: str) -> bool:
        return not self._role or stem == self._role or stem.rpartition("-")[0] == self._role


def shown(entry: Entry, *, colour: bool = False) -> Iterator[str]:
    """An entry as lines for people: local time, role, level, logger, message.

    With `colour`, for a terminal, what others wrote cannot move its cursor.
    """

    def safe(text: str) -> str:
        return clean(text, "\t") if colour else text

    clock = time.strftime("%H:%M:%S", time.localtime(entry.time)) if entry.time else "--:--:--"
    fraction = f".{int(entry.time % 1 * 1000):03d}" if entry.time else ".---"
    logger = entry.logger.removeprefix("asyncrl.")
    line = f"{clock}{fraction} {entry.name:<10} {entry.level:<7} {logger}: {entry.message}"
    line = safe(line)
    codes = {"WARNING": "33", "ERROR": "31", "CRITICAL": "31;1"}
    code = codes.get(entry.level) if colour else None
    yield f"\x1b[{code}m{line}\x1b[0m" if code else line
    for text in entry.traceback.splitlines():
        yield f"    {safe(text)}"
