"""Which process a pid means: by when it started, on a clock that nobody sets."""

from __future__ import annotations

from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None where it is not told, or gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        return int(text.rpartition(")")[2].split()[19])  # the name before it may hold anything
    except (OSError, ValueError, IndexError):
        return None
