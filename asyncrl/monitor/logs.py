"""The logs of all roles as one: read while they grow, merged by time.

    logs/actor-0.log ──► lines ──► entries (ours, vLLM's, Ray's, raw) ─┐
    logs/learner-0.log ──► ...                                        ─┴─► by time

An entry has the fields of the issue's list whoever printed it: what no format fits (a library's
print, a crash) is wrapped as an entry of its own, with the time of the one before it.
"""

from __future__ import annotations

import heapq
import re
import time
from calendar import timegm
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from asyncrl.monitor import words
from asyncrl.monitor.log_since import place_of
from asyncrl.monitor.words import clean

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
RAW = "raw"
"""The logger of a line that no logger wrote."""
LONGEST = 4_000
"""Characters of a line that are kept."""
CHUNK_BYTES = 256 << 10
HEAD_BYTES = 64 << 10
"""In which a log names its run."""
TAIL_BYTES = 64 << 10

_OURS = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\.(\d{3})Z ([A-Z]+) (\S+): (.*)", re.DOTALL)
_VLLM = re.compile(r"\(([^()]+) pid=\d+\) ([A-Z]+) (\d\d-\d\d \d\d:\d\d:\d\d) \[([^\]]*)\] (.*)")
_RAY = re.compile(
    r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ([IWEFCD]) [^\]]*\] (?:\((\w+)\) )?(.*)"
)
_RAY_LEVELS = {"D": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL",
               "C": "CRITICAL"}  # fmt: skip
_GLOG = re.compile(r"([IWEF])(\d{4} \d\d:\d\d:\d\d)\.(\d{3})\d* \d+ ([^\]]*)\] (.*)")
_BEGIN = re.compile(r"\S+ of run (\S+) begins, pid (\d+)")
_SPEAKS = re.compile(r"(Error|Exception|Fatal|out of memory|Segmentation)")
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above", "The above exception was the direct cause")


@dataclass(frozen=True, slots=True)
class Entry:
    """One record of a log.

    >>> Entry(0.0, "actor", 3, "r-1", "INFO", "asyncrl.logs", "hello").name
    'actor-3'
    """

    time: float
    """Seconds since 1970; of a raw line that of the entry before it, 0 if there is none."""
    role: str
    rank: int
    run_id: str
    level: str
    logger: str
    message: str
    traceback: str = ""

    @property
    def name(self) -> str:
        """As the log's file is called."""
        return f"{self.role}-{self.rank}" if self.role in ("actor", "learner", "buffer", "relay") \
            else self.role  # fmt: skip

    def at_least(self, level: str) -> bool:
        """Whether it is of this level or a graver one."""
        known = self.level if self.level in LEVELS else "INFO"
        return LEVELS.index(known) >= LEVELS.index(level)


