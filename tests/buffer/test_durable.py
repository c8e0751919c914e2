"""A buffer that is stopped and started again on what it stored, with its clients connected."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from asyncrl import wire
from asyncrl.buffer.client import BufferClient
from asyncrl.buffer.durable import Durability, Durable, Keeper, open_ledger
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.trajectories import TrajectoryWriter
from asyncrl.errors import StoreError
from asyncrl.recording import read_recording
from asyncrl.types import SAMPLE_OVERHEAD, BatchPart, FailureKind, SampleId, Trajectory, Version
from tests.buffer import peers
from tests.buffer.conftest import Running
from tests.buffer.peers import V0, produce
from tests.buffer.samples import header, prompts, same_arrays, trajectory

SETTINGS: dict[str, Any] = {
    "group_size": 2, "groups_per_batch": 2, "max_staleness": 9, "lease_timeout_s": 60.0,
}  # fmt: skip


class Buffer:
    """A buffer through several processes' worth of servers, all on the same port."""

    def __init__(self, folder: Path, durability: Durability, **options: Any) -> None:
        self.folder, self.durability, self.options = folder, durability, options
        self.running: Running | None = None
        self.port = 0
        self.start()

    def start(self) -> Running:
        recording = TrajectoryWriter(
            self.folder / "trajectories", max_bytes=1 << 30, resume=self.port != 0
        )
        ledger, self.keeper = open_ledger(
            self.folder / "buffer", durability=self.durability, run_id="r", prompts=prompts(),
            memory_bytes=self.options.get("memory_bytes", 1 << 30), store_bytes=1 << 28,
            recorded=True, **SETTINGS,
        )  # fmt: skip
        self.running = Running(ledger, port=self.port, keeper=self.keeper, recording=recording)
        self.port = int(self.running.endpoint.rpartition(":")[2])
        return self.running

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def restart(self) -> None:
        self.close()
        self.start()

    def close(self) -> None:
        if self.running is not None:
            self.running.close()
            error, self.running = self.running.error, None
            assert error is None


