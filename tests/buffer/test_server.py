"""The buffer over real sockets: data, long polls, refusals, restarts, the end."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from asyncrl import wire
from asyncrl.buffer.client import AsyncBufferClient, BufferClient
from asyncrl.errors import ConfigError, DeadlineError, LedgerError, WireError
from asyncrl.types import (
    SAMPLE_OVERHEAD,
    BatchPart,
    FailureKind,
    SampleId,
    Trajectory,
    Version,
)
from tests.buffer.conftest import Running
from tests.buffer.peers import V0, Serve, actor, learner, produce, raw
from tests.buffer.samples import prompts, same_arrays, trajectory


def test_a_few_hundred_samples_arrive_bit_for_bit(serve: Serve) -> None:
    batches, ranks, actors, size = 20, 2, 3, 4
    server = serve(group_size=size, groups_per_batch=4, ranks=ranks, window=3)
    sent: dict[SampleId, Trajectory] = {}
    got: dict[int, dict[int, BatchPart]] = {rank: {} for rank in range(ranks)}
    version = 0
    meet = threading.Barrier(ranks, timeout=60)

    def train(rank: int) -> None:
        nonlocal version
        with learner(server, rank) as client:
            for batch in range(1, batches + 1):
                part = client.pull(batch, wait_s=20)
                while isinstance(part, wire.NotYet):
                    part = client.pull(batch, wait_s=20)
                assert isinstance(part, BatchPart)
                got[rank][batch] = part
                meet.wait()  # both ranks have it, as after a collective
                if rank == 0:
                    client.commit(batch)
                    version = batch
                    client.published(Version(0, version))
                meet.wait()
            if rank == 0:
                client.stop("done", final=Version(0, version))

    async def one_actor(rank: int) -> None:
        rng = random.Random(rank)
        async with actor(server, rank) as client:
            while True:
                # Ask with what was published last: this actor applies at once.
                reply = await client.lease(client.name, Version(0, version), 6, wait_s=0.1)
                if reply.state != "running":
                    assert reply.final == Version(0, batches)
                    return
                work = [trajectory(x, k, client.name) for x in reply.leases for k in x.samples]
                rng.shuffle(work)
                for t in work:
                    sent[t.header.id] = t
                pushes = [client.push(wire.pack_trajectory(t)) for t in work]
                assert set(await asyncio.gather(*pushes)) <= {"accepted"}

    async def all_actors() -> None:
        await asyncio.gather(*(one_actor(rank) for rank in range(actors)))

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    asyncio.run(asyncio.wait_for(all_actors(), 120))
    for thread in threads:
        thread.join(60)
    trained: list[SampleId] = []
    for batch in range(1, batches + 1):
        parts = [got[rank][batch] for rank in range(ranks)]
        assert parts[0].manifest == parts[1].manifest
        assert sorted(i for p in parts for i in p.mine) == list(range(len(parts[0].manifest)))
        for part in parts:
            for index, e in zip(part.mine, part.envelopes, strict=True):
                assert e.header == part.manifest[index] == sent[e.header.id].header
                assert same_arrays(e, sent[e.header.id])
                assert np.array_equal(
                    wire.unpack_trajectory(e).behaviour_logprobs,
                    sent[e.header.id].behaviour_logprobs,
                )
        assert all(batch - 1 - h.version_min.version <= 1 for h in parts[0].manifest)
        trained += [h.id for h in parts[0].manifest]
    assert len(trained) == len(set(trained)) == batches * 4 * size
    with learner(server) as client:
        stats = client.stats()
    assert stats.conserved
    assert stats.counts["trained"] == len(trained)
    assert stats.counts["completed"] == len(sent)
    assert [r["step"] for r in server.records] == list(range(1, batches + 1))
    last = server.records[-1]
    assert last["metrics"]["samples/trained"] == len(trained)
    assert last["metrics"]["queue/capacity"] == 2 * 4 * size
    assert "samples/len_bias" in last["metrics"]


def test_a_lease_request_waits_until_work_is_free(serve: Serve) -> None:
    server = serve(max_staleness=0)

    async def scenario() -> None:
        async with actor(server, 0) as a, actor(server, 1) as b:
            (first, _) = (await a.lease("actor-0", V0, 4, wait_s=0)).leases
            none = await b.lease("actor-1", V0, 4, wait_s=0)
            assert none.leases == ()
            assert none.held_back
            waiting = asyncio.create_task(b.lease("actor-1", V0, 4, wait_s=60))
            await asyncio.sleep(0)
            await b.stats()  # the answer comes after the request was parked
            lost = first.group.sample(1)
            kind = FailureKind.INFRASTRUCTURE
            assert await a.fail("actor-0", first.lease, lost, kind, "engine died") == "accepted"
            (lease,) = (await waiting).leases
            assert (lease.group, lease.samples) == (first.group, (1,))

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_lease_request_waits_until_positions_fall(serve: Serve) -> None:
    server = serve(max_staleness=0, filter_zero_variance=True)

    async def scenario() -> None:
        async with actor(server, 0) as a, actor(server, 1) as b:
            (first, _) = (await a.lease("actor-0", V0, 4, wait_s=0)).leases
            waiting = asyncio.create_task(b.lease("actor-1", V0, 4, wait_s=60))
            await asyncio.sleep(0)
            await b.stats()  # the answer comes after the request was parked
            for k in (0, 1):  # equal rewards: the group is filtered out, another may be opened
                packed = wire.pack_trajectory(trajectory(first, k, "actor-0", reward=1.0))
                assert await a.push(packed) == "accepted"
            assert [x.group.index for x in (await waiting).leases] == [2]

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_newer_lease_request_answers_the_older(serve: Serve) -> None:
    server = serve(max_staleness=0)

    async def scenario() -> None:
        async with actor(server) as a:
            await a.lease("actor-0", V0, 4, wait_s=0)
            older = asyncio.create_task(a.lease("actor-0", V0, 4, wait_s=60))
            await asyncio.sleep(0)  # `older` is sent before the next one
            newer = await a.lease("actor-0", Version(0, 1), 4, wait_s=60)
            assert [x.group.index for x in newer.leases] == [2, 3]
            assert (await older).leases == ()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_pull_waits_for_the_last_sample_and_is_idempotent(serve: Serve) -> None:
    server = serve()
    sent: dict[SampleId, Trajectory] = {}
    parts: list[Any] = []

    def pull() -> None:
        with learner(server) as client:
            parts.extend(client.pull(1, wait_s=60) for _ in range(2))

    thread = threading.Thread(target=pull)

    async def scenario() -> None:
        async with actor(server) as client:
            assert await produce(client, 3, sent) == ["accepted"] * 3
            thread.start()
            assert await produce(client, 1, sent) == ["accepted"]

    asyncio.run(asyncio.wait_for(scenario(), 60))
    thread.join(60)
    first, second = parts
    assert first.manifest == second.manifest
    assert all(same_arrays(e, sent[e.header.id]) for e in second.envelopes)
    with learner(server) as client:
        client.commit(1)
        client.commit(1)
        assert client.stats().counts["trained"] == 4
        assert [r["step"] for r in server.records] == [1]
        with pytest.raises(LedgerError, match="batch 1 is already committed"):
            client.pull(1, wait_s=0)


def test_a_pull_in_vain_says_who_holds_what(serve: Serve) -> None:
    server = serve()

    async def scenario() -> None:
        async with actor(server, 3) as client:
            await client.lease("actor-3", V0, 4, wait_s=0)

    asyncio.run(scenario())
    with learner(server) as client:
        reply = client.pull(1, wait_s=0)
        assert isinstance(reply, wire.NotYet)
        assert reply.waiting_for == (
            "4 samples of batch 1, held by actor-3 (lease 1, 0 s), actor-3 (lease 2, 0 s)"
        )
        assert client.stats().waiting_for == reply.waiting_for


def test_the_same_push_again_changes_nothing(serve: Serve) -> None:
    server = serve()

    async def scenario() -> dict[str, int]:
        async with actor(server) as client:
            (lease,) = (await client.lease("actor-0", V0, 2, wait_s=0)).leases
            packed = wire.pack_trajectory(trajectory(lease, 0, "actor-0"))
            statuses = [await client.push(packed) for _ in range(3)]
            assert statuses == ["accepted", "duplicate", "duplicate"]
            stray = wire.pack_trajectory(trajectory(replace(lease, lease=99), 0, "actor-0"))
            assert await client.push(stray) == "unknown"
            await client.progress("actor-0", {lease.lease: 7})
            return (await client.stats()).counts

    counts = asyncio.run(asyncio.wait_for(scenario(), 30))
    assert (counts["completed"], counts["repeated_results"], counts["unknown_results"]) == (1, 2, 1)


GOOD = wire.encode(wire.StatsRequest(req=5))[0]


@pytest.mark.parametrize(
    ("frames", "message", "req"),
    [
        ([b""], "malformed header", 0),
        ([b"\xc1\xff"], "malformed header", 0),
        ([b"\x93\x01\x02\x03"], "malformed header", 0),
        ([msgspec.msgpack.encode({"type": "pull", "req": 8, "rank": "x"})], "malformed header", 8),
        ([msgspec.msgpack.encode({"type": "nonsense", "req": 9})], "malformed header", 9),
        ([msgspec.msgpack.encode({"type": "stats_request", "schema": 99, "req": 4})], "schema", 4),
        ([GOOD, b"stray"], "has 1 payloads, expected 0", 5),
        ([b"\x91" * 100_000], "malformed header", 0),
    ],
    ids=["empty", "not msgpack", "no map", "wrong type", "unknown", "schema", "frames", "deep"],
)
def test_malformed_messages_are_refused_and_the_server_goes_on(
    serve: Serve, frames: list[bytes], message: str, req: int
) -> None:
    server = serve()
    with raw(server) as exchange:
        reply = exchange(frames)
        assert isinstance(reply, wire.Error)
        assert (reply.error, reply.req) == ("WireError", req)
        assert message in reply.message
        stats = exchange([GOOD])
        assert isinstance(stats, wire.Stats)
        assert (stats.req, stats.counts["malformed"]) == (5, 1)


def test_strangers_are_refused(serve: Serve) -> None:
    server = serve()
    with raw(server, hello=False) as exchange:
        reply = exchange([GOOD])
        assert isinstance(reply, wire.Error)
        assert "say hello first" in reply.message
    with (
        pytest.raises(WireError, match=r"run 'r', learner-0 belongs to 'other'"),
        learner(server, run_id="other"),
    ):
        pass
    with raw(server) as exchange:
        reply = exchange(wire.encode(wire.Progress(actor="actor-0", tokens={})))
        assert isinstance(reply, wire.Error)
        assert "said hello as 'raw-0'" in reply.message
        reply = exchange(wire.encode(wire.Ok()))
        assert isinstance(reply, wire.Error)
        assert "not a request to the buffer" in reply.message
    with learner(server, rank=1) as client, pytest.raises(LedgerError, match="rank 1 is outside"):
        client.pull(1, wait_s=0)


def test_a_bug_in_the_ledger_is_an_error_reply_not_the_end(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()

    def broken(*args: Any) -> None:
        raise ZeroDivisionError("oops")

    with learner(server) as client:
        monkeypatch.setattr(server.ledger, "published", broken)
        with pytest.raises(
            LedgerError, match="internal error on Published: ZeroDivisionError: oops"
        ):
            client.published(Version(0, 1))
        monkeypatch.setattr(server.ledger, "exhausted_reason", broken)
        assert client.stats().conserved


def test_an_error_of_the_prompts_reaches_who_asked(serve: Serve) -> None:
    def bad() -> Iterator[Any]:
        raise ConfigError("no such file")
        yield

    server = serve(prompts=bad())

    async def scenario() -> None:
        async with actor(server) as client:
            with pytest.raises(ConfigError, match="no such file"):
                await client.lease("actor-0", V0, 4, wait_s=0)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_broken_conservation_law_ends_the_server(serve: Serve) -> None:
    server = serve()
    sent: dict[SampleId, Trajectory] = {}

    async def scenario() -> None:
        async with actor(server) as client:
            await produce(client, 4, sent)

    asyncio.run(scenario())
    with learner(server) as client:
        assert isinstance(client.pull(1, wait_s=0), BatchPart)
        server.ledger._books.census.dispatched += 1
        with pytest.raises(LedgerError, match="conservation violated"):
            client.commit(1)
    server.thread.join(30)
    assert isinstance(server.error, LedgerError)
    server.error = None


CRASHING_ACTOR = """
import asyncio, os, sys
from asyncrl.buffer.client import AsyncBufferClient
from asyncrl.types import Version

