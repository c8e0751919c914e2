"""A replay's temporary folder: it goes with its command, or with a later one if that was killed.

    folder, its lock taken ──► the command ends: gone
                └── is killed: the lock is free ──► the next replay or launch removes it

The lock is the system's (flock), so that it goes with its process, however that ends. A launch has
a guard for its own folder (processes/reaper.py), which ends whoever has a file below it open.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "asyncrl-replay-"
"""Of every such folder's name."""
OWNER = "owner.lock"
"""In the folder; it appears locked. A folder without it is left alone."""


class Scratch:
    """A temporary folder of this process; removed by `close`, or at the end of a `with`."""

    def __init__(self) -> None:
        self.path = tempfile.mkdtemp(prefix=PREFIX)
        hidden = os.path.join(self.path, f".{OWNER}")
        self._lock = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(hidden, os.path.join(self.path, OWNER))

    def close(self) -> None:
        """Remove it; safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Path:
        return Path(self.path)

    def __exit__(self, *_: object) -> None:
        self.close()


def remove_orphans() -> None:
    """Remove the folders of commands that were killed."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):  # another user's, or its owner lives
                    _remove(entry.path)


def _remove(folder: str) -> None:
    """Remove a folder of this user that has lost its owner.

    Raises:
        OSError: it has one, or is not to be had.
    """
    lock = os.open(os.path.join(folder, OWNER), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
