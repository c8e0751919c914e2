"""The shelf: what is in memory, what is only in the store, and when a payload goes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.buffer.shelf import COPY_BELOW, Shelf, ShelvedEnvelope, payload_key
from asyncrl.buffer.store import Store
from asyncrl.errors import StoreError
from asyncrl.types import INITIAL, SAMPLE_OVERHEAD, Envelope, SampleHeader, SampleId
from tests.buffer import samples

SIZE = 10_000


def head(n: int, lease: int = 7) -> SampleHeader:
    return samples.header(SampleId("p", 0, n // 100, n % 100), lease, "a", INITIAL)


def content(n: int, size: int = SIZE) -> bytes:
    return random.Random(n).randbytes(size)


def open_store(folder: Path, max_bytes: int = 1 << 26) -> Store:
    return Store.open(folder, run_id="r", sync=False, max_bytes=max_bytes)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = open_store(tmp_path)
    yield store
    store.close()


def test_the_newest_leave_memory_when_they_are_stored(store: Store) -> None:
    shelf = Shelf(store, memory_bytes=6 * SIZE + 8 * SAMPLE_OVERHEAD)
    held = [shelf.shelve(head(n), memoryview(content(n))) for n in range(8)]
    assert shelf.ram_bytes == 8 * (SIZE + SAMPLE_OVERHEAD), "before they are stored they stay"
    assert shelf.spilled == 0
    shelf.settle()
    assert shelf.spilled == 2
    assert shelf.ram_bytes == 6 * SIZE + 8 * SAMPLE_OVERHEAD
    assert [e.nbytes for e in held] == [SIZE] * 8
    assert shelf.loaded == 0
    for n, e in enumerate(held):
        assert e.payload == content(n)
        assert shelf.loaded == max(0, n - 5)
    assert shelf.ram_bytes == 6 * SIZE + 8 * SAMPLE_OVERHEAD, "what is read stays where it was"


def test_what_goes_makes_room_for_what_comes(store: Store) -> None:
    shelf = Shelf(store, memory_bytes=4 * (SIZE + SAMPLE_OVERHEAD))
    held = [shelf.shelve(head(n), content(n)) for n in range(4)]
    shelf.settle()
    for n in range(4, 30):
        held.append(shelf.shelve(head(n), content(n)))
        del held[0]
        shelf.settle()
    assert shelf.spilled == 0
    assert shelf.ram_bytes == 4 * (SIZE + SAMPLE_OVERHEAD)


def test_memory_too_small_for_the_records_alone_spills_all(store: Store) -> None:
    shelf = Shelf(store, memory_bytes=SAMPLE_OVERHEAD)
    held = [shelf.shelve(head(n), content(n)) for n in range(3)]
    shelf.settle()
    assert (shelf.spilled, shelf.ram_bytes) == (3, 3 * SAMPLE_OVERHEAD)
    assert [e.payload for e in held] == [content(n) for n in range(3)]


def test_without_a_store_all_stay_in_memory() -> None:
    shelf = Shelf(None, memory_bytes=1)
    held = [shelf.shelve(head(n), content(n)) for n in range(3)]
    shelf.settle()
    assert (shelf.spilled, shelf.ram_bytes) == (0, 3 * (SIZE + SAMPLE_OVERHEAD))
    assert held[2].payload == content(2)
    del held
    shelf.settle()
    assert shelf.ram_bytes == 0


def test_a_payload_lives_as_long_as_its_envelopes(store: Store) -> None:
    shelf = Shelf(store, memory_bytes=1 << 20)
    first, second = shelf.shelve(head(0), content(0)), shelf.shelve(head(1), content(1))
    shelf.settle()
    also = first
    del first
    shelf.settle()
    assert also.payload == content(0)
    del also
    assert store.get(payload_key(head(0))) == content(0), "gone from the store with the next commit"
    shelf.settle()
    assert shelf.keys() == {payload_key(head(1))}
    assert store.recover().keys == shelf.keys()
    assert shelf.ram_bytes == second.nbytes + SAMPLE_OVERHEAD
    with pytest.raises(StoreError, match="was released"):
        shelf.read(payload_key(head(0)))


def test_one_that_goes_before_it_is_stored_never_is(store: Store) -> None:
    shelf = Shelf(store, memory_bytes=1 << 20)
    shelf.shelve(head(0), content(0))
    shelf.settle()
    assert store.recover().keys == frozenset()
    assert shelf.ram_bytes == 0


def test_a_payload_that_is_sent_again_does_not_replace_the_first(store: Store) -> None:
    shelf = Shelf(store, memory_bytes=1 << 20)
    first = shelf.shelve(head(0), content(0))
    again = shelf.shelve(head(0), content(99))
    shelf.settle()
    assert shelf.ram_bytes == SIZE + SAMPLE_OVERHEAD, "counted once"
    assert first.payload == again.payload == content(0)
    del again
    shelf.settle()
    assert first.payload == store.get(payload_key(head(0))) == content(0)


def test_a_payload_that_is_sent_again_after_the_first_went_is_taken(store: Store) -> None:
    shelf = Shelf(store, memory_bytes=1 << 20)
    shelf.shelve(head(0), content(0))
    second = shelf.shelve(head(0), content(99, SIZE // 2))
    shelf.settle()
    assert second.payload == store.get(payload_key(head(0))) == content(99, SIZE // 2)
    assert shelf.ram_bytes == SIZE // 2 + SAMPLE_OVERHEAD


def test_leases_and_samples_have_keys_of_their_own(store: Store) -> None:
    shelf = Shelf(store, memory_bytes=0)
    what = [(n, lease) for n in range(4) for lease in (1, 2)]
    held = [shelf.shelve(head(n, lease), content(5 * n + lease)) for n, lease in what]
    shelf.settle()
    assert [e.payload for e in held] == [content(5 * n + lease) for n, lease in what]


def test_after_a_restart_payloads_are_in_the_store(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    shelf = Shelf(store, memory_bytes=1 << 20)
    held = [shelf.shelve(head(n), content(n)) for n in range(3)]
    shelf.settle()
    store.close()
    store = open_store(tmp_path)
    shelf = Shelf(store, memory_bytes=1 << 20)
    restored = [shelf.restore(e.header, e.nbytes) for e in held[:2]]
    assert store.keep_only(shelf.keys()) == 1
    assert (shelf.ram_bytes, shelf.loaded) == (2 * SAMPLE_OVERHEAD, 0)
    assert [e.nbytes for e in restored] == [SIZE, SIZE]
    assert restored == [Envelope(head(n), content(n)) for n in range(2)]
    assert shelf.loaded == 2
    del restored[0]
    shelf.settle()
    assert store.recover().keys == {payload_key(head(1))}
    store.close()


def test_a_store_that_is_full_costs_no_payload(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_bytes=1 << 20)
    shelf = Shelf(store, memory_bytes=0)
    held: list[ShelvedEnvelope] = []

    def fill() -> None:
        for n in range(90):
            held.append(shelf.shelve(head(n), content(n)))
            shelf.settle()

    with pytest.raises(StoreError, match="full"):
        fill()
    assert 20 < shelf.spilled == len(held) - 1
    assert [e.payload for e in held] == [content(n) for n in range(len(held))]
    store.close()


def test_short_payloads_are_copied_out_of_what_they_came_in() -> None:
    shelf = Shelf(None, memory_bytes=1 << 20)
    large = memoryview(bytearray(2 * COPY_BELOW))
    short = shelf.shelve(head(0), large[:100])
    long = shelf.shelve(head(1), large[:COPY_BELOW])
    assert isinstance(short.payload, bytes)
    assert isinstance(long.payload, memoryview)
    assert long.payload.obj is large.obj, "no copy"
