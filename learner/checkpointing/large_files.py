"""Large files written past the page cache (O_DIRECT).

What is written once and seldom read back, as a checkpoint is, gains nothing from the cache, and
the cache takes a core for it: for the pages, and to clear them. Where the file system has no such
way, the cache is used after all.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from io import RawIOBase
from typing import Any

import numpy as np
import xxhash

_PIECE = 8 << 20
"""Bytes handed over at once: a multiple of any disk's block; more would bring nothing."""
_DIRECT = getattr(os, "O_DIRECT", 0)  # not everywhere


class LargeFile(RawIOBase):
    """A new file, or one in place of another; on the disk once it is closed.

    Raises:
        OSError: the disk does not take it: when it is made, written to or closed.
    """

    _fd = -1
    failure: OSError | None = None
    """Why the disk does not take it. Whose write it was may say something else."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fd = _open(path)
        # It begins with a page and is shared, as O_DIRECT asks for: open(2), of forks.
        self._room = np.frombuffer(mmap.mmap(-1, _PIECE), np.uint8)
        self._held = self._passed = 0
        self._digest = xxhash.xxh3_64()

    def writable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Bytes written so far."""
        return self._passed + self._held

    @property
    def checksum(self) -> int:
        """xxh3_64 of what was written, once it is closed: the same as of the file's bytes."""
        return self._digest.intdigest()

    def write(self, data: Any) -> int:
        """All of it."""
        if self.closed:
            raise ValueError("write to a closed file")
        if self.failure is not None:
            raise self.failure
        left = np.frombuffer(data, np.uint8)  # numpy lets other threads run while it copies
        size = len(left)
        while len(left):
            taken = min(len(left), _PIECE - self._held)
            self._room[self._held : self._held + taken] = left[:taken]
            self._held += taken
            left = left[taken:]
            if self._held == _PIECE:
                self._noting(self._pass_on)
        return size

    def close(self) -> None:
        """Hand over the rest; safe to call twice."""
        if self.closed or self._fd < 0:
            return
        try:
            if self.failure is None:
                self._noting(self._finish)
        finally:
            super().close()
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _finish(self) -> None:
        _use_cache(self._fd)  # the rest is no whole number of blocks
        self._pass_on()
        os.fsync(self._fd)  # by this machine: what rank 0 syncs is its own cache's alone

    def _noting(self, call: Callable[[], None]) -> None:
        try:
            call()
        except OSError as e:
            self.failure = e
            raise

    def _pass_on(self) -> None:
        held, self._held = self._room[: self._held].data, 0
        self._digest.update(held)
        while held:  # after a short write the next one says why
            try:
                written = os.write(self._fd, held)
            except OSError as e:
                if e.errno == errno.EINVAL and _use_cache(self._fd):
                    continue
                raise
            if not written:
                raise OSError(errno.ENOSPC, "the disk took nothing more")
            self._passed += written
            held = held[written:]


def _open(path: str | os.PathLike[str]) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)


def _use_cache(fd: int) -> bool:
    """From now on; whether it was not used before."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~_DIRECT)
    return bool(flags & _DIRECT)
