"""A copy of the ledger in a folder of its own, for a checkpoint: one file in the store's format.

    save_ledger ─► state and envelopes, at that moment ─► a thread writes ─► saved, on the disk
                                                          (the buffer serves on)
    resume ─► read_copy ─► state, payloads ─► a ledger as it was, in memory or in a store of its own

The payload of an envelope that somebody has stays where it is, so nothing is copied in memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import lmdb

from asyncrl.buffer.store import ENGINE, MIN_MAP_BYTES
from asyncrl.buffer.store_file import DATA_FILE, check_file, damaged, refused, sync_folder
from asyncrl.buffer.store_layout import DATABASES, Layout
from asyncrl.errors import AsyncRLError, LedgerError, StoreError
from asyncrl.types import SAMPLE_OVERHEAD, Envelope
from asyncrl.wire import Frame

PER_COMMIT_BYTES = 16 << 20
"""Payloads written in one transaction, so that its dirty pages stay few."""
PART = ".part"
"""Ending of a copy that is not complete."""
BESIDES_BYTES = 64 << 20
"""What the file may take besides state and samples."""

CLOSE_S = 30.0
"""How long the end of the buffer waits for a copy under way."""

logger = logging.getLogger(__name__)


class Written(NamedTuple):
    """A complete copy."""

    samples: int
    nbytes: int
    """Of the file."""


def write_copy(
    folder: Path, run_id: str, state: bytes, samples: Mapping[bytes, Envelope]
) -> Written:
    """Write a copy; it is complete, and on the disk, when its file has its name.

    Args:
        folder: made if it is not there; a copy that is there is replaced.
        state: of the ledger (`buffer/snapshot.py`).
        samples: all that the state speaks of, by `payload_key`.

    Raises:
        StoreError: the folder cannot be written, or the disk is full.
    """
    path, part = folder / DATA_FILE, folder / (DATA_FILE + PART)
    payloads = sum(e.nbytes + SAMPLE_OVERHEAD for e in samples.values())
    most = 2 * (payloads + len(samples) * 8192 + len(state)) + BESIDES_BYTES
    try:
        folder.mkdir(exist_ok=True)
        part.unlink(missing_ok=True)  # of a process that was killed
        with contextlib.closing(_open(part, most)) as env:
            layout = Layout(env, folder, run_id)
            for some in _chunks(samples):
                with env.begin(write=True) as txn:
                    for key, payload in some:
                        layout.put(txn, key, payload)
            with env.begin(write=True) as txn:
                layout.replace_snapshot(txn, state, following=0)
            env.sync(True)
        os.replace(part, path)
        sync_folder(folder)
        return Written(len(samples), path.stat().st_size)
    except (lmdb.Error, OSError) as e:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise refused(folder, "write the copy of", e, most) from e


def read_copy(folder: Path, run_id: str) -> tuple[bytes, dict[bytes, bytes]]:
    """The state and the payloads of a copy, each checked.

    Raises:
        StoreError: there is none, it is damaged, or another run's.
    """
    check_file(folder, goes_on=True)
    try:
        with contextlib.closing(_open(folder / DATA_FILE, 0, readonly=True)) as env:
            layout = Layout(env, folder, run_id)
            with env.begin(buffers=True) as txn:
                payloads = {
                    bytes(key): bytes(layout.opened(bytes(key), value, "payload"))
                    for key, value in txn.cursor(layout.payloads)
                }
            with env.begin() as txn:
                state = layout.read_snapshot(txn)
    except (lmdb.Error, OSError) as e:
        raise refused(folder, "read the copy of", e) from e
    if state is None:
        raise damaged(folder, "it has no snapshot")
    return state, payloads


def _open(path: Path, max_bytes: int, readonly: bool = False) -> lmdb.Environment:
    """The file as LMDB's, for this process alone; without a lock file beside it."""
    size = path.stat().st_size if readonly else max_bytes
    return lmdb.open(
        str(path), subdir=False, lock=False, readonly=readonly, sync=False, meminit=False,
        map_size=max(MIN_MAP_BYTES, -(-size // 65536) * 65536), max_dbs=len(DATABASES),
        lib_version=ENGINE,
    )  # fmt: skip


def _chunks(samples: Mapping[bytes, Envelope]) -> Iterator[list[tuple[bytes, Frame]]]:
    """The payloads, in the order of their keys, some at a time."""
    chunk: list[tuple[bytes, Frame]] = []
    size = 0
    for key in sorted(samples):
        chunk.append((key, samples[key].payload))
        size += len(chunk[-1][1])
        if size >= PER_COMMIT_BYTES:
            yield chunk
            chunk, size = [], 0
    yield chunk


class Copier:
    """Makes one copy at a time, in a thread; for the buffer's loop.

    Args:
        run_id: of the run.
        below: the folder that copies must lie in; None refuses all.
    """

    def __init__(self, run_id: str, below: Path | None) -> None:
        self._run_id, self._below = run_id, below
        self._thread: threading.Thread | None = None
        self._result: Written | AsyncRLError | None = None

    @property
    def busy(self) -> bool:
        """Whether a copy is under way, or its result was not taken yet."""
        return self._thread is not None

    def start(self, path: str, state: bytes, samples: Mapping[bytes, Envelope]) -> None:
        """Begin a copy; `take` has its result.

        Raises:
            LedgerError: the path is none for a copy, or another one is under way.
        """
        if self.busy:
            raise LedgerError("a copy of the ledger is under way: ask again when it is complete")
        folder = Path(path)
        inside = self._below is not None and self._below.resolve() in folder.resolve().parents
        if not inside or not folder.parent.is_dir():
            raise LedgerError(
                f"no copy of the ledger can be written to {path}: it must be a folder below "
                f"{self._below}, whose parent is there"
            )

        def run() -> None:
            try:
                self._result = write_copy(folder, self._run_id, state, samples)
            except AsyncRLError as e:
                self._result = e
            except Exception as e:
                logger.exception("the copy of the ledger failed")
                self._result = StoreError(f"{folder}: {type(e).__name__}: {e}")

        self._result = None
        self._thread = threading.Thread(target=run, name="ledger-copy", daemon=True)
        self._thread.start()

    def take(self) -> Written | AsyncRLError | None:
        """The result of the copy, once; None while it is under way, or there is none."""
        if self._thread is None or self._thread.is_alive():
            return None
        self._thread.join()
        self._thread, result, self._result = None, self._result, None
        return result

    def close(self) -> None:
        """Wait for a copy under way, at most CLOSE_S: the store that it reads closes next."""
        if self._thread is not None:
            self._thread.join(CLOSE_S)
