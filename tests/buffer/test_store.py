"""The store: what a commit survives, what is refused, and that the file does not grow."""

from __future__ import annotations

import os
import random
import resource
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest

from asyncrl.buffer.store import Store
from asyncrl.errors import StoreError
from tests.buffer import store_process
from tests.buffer.store_process import BURST, key, payload

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@contextmanager
def opened(folder: Path, *, run_id: str = "r", max_bytes: int = 64 * MIB) -> Iterator[Store]:
    store = Store.open(folder, run_id=run_id, sync=False, max_bytes=max_bytes)
    try:
        yield store
    finally:
        store.close()


def refusal(folder: Path, match: str, run_id: str = "r") -> str:
    """The error at opening; the data is untouched."""
    file = folder / "data.mdb"
    before = file.read_bytes() if file.is_file() else None
    with pytest.raises(StoreError, match=match) as e:
        Store.open(folder, run_id=run_id, sync=False, max_bytes=64 * MIB)
    assert (file.read_bytes() if file.is_file() else None) == before
    assert str(folder) in str(e.value)
    assert "\n" not in str(e.value)
    return str(e.value)


def contents(store: Store) -> tuple[bytes | None, list[bytes], dict[bytes, bytes]]:
    """All that is there, checked as at a start."""
    found = store.recover()
    entries = list(found.entries)
    assert store.keep_only(found.keys) == 0
    return found.snapshot, entries, {k: store.get(k) for k in found.keys}