async def main():
    client = AsyncBufferClient(sys.argv[1], "r", "actor", int(sys.argv[2]))
    await client.hello()
    reply = await client.lease(client.name, Version(0, 0), 4, wait_s=10)
    print(sum(len(x.samples) for x in reply.leases), flush=True)
    os._exit(9)

asyncio.run(main())
"""


def crash_one_actor(server: Running, rank: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CRASHING_ACTOR, server.endpoint, str(rank)],
        capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (9, "4\n"), done.stderr


def test_the_leases_of_a_crashed_process_expire_and_others_do_its_work(serve: Serve) -> None:
    server = serve(max_staleness=0, lease_timeout_s=0.5)
    crash_one_actor(server, 7)
    sent: dict[SampleId, Trajectory] = {}

    async def scenario() -> None:
        async with actor(server) as client:
            reply = await client.lease("actor-0", V0, 4, wait_s=30)  # parked until the expiry
            assert [x.group.index for x in reply.leases] == [0, 1]
            for lease in reply.leases:
                for k in lease.samples:
                    t = trajectory(lease, k, "actor-0")
                    sent[t.header.id] = t
                    assert await client.push(wire.pack_trajectory(t)) == "accepted"

    asyncio.run(asyncio.wait_for(scenario(), 60))
    with learner(server) as client:
        part = client.pull(1, wait_s=10)
        assert isinstance(part, BatchPart)
        assert all(same_arrays(e, sent[e.header.id]) for e in part.envelopes)
        counts = client.stats().counts
        assert (counts["requeued"], counts["assigned"], counts["dispatched"]) == (4, 4, 8)


def test_a_restarted_actor_frees_what_its_former_self_held(serve: Serve) -> None:
    server = serve(max_staleness=0, lease_timeout_s=600.0)
    crash_one_actor(server, 0)

    async def scenario() -> None:
        async with actor(server, 0) as client:  # the same name
            await client.hello()  # a resend of the greeting drops nothing
            reply = await client.lease("actor-0", V0, 4, wait_s=0)
            assert [x.group.index for x in reply.leases] == [0, 1]
            await client.hello()
            stats = await client.stats()
            assert (stats.counts["requeued"], stats.counts["leased"]) == (4, 4)
            waiting = asyncio.create_task(client.lease("actor-0", V0, 4, wait_s=60))
            await asyncio.sleep(0)
            await client.stats()  # the answer comes after the request was parked
            async with actor(server, 0) as third:  # yet another took the name over
                with pytest.raises(LedgerError, match="actor-0 was replaced"):
                    await waiting
                with pytest.raises(LedgerError, match="actor-0 was replaced"):
                    await client.lease("actor-0", V0, 4, wait_s=0)
                stats = await third.stats()
                assert (stats.counts["requeued"], stats.counts["leased"]) == (8, 0)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_stop_answers_everybody_and_serves_what_is_assigned(serve: Serve) -> None:
    server = serve(ranks=2, server={"drain_s": 0.3})
    sent: dict[SampleId, Trajectory] = {}

    async def scenario() -> None:
        async with actor(server, 0) as a, actor(server, 1) as b:
            await produce(a, 4, sent)
            with learner(server, 0) as rank0, learner(server, 1) as rank1:
                assert isinstance(rank0.pull(1, wait_s=0), BatchPart)
                await a.lease("actor-0", V0, 8, wait_s=0)
                parked = asyncio.create_task(b.lease("actor-1", V0, 4, wait_s=60))
                await b.stats()  # `parked` was sent before
                waiting = asyncio.create_task(asyncio.to_thread(rank0.pull, 2, 60.0))
                rank1.stop("Ctrl-C")
                assert (await parked).state == "stopping"
                assert (await waiting) == wire.Stopped(req=3, reason="Ctrl-C")
                # Rank 0 has batch 1, so rank 1 gets it too; there is no batch 2 for anyone.
                assert isinstance(rank1.pull(1, wait_s=0), BatchPart)
                assert isinstance(rank1.pull(2, wait_s=0), wire.Stopped)
                rank0.commit(1)
                rank0.stop("1 steps are done", final=Version(0, 1))
                last = await a.lease("actor-0", V0, 4, wait_s=60)
                assert (last.state, last.final, last.leases) == ("done", Version(0, 1), ())
                assert rank0.stats().state == "done"

    asyncio.run(asyncio.wait_for(scenario(), 60))
    server.thread.join(30)  # nobody asks any more: `run` returns by itself
    assert not server.thread.is_alive()


def test_pulls_end_when_the_prompts_do(serve: Serve) -> None:
    server = serve(prompts=prompts(3))
    sent: dict[SampleId, Trajectory] = {}

    async def scenario() -> None:
        async with actor(server) as client:
            assert len(await produce(client, 9, sent)) == 6

    asyncio.run(scenario())
    with learner(server) as client:
        assert isinstance(client.pull(1, wait_s=0), BatchPart)
        reply = client.pull(2, wait_s=60)
        assert isinstance(reply, wire.Stopped)
        assert reply.reason == (
            "prompts exhausted, 1 groups left, batch 2 needs 2: not trained, their samples "
            "stay held"
        )


def test_a_reward_that_always_fails_ends_the_pull_with_one_message(serve: Serve) -> None:
    server = serve(max_attempts=1)

    async def scenario() -> None:
        async with actor(server) as a:
            with learner(server) as rank0:
                waiting = asyncio.create_task(asyncio.to_thread(rank0.pull, 1, 60.0))
                while not waiting.done():
                    for lease in (await a.lease("actor-0", V0, 4, wait_s=1)).leases:
                        sample, kind = lease.group.sample(0), FailureKind.REWARD
                        await a.fail("actor-0", lease.lease, sample, kind, "KeyError: 'x'")
                with pytest.raises(LedgerError, match=r"failed .* its reward \(KeyError: 'x'\)"):
                    await waiting
                with pytest.raises(LedgerError, match=r"check task\.reward"):
                    rank0.pull(1, wait_s=0)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_buffer_that_is_not_there_is_a_named_deadline() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        silent.bind("tcp://127.0.0.1:0")
        endpoint = silent.getsockopt_string(zmq.LAST_ENDPOINT)
        client = BufferClient(endpoint, "r", "learner", 1, timeout_s=0.05)
        with pytest.raises(
            DeadlineError, match=r"learner-1 waited 0 s .* reply to Pull of batch 7"
        ):
            client.pull(7, wait_s=0)
        client.close()
        client.close()

        async def scenario() -> None:
            lonely = AsyncBufferClient(endpoint, "r", "actor", 2, timeout_s=0.05)
            with pytest.raises(DeadlineError, match=r"actor-2 waited .* reply to Hello"):
                await lonely.hello()
            lonely.close()
            lonely.close()

        asyncio.run(scenario())


def test_a_reply_that_came_too_late_is_not_taken_for_the_next(serve: Serve) -> None:
    server = serve()
    with learner(server) as client:
        with pytest.raises(DeadlineError):
            client.pull(1, wait_s=0.3, deadline_s=0.01)
        began = time.monotonic()
        assert isinstance(client.stats(), wire.Stats)
        reply = client.pull(1, wait_s=0.4)  # the first pull's NotYet arrives meanwhile
        assert isinstance(reply, wire.NotYet)
        assert time.monotonic() - began < 30


def test_a_commit_asks_for_a_checkpoint_when_kept_batches_take_the_room(serve: Serve) -> None:
    batch = 2 * 2 * (SAMPLE_OVERHEAD + 1000)
    server = serve(
        retain=True, max_staleness=9, max_bytes=2 * batch, sample_bytes=SAMPLE_OVERHEAD + 1000
    )
    sent: dict[SampleId, Trajectory] = {}

    async def scenario() -> list[bool]:
        asked = []
        async with actor(server) as client:
            with learner(server) as rank0:
                for batch in range(1, 4):
                    await produce(client, 4, sent)
                    assert isinstance(rank0.pull(batch, wait_s=20), BatchPart)
                    asked.append(rank0.commit(batch))
                rank0.covered(3)
                await produce(client, 4, sent)
                assert isinstance(rank0.pull(4, wait_s=20), BatchPart)
                asked.append(rank0.commit(4))
        return asked

    assert asyncio.run(asyncio.wait_for(scenario(), 60)) == [False, True, True, False]