def within(seconds: float, scenario: Callable[[AsyncExitStack], Coroutine[Any, Any, None]]) -> None:
    """Run it; what it entered is closed whatever happens."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            await asyncio.wait_for(scenario(stack), seconds)

    asyncio.run(main())


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[Callable[..., Buffer]]:
    made: list[Buffer] = []

    def make(durability: Durability = "process", **options: Any) -> Buffer:
        made.append(Buffer(tmp_path, durability, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("durability", ["process", "disk"])
def test_what_was_acknowledged_is_there_after_a_restart(
    buffer: Callable[..., Buffer], durability: Durability
) -> None:
    server = buffer(durability)
    sent: dict[SampleId, Trajectory] = {}
    trained: list[SampleId] = []

    async def scenario(stack: AsyncExitStack) -> None:
        actor = await stack.enter_async_context(peers.actor(server, resend_s=0.2))
        rank = stack.enter_context(peers.learner(server, resend_s=0.2))
        saver = stack.enter_context(peers.learner(server, resend_s=0.2))  # for its checkpoints
        for batch in range(1, 7):
            assert set(await produce(actor, 4, sent)) == {"accepted"}
            if batch % 2:
                await asyncio.to_thread(server.restart)
            await asyncio.to_thread(saver.stats)
            part = await asyncio.to_thread(rank.pull, batch, 20)
            assert isinstance(part, BatchPart)
            assert all(same_arrays(e, sent[e.header.id]) for e in part.envelopes)
            if batch % 3 == 0:
                await asyncio.to_thread(server.restart)
                again = await asyncio.to_thread(rank.pull, batch, 20)
                assert isinstance(again, BatchPart)
                assert (again.manifest, again.mine) == (part.manifest, part.mine)
                assert all(same_arrays(e, sent[e.header.id]) for e in again.envelopes)
            await asyncio.to_thread(rank.commit, batch)
            await asyncio.to_thread(rank.published, Version(0, batch))
            trained.extend(e.header.id for e in part.envelopes)
        stats = await asyncio.to_thread(rank.stats)
        assert stats.conserved
        assert (stats.counts["trained"], stats.counts["held"]) == (24, 0)
        assert actor.resent > 0

    within(120, scenario)
    server.close()
    assert sorted(trained) == sorted(sent)
    entries = [r.entry for r in read_recording(server.folder / "trajectories")]
    fates = sorted(e.id for e in entries if e.outcome == "trained")
    assert fates == sorted(sent), "recorded once each, with what became of it"
    assert {e.outcome for e in entries} <= {"trained", "held"}


def test_leases_whose_answer_was_lost_are_free_again(buffer: Callable[..., Buffer]) -> None:
    server = buffer()

    async def scenario(stack: AsyncExitStack) -> None:
        actor = await stack.enter_async_context(peers.actor(server, resend_s=0.2))
        held = await actor.lease("actor-0", V0, 2, wait_s=0)
        # Leases that the ledger granted and the client never heard of.
        server.close()
        ledger, keeper = open_ledger(
            server.folder / "buffer", durability="process", run_id="r", prompts=prompts(),
            memory_bytes=1 << 30, store_bytes=1 << 28, **SETTINGS,
        )  # fmt: skip
        lost = ledger.lease("actor-0", V0, 4, 0.0)
        keeper.settle(recorded=True)
        keeper.close()
        server.start()
        again = await actor.lease("actor-0", V0, 4, wait_s=5)
        wanted = {(x.group, k) for x in lost for k in x.samples}
        assert {(x.group, k) for x in again.leases for k in x.samples} == wanted
        work = [trajectory(x, k, "actor-0") for x in held.leases for k in x.samples]
        assert {await actor.push(wire.pack_trajectory(t)) for t in work} == {"accepted"}

    within(60, scenario)


def test_leases_of_an_actor_that_died_with_the_buffer_are_free_again(
    buffer: Callable[..., Buffer],
) -> None:
    server = buffer()

    async def scenario(stack: AsyncExitStack) -> None:
        former = await stack.enter_async_context(peers.actor(server, resend_s=0.2))
        held = await former.lease("actor-0", V0, 4, wait_s=0)
        former.close()
        server.restart()
        actor = await stack.enter_async_context(peers.actor(server, resend_s=0.2))
        again = await actor.lease("actor-0", V0, 4, wait_s=5)
        wanted = {(x.group, k) for x in held.leases for k in x.samples}
        assert {(x.group, k) for x in again.leases for k in x.samples} == wanted

    within(60, scenario)


def test_a_quarantine_is_told_once(tmp_path: Path) -> None:
    def opened() -> tuple[Ledger, Keeper]:
        return open_ledger(
            tmp_path, durability="process", run_id="r", prompts=prompts(), memory_bytes=1 << 30,
            store_bytes=1 << 28, max_attempts=1, failed_member="drop", **SETTINGS,
        )  # fmt: skip

    ledger, keeper = opened()
    lease = ledger.lease("a", V0, 2, 0.0)[0]
    ledger.fail("a", lease.lease, lease.group.sample(0), FailureKind.REWARD, "no", 0.0)
    told = ledger.take_quarantined()
    keeper.settle(recorded=True)
    keeper.close()
    ledger, keeper = opened()
    again = ledger.take_quarantined()
    keeper.close()
    assert (told, again) == ([(lease.group.source, lease.group.index, "reward: no")], [])
    assert ledger.gauges(0.0)["prompts/quarantined"] == 1


def test_a_stop_survives(buffer: Callable[..., Buffer]) -> None:
    server = buffer()
    with peers.learner(server, resend_s=0.2) as rank:
        rank.stop("enough", evaluate=True)
        server.restart()
        reply = rank.pull(1, wait_s=5)
        assert isinstance(reply, wire.Stopped)
        assert reply.reason == "enough"


@pytest.mark.parametrize("size", [600, 4_100, 5_000, 20_000])
def test_the_ledger_leases_no_more_before_the_file_is_full(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.buffer.durable.FILE_BESIDES", 1 << 20)
    limit = 4 << 20
    ledger, keeper = open_ledger(
        tmp_path, durability="process", run_id="r", prompts=prompts(), memory_bytes=1,
        store_bytes=limit, max_bytes=limit, sample_bytes=size + SAMPLE_OVERHEAD, group_size=8,
        groups_per_batch=4, max_staleness=1000, lease_timeout_s=60.0,
    )  # fmt: skip
    try:
        while leases := ledger.lease("a", V0, 64, 0.0):
            for lease in leases:
                for k in lease.samples:
                    h = header(lease.group.sample(k), lease.lease, "a", V0)
                    assert ledger.accept(keeper.envelope(h, bytes(size)), 0.0) == "accepted"
            keeper.settle(recorded=True)
        assert ledger.held_back("a") == "bytes"
    finally:
        keeper.close()


def test_a_snapshot_shortens_the_journal(
    buffer: Callable[..., Buffer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.buffer.durable.SNAPSHOT_ENTRIES", 10)
    server = buffer(memory_bytes=1)  # everything is spilled, too
    sent: dict[SampleId, Trajectory] = {}

    async def scenario(stack: AsyncExitStack) -> None:
        actor = await stack.enter_async_context(peers.actor(server, resend_s=0.2))
        rank = stack.enter_context(peers.learner(server, resend_s=0.2))
        for batch in range(1, 9):
            await produce(actor, 4, sent)
            part = await asyncio.to_thread(rank.pull, batch, 20)
            assert isinstance(part, BatchPart)
            assert all(same_arrays(e, sent[e.header.id]) for e in part.envelopes)
            await asyncio.to_thread(rank.commit, batch)
            await asyncio.to_thread(rank.published, Version(0, batch))
            if batch % 4 == 0:
                await asyncio.to_thread(server.restart)
        stats = await asyncio.to_thread(rank.stats)
        assert stats.conserved
        assert stats.counts["trained"] == 32
        assert stats.gauges["store/journal"] < 40
        assert isinstance(server.keeper, Durable)

    within(60, scenario)


def test_another_runs_store_is_refused(tmp_path: Path) -> None:
    def opened(run_id: str) -> Any:
        return open_ledger(
            tmp_path, durability="process", run_id=run_id, prompts=prompts(),
            memory_bytes=1 << 30, store_bytes=1 << 28, **SETTINGS,
        )  # fmt: skip

    _, keeper = opened("one")
    keeper.close()
    with pytest.raises(StoreError, match="belongs to run 'one'"):
        opened("two")
    opened("one")[1].close()


def test_a_hello_that_is_lost_with_another_death_is_said_again() -> None:
    context: Any = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.rcvtimeo = 30_000
    port = router.bind_to_random_port("tcp://127.0.0.1")
    heard: list[str] = []

    def buffer_that_dies_once_more() -> None:
        known = False
        while "commit again" not in heard:
            identity, *frames = router.recv_multipart()
            message = wire.decode(frames)[0]
            if isinstance(message, wire.Hello):
                heard.append("hello")
                if heard.count("hello") == 1:
                    continue  # it died with this one
                known = True
                reply: wire.Message = wire.Ok(req=message.req)
            elif known:
                heard.append("commit again")
                reply = wire.Ok(req=message.req)
            else:
                reply = wire.Error(req=message.req, error="HelloNeeded", message="who?")
            router.send_multipart([identity, *wire.encode(reply)])

    thread = threading.Thread(target=buffer_that_dies_once_more)
    thread.start()
    client = BufferClient(f"tcp://127.0.0.1:{port}", "r", "learner", 0, resend_s=0.2)
    try:
        client.commit(1)
    finally:
        client.close()
        thread.join(60)
        router.close()
        context.term()
    assert heard == ["hello", "hello", "commit again"]
