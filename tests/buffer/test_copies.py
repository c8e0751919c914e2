"""Copies of the ledger for a checkpoint: what is in one, and a run that goes on from it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.copies import read_copy, write_copy
from asyncrl.buffer.durable import Durability, open_ledger
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.shelf import payload_key
from asyncrl.errors import LedgerError, StoreError
from asyncrl.types import BatchPart, Envelope, SampleHeader, SampleId, Trajectory, Version
from tests.buffer.conftest import Running
from tests.buffer.peers import actor, learner, produce
from tests.buffer.samples import envelope, prompts, same_arrays
from tests.buffer.walks import Walk

SETTINGS: dict[str, Any] = {
    "group_size": 2, "groups_per_batch": 2, "max_staleness": 9, "lease_timeout_s": 60.0,
    "retain": True,
}  # fmt: skip


def bare(header: SampleHeader, nbytes: int) -> Envelope:
    return Envelope(header, bytes(nbytes))


@pytest.mark.parametrize("seed", range(8))
def test_the_state_in_a_copy_is_the_one_after_its_checkpoint(seed: int) -> None:
    rng = random.Random(seed)
    walk = Walk(
        rng, group_size=2, groups_per_batch=2, max_staleness=3, window=2, retain=True,
        replay_groups=seed % 2, replay_max_staleness=4,
    )  # fmt: skip
    assert walk.run(batches=9)
    ledger = walk.ledger
    for batch in (0, rng.randrange(1, 8), ledger.committed):
        state, samples = ledger.copy(batch)
        ledger.covered(batch)
        assert ledger.state() == state
        copied = Ledger.restore(
            state, envelope=bare, now=walk.now, **walk.settings | {"prompts": prompts()}
        )
        assert copied.state() == state
        held = sum(e.nbytes for e in samples.values())
        assert held == ledger.gauges(walk.now)["queue/bytes"]
    with pytest.raises(LedgerError, match="batches up to 9 are not kept any more"):
        ledger.copy(8)


def test_a_covered_group_that_somebody_still_works_on_keeps_no_samples() -> None:
    ledger = Ledger(prompts=prompts(), **SETTINGS | {"groups_per_batch": 1})
    (late,) = ledger.lease("a", Version(0, 0), 2, 0.0)
    ledger.expire(61.0)
    (second,) = ledger.lease("b", Version(0, 0), 2, 61.0)
    assert second.group == late.group
    for k in late.samples:
        sent = envelope(late.group.sample(k), late.lease, "a", Version(0, 0))
        assert ledger.accept(sent, 62.0) == "accepted"
    assert ledger.assign(1) is not None
    ledger.commit(1)
    assert ledger.lessees() == {"b"}
    state, samples = ledger.copy(1)
    assert samples == {}
    settings = {"prompts": prompts(), **SETTINGS, "groups_per_batch": 1}
    copied = Ledger.restore(state, envelope=bare, now=62.0, **settings)
    ledger.covered(1)
    assert copied.state() == ledger.state() == state


class Buffer:
    """A served ledger of a run's folder."""

    def __init__(self, run_dir: Path, durability: Durability, **options: Any) -> None:
        ledger, keeper = open_ledger(
            run_dir / "buffer", durability=durability, run_id="r", prompts=prompts(),
            memory_bytes=1, store_bytes=1 << 28, **SETTINGS, **options,
        )  # fmt: skip
        self.running = Running(ledger, keeper=keeper, copies_below=run_dir)
        self.endpoint = self.running.endpoint

    def close(self) -> None:
        self.running.close()
        assert self.running.error is None


def pull(client: Any, batch: int) -> BatchPart:
    part = client.pull(batch, wait_s=10.0)
    assert isinstance(part, BatchPart)
    return part


@pytest.mark.parametrize("durability", ["none", "process"])
def test_what_a_copy_holds_can_be_served_again(durability: Durability, tmp_path: Path) -> None:
    buffer = Buffer(tmp_path, durability)
    sent: dict[SampleId, Trajectory] = {}

    async def fill() -> None:
        async with actor(buffer) as a:
            assert set(await produce(a, 20, sent)) == {"accepted"}

    try:
        asyncio.run(fill())
        with learner(buffer) as client:
            before = {}
            for batch in (1, 2, 3):
                before[batch] = pull(client, batch)
                client.commit(batch)
            before[4] = pull(client, 4)  # assigned; one more is queued
            saved = client.save_ledger(tmp_path / "ledger", batch=1)
            assert saved.samples == 16, "batch 1 is covered by the checkpoint"
            assert saved.nbytes == (tmp_path / "ledger" / "data.mdb").stat().st_size
            client.commit(4)
            client.rewind(3, 1)
            with pytest.raises(LedgerError, match="incarnation 0 of the learner, which is 1"):
                client.commit(4)  # of a learner that is gone
            client.rewind(3, 1)  # the next one's own
            client.commit(4, incarnation=1)
    finally:
        buffer.close()

    state, payloads = read_copy(tmp_path / "ledger", "r")
    assert len(payloads) == saved.samples
    again = Ledger.restore(
        state, prompts=prompts(), now=0.0, **SETTINGS,
        envelope=lambda h, _: Envelope(h, payloads[payload_key(h)]),
    )  # fmt: skip
    again.rewind(1, 1)
    assert again.conserved()
    for batch in (2, 3, 4):
        part = again.part(batch, 0)
        assert part is not None
        assert part.manifest == before[batch].manifest
        assert all(same_arrays(e, sent[e.header.id]) for e in part.envelopes)
        again.commit(batch)
    assert again.part(5, 0) is not None, "what was queued is there as well"
    assert again.version == Version(1, 1)


def test_a_copy_is_refused_where_it_must_not_be(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    buffer = Buffer(run_dir, "none")
    try:
        with learner(buffer) as client:
            for path in (tmp_path / "ledger", run_dir, run_dir / "no" / "ledger"):
                with pytest.raises(LedgerError, match="must be a folder below"):
                    client.save_ledger(path, batch=0)
            with pytest.raises(LedgerError, match="batch 1: the last committed is 0"):
                client.save_ledger(run_dir / "ledger", batch=1)
            client.save_ledger(run_dir / "ledger", batch=0)
            client.save_ledger(run_dir / "ledger", batch=0)  # replaces it
    finally:
        buffer.close()
    assert [p.name for p in (run_dir / "ledger").iterdir()] == ["data.mdb"]


def test_a_copy_that_is_damaged_or_another_runs_is_not_read(tmp_path: Path) -> None:
    ledger = Ledger(prompts=prompts(), **SETTINGS)
    write_copy(tmp_path / "ledger", "r", *ledger.copy(0))
    with pytest.raises(StoreError, match="belongs to run 'r', this one is 'other'"):
        read_copy(tmp_path / "ledger", "other")
    file = tmp_path / "ledger" / "data.mdb"
    content, state = file.read_bytes(), ledger.state()
    assert state[:40] in content
    file.write_bytes(content.replace(state[:40], state[:39] + b"?"))
    with pytest.raises(StoreError, match="corrupt"):
        read_copy(tmp_path / "ledger", "r")
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(StoreError, match="corrupt"):
        read_copy(tmp_path / "ledger", "r")
    file.unlink()
    with pytest.raises(StoreError, match="is missing"):
        read_copy(tmp_path / "ledger", "r")