@dataclass
class _File:
    """One role's log as far as it was read."""

    path: Path
    role: str
    rank: int
    at: int = 0
    rest: bytes = b""
    run_id: str = ""
    last: Entry | None = None
    """The newest entry, which may still grow by a traceback."""
    tracing: bool = False
    ended: bool = False
    """Whether the traceback has come to its last line, the error's."""
    ready: list[Entry] = field(default_factory=list)

    def read(self, whole: bool) -> Iterator[Entry]:
        """The entries that ended since the last call; with `whole` the last one too."""
        grew = False
        while data := self._chunk():
            grew = True
            self.at += len(data)
            *lines, self.rest = (self.rest + data).split(b"\n")
            for line in lines:
                self._take(line.decode("utf-8", "replace").rpartition("\r")[2][:LONGEST])
            yield from self._taken()
        if whole or not grew:
            self._end()
        yield from self._taken()

    def _chunk(self) -> bytes:
        """What follows. The file is not held open: there may be many, each read bit by bit."""
        try:
            with open(self.path, "rb") as file:
                if file.seek(0, 2) < self.at:
                    self.at, self.rest = 0, b""  # another file
                file.seek(self.at)
                return file.read(CHUNK_BYTES)
        except OSError:
            return b""

    def _taken(self) -> list[Entry]:
        found, self.ready = self.ready, []
        return found

    def skip_to_tail(self) -> None:
        """Begin with the last TAIL_BYTES."""
        with suppress(OSError), open(self.path, "rb") as file:
            if (size := file.seek(0, 2)) > TAIL_BYTES:
                file.seek(size - TAIL_BYTES)
                file.readline()
                self.at = file.tell()

    def first_run_id(self) -> str:
        """The run that its beginning names; empty where that says nothing."""
        try:
            with open(self.path, "rb") as file:
                head = file.read(HEAD_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""
        begins = (_BEGIN.fullmatch(ours[5]) for line in head.split("\n")
                  if (ours := _OURS.match(line)))  # fmt: skip
        return next((begin[1] for begin in begins if begin), "")

    def _take(self, line: str) -> None:
        if self._continues(line):
            return
        if not line.strip():
            return
        self._end()
        self.last = self._parse(line)

    def _continues(self, line: str) -> bool:
        """Whether a line belongs to the traceback of the entry before it."""
        if self.last is None:
            return False
        begins = line == _TRACEBACK or line.startswith(_CHAINED)
        if not self.tracing and begins and self.last.logger != RAW:
            self.tracing, self.ended = True, False
        elif not self.tracing:
            return False
        elif begins:
            self.ended = False
        elif self.ended:
            if line.strip():
                self.tracing = False
                return False
        elif line and not line.startswith((" ", "\t")):
            if _recognised(line):
                self.tracing = False
                return False
            self.ended = True  # "ValueError: ..."
        text = f"{self.last.traceback}\n{line}" if self.last.traceback else line
        self.last = replace(self.last, traceback=text)
        return True

    def _end(self) -> None:
        if self.last is not None:
            self.ready.append(replace(self.last, traceback=self.last.traceback.rstrip()))
            self._before = self.last.time
        self.last, self.tracing = None, False

    _before: float = 0.0

    def _parse(self, line: str) -> Entry:
        try:
            return self._record(line)
        except (ValueError, OverflowError):  # it has the form of a record, but no such date
            level = "ERROR" if _SPEAKS.search(line) else "INFO"
            return Entry(self._before, self.role, self.rank, self.run_id, level, RAW, line)

    def _record(self, line: str) -> Entry:
        at, level, logger, message = self._before, "", RAW, line
        if ours := _OURS.match(line):
            at = timegm(time.strptime(ours[1], "%Y-%m-%dT%H:%M:%S")) + int(ours[2]) / 1000
            level, logger, message = ours[3], ours[4], ours[5]
            if begin := _BEGIN.fullmatch(message):
                self.run_id = begin[1]
        elif vllm := _VLLM.match(line):
            at = self._local(vllm[3], "%m-%d %H:%M:%S")
            if at <= self._before < at + 1:  # it has no fraction: not before the line before it
                at = self._before
            level, logger, message = vllm[2], f"vllm {vllm[1]} {vllm[4]}", vllm[5]
        elif ray := _RAY.match(line):
            at = time.mktime(time.strptime(ray[1], "%Y-%m-%d %H:%M:%S")) + int(ray[2]) / 1000
            level, logger, message = _RAY_LEVELS[ray[3]], f"ray {ray[4] or ''}".rstrip(), ray[5]
        elif glog := _GLOG.match(line):
            at = self._local(glog[2], "%m%d %H:%M:%S") + int(glog[3]) / 1000
            level, logger, message = _RAY_LEVELS[glog[1]], glog[4], glog[5]
        if not level:
            level = "ERROR" if _SPEAKS.search(line) else "INFO"
        return Entry(at, self.role, self.rank, self.run_id, level, logger, message)

    def _local(self, stamp: str, form: str) -> float:
        """A time without year and zone: this machine's zone, the year of the log."""
        year = time.localtime(self._before or self.path.stat().st_mtime).tm_year
        return time.mktime(time.strptime(f"{year} {stamp}", f"%Y {form}"))


def _time(entry: Entry) -> float:
    return entry.time


def _recognised(line: str) -> bool:
    return any(form.match(line) for form in (_OURS, _VLLM, _RAY, _GLOG))


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
        self._files: dict[Path, _File] = {}

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
                file = _File(path, words.text(role), rank or 0)
                if self._tail:
                    file.skip_to_tail()
                elif self._since is not None:
                    with suppress(OSError):
                        file.at, file.run_id = place_of(path, self._since)
                self._files[path] = file

    def _named(self, file: _File, entries: Iterator[Entry]) -> Iterator[Entry]:
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


def tail(folder: Path, lines: int, role: str = "") -> list[Entry]:
    """The newest entries of a run's logs."""
    return LogReader(folder, role, tail=True).update(whole=True)[-lines:]


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
