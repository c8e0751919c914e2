"""Memory that a relay makes ahead: who may write to it, and what becomes of it when things fail."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.actors.gloo_receiver import GlooReceiver
from asyncrl.actors.relay import spare as spare_module
from asyncrl.actors.relay.memory import Draft, Offer, mapped
from asyncrl.actors.relay.receiver import RelayReceiver
from asyncrl.actors.relay.spare import Pages, Spare
from asyncrl.errors import WeightSyncError
from asyncrl.types import Version
from asyncrl.weights import ParamSpec, TransferPlan
from tests.helpers.eventually import eventually
from tests.helpers.forks import Process

NBYTES = 1 << 16
PIECE = 1 << 12


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_module, "PIECE_BYTES", PIECE)


@pytest.fixture
def spare() -> Iterator[Spare]:
    made = Spare()
    yield made
    made.close()


def plan_of(numel: int) -> TransferPlan:
    return TransferPlan((ParamSpec("w", "float32", (numel,)),))


class Filling(GlooReceiver):
    """What comes is the version's number, as long as nobody says otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.value = 0.0
        self.drafts: list[Draft] = []
        self.before_bucket: Callable[[], None] = lambda: None

    def receive(
        self, plan: TransferPlan, sink: Any, *, bucket_bytes: int, timeout_s: float
    ) -> None:
        value = self.value
        self.drafts.append(sink)
        for bucket in plan.buckets(bucket_bytes):
            part = sink.room(bucket)
            self.before_bucket()
            part.fill_(value)
            sink.filled(bucket, part)


class Relay:
    """A receiver that is told what comes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "offer.json"
        self.gloo = Filling()
        self.receiver = RelayReceiver(str(self.path))
        self.receiver.gloo = self.gloo

    @property
    def spare(self) -> Pages | None:
        return self.receiver._spare._pages

    async def receive(self, number: int, numel: int = NBYTES // 4) -> None:
        plan = plan_of(numel)
        content = torch.full((numel,), float(number)).view(torch.uint8).numpy().data
        info = plan.to_info() | {"checksums": plan.checksums({"float32": content})}
        self.gloo.value = float(number)
        await self.receiver.begin(Version(0, number))
        await self.receiver.receive(info | {"bucket_bytes": PIECE, "timeout_s": 30.0})

    async def take(self, number: int, numel: int = NBYTES // 4) -> None:
        await self.receive(number, numel)
        await self.receiver.commit(Version(0, number))

    def offered(self) -> torch.Tensor:
        """What an engine maps."""
        offer = Offer.read(self.path)
        assert offer is not None
        fd = offer.open()
        try:
            return mapped(f"/proc/self/fd/{fd}", TransferPlan.from_info(offer.info))["float32"]
        finally:
            os.close(fd)

    def check(self, number: int) -> None:
        assert torch.equal(self.offered(), torch.full_like(self.offered(), float(number)))


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Relay]:
    made = Relay(tmp_path)
    yield made
    made.receiver.close()


def is_open(pages: Pages) -> bool:
    try:
        return pages.name in os.readlink(f"/proc/self/fd/{pages.fd}")
    except FileNotFoundError:
        return False


def made(pages: Pages | None) -> bool:
    return pages is not None and pages.allocated == pages.nbytes


class Gate:
    """Stops the thread that makes memory before it clears a piece."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        touch = Pages.touch

        def stopped(pages: Pages, start: int, stop: int) -> None:
            if start == at:
                self.reached.set()
                assert self.open.wait(30)
            touch(pages, start, stop)

        monkeypatch.setattr(Pages, "touch", stopped)


def test_a_version_is_received_into_what_was_made_after_the_last(relay: Relay) -> None:
    async def run() -> None:
        await relay.take(1)
        ahead = relay.spare
        assert ahead is not None
        await asyncio.to_thread(eventually, lambda: made(ahead), "memory was not made")
        assert os.fstat(ahead.fd).st_blocks * 512 >= NBYTES
        await relay.take(2)
        assert f'"{ahead.name}"' in relay.path.read_text()
        relay.check(2)

    asyncio.run(run())


def test_who_maps_an_old_version_goes_on_with_it(relay: Relay) -> None:
    async def run() -> None:
        await relay.take(1)
        engine = relay.offered()
        for number in range(2, 6):
            await relay.take(number)
            relay.check(number)
        assert torch.equal(engine, torch.full_like(engine, 1.0))

    asyncio.run(run())


