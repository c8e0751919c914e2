"""What lies in the store's file: its databases and records, and how each is known to be whole.

| database | key | value |
|---|---|---|
| meta | "identity", "snapshot" | run and format (JSON); sealed head of the snapshot |
| snapshot | number of the piece, 4 bytes | a piece of it |
| journal | number of the entry, 8 bytes | sealed entry |
| payloads | the caller's key | sealed payload |

Numbers are big-endian, so that their order is that of the keys. *Sealed* is a checksum, then the
content; the checksum is of content and key, so that a page of older content does not pass either.
Entries are numbered without a gap over the whole life of the store. A snapshot is cut into
pieces of one page: a long value would need a long run of free pages in a file that payloads
fragment, and the file would grow to find one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import lmdb
import msgspec
import xxhash

from asyncrl.buffer.store_file import damaged
from asyncrl.errors import StoreError
from asyncrl.wire import Frame

FORMAT = 1
"""Of all the above; a store of a higher one is refused."""
CHECKSUM_BYTES = 8
SNAPSHOT_PIECE = 4080
"""Bytes of a piece: one overflow page of 4 KiB without its header of 16 bytes."""

DATABASES = (b"meta", b"snapshot", b"journal", b"payloads")
_IDENTITY, _SNAPSHOT = b"identity", b"snapshot"

Txn: TypeAlias = "lmdb.Transaction[bytes]"


class _Identity(msgspec.Struct, frozen=True):
    format: int
    run_id: str


class _SnapshotHead(msgspec.Struct, frozen=True):
    nbytes: int
    checksum: int
    first: int
    """Number of the first journal entry after this snapshot."""


class Layout:
    """The databases of one environment, and the reads and writes that know what is in them.

    Raises:
        StoreError: another run's, a newer format, not a store of asyncrl, or a damaged one.
    """

    def __init__(self, env: lmdb.Environment, folder: Path, run_id: str) -> None:
        self._folder = folder
        with env.begin() as txn:
            new = txn.stat()["entries"] == 0
        if new:
            with env.begin(write=True) as txn:
                meta = env.open_db(DATABASES[0], txn=txn)
                txn.put(_IDENTITY, msgspec.json.encode(_Identity(FORMAT, run_id)), db=meta)
                for name in DATABASES[1:]:
                    env.open_db(name, txn=txn)
        else:
            self._check_identity(env, run_id)
        # Not in a read transaction: py-lmdb resets those, which closes what they opened.
        self.meta, self.pieces, self.journal, self.payloads = (
            env.open_db(name, create=False) for name in DATABASES
        )

    def _check_identity(self, env: lmdb.Environment, run_id: str) -> None:
        try:
            meta = env.open_db(DATABASES[0], create=False)
            with env.begin() as txn:
                identity = msgspec.json.decode(txn.get(_IDENTITY, b"", db=meta), type=_Identity)
        except (lmdb.NotFoundError, lmdb.IncompatibleError, msgspec.DecodeError) as e:
            raise damaged(self._folder, "it does not say whose it is") from e
        if identity.format > FORMAT:
            raise StoreError(
                f"the buffer's store {self._folder} has format {identity.format}, this asyncrl "
                f"reads {FORMAT}: resume the run with the newer asyncrl that made it"
            )
        if identity.run_id != run_id:
            raise StoreError(
                f"the buffer's store {self._folder} belongs to run {identity.run_id!r}, this one "
                f"is {run_id!r}: nothing was overwritten; give the run a folder of its own"
            )

    def journal_range(self, txn: Txn) -> range:
        """The numbers of the journal's entries.

        Raises:
            StoreError: there is a gap, or entries between the snapshot and the first are missing.
        """
        head = self._head(txn)
        first = head.first if head is not None else 0
        numbers = range(first, first + txn.stat(self.journal)["entries"])
        cursor = txn.cursor(self.journal)
        ends = [int.from_bytes(cursor.key()) for at in (cursor.first, cursor.last) if at()]
        if ends != [*numbers[:1], *numbers[-1:]]:
            raise damaged(self._folder, f"the journal has entries {ends}, not {numbers}")
        return numbers

    def append(self, txn: Txn, number: int, entry: bytes) -> None:
        """Add the journal entry of this number."""
        key = number.to_bytes(8)
        txn.put(key, _sealed(key, entry), append=True, db=self.journal)

    def read_entries(self, txn: Txn, numbers: range) -> Iterator[bytes]:
        """The journal entries of these numbers."""
        for number in numbers:
            key = number.to_bytes(8)
            value = txn.get(key, db=self.journal)
            if value is None:
                raise damaged(self._folder, f"no journal entry {number}")
            yield bytes(self.opened(key, value, "journal entry"))

    def replace_snapshot(self, txn: Txn, data: bytes, following: int) -> None:
        """Write a snapshot and empty the journal, whose next entry is number `following`."""
        txn.drop(self.journal, delete=False)
        txn.drop(self.pieces, delete=False)
        view = memoryview(data)
        for number, start in enumerate(range(0, len(data), SNAPSHOT_PIECE)):
            piece = view[start : start + SNAPSHOT_PIECE]
            txn.put(number.to_bytes(4), piece, append=True, db=self.pieces)
        head = _SnapshotHead(len(data), xxhash.xxh3_64_intdigest(data), following)
        txn.put(_SNAPSHOT, _sealed(_SNAPSHOT, msgspec.msgpack.encode(head)), db=self.meta)

    def read_snapshot(self, txn: Txn) -> bytes | None:
        """The snapshot, if there is one."""
        head = self._head(txn)
        if head is None:
            return None
        data = b"".join(txn.cursor(self.pieces).iternext(keys=False))
        if len(data) != head.nbytes or xxhash.xxh3_64_intdigest(data) != head.checksum:
            raise damaged(self._folder, "the checksum of the snapshot is wrong")
        return data

    def put(self, txn: Txn, key: bytes, payload: Frame) -> None:
        """Write a payload."""
        txn.put(key, _sealed(key, payload), db=self.payloads)

    def opened(self, key: bytes, value: Frame, what: str) -> Frame:
        """The content of a sealed value."""
        content = value[CHECKSUM_BYTES:]
        if value[:CHECKSUM_BYTES] != _checksum(key, content):
            raise damaged(self._folder, f"the checksum of {what} {key.hex()} is wrong")
        return content

    def used_bytes(self, txn: Txn) -> int:
        """Bytes of the pages that hold something."""
        stats = [txn.stat(db) for db in (self.meta, self.pieces, self.journal, self.payloads)]
        pages = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        return pages * stats[0]["psize"]

    def _head(self, txn: Txn) -> _SnapshotHead | None:
        value = txn.get(_SNAPSHOT, db=self.meta)
        if value is None:
            return None
        head = self.opened(_SNAPSHOT, value, "snapshot's head")
        return msgspec.msgpack.decode(head, type=_SnapshotHead)


def _checksum(key: bytes, content: Frame) -> bytes:
    return xxhash.xxh3_64_digest(content, seed=xxhash.xxh3_64_intdigest(key))


def _sealed(key: bytes, content: Frame) -> bytes:
    return b"".join((_checksum(key, content), content))
