"""Actors that fall silent or are gone, what each role may ask, and how a run ends in order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrl import wire
from asyncrl.buffer.client import BufferClient
from asyncrl.buffer.clients import Clients
from asyncrl.errors import LedgerError, WireError
from asyncrl.types import BatchPart, FailureKind, SampleId, Trajectory, Version
from tests.buffer.conftest import Running
from tests.buffer.peers import V0, Serve, actor, launcher, learner, produce, raw
from tests.buffer.samples import header, prompts, trajectory


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def step(self, seconds: float, server: Running, client: BufferClient) -> None:
        """Let time pass, and the server look at it."""
        self.now += seconds
        client.stats()  # answered in a pass of its loop, which then looks at the time
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), server.loop).result(30)


def hello(clients: Clients, name: bytes, rank: int, now: float, pid: int = 1) -> None:
    clients.hello(name, wire.Hello(run_id="r", role="actor", rank=rank, pid=pid))
    clients.heard(name, now)


def test_silence_is_noticed_once_and_ends_with_the_next_message() -> None:
    clients = Clients("r", silent_after_s=10.0)
    hello(clients, b"a", 0, 0.0)
    hello(clients, b"b", 1, 0.0)
    assert clients.newly_silent(4.0) == []
    clients.heard(b"b", 6.0)
    assert clients.newly_silent(8.0) == []
    assert clients.newly_silent(10.0) == ["actor-0"]
    assert clients.newly_silent(11.0) == []
    assert clients.ages(11.0) == {"actor-0": 11.0, "actor-1": 5.0}
    assert clients.heard(b"b", 12.0) == ""
    assert clients.heard(b"a", 12.0) == "actor-0"
    assert clients.newly_silent(16.0) == []
    assert clients.newly_silent(21.0) == []
    assert clients.newly_silent(22.0) == ["actor-0", "actor-1"]


def test_time_in_which_the_buffer_stood_still_is_nobodys_silence() -> None:
    clients = Clients("r", silent_after_s=10.0)
    hello(clients, b"a", 0, 0.0)
    assert clients.newly_silent(3.0) == []
    assert clients.newly_silent(303.0) == []
    assert clients.newly_silent(307.0) == []
    assert clients.newly_silent(310.0) == ["actor-0"]


def test_who_is_gone_or_replaced_is_not_heard_and_not_missed() -> None:
    clients = Clients("r", silent_after_s=10.0)
    hello(clients, b"old", 0, 0.0)
    hello(clients, b"new", 0, 1.0, pid=2)
    clients.heard(b"old", 9.0)
    assert clients.ages(9.0) == {"actor-0": 8.0}
    clients.gone("actor-0")
    clients.heard(b"new", 9.0)
    assert clients.ages(9.0) == {}
    assert clients.newly_silent(4.0) == clients.newly_silent(99.0) == []


def watchful(serve: Serve) -> tuple[Clock, Any]:
    """A clock, and a server on it by which an actor is silent after 10 s."""
    clock = Clock()
    options = {"clock": clock, "silent_after_s": 10.0}
    return clock, serve(max_staleness=0, lease_timeout_s=600.0, server=options)


def test_a_silent_actor_loses_its_leases_and_is_served_again_when_it_speaks(serve: Serve) -> None:
    clock, server = watchful(serve)

    async def scenario() -> None:
        async with actor(server, 0) as a, actor(server, 1) as b:
            with learner(server) as other:
                (first, _) = (await a.lease("actor-0", V0, 4, wait_s=0)).leases
                for _ in range(2):
                    clock.step(4, server, other)
                    assert (await b.lease("actor-1", V0, 4, wait_s=0)).leases == ()
                gauges = other.stats().gauges
                assert gauges["heartbeat_age_s/actor-0"] == gauges["actor/heartbeat_age_s"] == 8
                assert gauges["heartbeat_age_s/actor-1"] == 0
                clock.step(2, server, other)
                taken = (await b.lease("actor-1", V0, 3, wait_s=0)).leases
                assert [(x.group.index, x.samples) for x in taken] == [(0, (0, 1)), (1, (0,))]
                # It speaks: a late result counts if it is the first, and it gets work again.
                late = wire.pack_trajectory(trajectory(first, 0, "actor-0"))
                assert await a.push(late) == "accepted"
                second = wire.pack_trajectory(trajectory(taken[0], 0, "actor-1"))
                assert await b.push(second) == "duplicate"
                again = (await a.lease("actor-0", V0, 4, wait_s=0)).leases
                assert [(x.group.index, x.samples) for x in again] == [(1, (1,))]
                stats = other.stats()
                assert stats.counts["requeued"] == 3  # and one that came after all
                assert stats.conserved

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert [r["event"] for r in server.records if r["event"]] == [
        {"event": "actor_silent", "actor": "actor-0", "leases": 2}
    ]


def test_a_silent_actor_has_no_request_that_could_be_granted(serve: Serve) -> None:
    """However long it asked to wait: it is answered, with nothing, while it is not silent yet."""
    clock, server = watchful(serve)

    async def scenario() -> None:
        async with actor(server, 0) as a, actor(server, 1) as b:
            with learner(server) as other:
                (first, _) = (await a.lease("actor-0", V0, 4, wait_s=0)).leases
                parked = asyncio.create_task(b.lease("actor-1", V0, 4, wait_s=600))
                await asyncio.sleep(0)
                await b.stats()  # the answer comes after the request was parked
                clock.step(4.9, server, other)
                assert not parked.done()
                clock.step(0.1, server, other)
                assert (await parked).leases == ()
                # Work that becomes free now is not given to whom nobody has heard since.
                kind, sample = FailureKind.INFRASTRUCTURE, first.group.sample(0)
                await a.fail("actor-0", first.lease, sample, kind, "engine died")
                stats = await a.stats()
                assert (stats.counts["requeued"], stats.counts["leased"]) == (1, 3)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_after_a_stop_an_actor_may_be_quiet(serve: Serve) -> None:
    clock = Clock()
    server = serve(lease_timeout_s=600.0, server={"clock": clock, "drain_s": 600.0})

    async def scenario() -> None:
        async with actor(server) as a:
            with learner(server) as other:
                await a.lease("actor-0", V0, 4, wait_s=0)
                other.stop("finished", final=V0, evaluate=True)
                for _ in range(4):
                    clock.step(4, server, other)
                counts = other.stats().counts
                assert (counts["leased"], counts["requeued"]) == (4, 0)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert server.records == []


def test_an_actor_that_is_gone_frees_its_leases_and_must_say_hello_again(serve: Serve) -> None:
    server = serve(max_staleness=0, lease_timeout_s=600.0)

    async def scenario() -> None:
        async with actor(server, 0) as a, actor(server, 1) as b:
            leases = (await a.lease("actor-0", V0, 4, wait_s=0)).leases
            dead = asyncio.create_task(a.lease("actor-0", V0, 4, wait_s=60))
            alive = asyncio.create_task(b.lease("actor-1", V0, 4, wait_s=60))
            await asyncio.sleep(0)
            await asyncio.gather(a.stats(), b.stats())  # both requests are parked
            with launcher(server) as boss:
                boss.gone("actor-0", "killed by signal 9")
                boss.gone("actor-7", "never was there")
                assert "heartbeat_age_s/actor-0" not in boss.stats().gauges
            assert [x.group.index for x in (await alive).leases] == [0, 1]
            with pytest.raises(LedgerError, match="actor-0 was replaced .* or has ended"):
                await dead
            # What it had sent before it died may still arrive: no lease, but results count.
            with pytest.raises(LedgerError, match="no more leases"):
                await a.lease("actor-0", V0, 4, wait_s=0)
            late = wire.pack_trajectory(trajectory(leases[0], 0, "actor-0"))
            assert await a.push(late) == "accepted"
            async with actor(server, 0) as successor:
                assert (await successor.lease("actor-0", V0, 4, wait_s=0)).state == "running"
                assert (await successor.stats()).counts["requeued"] == 3

    asyncio.run(asyncio.wait_for(scenario(), 60))


SAMPLE = SampleId("p", 0, 0, 0)


@pytest.mark.parametrize(
    ("role", "request_", "allowed"),
    [
        ("actor", wire.Gone(actor="actor-1", reason=""), "launcher"),
        ("learner", wire.Gone(actor="actor-1", reason=""), "launcher"),
        ("actor", wire.Commit(batch=1), "learner"),
        ("launcher", wire.Commit(batch=1), "learner"),
        ("actor", wire.Published(version=Version(0, 1)), "learner"),
        ("launcher", wire.Pull(rank=0, batch=1, wait_s=0), "learner"),
        ("actor", wire.Stop(reason="enough"), "learner or launcher"),
        ("learner", wire.LeaseRequest(actor="learner-0", applied=V0, capacity=1, wait_s=0),
         "actor"),
        ("launcher", wire.Progress(actor="launcher-0", tokens={}), "actor"),
        ("learner", wire.Push(header=header(SAMPLE, 1, "learner-0", V0, response_tokens=1)),
         "actor"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, wire.Message) else None,
)  # fmt: skip
def test_a_request_of_the_wrong_role_is_refused(
    serve: Serve, role: str, request_: wire.Message, allowed: str
) -> None:
    server = serve()
    frames = [bytes(8 + 17)] if isinstance(request_, wire.Push) else []
    with raw(server, role=role) as exchange:
        reply = exchange(wire.encode(request_, frames))
        assert isinstance(reply, wire.Error)
        assert f"may come from {allowed} only, its sender said hello as '{role}-0'" in reply.message
        stats = exchange(wire.encode(wire.StatsRequest()))
        assert isinstance(stats, wire.Stats)
        assert stats.state == "running"


def test_what_comes_before_hello_is_counted(serve: Serve) -> None:
    server = serve()
    with raw(server, hello=False) as exchange:
        assert isinstance(exchange(wire.encode(wire.Stop(reason="enough"))), wire.Error)
    with learner(server) as client:
        stats = client.stats()
        assert (stats.counts["strangers"], stats.state) == (1, "running")


@pytest.mark.parametrize(
    ("stops", "evaluate"),
    [
        ([("learner", True)], True),
        ([("learner", False)], False),
        ([("launcher", True), ("learner", True)], True),
        ([("launcher", False), ("learner", True)], False),
        ([("learner", True), ("launcher", False)], False),
    ],
    ids=["finished", "not asked", "stop.wall_s", "interrupted", "interrupted late"],
)
def test_the_last_version_is_evaluated_unless_a_stop_was_against_it(
    serve: Serve, stops: list[tuple[str, bool]], evaluate: bool
) -> None:
    server = serve()
    with learner(server) as rank0, launcher(server) as boss:
        for i, (role, wish) in enumerate(stops):
            if role == "learner":
                rank0.stop(f"reason {i}", final=Version(0, 3), evaluate=wish)
            else:
                boss.stop(f"reason {i}", evaluate=wish)
                stats = boss.stats()
                assert stats.evaluate == (stats.state == "done" and evaluate)
        stats = boss.stats()

    async def ask() -> wire.Leases:
        async with actor(server) as client:
            return await client.lease(client.name, V0, 1, wait_s=0)

    reply = asyncio.run(asyncio.wait_for(ask(), 30))
    assert (stats.state, stats.final, stats.evaluate) == ("done", Version(0, 3), evaluate)
    assert (reply.state, reply.final, reply.evaluate) == ("done", Version(0, 3), evaluate)
    assert stats.reason == "reason 0"


def test_filtering_without_end_stops_everybody_in_order(serve: Serve) -> None:
    server = serve(filter_zero_variance=True, max_filtered_in_a_row=3)
    sent: dict[SampleId, Trajectory] = {}

    async def scenario() -> None:
        async with actor(server, 0) as a, actor(server, 1) as b:
            with learner(server) as rank0:
                waiting = asyncio.create_task(asyncio.to_thread(rank0.pull, 1, 60.0))
                await produce(a, 4, sent)  # rewards are all 0
                assert (await b.lease("actor-1", V0, 0, wait_s=0)).state == "running"
                parked = asyncio.create_task(b.lease("actor-1", V0, 0, wait_s=60))
                await produce(a, 2, sent)
                reply = await waiting
                assert isinstance(reply, wire.Stopped)
                assert reply.reason.startswith("buffer.max_filtered_in_a_row=3: so many groups")
                assert (await parked).state == "stopping"
                stats = rank0.stats()
                assert (stats.state, stats.reason) == ("stopping", reply.reason)
                assert (stats.counts["groups_filtered"], stats.conserved) == (3, True)
                rank0.stop("stopped", final=V0, evaluate=True)
                assert rank0.stats().evaluate

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_the_end_of_the_prompts_stops_the_actors_too(serve: Serve) -> None:
    server = serve(prompts=prompts(5), prompts_end="stop.epochs=1", ranks=2, max_staleness=2)
    sent: dict[SampleId, Trajectory] = {}

    async def scenario() -> None:
        async with actor(server) as a:
            with learner(server, 0) as rank0, learner(server, 1) as rank1:
                assert len(await produce(a, 20, sent)) == 10
                parked = asyncio.create_task(a.lease("actor-0", V0, 1, wait_s=60))
                for batch in (1, 2):
                    assert isinstance(rank0.pull(batch, wait_s=0), BatchPart)
                # The last batch is given out: what is left fills none, so the run is ending.
                assert (await parked).state == "stopping"
                for batch in (1, 2):
                    assert isinstance(rank1.pull(batch, wait_s=0), BatchPart)
                    rank0.commit(batch)
                replies: list[Any] = [r.pull(3, wait_s=60) for r in (rank0, rank1)]
                assert replies[0].reason == replies[1].reason
                assert replies[0].reason == (
                    "stop.epochs=1: prompts exhausted, 1 groups left, batch 3 needs 2: not "
                    "trained, their samples stay held"
                )
                stats = rank0.stats()
                assert (stats.reason, stats.counts["held"]) == (replies[0].reason, 2)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_pull_finds_out_that_the_prompts_ended_when_no_actor_asks(serve: Serve) -> None:
    server = serve(prompts=prompts(0))
    with learner(server) as rank0:
        assert isinstance(rank0.pull(1, wait_s=60), wire.Stopped)
        assert rank0.stats().state == "stopping"


def test_a_stranger_cannot_take_part(serve: Serve) -> None:
    server = serve()
    client = BufferClient(server.endpoint, "other", "launcher", 0)
    try:
        with pytest.raises(WireError, match="launcher-0 belongs to 'other'"):
            client.hello()
        with pytest.raises(WireError, match="launcher-0 belongs to 'other'"):
            client.gone("actor-0", "I say so")
    finally:
        client.close()


# --- a run that is scaled ----------------------------------------------------------------------


def test_an_actor_that_is_to_leave_gets_no_lease_and_may_finish_what_it_has(serve: Serve) -> None:
    _, server = watchful(serve)

    async def scenario() -> None:
        async with actor(server, 0) as a, actor(server, 1) as b:
            with launcher(server) as chief:
                (first,) = (await b.lease("actor-1", V0, 2, wait_s=0)).leases
                chief.scale(1, ["actor-1"])
                reply = await b.lease("actor-1", V0, 2, wait_s=600)
                assert (reply.leases, reply.leave, reply.actors) == ((), True, 1)
                reply = await b.lease("actor-1", V0, 0, wait_s=0)
                assert (reply.leases, reply.leave, reply.state) == ((), True, "running")
                for k in range(2):
                    done = wire.pack_trajectory(trajectory(first, k, "actor-1"))
                    assert await b.push(done) == "accepted"
                other = await a.lease("actor-0", V0, 2, wait_s=0)
                assert (len(other.leases), other.leave, other.actors) == (1, False, 1)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_request_that_waits_is_answered_when_its_actor_is_to_leave(serve: Serve) -> None:
    """With room at once; without, it goes on waiting for the end of the run."""
    _, server = watchful(serve)

    async def scenario() -> None:
        async with actor(server, 0) as a, actor(server, 1) as b, actor(server, 2) as c:
            with launcher(server) as chief:
                await a.lease("actor-0", V0, 4, wait_s=0)  # nothing is left
                parked = {
                    x: asyncio.create_task(x.lease(x.name, V0, room, wait_s=600))
                    for x, room in ((a, 2), (b, 2), (c, 0))
                }
                await asyncio.sleep(0)
                for x in parked:
                    await x.stats()  # answered after the request was parked
                chief.scale(1, ["actor-1", "actor-2"])
                assert (await parked[b]).leave
                await a.stats()
                assert not parked[a].done()
                assert not parked[c].done()
                chief.stop("over", Version(0, 1))
                for x in (a, c):
                    end = await parked[x]
                    assert (end.state, end.actors, end.leave) == ("done", 1, False)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_the_successor_of_one_that_left_is_not_told_to_leave(serve: Serve) -> None:
    _, server = watchful(serve)

    async def scenario() -> None:
        with launcher(server) as chief:
            async with actor(server, 1) as b:
                (lease, _) = (await b.lease("actor-1", V0, 4, wait_s=0)).leases
                chief.scale(1, ["actor-1"])
                assert (await b.lease("actor-1", V0, 4, wait_s=0)).leave
                chief.gone("actor-1", "it has left")
                with pytest.raises(LedgerError, match="actor-1 was replaced"):
                    await b.lease("actor-1", V0, 4, wait_s=0)
            async with actor(server, 1) as successor:
                again = (await successor.lease("actor-1", V0, 4, wait_s=0)).leases
                assert again[0].group == lease.group, "what it had not finished was free at once"

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_one_that_has_not_said_hello_yet_is_told_to_leave_all_the_same(serve: Serve) -> None:
    _, server = watchful(serve)

    async def scenario() -> None:
        with launcher(server) as chief:
            chief.scale(1, ["actor-1"])
            async with actor(server, 1) as late:
                assert (await late.lease("actor-1", V0, 4, wait_s=600)).leave

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_only_the_launcher_may_scale(serve: Serve) -> None:
    _, server = watchful(serve)
    with learner(server) as other, pytest.raises(WireError, match="Scale may come from launcher"):
        other.scale(3)
