"""Where in a log the lines of a time begin: those before it are looked at, but not taken apart."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import NamedTuple

_OURS = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [A-Z]+ ")
_STAMP = len("2026-11-30T08:07:53")
_BEGIN = re.compile(rb" of run (\S+) begins, pid \d+$")


class Place(NamedTuple):
    """In a log: a byte, and the run that the lines before it name last."""

    at: int
    run_id: str


def place_of(path: Path, after: float) -> Place:
    """The last of our lines that is older than `after` (seconds since 1970), as long as none was
    newer; the beginning where there is none. What has another form follows one of ours.

    Raises:
        OSError: it cannot be read.
    """
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(max(after, 0.0))).encode()
    found, at, run_id = Place(0, ""), 0, ""
    with open(path, "rb") as file:
        for line in file:
            if _OURS.match(line):
                if line[:_STAMP] >= stamp:  # such stamps are in order as text
                    break
                found = Place(at, run_id)
                if begin := _BEGIN.search(line.rstrip()):
                    run_id = begin[1].decode("utf-8", "replace")
            at += len(line)
    return found
