"""The relay without vLLM: shared memory, its receiver, and engines that load when they like."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.actors.gloo_receiver import GlooReceiver
from asyncrl.actors.relay import watch as watch_module
from asyncrl.actors.relay.memory import Draft, Offer, mapped
from asyncrl.actors.relay.receiver import RelayReceiver
from asyncrl.actors.relay.spare import Spare
from asyncrl.actors.relay.watch import RelayWatch
from asyncrl.actors.weights import EngineWeights
from asyncrl.errors import WeightSyncError
from asyncrl.types import Version
from asyncrl.weights import ParamSpec, TransferPlan
from tests.helpers.eventually import eventually
from tests.weights.fakes import Learner, MappingEngine, N, subscriber

PLAN = TransferPlan(
    (
        ParamSpec("a", "float32", (3, 5)), ParamSpec("b", "bfloat16", (7,)),
        ParamSpec("c", "float32", ()),
    )
)  # fmt: skip
V1, V2 = Version(0, 1), Version(0, 2)


def flat(plan: TransferPlan, value: float) -> dict[str, torch.Tensor]:
    return {d: torch.full((n,), value, dtype=getattr(torch, d)) for d, n in plan.sizes.items()}


def info_of(plan: TransferPlan, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    raw = {d: t.view(torch.uint8).numpy().data for d, t in tensors.items()}
    return plan.to_info() | {"checksums": plan.checksums(raw)}


class Shelf:
    """Puts versions on offer as a receiver does; one parameter, filled with the version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan = TransferPlan((ParamSpec("w", "float32", (N,)),))
        self.drafts: list[Draft] = []
        self.spare = Spare()

    def draft(
        self, version: Version, plan: TransferPlan, tensors: dict[str, torch.Tensor],
        sent: dict[str, torch.Tensor] | None = None,
    ) -> Draft:  # fmt: skip
        checksums = info_of(plan, sent or tensors)["checksums"]
        draft = Draft(version, plan, checksums, self.spare)
        for bucket in plan.buckets(16 if plan is PLAN else 1 << 20):
            room = draft.room(bucket)
            room.copy_(tensors[bucket.dtype][bucket.start : bucket.stop])
            draft.filled(bucket, room)
        self.drafts.append(draft)
        return draft

    def offer(self, number: int) -> Draft:
        tensors = flat(self.plan, float(number))
        draft, info = (
            self.draft(Version(0, number), self.plan, tensors),
            info_of(self.plan, tensors),
        )
        assert draft.seal() == []
        Offer.of(draft, info).write(self.path)
        return draft


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    made = Shelf(tmp_path / "offer.json")
    yield made
    for draft in made.drafts:
        draft.close()
    made.spare.close()


# --- the memory ---------------------------------------------------------------------------------


