"""The buffer's durable store: journal, payloads and snapshot in one LMDB file.

    journal, put, delete, snapshot ──► queue ── commit ──► ONE transaction ──► the replies may go
    after a start: recover ──► the snapshot, then the journal ──► keep_only(what they refer to)

Nothing is written before `commit`, which writes all that is queued or nothing (group commit).
What a commit survives depends on `sync`:

* False: SIGKILL of the process, since the data is in the system's page cache. Not promised after a
  power cut or a crash of the system: the file may then be an older state, or a mixture. A mixture
  is recognised and refused; an older state as a whole cannot be told from a good one.
* True: also a power cut; fsync precedes the return of `commit`.

A bad file is recognised when it is opened, before anything is written: LMDB's own verifier walks
all pages without mapping them (a truncated file is an error, not SIGBUS), and every value has a
checksum (buffer/store_layout.py). LMDB writes through the file, not through a writable map: on a
full disk that would be SIGBUS.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import lmdb

from asyncrl.buffer.store_file import check_file, damaged, lock_folder, refused, sync_folder
from asyncrl.buffer.store_layout import DATABASES, Layout
from asyncrl.wire import Frame

ENGINE = 0
"""LMDB's major version: the file format of 0.9, which every LMDB tool reads."""
MIN_MAP_BYTES = 1 << 20
ENTRIES_PER_READ = 1024
"""Journal entries read in one transaction: a reader that stays open keeps pages from reuse."""
DELETES_PER_COMMIT = 4096
SLOW_S = 2.0
"""A commit that takes longer is written to the log."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a store holds when it is opened: state = the snapshot, then each entry in order."""

    snapshot: bytes | None
    entries: Iterator[bytes]
    """The journal in order, read as it is consumed; raises StoreError at a corrupt entry."""
    keys: frozenset[bytes]
    """Keys of the payloads that are there."""


