"""Payloads of the samples that the buffer holds: in memory as far as it goes, else in the store.

    shelve ─► memory (and queued for the store) ─► settle ─► over memory_bytes: the newest leave
                                                             memory, they are read last
    payload ─► from memory, else from the store (and not back into memory)
    nobody has an envelope of it any more ─► settle ─► gone from both

An envelope on the shelf is a handle: its header, its size, and where its payload is now. The
payload lives as long as any of its envelopes: whoever needs it keeps one, nobody releases it.
"""

from __future__ import annotations

import struct
from collections import deque

from asyncrl.buffer.store import Store
from asyncrl.errors import StoreError
from asyncrl.types import SAMPLE_OVERHEAD, Envelope, SampleHeader
from asyncrl.wire import Frame

COPY_BELOW = 32768
"""A shorter payload is copied. ZeroMQ receives what is shorter than 8 KiB into shared buffers of
that size, which a payload kept as it came would keep (measured besides the payload: 10 KB of
memory for one of 2 KB), and leaves holes between longer ones (3 KB for one of 16 KB). With the
copy a sample costs 1.1 to 2 KB besides its payload at any length, which SAMPLE_OVERHEAD covers.
(Resident memory, 8 clients over TCP, 700 bytes to 200 KB, with and without random departures.)"""


def payload_key(header: SampleHeader) -> bytes:
    """The store's key of a sample's payload: a lease gives each of its samples at most once."""
    return struct.pack(">QI", header.lease, header.id.sample)


def own(payload: Frame) -> Frame:
    """The payload for keeping: itself, or a copy where what it came in is much larger."""
    return bytes(payload) if len(payload) < COPY_BELOW else payload


class ShelvedEnvelope(Envelope):
    """A sample whose payload is on a shelf."""

    __slots__ = ("__weakref__", "_key", "_nbytes", "_shelf")

    def __init__(self, header: SampleHeader, nbytes: int, shelf: Shelf) -> None:
        self.header = header
        self._key = payload_key(header)
        self._nbytes = nbytes
        self._shelf = shelf

    def __del__(self) -> None:
        self._shelf.gone.append(self._key)  # in whichever thread; seen to at the next settle

    @property
    def payload(self) -> Frame:
        """The payload, from memory or the store.

        Raises:
            StoreError: it is corrupt in the store.
        """
        return self._shelf.read(self._key)

    @property
    def nbytes(self) -> int:
        """Bytes of the payload, known without reading it."""
        return self._nbytes


class Shelf:
    """Keeps payloads in memory up to a limit, the rest only in the store.

    >>> shelf = Shelf(None, memory_bytes=1 << 30)
    >>> shelf.ram_bytes
    0

    Args:
        store: where payloads go when they come; None keeps all in memory, whatever the limit.
        memory_bytes: limit of `ram_bytes`, kept as far as payloads can leave memory.
    """

    def __init__(self, store: Store | None, memory_bytes: int) -> None:
        self.gone: deque[bytes] = deque()
        """Keys of envelopes that nobody has any more."""
        self._store = store
        self._memory_bytes = memory_bytes
        self._holders: dict[bytes, int] = {}  # of each payload on the shelf
        self._resident: dict[bytes, Frame] = {}  # in the order of arrival
        self._resident_bytes = 0
        self.spilled = 0
        """Payloads that left memory for the store so far."""
        self.loaded = 0
        """Payloads read from the store so far."""

    def shelve(self, header: SampleHeader, payload: Frame) -> ShelvedEnvelope:
        """Put a payload on the shelf; with a store, it is stored at the store's next commit.

        A payload sent again, with the key of one that is there, is dropped: the first counts, and
        stays as long as any of its envelopes.
        """
        self._drain()  # one with this key that nobody has any more is not "there"
        key = payload_key(header)
        holders = self._holders.get(key, 0)
        self._holders[key] = holders + 1
        if not holders:
            self._resident[key] = payload = own(payload)
            self._resident_bytes += len(payload)
            if self._store is not None:
                self._store.put(key, payload)
        return ShelvedEnvelope(header, len(payload), self)

    def restore(self, header: SampleHeader, nbytes: int) -> ShelvedEnvelope:
        """The envelope of a payload that is in the store, after a restart; it is not read."""
        key = payload_key(header)
        self._holders[key] = self._holders.get(key, 0) + 1
        return ShelvedEnvelope(header, nbytes, self)

    def keys(self) -> frozenset[bytes]:
        """Keys of the payloads that somebody has an envelope of."""
        self._drain()
        return frozenset(self._holders)

    def settle(self) -> None:
        """Commit the store; what is over the limit leaves memory, the newest first.

        Raises:
            StoreError: the store cannot take it; it is as it was.
        """
        self._drain()
        if self._store is None:
            return
        self._store.commit()
        while self.ram_bytes > self._memory_bytes and self._resident:
            _, payload = self._resident.popitem()
            self._resident_bytes -= len(payload)
            self.spilled += 1

    def _drain(self) -> None:
        while self.gone:
            self._release(self.gone.popleft())

    def _release(self, key: bytes) -> None:
        """One envelope fewer of a payload; without any it leaves memory and store."""
        holders = self._holders.get(key, 0)
        if holders > 1:  # another thread may be reading it: the key is never absent meanwhile
            self._holders[key] = holders - 1
            return
        self._holders.pop(key, None)
        self._resident_bytes -= len(self._resident.pop(key, b""))
        if holders and self._store is not None:
            self._store.delete(key)

    def read(self, key: bytes) -> Frame:
        """The payload of a key, from memory or the store (any thread).

        Raises:
            StoreError: it is not on the shelf, or corrupt in the store.
        """
        payload = self._resident.get(key)
        if payload is not None:
            return payload
        if self._store is None or key not in self._holders:
            raise StoreError(f"the payload {key.hex()} was released: nobody may read it any more")
        self.loaded += 1
        return self._store.get(key)

    @property
    def ram_bytes(self) -> int:
        """Bytes in memory: payloads there, and SAMPLE_OVERHEAD for each sample, spilled or not."""
        return self._resident_bytes + len(self._holders) * SAMPLE_OVERHEAD