def test_a_sealed_version_is_whole_and_cannot_change(shelf: Shelf) -> None:
    tensors = flat(PLAN, 1.5)
    info = info_of(PLAN, tensors)
    draft = shelf.draft(V1, PLAN, tensors)
    assert draft.seal() == []
    Offer.of(draft, info).write(shelf.path)
    offer = Offer.read(shelf.path)
    assert offer == Offer.of(draft, info)
    assert TransferPlan.from_info(offer.info) == PLAN
    with pytest.raises(PermissionError):
        os.pwrite(draft.pages.fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(draft.pages.fd, 0)
    fd = offer.open()
    got = mapped(f"/proc/self/fd/{fd}", PLAN)
    os.close(fd)
    assert {d: t.tolist() for d, t in got.items()} == {d: t.tolist() for d, t in tensors.items()}
    got["float32"][0] = 7.0  # a copy of that page: nobody else sees it
    assert mapped(f"/proc/self/fd/{draft.pages.fd}", PLAN)["float32"][0] == 1.5


def test_what_arrived_wrong_is_named_and_never_sealed(shelf: Shelf) -> None:
    tensors, sent = flat(PLAN, 1.5), flat(PLAN, 1.5)
    tensors["bfloat16"][3] = 2.0
    draft = shelf.draft(V1, PLAN, tensors, sent)
    info = info_of(PLAN, sent)
    assert draft.seal() == ["b"]
    with pytest.raises(WeightSyncError, match="0:1 is not held any more"):
        Offer.of(draft, info).open()


def test_what_never_came_is_not_taken_for_whole(shelf: Shelf) -> None:
    draft = Draft(V1, PLAN, info_of(PLAN, flat(PLAN, 1.5))["checksums"], shelf.spare)
    shelf.drafts.append(draft)
    draft.room(list(PLAN.buckets())[-1])
    assert draft.seal() == ["a", "c", "b"]


def test_an_offer_whose_memory_is_gone_is_not_mistaken_for_another(shelf: Shelf) -> None:
    first, second = shelf.offer(1), shelf.offer(2)
    offer = Offer.read(shelf.path)
    assert offer is not None
    with pytest.raises(WeightSyncError, match="not held any more"):
        offer._replace(fd=first.pages.fd).open()  # sealed and as long, but another version
    with pytest.raises(WeightSyncError, match="not held any more: .*No such file"):
        offer._replace(fd=10_000).open()
    with open(os.devnull) as other, pytest.raises(WeightSyncError, match="not held any more"):
        offer._replace(fd=other.fileno()).open()
    os.close(offer.open())
    assert second.nbytes == offer.nbytes == 4 * N


def test_who_is_cancelled_keeps_the_memory_until_its_thread_has_ended(tmp_path: Path) -> None:
    """Else the thread would write into whichever file has that number next."""
    receives, may_go_on = threading.Event(), threading.Event()
    fds: list[int] = []

    class Slow(GlooReceiver):
        def receive(self, plan: TransferPlan, sink: Any, **_: Any) -> None:
            fds.append(sink.pages.fd)
            receives.set()
            assert may_go_on.wait(30)
            bucket = next(iter(plan.buckets(16)))
            sink.filled(bucket, sink.room(bucket))

    def is_held() -> bool:
        try:
            return os.readlink(f"/proc/self/fd/{fds[0]}").startswith("/memfd:asyncrl-")
        except FileNotFoundError:
            return False

    async def run() -> None:
        receiver = RelayReceiver(str(tmp_path / "offer.json"))
        receiver.gloo = Slow()
        await receiver.begin(V1)
        info = info_of(PLAN, flat(PLAN, 1.5)) | {"bucket_bytes": 16, "timeout_s": 30.0}
        receiving = asyncio.create_task(receiver.receive(info))
        await asyncio.to_thread(receives.wait, 30)
        receiving.cancel()
        try:
            with pytest.raises(asyncio.CancelledError):
                await receiving
            assert is_held()
        finally:
            may_go_on.set()
        async with asyncio.timeout(30):
            while is_held():
                await asyncio.sleep(0.01)

    asyncio.run(run())


def test_who_maps_a_version_keeps_it_though_the_receiver_has_gone_on(shelf: Shelf) -> None:
    shelf.offer(1)
    offer = Offer.read(shelf.path)
    assert offer is not None
    fd = offer.open()
    shelf.drafts.pop().close()
    got = mapped(f"/proc/self/fd/{fd}", shelf.plan)["float32"]
    os.close(fd)
    assert torch.equal(got, torch.full((N,), 1.0))


# --- an engine's end ----------------------------------------------------------------------------


@dataclasses.dataclass
class Watched:
    """An engine that watches a shelf, in the running loop."""

    engine: MappingEngine
    weights: EngineWeights
    watch: RelayWatch
    failures: list[tuple[Version, str]]

    async def reaches(self, version: Version) -> None:
        async with asyncio.timeout(30):
            while self.engine.applied != version:
                await asyncio.sleep(0.001)
        assert self.engine.weights is not None
        assert torch.equal(self.engine.weights, torch.full((N,), float(version.version)))


def watching(path: Path, scenario: Callable[[Watched], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        engine, failures = MappingEngine(), []
        weights = subscriber(engine)
        watch = RelayWatch(
            str(path), weights, applied=lambda: engine.applied,
            on_failure=lambda version, reason: failures.append((version, reason)),
        )  # fmt: skip
        task = asyncio.create_task(watch.run())
        try:
            async with asyncio.timeout(60):
                await scenario(Watched(engine, weights, watch, failures))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_an_engine_takes_the_newest_and_counts_what_it_skipped(shelf: Shelf) -> None:
    async def scenario(w: Watched) -> None:
        shelf.offer(3)
        await w.reaches(Version(0, 3))
        assert w.weights.metrics()["sync/skipped"] == 0, "it was not there before"
        w.engine.hangs = "begin"  # it waits for its requests, say: nobody waits for it
        shelf.offer(4)
        while w.engine.steps.count("begin") < 2:
            await asyncio.sleep(0.001)
        for number in (5, 6):
            shelf.offer(number)
        w.engine.hangs = ""
        w.engine.thawed.set()
        await w.reaches(Version(0, 6))
        metrics = w.weights.metrics()
        assert metrics["sync/skipped"] == 1
        assert 0 <= metrics["sync/load_s"] <= metrics["sync/pause_s"] < 30
        assert set(w.weights.metrics()) == {"sync/skipped"}, "each update is told of once"
        assert w.engine.steps == ["begin", "receive", "commit"] * 3
        assert w.failures == []

    watching(shelf.path, scenario)


def test_what_could_not_be_loaded_is_tried_again_later_each_time(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "RETRY_S", 0.1)
    seen: list[float] = []

    async def scenario(w: Watched) -> None:
        w.engine.fails = "receive"
        w.engine.on_step = lambda step: seen.append(time.monotonic()) if step == "begin" else None
        shelf.offer(1)
        while len(seen) < 3:
            await asyncio.sleep(0.001)
        assert w.engine.applied == Version(0, 0)
        assert w.engine.broken is None
        assert w.failures[0] == (V1, "weight update: receive failed: no receive today")
        w.engine.fails = ""
        await w.reaches(V1)

    watching(shelf.path, scenario)
    assert seen[1] - seen[0] >= 0.1
    assert seen[2] - seen[1] >= 0.2


def test_who_leaves_takes_no_more(shelf: Shelf) -> None:
    async def scenario(w: Watched) -> None:
        shelf.offer(1)
        await w.reaches(V1)
        w.watch.held = True
        shelf.offer(2)
        await asyncio.sleep(3 * watch_module.POLL_S)
        assert w.engine.applied == V1
        w.watch.held = False
        await w.reaches(V2)

    watching(shelf.path, scenario)


# --- receivers, and the learner -----------------------------------------------------------------


def test_a_restarted_receiver_is_caught_up_and_its_engines_with_it(
    learner: Learner, tmp_path: Path
) -> None:
    learner.fleet.relays = tmp_path
    learner.start("relay-0", "relay-1")
    for _ in range(2):
        learner.publish()
        learner.publisher.wait()
    learner.check("relay-0", "relay-1")
    held = learner.fleet.actors["relay-0"].subscriber.metrics()
    assert held == {"sync/held_bytes": 4 * N}
    learner.fleet.kill("relay-0")
    assert not (tmp_path / "relay-0.json").exists()
    learner.fleet.add("relay-0")

    async def scenario(w: Watched) -> None:
        assert await asyncio.to_thread(learner.publisher.finish, 60.0) == []
        await w.reaches(learner.version)
        await asyncio.to_thread(learner.publish)
        await w.reaches(learner.version)

    watching(tmp_path / "relay-0.json", scenario)
    learner.publisher.wait()
    learner.check("relay-0", "relay-1")
    timings = learner.publisher.take_timings()
    assert timings["sync/bytes"] == 4 * N
    # Of each the version on offer and the memory of the next, once its thread has closed the last.
    eventually(lambda: len(memories()) == 4, lambda: f"held: {memories()}")


def memories() -> set[str]:
    """Names of the shared memory that this process holds."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return {name for name in found if name.startswith("/memfd:asyncrl-")}
