"""The recording of a run: what is in it, and what disks and kills do to it."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl import wire
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.trajectories import TrajectoryWriter
from asyncrl.errors import DataError
from asyncrl.recording import INDEX, Recorded, Retired, decode_sample, encode_sample, read_recording
from asyncrl.types import BatchPart, FailureKind, Lease, SampleId, Trajectory, Version
from tests.buffer.conftest import small_ledger
from tests.buffer.peers import V0, Serve, actor, learner
from tests.buffer.samples import prompts, same_arrays, trajectory
from tests.helpers.metric_names import undocumented

PLENTY = 1 << 30


def retired(count: int, **fields: Any) -> list[Retired]:
    """Samples of one to fifty tokens."""
    sent = [
        trajectory(Lease(i, group, (0,), V0, 60.0, prompt), 0, "actor-0")
        for i, (group, prompt) in enumerate(prompts(count), start=1)
    ]
    return [Retired(wire.pack_trajectory(t), "filtered", 0, **fields) for t in sent]


def ids(recorded: list[Recorded]) -> list[SampleId]:
    return [r.entry.id for r in recorded]


def test_a_whole_run_is_recorded_once_and_byte_for_byte(serve: Serve, tmp_path: Path) -> None:
    folder = tmp_path / "trajectories"
    writer = TrajectoryWriter(folder, max_bytes=PLENTY, segment_bytes=8192)
    server = serve(
        group_size=3, groups_per_batch=2, batches_per_publication=2, max_staleness=2, window=3,
        ranks=2, max_attempts=1, failed_member="drop", filter_zero_variance=True,
        server={"recording": writer},
    )  # fmt: skip
    sent: dict[SampleId, Trajectory] = {}
    ranks: dict[SampleId, int] = {}
    dropped: set[SampleId] = set()
    batches, n_pub = 12, 2
    rng = random.Random(1)

    async def scenario() -> None:
        nonlocal ranks
        async with actor(server) as client:
            with learner(server, 0) as rank0, learner(server, 1) as rank1:
                version, batch = 0, 1
                while batch <= batches:
                    applied = Version(0, max(0, version - rng.randrange(2)))
                    reply = await client.lease(client.name, applied, 9, wait_s=0)
                    work = [(x, k) for x in reply.leases for k in x.samples]
                    rng.shuffle(work)
                    for lease, k in work:
                        sample = lease.group.sample(k)
                        if rng.random() < 0.05:
                            kind = FailureKind.REWARD
                            await client.fail(client.name, lease.lease, sample, kind, "boom")
                            continue
                        t = trajectory(lease, k, client.name, float(rng.random() < 0.3))
                        if await client.push(wire.pack_trajectory(t)) == "accepted":
                            sent[sample] = t
                    parts = [r.pull(batch, wait_s=0) for r in (rank0, rank1)]
                    if not isinstance(parts[0], BatchPart):
                        continue
                    for part in parts:
                        assert isinstance(part, BatchPart)
                        ranks |= {e.header.id: part.rank for e in part.envelopes}
                    stale = [h.id for h in parts[0].manifest if rng.random() < 0.1]
                    dropped.update(stale)
                    rank0.commit(batch, stale)
                    if batch % n_pub == 0:
                        version += 1
                        rank0.published(Version(0, version))
                    batch += 1
                (lease, *_) = (await client.lease(client.name, Version(0, version), 9, 0)).leases
                rank0.stop("finished", final=Version(0, version))
                late = trajectory(lease, lease.samples[0], client.name)  # comes after the end
                assert await client.push(wire.pack_trajectory(late)) == "accepted"
                sent[late.header.id] = late
                # All that ended is on disk before the server ends: it may be killed then.
                while (gauges := (await client.stats()).gauges)["record/samples"] < len(sent):
                    await asyncio.sleep(0.01)
                assert gauges["record/waiting"] == 0

    asyncio.run(asyncio.wait_for(scenario(), 120))
    server.close()
    counts = server.ledger.counts()
    recorded = list(read_recording(folder))
    assert len(ids(recorded)) == len(set(ids(recorded))) == counts["completed"]
    assert set(ids(recorded)) == set(sent)
    by_outcome = Counter(r.entry.outcome for r in recorded)
    assert by_outcome["trained"] == counts["trained"]
    assert by_outcome["dropped_stale"] == counts["dropped_stale"] == len(dropped)
    assert by_outcome["filtered"] == counts["filtered"]
    assert 0 < by_outcome["failed"] <= counts["failed"]
    assert by_outcome["held"] == counts["held"] - counts["leased"]
    assert min(by_outcome[o] for o in ("trained", "dropped_stale", "filtered", "held")) > 0
    order: dict[int, list[int]] = {}
    for r in recorded:
        e, t = r.entry, sent[r.entry.id]
        assert same_arrays(r.envelope(), t)
        assert r.envelope().header == t.header
        assert (e.version_min, e.version_max) == (t.header.version_min, t.header.version_max)
        assert (e.reward, e.actor, e.lease) == (t.header.reward, "actor-0", t.header.lease)
        if e.id in ranks:
            assert e.outcome == ("dropped_stale" if e.id in dropped else "trained")
            assert e.batch is not None
            assert (e.rank, e.version) == (ranks[e.id], (e.batch - 1) // n_pub)
            stamps = r.trajectory().versions
            assert e.head_staleness == e.version - stamps.min()
            assert e.head_staleness <= 2
            assert e.position is not None
            order.setdefault(e.batch, []).append(e.position)
        else:
            assert (e.rank, e.version, e.batch, e.position, e.head_staleness) == (None,) * 5
    assert sorted(order) == list(range(1, batches + 1))
    first, last = order[1], order[batches]
    assert max(first) <= 3  # two groups, and the window lets one come from two places on
    assert len(set(last)) == 2
    assert all(abs(p - 2 * (batches - 1)) <= 3 for p in last)
    assert len(list(folder.glob("*.frames"))) > 2
    assert all(f.stat().st_size <= 8192 for f in folder.glob("*.frames"))
    metrics = writer.metrics()
    assert metrics["record/samples"] == len(recorded)
    assert metrics["record/bytes"] == sum(f.stat().st_size for f in folder.iterdir())
    assert metrics["record/unrecorded"] == 0
    emitted = set(server.records[-1]["metrics"])
    assert {"record/samples", "record/bytes", "record/unrecorded"} < emitted
    assert "actor/heartbeat_age_s" in emitted
    assert undocumented(emitted, ("Buffer", "At each commit")) == []


def test_what_is_held_when_a_server_is_cancelled_is_recorded(serve: Serve, tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, max_bytes=PLENTY)
    server = serve(server={"recording": writer})

    async def scenario() -> None:
        async with actor(server) as client:
            (lease,) = (await client.lease(client.name, V0, 2, wait_s=0)).leases
            await client.push(wire.pack_trajectory(trajectory(lease, 1, client.name)))
            assert (await client.stats()).gauges["record/samples"] == 0

    asyncio.run(asyncio.wait_for(scenario(), 60))
    server.close()
    assert [(r.entry.id.sample, r.entry.outcome) for r in read_recording(tmp_path)] == [(1, "held")]


def test_a_commit_after_the_end_does_not_tell_a_sample_twice() -> None:
    ledger = small_ledger(groups_per_batch=1)
    ledger.keep_retired()
    (lease,) = ledger.lease("a", V0, 2, now=0)
    for k in lease.samples:
        ledger.accept(wire.pack_trajectory(trajectory(lease, k, "a")), now=0)
    ledger.assign(1)
    ledger.tell_held()
    ledger.commit(1)
    assert [r.outcome for r in ledger.take_retired()] == ["held", "held"]
    assert ledger.take_retired() == []


def test_the_memory_of_what_retired_is_freed_when_it_is_taken() -> None:
    ledger: Ledger = small_ledger(filter_zero_variance=True)
    ledger.keep_retired()
    for round_ in range(1, 4):
        for lease in ledger.lease("a", V0, 2, now=0):
            for k in lease.samples:
                ledger.accept(wire.pack_trajectory(trajectory(lease, k, "a")), now=0)
        assert len(ledger.take_retired()) == 2, round_
    assert ledger.gauges(0)["queue/bytes"] == 0


def test_a_sample_on_disk_is_its_push_with_lengths() -> None:
    (sample,) = retired(1)
    data = encode_sample(sample.envelope)
    at, frames = 0, []
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        frames.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    message, payloads = wire.decode(frames)
    assert message == wire.Push(req=0, header=sample.envelope.header)
    assert payloads == (sample.envelope.payload,)
    assert decode_sample(data).header == sample.envelope.header
    for bad in (data[:-1], data + b"\0", b"", b"\xff" * 100):
        with pytest.raises(wire.WireError):
            decode_sample(bad)


def test_recording_ends_at_its_size_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = TrajectoryWriter(tmp_path, max_bytes=20_000)
    samples = retired(100)
    with caplog.at_level(logging.WARNING):
        writer.put(samples[:90])
        writer.close()
        writer.put(samples[90:])
    assert writer.ended.startswith("record.max_gib is reached after ")
    recorded = list(read_recording(tmp_path))
    assert ids(recorded) == [s.envelope.header.id for s in samples[: len(recorded)]]
    assert 5 < len(recorded) < 90
    metrics = writer.metrics()
    size = sum(f.stat().st_size for f in tmp_path.iterdir())
    assert metrics == {
        "record/samples": len(recorded),
        "record/bytes": size,
        "record/unrecorded": 100 - len(recorded),
    }
    assert 19_000 < size <= 20_000
    assert sum("recording ended" in r.message for r in caplog.records) == 1


def test_the_end_of_the_recording_is_an_event_and_the_run_goes_on(
    serve: Serve, tmp_path: Path
) -> None:
    writer = TrajectoryWriter(tmp_path, max_bytes=1)
    server = serve(filter_zero_variance=True, server={"recording": writer})

    async def scenario() -> None:
        async with actor(server) as client:
            for _ in range(3):
                for lease in (await client.lease(client.name, V0, 2, wait_s=0)).leases:
                    for k in lease.samples:
                        packed = wire.pack_trajectory(trajectory(lease, k, client.name))
                        assert await client.push(packed) == "accepted"
            while (await client.stats()).gauges["record/unrecorded"] < 6:
                await asyncio.sleep(0.01)
            while not server.records:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    reason = "record.max_gib is reached after 0 samples"
    assert [r["event"] for r in server.records] == [{"event": "recording_ended", "reason": reason}]


class FakeFile(io.RawIOBase):
    """A file that asks before each write."""

    def __init__(self, path: str, before_write: Callable[[str, int], int]) -> None:
        self.path, self.before_write = path, before_write
        self.file = open(path, "xb", buffering=0)  # noqa: SIM115

    def write(self, data: Any) -> int:
        """What `before_write` lets pass of it."""
        return self.file.write(data[: self.before_write(self.path, len(data))])

    def truncate(self, size: int | None = None) -> int:
        return self.file.truncate(size)

    def close(self) -> None:
        self.file.close()
        super().close()


def create(before_write: Callable[[str, int], int]) -> Any:
    return lambda path: FakeFile(path, before_write)


def test_a_slow_disk_holds_nobody_and_what_does_not_fit_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    free, writing = threading.Event(), threading.Event()

    def before_write(path: str, size: int) -> int:
        writing.set()
        assert free.wait(60)
        return size

    samples = retired(100)
    writer = TrajectoryWriter(
        tmp_path, max_bytes=PLENTY, queue_bytes=10_000, create=create(before_write)
    )
    with caplog.at_level(logging.WARNING):
        writer.put(samples[:3])
        assert writing.wait(60)
        for sample in samples[3:]:
            writer.put([sample])  # the disk stands still all the time
    assert sum("too slow" in r.message for r in caplog.records) == 1
    waiting, lost = writer.waiting, writer.metrics()["record/unrecorded"]
    assert waiting + lost == 100
    assert min(waiting, lost) > 5
    free.set()
    writer.close(60)
    recorded = list(read_recording(tmp_path))
    assert len(recorded) == writer.metrics()["record/samples"] == waiting
    assert writer.metrics()["record/unrecorded"] == lost
    assert writer.waiting == 0
    assert writer.ended == ""


def test_a_disk_that_never_answers_does_not_hold_up_the_end(tmp_path: Path) -> None:
    free, writing = threading.Event(), threading.Event()

    def before_write(path: str, size: int) -> int:
        writing.set()
        assert free.wait(60)
        return size

    writer = TrajectoryWriter(tmp_path, max_bytes=PLENTY, create=create(before_write))
    samples = retired(10)
    writer.put(samples[:2])
    assert writing.wait(60)
    writer.put(samples[2:])
    writer.close(timeout_s=0.05)
    assert "the disk did not take what was left within 0 s" in writer.ended
    assert writer.metrics()["record/unrecorded"] == 8
    assert writer.waiting == 2
    free.set()
    writer._thread.join(60)
    assert writer.metrics()["record/samples"] == len(list(read_recording(tmp_path))) == 2


@pytest.mark.parametrize("full", ["frames", "jsonl"])
def test_a_full_disk_ends_the_recording_and_leaves_what_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, full: str
) -> None:
    """The write that fails has left some of its bytes; they are cut off again."""
    samples = retired(60)
    first_done, calls = threading.Event(), Counter[str]()

    def before_write(path: str, size: int) -> int:
        if not path.endswith(full):
            return size
        calls[path] += 1
        if calls[path] == 1:
            return size
        if calls[path] == 2:
            return min(size, 100)
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = TrajectoryWriter(tmp_path, max_bytes=PLENTY, create=create(before_write))
    with caplog.at_level(logging.WARNING):
        writer.put(samples[:20])
        while writer.waiting:
            first_done.wait(0.01)
        writer.put(samples[20:40])
        while writer.waiting:
            first_done.wait(0.01)
        writer.put(samples[40:])
        writer.close()
    assert "No space left on device" in writer.ended
    recorded = list(read_recording(tmp_path))
    assert ids(recorded) == [s.envelope.header.id for s in samples[:20]]
    assert writer.metrics()["record/samples"] == 20
    assert writer.metrics()["record/unrecorded"] == 40
    index = (tmp_path / "index.jsonl").read_bytes()
    assert index.endswith(b"\n")
    assert index.count(b"\n") == 20
    if full == "frames":
        whole = recorded[-1].entry
        assert (tmp_path / whole.file).stat().st_size == whole.offset + whole.bytes
    assert sum("recording ended" in r.message for r in caplog.records) == 1


def test_an_older_recording_is_never_written_over(tmp_path: Path) -> None:
    first = TrajectoryWriter(tmp_path, max_bytes=PLENTY)
    first.put(retired(3))
    first.close()
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    second = TrajectoryWriter(tmp_path, max_bytes=PLENTY)
    second.put(retired(2))
    second.close()
    assert "File exists" in second.ended
    assert second.metrics()["record/unrecorded"] == 2
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before


def test_every_torn_end_is_readable(tmp_path: Path) -> None:
    samples = retired(5)
    writer = TrajectoryWriter(tmp_path, max_bytes=PLENTY)
    writer.put(samples)
    writer.close()
    whole = list(read_recording(tmp_path))
    assert len(whole) == 5
    index, frames = tmp_path / "index.jsonl", tmp_path / "000001.frames"
    text, data = index.read_bytes(), frames.read_bytes()
    lines = text.split(b"\n")
    at_line_4 = len(b"\n".join(lines[:3])) + 1
    for cut in (*range(at_line_4, len(text), 11), len(text) - 1):
        index.write_bytes(text[:cut])
        expected = text[:cut].count(b"\n")
        assert len(list(read_recording(tmp_path))) == expected
    index.write_bytes(text)
    for cut in (*range(whole[3].entry.offset, len(data), 11), len(data) - 1):
        frames.write_bytes(data[:cut])
        complete = [r for r in whole if r.entry.offset + r.entry.bytes <= cut]
        assert ids(list(read_recording(tmp_path))) == ids(complete)
    frames.unlink()
    assert list(read_recording(tmp_path)) == []
    with pytest.raises(DataError, match="000001.frames at byte 0"):
        whole[0].trajectory()


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, max_bytes=PLENTY)
    writer.put(retired(2))
    writer.close()
    index = tmp_path / "index.jsonl"
    good = index.read_bytes().split(b"\n")[0]
    escape = json.dumps(json.loads(good) | {"file": "../../secret.frames"}).encode()
    for bad in (b"{", b'{"id": 3}', escape):
        index.write_bytes(good + b"\n" + bad + b"\n")
        with pytest.raises(DataError, match=r"index\.jsonl:2: "):
            list(read_recording(tmp_path))
    with pytest.raises(DataError, match="no recording"):
        list(read_recording(tmp_path / "nowhere"))


def test_consumption_and_staleness_of_an_earlier_incarnation(tmp_path: Path) -> None:
    writer = TrajectoryWriter(tmp_path, max_bytes=PLENTY)
    (envelope,) = [r.envelope for r in retired(1)]
    consumed = {"version": 2, "batch": 3, "rank": 1, "position": 8}
    writer.put([Retired(envelope, "trained", 1, **consumed)])
    writer.close()
    (one,) = read_recording(tmp_path)
    assert one.entry.head_staleness == 2
    assert (one.entry.incarnation, one.entry.position, one.entry.rank) == (1, 8, 1)
    versions = wire.unpack_trajectory(envelope).versions
    np.testing.assert_array_equal(one.trajectory().versions, versions)


ENDLESS = """
import sys, time
from asyncrl.buffer.trajectories import TrajectoryWriter
from tests.buffer.test_recording import retired