def test_memory_of_another_size_is_dropped(relay: Relay) -> None:
    async def run() -> None:
        await relay.take(1)
        ahead = relay.spare
        assert ahead is not None
        await relay.take(2, numel=100)
        relay.check(2)
        assert not is_open(ahead)
        assert relay.spare is not None
        assert relay.spare.nbytes == 400

    asyncio.run(run())


def test_nobody_clears_what_has_been_taken(spare: Spare, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, at=2 * PIECE)
    spare.prepare(NBYTES, None)
    assert gate.reached.wait(30)
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(spare.take, NBYTES)
        try:
            done, _ = wait([taking], 0.1)
            assert not done, "the piece under way is still being cleared"
        finally:
            gate.open.set()
        pages = taking.result(30)
    assert pages.allocated == 3 * PIECE, "no further piece is made"
    pages.allocate(NBYTES)
    content = torch.frombuffer(pages.map, dtype=torch.uint8)
    content.fill_(7)
    assert spare._thread is not None
    spare._thread.join(30)
    assert torch.equal(content, torch.full_like(content, 7))
    assert spare._pages is None
    pages.close()


def test_a_receiver_without_memory_ahead_allocates_as_it_comes(
    relay: Relay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    allocate = Pages.allocate

    def full(pages: Pages, stop: int) -> None:
        if threading.current_thread().name == "relay-spare" and stop > PIECE:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(pages, stop)

    monkeypatch.setattr(Pages, "allocate", full)

    async def run() -> None:
        for number in (1, 2, 3):
            await relay.take(number)
            relay.check(number)
            await asyncio.to_thread(eventually, lambda: relay.spare is None, "it did not fail")

    asyncio.run(run())
    assert [r.message.partition(":")[0] for r in caplog.records] == [
        f"no memory for the next version ({NBYTES} bytes) ahead of it"
    ]


def test_a_version_for_which_no_memory_is_left_is_refused(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(pages: Pages, stop: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def run() -> None:
        await relay.take(1)
        monkeypatch.setattr(Pages, "allocate", full)
        with pytest.raises(WeightSyncError, match="receive failed: OSError: .*No space left"):
            await relay.receive(2, numel=100)
        relay.check(1)
        assert relay.receiver.applied == Version(0, 1)

    asyncio.run(run())


def test_an_abandoned_receive_writes_to_nobody_elses_memory(relay: Relay) -> None:
    stuck, may_go_on = threading.Event(), threading.Event()

    def stick() -> None:
        relay.gloo.before_bucket = lambda: None
        stuck.set()
        assert may_go_on.wait(30)

    async def run() -> None:
        await relay.take(1)
        relay.gloo.before_bucket = stick
        receiving = asyncio.create_task(relay.receive(2))
        assert await asyncio.to_thread(stuck.wait, 30)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        try:
            await relay.take(3)
            await relay.receive(4)
        finally:
            may_go_on.set()
        abandoned = relay.gloo.drafts[1].pages
        await asyncio.to_thread(eventually, lambda: not is_open(abandoned), "it is still held")

    asyncio.run(run())
    relay.check(3)
    asyncio.run(relay.receiver.commit(Version(0, 4)))
    relay.check(4)


def make_without_end(folder: str) -> None:
    """A receiver that offers a version and is still making memory for the next."""
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch, at=0)
        relay = Relay(Path(folder))
        asyncio.run(relay.take(1))
        assert gate.reached.wait(30)
        signal.pause()


def test_a_receiver_that_dies_while_it_makes_memory_leaves_none(tmp_path: Path) -> None:
    process = Process(target=make_without_end, args=(str(tmp_path),))
    process.start()
    offer: list[Offer] = []

    def is_offered() -> bool:
        offer[:] = filter(None, [Offer.read(tmp_path / "offer.json")])
        return bool(offer)

    try:
        eventually(is_offered, "nothing was offered")
        fd = offer[0].open()
        weights = mapped(f"/proc/self/fd/{fd}", TransferPlan.from_info(offer[0].info))["float32"]
        os.close(fd)
    finally:
        process.kill()
        process.join(30)
        process.close()
    assert torch.equal(weights, torch.full_like(weights, 1.0))
    assert not [name for name in os.listdir("/dev/shm") if "asyncrl" in name]