class Store:
    """A store that one process has open; not thread-safe. Made by `open`.

    >>> store = Store.open("runs/x/buffer", run_id="x", sync=False, max_bytes=1 << 30)
    ... # doctest: +SKIP
    >>> store.journal(b"accepted 7"); store.put(key, frame)  # doctest: +SKIP
    >>> store.commit()                                       # doctest: +SKIP
    2
    """

    def __init__(self, folder: Path, env: lmdb.Environment, lock: BinaryIO, run_id: str) -> None:
        self._folder = folder
        self._env = env
        self._lock = lock
        self._layout = Layout(env, folder, run_id)
        with env.begin() as txn:
            self._numbers = self._layout.journal_range(txn)
            self._used_bytes = self._layout.used_bytes(txn)
        self._entries: list[bytes] = []
        self._payloads: dict[bytes, Frame | None] = {}  # None: delete
        self._snapshot: bytes | None = None
        self._queued_bytes = 0

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str], *, run_id: str, sync: bool, max_bytes: int,
        goes_on: bool = False,
    ) -> Store:  # fmt: skip
        """Open the store in `folder`, or make one; it is locked until `close` or death.

        Args:
            folder: the store's own folder, on a local disk.
            run_id: the run that the store belongs to.
            sync: whether `commit` waits for the disk.
            max_bytes: what the file may grow to.
            goes_on: whether a former process has had it: one that is not there is an error then.

        Raises:
            StoreError: the store is gone, corrupt, another run's, of a newer format, or open in
                another process (nothing is changed), or the folder cannot be written to.
        """
        path = Path(folder)
        lock = lock_folder(path)
        env: lmdb.Environment | None = None
        try:
            check_file(path, goes_on=goes_on)
            env = lmdb.open(
                str(path),
                map_size=max(MIN_MAP_BYTES, -(-max_bytes // 65536) * 65536),  # whole pages
                max_dbs=len(DATABASES),
                sync=sync,
                meminit=False,
                max_spare_txns=1,
                lib_version=ENGINE,
            )
            store = cls(path, env, lock, run_id)
            if sync:
                sync_folder(path)
        except BaseException as e:
            if env is not None:
                env.close()
            lock.close()
            if isinstance(e, (lmdb.Error, OSError)):
                raise refused(path, "open", e, max_bytes) from e
            raise
        return store

    def journal(self, entry: bytes) -> None:
        """Queue an entry for the journal."""
        self._entries.append(entry)
        self._queued_bytes += len(entry)

    def put(self, key: bytes, payload: Frame) -> None:
        """Queue a payload; `payload` is read when it is committed and must not change before."""
        self._unqueue(key)
        self._payloads[key] = payload
        self._queued_bytes += len(payload)

    def delete(self, key: bytes) -> None:
        """Queue a payload's removal; a key that is not there is fine."""
        self._unqueue(key)
        self._payloads[key] = None

    def snapshot(self, data: bytes) -> None:
        """Queue a snapshot; with it the journal is emptied, of what is queued so far as well."""
        self._queued_bytes += len(data) - len(self._snapshot or b"")
        self._queued_bytes -= sum(map(len, self._entries))
        self._snapshot = data
        self._entries.clear()

    def commit(self) -> int:
        """Write all that is queued in one transaction; the number of operations.

        Raises:
            StoreError: the store or the disk is full, or the disk fails. The store then holds what
                it held before; what was queued still is, and may be committed again.
        """
        operations = len(self._entries) + len(self._payloads) + (self._snapshot is not None)
        if not operations:
            return 0
        layout, first, following = self._layout, self._numbers.start, self._numbers.stop
        began = time.monotonic()
        try:
            with self._env.begin(write=True) as txn:
                if self._snapshot is not None:
                    first = following
                    layout.replace_snapshot(txn, self._snapshot, following)
                for key, payload in self._payloads.items():
                    if payload is None:
                        txn.delete(key, db=layout.payloads)
                    else:
                        layout.put(txn, key, payload)
                for number, entry in enumerate(self._entries, following):
                    layout.append(txn, number, entry)
                used_bytes = layout.used_bytes(txn)
        except lmdb.Error as e:
            raise refused(self._folder, "write", e, self._env.info()["map_size"]) from e
        if (seconds := time.monotonic() - began) > SLOW_S:
            log.warning("%s: the disk took %.1f s for a commit; all wait", self._folder, seconds)
        self._numbers = range(first, following + len(self._entries))
        self._used_bytes = used_bytes
        self._entries.clear()
        self._payloads.clear()
        self._snapshot = None
        self._queued_bytes = 0
        return operations

    def get(self, key: bytes) -> bytes:
        """The committed payload of `key`.

        Raises:
            StoreError: there is none, or it is corrupt.
        """
        with self._env.begin(buffers=True) as txn:
            value = txn.get(key, db=self._layout.payloads)
            if value is None:
                raise damaged(self._folder, f"no payload {key.hex()}")
            return bytes(self._layout.opened(key, value, "payload"))

    def recover(self) -> Recovered:
        """What the store holds; call it, and consume the entries, before the first commit.

        Raises:
            StoreError: the snapshot is corrupt.
        """
        with self._env.begin() as txn:
            keys = frozenset(txn.cursor(self._layout.payloads).iternext(values=False))
            snapshot = self._layout.read_snapshot(txn)
        return Recovered(snapshot, self._read_journal(), keys)

    def keep_only(self, keys: Collection[bytes]) -> int:
        """Check the payloads of `keys`, delete all others; how many those were.

        Reads every payload once (about 2 GB/s from the page cache).

        Raises:
            StoreError: one of `keys` is missing or corrupt; nothing has been deleted then.
        """
        missing = set(keys)
        surplus = []
        with self._env.begin(buffers=True) as txn:
            for view, value in txn.cursor(self._layout.payloads):
                key = bytes(view)
                if key in missing:
                    missing.discard(key)
                    self._layout.opened(key, value, "payload")
                else:
                    surplus.append(key)
        if missing:
            what = f"{len(missing)} payloads are missing, {min(missing).hex()} the first"
            raise damaged(self._folder, what)
        for start in range(0, len(surplus), DELETES_PER_COMMIT):
            for key in surplus[start : start + DELETES_PER_COMMIT]:
                self.delete(key)
            self.commit()
        return len(surplus)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use; the file also has free pages, which are used again."""
        return self._used_bytes

    @property
    def entries(self) -> int:
        """Committed entries in the journal, which a restart replays."""
        return len(self._numbers)

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait for `commit`."""
        return self._queued_bytes

    def close(self) -> None:
        """Close and unlock; what is queued is not written. Calling it again is fine."""
        self._env.close()
        self._lock.close()

    def _unqueue(self, key: bytes) -> None:
        self._queued_bytes -= len(self._payloads.pop(key, None) or b"")

    def _read_journal(self) -> Iterator[bytes]:
        numbers = self._numbers
        for start in range(0, len(numbers), ENTRIES_PER_READ):
            with self._env.begin() as txn:
                some = numbers[start : start + ENTRIES_PER_READ]
                entries = list(self._layout.read_entries(txn, some))
            yield from entries
