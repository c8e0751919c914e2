"""A disk that is full, read-only or slow, in words; whole lines, fsync and checksums of files."""

from __future__ import annotations

import errno
import io
import os
import resource
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import xxhash

_FULL = (errno.ENOSPC, errno.EDQUOT)
_READ_BYTES = 1 << 16
_HASH_BYTES = 1 << 20
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


def trouble(path: str | os.PathLike[str], error: OSError) -> str:
    """Path, reason and fix, in one line.

    >>> trouble("/proc/no", PermissionError(errno.EACCES, "Permission denied"))
    '/proc/no cannot be written (permission denied): let this user write there'
    """
    text = f"{os.fspath(path)} cannot be written"
    why = os.strerror(error.errno).lower() if error.errno else str(error)
    if error.errno in _FULL:
        with suppress(OSError):
            free = shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free
            why += f", {free / 2**30:.2f} GiB are free"
        return f"{text} ({why}): make room"
    if error.errno == errno.EFBIG:
        why, fix = too_large()
        return f"{text} ({why}): {fix}"
    if error.errno in _REFUSED:
        return f"{text} ({why}): let this user write there"
    return f"{text} ({why}): see to the disk"


def too_large() -> tuple[str, str]:
    """Reason and fix of a file that may not grow (EFBIG); more room would not help."""
    why = os.strerror(errno.EFBIG).lower()
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY:
        return f"{why}, the limit is {limit:,} bytes", "raise it (ulimit -f)"
    return why, "use a file system that takes files of this size"


def sync(path: str | os.PathLike[str]) -> None:
    """Make a file's content, or a folder's entries, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(path: str | os.PathLike[str], text: str, *, durable: bool = False) -> None:
    """Replace a text file by another one: whole, or, after an error, it is what it was.

    Args:
        durable: it survives a power cut when this returns.

    Raises:
        OSError: the disk did not take it.
    """
    temporary = f"{os.fspath(path)}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.remove(temporary)
        raise
    if durable:
        sync(os.path.dirname(os.path.abspath(path)))


def set_aside(folder: Path) -> Path:
    """Keep a folder that cannot be used under another name; one that was kept before goes.

    Raises:
        OSError: it stays where it is.
    """
    aside = folder.with_name(folder.name + ".before-resume")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(folder, aside)
    return aside


def checksum(path: str | os.PathLike[str]) -> str:
    """xxh3_64 of a file's bytes, read in pieces so that other threads go on."""
    digest = xxhash.xxh3_64()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_HASH_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _whole_lines(path: str) -> int:
    """Bytes of a file up to the end of its last whole line; read from its end."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _READ_BYTES)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


class _Forgiving(io.FileIO):
    """A file that takes what the disk does not: lines of a log are lost, nobody who writes them."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def log_stream(fd: int, *, closefd: bool = False) -> TextIO:
    """A stream for a process's output that never fails, line by line."""
    raw = _Forgiving(fd, "w", closefd=closefd)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True
    )


class LineFile:
    """An append-only file of lines: each is there whole, or not at all.

    A torn last line, of a process that was killed, is taken away first.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # No buffer: a line that did not reach the disk must not come back with a later one.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115
        self.path = os.fspath(path)
        if (whole := _whole_lines(self.path)) < os.fstat(self._file.fileno()).st_size:
            os.ftruncate(self._file.fileno(), whole)

    def append(self, lines: bytes) -> None:
        """Write whole lines.

        Raises:
            OSError: the disk did not take all of them; none of them stays.
        """
        size = os.fstat(self._file.fileno()).st_size
        try:
            rest = memoryview(lines)
            while rest:  # after a short write the next one says why
                if not (written := self._file.write(rest)):
                    raise OSError(errno.ENOSPC, "the disk took nothing more", self.path)
                rest = rest[written:]
        except OSError:
            with suppress(OSError):  # a torn line would spoil the next one
                os.ftruncate(self._file.fileno(), size)
            raise

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._file.close()
