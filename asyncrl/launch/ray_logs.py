"""What Ray wrote in its session's folder, which goes with the run: kept beside the other logs."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

COMPLAINT = re.compile(rb"^\[[^\]]* [WEFC] \d")
"""A line of Ray's own loggers, of warning or worse."""
MARKS = (b":job_id:", b":actor_name:", b":task_name:")
"""Lines that Ray writes for itself."""
MOST_BYTES = 256 << 10
"""Of the end of each file."""


def keep_ray_logs(scratch: str, path: str) -> None:
    """Append what this machine's Ray complained of to `path`; nothing where there is nothing.

    Of its servers' output that is what they call a warning or worse; of the error output of all,
    whatever is printed there.
    """
    kept: list[bytes] = []
    for file in sorted(Path(scratch).glob("session_2*/logs/*")):
        if file.suffix not in (".out", ".err", ".log"):
            continue
        with contextlib.suppress(OSError):
            lines = [line for line in _end(file).splitlines() if line.strip()]
            if file.suffix == ".err":
                lines = [line for line in lines if not line.startswith(MARKS)]
            else:
                lines = [line for line in lines if COMPLAINT.match(line)]
            if lines:
                kept += [f"{file.name}:".encode(), *lines]
    if kept:
        with contextlib.suppress(OSError), open(path, "ab") as log:
            log.write(b"\n".join(kept) + b"\n")


def _end(path: Path) -> bytes:
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, 2) - MOST_BYTES))
        return file.read()