def filled(folder: Path) -> tuple[bytes | None, list[bytes], dict[bytes, bytes]]:
    """A store with some of everything; what it holds."""
    with opened(folder) as store:
        for n in range(60):
            store.journal(b"entry %d" % n)
            store.put(key(n), payload(n))
            if n == 30:
                store.snapshot(payload(1000) * 3)
            if n % 3 == 0:
                store.delete(key(n // 2))
            store.commit()
        return contents(store)


def test_a_commit_is_what_another_opening_finds(folder: Path) -> None:
    with opened(folder) as store:
        assert store.recover().snapshot is None
        store.journal(b"lost")
        store.put(key(1), memoryview(b"one"))
        store.put(key(2), b"two")
        assert store.queued_bytes == len(b"lost" + b"one" + b"two")
        store.snapshot(b"state")
        store.journal(b"a")
        store.journal(b"b")
        assert store.queued_bytes == len(b"one" + b"two" + b"state" + b"a" + b"b")
        assert store.commit() == 5
        store.delete(key(1))
        store.put(key(3), b"three")
        store.delete(key(3))
        store.delete(b"never there")
        store.journal(b"c")
        store.commit()
        assert (store.entries, store.queued_bytes) == (3, 0)
        store.journal(b"not committed")
        store.put(key(4), b"not committed")
    with opened(folder) as store:
        assert store.entries == 3
        assert contents(store) == (b"state", [b"a", b"b", b"c"], {key(2): b"two"})
        store.journal(b"d")
        store.commit()
        assert contents(store)[1] == [b"a", b"b", b"c", b"d"]
        store.snapshot(b"")
        store.commit()
        assert contents(store) == (b"", [], {key(2): b"two"})


def test_a_commit_is_one_transaction_and_an_empty_one_is_none(folder: Path) -> None:
    def transactions() -> int:
        env = lmdb.open(str(folder))
        try:
            return env.info()["last_txnid"]
        finally:
            env.close()

    with opened(folder):
        pass
    before = transactions()
    with opened(folder) as store:
        for n in range(50):
            store.put(key(n), payload(n))
            store.journal(b"x")
        store.snapshot(b"s")
        store.commit()
        assert store.commit() == 0
    assert transactions() == before + 1


def test_a_payload_that_is_not_there(folder: Path) -> None:
    with opened(folder) as store:
        with pytest.raises(StoreError, match=key(7).hex()):
            store.get(key(7))
        store.put(key(1), b"one")
        store.commit()
        with pytest.raises(StoreError, match="2 payloads are missing"):
            store.keep_only([key(2), key(3)])
        assert store.get(key(1)) == b"one", "nothing is deleted then"


def test_payloads_that_nobody_knows_go(folder: Path) -> None:
    with opened(folder) as store:
        for n in range(5000):
            store.put(key(n), b"%d" % n)
        store.commit()
        used = store.used_bytes
        assert store.keep_only([key(7), key(4999)]) == 4998
        assert contents(store)[2] == {key(7): b"7", key(4999): b"4999"}
        assert store.used_bytes < used / 5


def test_a_long_journal_is_read_in_order(folder: Path) -> None:
    with opened(folder) as store:
        for n in range(3000):
            store.journal(b"%d" % n)
        store.commit()
        assert list(store.recover().entries) == [b"%d" % n for n in range(3000)]


def test_payloads_are_read_in_other_threads_meanwhile(folder: Path) -> None:
    done = threading.Event()
    wrong: list[int] = []
    with opened(folder) as store:
        for n in range(20):
            store.put(key(n), payload(n))
        store.commit()

        def read() -> None:
            while not done.is_set():
                wrong.extend(n for n in range(20) if store.get(key(n)) != payload(n))

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for n in range(100, 600):
            store.put(key(n), payload(n % 50))
            store.delete(key(n - 10)) if n >= 110 else None
            store.commit()
        done.set()
        for reader in readers:
            reader.join()
    assert wrong == []


# SIGKILL


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(folder: Path, mode: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.buffer.store_process", str(folder), mode]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("mode", ["sync", "nosync"])
def test_what_was_acknowledged_survives_sigkill(
    folder: Path, mode: str, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    rng = random.Random(mode)
    count = 0
    for _ in range(10):
        process = start(folder, mode)
        assert process.stdout is not None
        told = int(process.stdout.readline())
        assert told == count
        for _ in range(rng.randrange(60)):
            told = int(process.stdout.readline())
        process.kill()
        for line in process.stdout.read().split():
            told = int(line)
        process.wait()
        store, count = store_process.open_store(str(folder), sync=False)
        store.close()
        assert told <= count <= told + BURST, "beyond it at most the commit under way"
    assert count > 300


def test_two_processes_never_share_a_store(
    folder: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = start(folder, "nosync")
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(StoreError, match=f"open in process {process.pid}:"):
        Store.open(folder, run_id="r", sync=False, max_bytes=MIB)
    process.kill()
    process.wait()
    store, _ = store_process.open_store(str(folder), sync=False)
    refusal(folder, f"open in process {os.getpid()}:")
    store.close()
    with opened(folder):
        pass


@pytest.mark.parametrize("sync", [True, False])
def test_sync_is_lmdbs(folder: Path, sync: bool) -> None:
    store = Store.open(folder, run_id="r", sync=sync, max_bytes=MIB)
    flags = store._env.flags()
    store.close()
    assert flags["sync"] == sync
    assert flags["metasync"], "the page that makes a commit valid is synced too"
    assert not flags["writemap"], "SIGBUS on a full disk"


# Refusals


@pytest.mark.parametrize("lose", [Path.unlink, lambda file: os.truncate(file, 0)])
def test_a_store_that_is_gone_is_not_made_anew_for_who_goes_on(
    folder: Path, lose: Callable[[Path], None]
) -> None:
    filled(folder)
    lose(folder / "data.mdb")
    with pytest.raises(StoreError, match=r"data\.mdb is missing or empty") as e:
        Store.open(folder, run_id="r", sync=False, max_bytes=MIB, goes_on=True)
    assert str(folder) in str(e.value)


def test_another_runs_store_is_not_touched(folder: Path) -> None:
    held = filled(folder)
    refusal(folder, "belongs to run 'r', this one is 'other'", run_id="other")
    with opened(folder) as store:
        assert contents(store) == held


def test_a_store_of_a_newer_format_is_not_touched(folder: Path) -> None:
    filled(folder)
    env = lmdb.open(str(folder), max_dbs=1)
    meta = env.open_db(b"meta", create=False)
    with env.begin(write=True) as txn:
        txn.put(b"identity", b'{"format": 2, "run_id": "r", "shards": []}', db=meta)
    env.close()
    refusal(folder, "format 2, this asyncrl reads 1")


def test_a_file_of_something_else_is_not_touched(folder: Path) -> None:
    env = lmdb.open(str(folder))
    with env.begin(write=True) as txn:
        txn.put(b"somebody's", b"data")
    env.close()
    refusal(folder, "corrupt .*does not say whose")
    (folder / "data.mdb").write_bytes(b"text" * 5000)
    refusal(folder, "corrupt .*not an LMDB data file")


def test_a_start_that_was_killed_is_a_new_store(folder: Path) -> None:
    folder.mkdir()
    (folder / "data.mdb").touch()
    with opened(folder) as store:
        assert contents(store) == (None, [], {})


def test_a_truncated_file_is_refused(folder: Path) -> None:
    filled(folder)
    file = folder / "data.mdb"
    whole = file.read_bytes()
    for length in (10, 4096, 8192, len(whole) // 2 + 100):
        file.write_bytes(whole[:length])
        refusal(folder, "corrupt")


def test_flipped_bits_are_refused_or_do_not_matter(folder: Path) -> None:
    held = filled(folder)
    file = folder / "data.mdb"
    whole = file.read_bytes()
    rng = random.Random(0)
    refused = 0
    for trial in range(200):
        bad = bytearray(whole)
        bad[rng.randrange(8192 if trial % 4 == 0 else len(whole))] ^= 1 << rng.randrange(8)
        file.write_bytes(bad)
        try:
            with opened(folder) as store:
                found = store.recover()
                entries = list(found.entries)
                store.keep_only(held[2])
                assert (found.snapshot, entries) == held[:2]
                assert found.keys == held[2].keys()
                assert all(store.get(k) == held[2][k] for k in held[2])
        except StoreError:
            refused += 1
    assert refused > 60, "about half the file is in use"


def test_pages_of_two_times_are_refused_or_one_of_them(folder: Path) -> None:
    """What a crash of the system may leave of a store that is not synced."""
    rng = random.Random(0)
    states, files, live = [], [], []
    file = folder / "data.mdb"
    with opened(folder) as store:
        for n in range(40):
            for sample in range(2):
                live.append(struct.pack(">QI", n, sample))
                store.put(live[-1], rng.randbytes(3000))  # a page: an old one looks whole
                store.journal(live[-1])
            if n % 15 == 10:
                store.snapshot(payload(1000 + n))
            while len(live) > 20:
                store.delete(live.pop(rng.randrange(len(live))))
            store.commit()
            states.append(contents(store))
            files.append(file.read_bytes())
    refused = 0
    for _ in range(150):
        new = rng.randrange(10, 40)
        old = new - rng.choice((1, 2, 8))
        share = rng.choice((0.02, 0.1, 0.5, 0.9))
        mixed = bytearray(files[new])
        for at in range(0, len(mixed), 4096):
            if rng.random() < share:
                mixed[at : at + 4096] = files[old][at : at + 4096].ljust(4096, b"\0")
        file.write_bytes(mixed)
        try:
            with opened(folder) as store:
                assert contents(store) in states[old - 1 : new + 1]
        except StoreError:
            refused += 1
    assert 30 < refused < 150


# No room


def fill(store: Store, most: int = 1000) -> None:
    """Commit one sample of 20 KB after another."""
    for n in range(most):
        store.journal(b"%d" % n)
        store.put(key(n), bytes(20_000))
        store.commit()


def test_a_full_store_holds_what_it_held(folder: Path) -> None:
    with opened(folder, max_bytes=2 * MIB) as store:
        with pytest.raises(StoreError, match=r"full at 0.00195 GiB: raise buffer.store_gib"):
            fill(store)
        count = store.entries
        assert 50 < count < 110
        assert 1.5 * MIB < store.used_bytes <= 2 * MIB
    with opened(folder, max_bytes=2 * MIB) as store:
        _, entries, payloads = contents(store)
        assert entries == [b"%d" % n for n in range(count)]
        assert payloads == {key(n): bytes(20_000) for n in range(count)}
        for n in range(10):
            store.delete(key(n))
        store.commit()
        store.delete(key(10))
        store.commit()  # what a commit frees is used by the one after the next
        store.put(key(count), bytes(20_000))
        store.commit()
    with opened(folder, max_bytes=4 * MIB) as store:
        for n in range(50):
            store.put(key(2000 + n), bytes(20_000))
        store.commit()
        assert len(contents(store)[2]) == count - 11 + 1 + 50


def test_a_disk_without_room_leaves_what_was_held(folder: Path) -> None:
    """A limit on the file's size stands in for the disk: LMDB gets the same short write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(folder) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 * MIB, hard))
        try:
            with pytest.raises(StoreError, match="no room on its disk, or the disk fails"):
                fill(store)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        count = store.entries
        assert 100 < count < 160
        assert contents(store)[1] == [b"%d" % n for n in range(count)]
        assert store.commit() == 2, "what was queued is not lost when there is room again"
    with opened(folder) as store:
        assert contents(store)[1] == [b"%d" % n for n in range(count + 1)]
        assert store.get(key(count)) == bytes(20_000)


@pytest.fixture
def unprivileged() -> Iterator[None]:
    """Permissions count; for root they do not."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_cannot_be_written_to(folder: Path, request: pytest.FixtureRequest) -> None:
    folder.mkdir()
    folder.chmod(0o500)
    request.getfixturevalue("unprivileged")
    with pytest.raises(StoreError, match="Permission denied.*can be written to"):
        Store.open(folder, run_id="r", sync=False, max_bytes=MIB)
    with pytest.raises(StoreError, match=r"cannot open the buffer's store .*Permission denied"):
        Store.open(folder / "below", run_id="r", sync=False, max_bytes=MIB)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot open the buffer's store"):
        Store.open(tmp_path / "file", run_id="r", sync=False, max_bytes=MIB)


# Space


@pytest.mark.parametrize(("shortest", "longest"), [(20_000, 20_000), (2_000, 60_000)])
@pytest.mark.parametrize("order", ["first", "any"])
def test_the_file_does_not_grow(folder: Path, shortest: int, longest: int, order: str) -> None:
    rng = random.Random(0)
    content = memoryview(rng.randbytes(longest))
    live: list[bytes] = []
    sizes = []
    with opened(folder, max_bytes=256 * MIB) as store:
        for n in range(20_000):
            live.append(key(n))
            store.put(live[-1], content[: rng.randint(shortest, longest)])
            store.journal(bytes(200))
            if len(live) > 500:
                store.delete(live.pop(0 if order == "first" else rng.randrange(len(live))))
            if n % 32 == 0:
                store.commit()
            if store.entries >= 1000:
                store.snapshot(content[:40_000].tobytes() * 10)
            if n % 1000 == 999:
                sizes.append((folder / "data.mdb").stat().st_size)
        assert len(contents(store)[2]) >= 500
    assert sizes[-1] < 1.05 * sizes[6], sizes
    assert sizes[-1] < 2 * (500 * (shortest + longest) / 2)
