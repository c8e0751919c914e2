"""Files past the page cache have the bytes that were written, whatever their size and the disk."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncrl.disk import checksum
from asyncrl.learner.checkpointing import large_files
from asyncrl.learner.checkpointing.large_files import LargeFile

SHIPPED = large_files._PIECE
PAGE = os.sysconf("SC_PAGE_SIZE")
PIECE = 2 * PAGE
"""Instead of 8 MiB, so that small files have several."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_files, "_PIECE", PIECE)


def data(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def write(path: Path, *parts: Any) -> LargeFile:
    with LargeFile(path) as file:
        for part in parts:
            before = file.tell()
            assert file.write(part) == memoryview(part).nbytes
            assert file.tell() == before + memoryview(part).nbytes
    return file


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 3 * PIECE), st.sampled_from([0, PAGE, PIECE]))))
@example([])
@example([PIECE])
@example([PIECE + 1])
@example([PIECE - 1, 2])
def test_what_is_written_is_there(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    path = tmp_path_factory.mktemp("files") / "file"
    path.write_bytes(b"older" * PIECE)
    parts = [data(size) for size in sizes]
    file = write(path, *parts)
    assert path.read_bytes() == b"".join(parts)
    assert f"{file.checksum:016x}" == checksum(path)


def test_a_piece_is_so_many_blocks_of_any_disk() -> None:
    assert SHIPPED % (64 << 10) == 0 < SHIPPED


def test_whatever_has_bytes_can_be_written(tmp_path: Path) -> None:
    numbers = np.arange(PIECE, dtype=np.int32)
    write(tmp_path / "x", numbers, memoryview(b"ab"), bytearray(b"c"))
    assert (tmp_path / "x").read_bytes() == numbers.tobytes() + b"abc"


@contextmanager
def _writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether each write went past the cache. Such a one is refused as a disk would refuse it."""
    seen: list[bool] = []
    real = os.write

    def write(fd: int, piece: Any) -> int:
        seen.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        if seen[-1] and len(piece) % PAGE:
            raise OSError(errno.EINVAL, "no whole number of blocks")
        return real(fd, piece)

    with monkeypatch.context() as patch:
        patch.setattr(large_files.os, "write", write)
        yield seen


def test_all_but_the_rest_goes_past_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _writes(monkeypatch) as seen:
        write(tmp_path / "x", data(2 * PIECE + 5))
    assert seen == [True, True, False]


def test_a_file_system_that_has_only_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return real(path, flags, mode)

    monkeypatch.setattr(large_files.os, "open", refuse)
    with _writes(monkeypatch) as seen:
        write(tmp_path / "x", data(2 * PIECE + 5))
    assert seen == [False] * 3
    assert (tmp_path / "x").read_bytes() == data(2 * PIECE + 5)


def test_a_file_system_that_says_so_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or has larger blocks than a page."""
    real, seen = os.write, []

    def refuse(fd: int, piece: Any) -> int:
        seen.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        if seen[-1]:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, piece)

    monkeypatch.setattr(large_files.os, "write", refuse)
    write(tmp_path / "x", data(2 * PIECE + 5))
    assert seen == [True, False, False, False]
    assert (tmp_path / "x").read_bytes() == data(2 * PIECE + 5)


def test_an_error_that_stays_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, piece: Any) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(large_files.os, "write", refuse)
    with pytest.raises(OSError, match="Invalid argument"):
        write(tmp_path / "x", data(PIECE))


def test_a_disk_that_failed_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes after a hole would be no part of the file."""
    pieces: list[Any] = []

    def refuse(fd: int, piece: Any) -> int:
        pieces.append(piece)
        raise OSError(errno.EIO, "Input/output error")

    file = LargeFile(tmp_path / "x")
    with monkeypatch.context() as patch:
        patch.setattr(large_files.os, "write", refuse)
        with pytest.raises(OSError, match="Input/output error") as caught:
            file.write(data(PIECE + 1))
    assert file.failure is caught.value
    with pytest.raises(OSError, match="Input/output error"):
        file.write(b"more")
    file.close()
    assert len(pieces) == 1
    assert (tmp_path / "x").read_bytes() == b""


@pytest.mark.parametrize("most", [PAGE, PAGE - 1, 7])
def test_a_disk_that_takes_a_part_gets_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    real = os.write
    monkeypatch.setattr(large_files.os, "write", lambda fd, piece: real(fd, piece[:most]))
    write(tmp_path / "x", data(3 * PIECE + 5))
    assert (tmp_path / "x").read_bytes() == data(3 * PIECE + 5)


def test_a_disk_that_takes_nothing_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_files.os, "write", lambda fd, piece: 0)
    with pytest.raises(OSError, match="the disk took nothing more") as caught:
        write(tmp_path / "x", data(5))
    assert caught.value.errno == errno.ENOSPC


def test_it_is_on_the_disk_once_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(large_files.os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    write(tmp_path / "x", data(PIECE + 5))
    assert synced == [PIECE + 5]


def test_a_closed_file_is_not_written_to(tmp_path: Path) -> None:
    """Its descriptor may be another file's by now."""
    file = write(tmp_path / "x", b"123")
    with open(tmp_path / "other", "wb") as other, pytest.raises(ValueError, match="closed"):
        file.write(data(PIECE))
    assert other.closed
    assert (tmp_path / "other").read_bytes() == b""


@pytest.mark.parametrize("limit", [PIECE, PIECE + 100, 3 * PIECE - 1])
def test_a_file_that_may_not_grow(tmp_path: Path, limit: int) -> None:
    """Where the limit is inside of a block, the disk takes a part of a piece, by the cache."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    file = LargeFile(tmp_path / "x")
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            file.write(data(4 * PIECE))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert (tmp_path / "x").read_bytes() == data(4 * PIECE)[:limit]
    file.close()


def test_a_full_disk_is_told_when_the_file_is_closed_and_once() -> None:
    file = LargeFile("/dev/full")
    file.write(b"x")
    number = file._fd
    with pytest.raises(OSError, match="No space left") as caught:
        file.close()
    assert caught.value.errno == errno.ENOSPC
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        LargeFile(tmp_path / "nowhere" / "x")
