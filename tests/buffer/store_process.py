"""A process that fills a store until it is killed: `python -m tests.buffer.store_process`.

Entry n says n; sample n's payload follows from n; LIVE samples are kept; every SNAPSHOT_EVERY
entries the snapshot says how many there were. After each commit the count is told on stdout.
"""

from __future__ import annotations

import random
import struct
import sys

from asyncrl.buffer.store import Store

LIVE = 20
SNAPSHOT_EVERY = 50
BURST = 8
SNAPSHOT_PAD = bytes(10_000)


def key(n: int) -> bytes:
    return struct.pack(">QI", n, 0)


def payload(n: int) -> bytes:
    rng = random.Random(n)
    return rng.randbytes(rng.randrange(100, 20_000))


def open_store(folder: str, sync: bool) -> tuple[Store, int]:
    """The store, and how many entries were committed; all that it holds is checked."""
    store = Store.open(folder, run_id="r", sync=sync, max_bytes=1 << 26)
    found = store.recover()
    before = 0
    if found.snapshot is not None:
        assert found.snapshot[8:] == SNAPSHOT_PAD
        before = int.from_bytes(found.snapshot[:8])
    entries = [int.from_bytes(e) for e in found.entries]
    count = before + len(entries)
    assert entries == list(range(before, count)), "in order, without a gap"
    live = range(max(0, count - LIVE), count)
    assert found.keys == {key(n) for n in live}, "as of the same commit"
    assert all(store.get(key(n)) == payload(n) for n in live)
    return store, count


def main(folder: str, sync: bool) -> None:
    store, count = open_store(folder, sync)
    print(count, flush=True)
    while True:
        for n in range(count, count + random.randint(1, BURST)):
            store.put(key(n), memoryview(payload(n)))
            store.journal(n.to_bytes(8))
            store.delete(key(n - LIVE)) if n >= LIVE else None
            count = n + 1
            if count % SNAPSHOT_EVERY == 0:
                store.snapshot(count.to_bytes(8) + SNAPSHOT_PAD)
        store.commit()
        print(count, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "sync")
