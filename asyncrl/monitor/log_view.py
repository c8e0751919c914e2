"""What `asyncrl logs` prints."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from asyncrl.errors import UserError
from asyncrl.monitor.log_file import LEVELS, Entry
from asyncrl.monitor.logs import LogReader, shown

POLL_S = 0.5
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def show(
    folder: Path, *, role: str = "", level: str = "debug", since: str = "", follow: bool = False,
    as_json: bool = False, file: TextIO | None = None,
) -> None:  # fmt: skip
    """Print a run's logs as one.

    Raises:
        UserError: there is no such log or level, or `since` is no time.
    """
    out = file or sys.stdout
    least, after = level.upper(), time.time() - _age(since) if since else 0.0
    if least not in LEVELS:
        raise UserError(f"--level {level}: one of {', '.join(LEVELS).lower()} is asked for")
    known = sorted(p.stem for p in (folder / "logs").glob("*.log"))
    if role and not any(n == role or n.rpartition("-")[0] == role for n in known):
        raise UserError(f"--role {role}: {folder} has the logs of {', '.join(known) or 'nobody'}")
    reader = LogReader(folder, role, since=after if since else None)
    colour = out.isatty()

    def put(entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.time < after or not entry.at_least(least):
                continue
            if as_json:
                print(json.dumps(asdict(entry)), file=out)
            else:
                print("\n".join(shown(entry, colour=colour)), file=out)
        out.flush()

    put(reader.stream(whole=not follow))
    while follow:
        over = _over(folder)  # before the last look: what came meanwhile is seen
        entries = reader.update(whole=over)
        put(entries)
        if over:
            return
        time.sleep(POLL_S)


def _over(folder: Path) -> bool:
    """Whether nothing more will come."""
    from asyncrl.monitor.status_reader import read, why_over

    try:
        return bool(why_over(folder, read(folder)))
    except UserError:  # it has not written its status yet, or that cannot be read
        return (folder / "summary.json").exists()


def _age(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None:
        raise UserError(f"--since {text}: a time is asked for, e.g. 90s, 5m or 2h")
    return float(found[1]) * _UNITS[found[2]]