writer = TrajectoryWriter(sys.argv[1], max_bytes=1 << 30, segment_bytes=50_000)
samples = retired(5000)
print("ready", flush=True)
for sample in samples:
    writer.put([sample])
    time.sleep(0.0002)  # so that it is killed in the middle, whatever the disk's speed
"""


def test_a_killed_process_leaves_a_recording_that_can_be_read(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(tmp_path / "t")],
        stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": os.getcwd()},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        index, patience = tmp_path / "t" / "index.jsonl", threading.Event()
        for _ in range(6000):
            if index.exists() and index.stat().st_size > 100_000:
                break
            patience.wait(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()  # type: ignore[union-attr]
    recorded = list(read_recording(tmp_path / "t"))
    assert len(recorded) > 100
    assert [r.entry.id.index for r in recorded] == list(range(len(recorded)))
    for r in recorded:
        sent = Lease(r.entry.lease, r.entry.id.group, (0,), V0, 60.0, next(prompts(1))[1])
        assert same_arrays(r.envelope(), trajectory(sent, 0, "actor-0"))


def test_what_was_held_comes_again_only_with_another_fate(tmp_path: Path) -> None:
    samples = retired(2)
    held = [replace(s, outcome="held") for s in samples]
    before = TrajectoryWriter(tmp_path, max_bytes=PLENTY)
    before.put(held)
    before.close()
    after = TrajectoryWriter(tmp_path, max_bytes=PLENTY, resume=True)
    after.put([samples[0], held[1]])
    after.close()
    told = [(r.entry.id.index, r.entry.outcome) for r in read_recording(tmp_path)]
    assert told == [(0, "held"), (1, "held"), (0, "filtered")]


def test_a_writer_goes_on_with_what_its_predecessor_left(tmp_path: Path) -> None:
    folder, samples = tmp_path / "t", retired(8)
    before = TrajectoryWriter(folder, max_bytes=PLENTY)
    before.put(samples[:5])
    before.close()
    index = folder / INDEX
    index.write_bytes(index.read_bytes() + b'{"id": torn')
    after = TrajectoryWriter(folder, max_bytes=PLENTY, resume=True)
    after.put(samples[3:])
    after.close()
    assert ids(list(read_recording(folder))) == [s.envelope.header.id for s in samples]
    metrics = after.metrics()
    assert (metrics["record/samples"], metrics["record/unrecorded"]) == (8, 0)
    assert metrics["record/bytes"] == sum(p.stat().st_size for p in folder.iterdir())
