"""One role's log, read bit by bit: lines of several forms, each as an entry."""

from __future__ import annotations

import re
import time
from calendar import timegm
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
RAW = "raw"
"""The logger of a line that no logger wrote."""
LONGEST = 4_000
"""Characters of a line that are kept."""
CHUNK_BYTES = 256 << 10
HEAD_BYTES = 64 << 10
"""In which a log names its run."""
TAIL_BYTES = 64 << 10

_STAMP = r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\.(\d{3})Z ([A-Z]+) "
_STAMPED = re.compile(_STAMP.encode())
_OURS = re.compile(rf"{_STAMP}(\S+): (.*)", re.DOTALL)
_VLLM = re.compile(r"\(([^()]+) pid=\d+\) ([A-Z]+) (\d\d-\d\d \d\d:\d\d:\d\d) \[([^\]]*)\] (.*)")
_RAY = re.compile(
    r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ([IWEFCD]) [^\]]*\] (?:\((\w+)\) )?(.*)"
)
_RAY_LEVELS = {"D": "DEBUG", "I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL",
               "C": "CRITICAL"}  # fmt: skip
_GLOG = re.compile(r"([IWEF])(\d{4} \d\d:\d\d:\d\d)\.(\d{3})\d* \d+ ([^\]]*)\] (.*)")
_BEGIN = re.compile(r"\S+ of run (\S+) begins, pid (\d+)")
_BEGINS = b" begins, pid "
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
class LogFile:
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

    def skip_older(self, after: float) -> None:
        """Begin with the last of our lines that is older than `after` (seconds since 1970), as long
        as none was newer: what follows it, in another form, may belong to it.

        Lines before it are looked at, but not taken apart.
        """
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(max(after, 0.0))).encode()
        at, run_id = 0, ""
        with suppress(OSError), open(self.path, "rb") as file:
            for line in file:
                if ours := _STAMPED.match(line):
                    if ours[1] >= stamp:  # such stamps are in order as text
                        break
                    self.at, self.run_id = at, run_id
                    if _BEGINS in line:
                        run_id = _begun(line.decode("utf-8", "replace").rstrip()) or run_id
                at += len(line)

    def first_run_id(self) -> str:
        """The run that its beginning names; empty where that says nothing."""
        try:
            with open(self.path, "rb") as file:
                head = file.read(HEAD_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""
        return next(filter(None, map(_begun, head.split("\n"))), "")

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


def _recognised(line: str) -> bool:
    return any(form.match(line) for form in (_OURS, _VLLM, _RAY, _GLOG))


def _begun(line: str) -> str:
    """The run that a line of ours says has begun; empty for any other line."""
    ours = _OURS.match(line)
    begin = _BEGIN.fullmatch(ours[5]) if ours else None
    return begin[1] if begin else ""
