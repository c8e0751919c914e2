"""Bytes: what is set aside, what is freed, who is held back, and that the limit stops no run."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.buffer.ledger import Ledger
from asyncrl.errors import ConfigError
from asyncrl.types import SAMPLE_OVERHEAD, Envelope, FailureKind, Version
from tests.buffer.samples import envelope, header, prompts
from tests.buffer.walks import Walk, give_all

V0 = Version(0, 0)
LONGEST = SAMPLE_OVERHEAD + 1000
GROUP = 2 * LONGEST


def make(**changes: Any) -> Ledger:
    """G = 2 groups of 2 samples, S = 3: admission lets 8 groups be alive."""
    values: dict[str, Any] = {
        "prompts": prompts(), "group_size": 2, "groups_per_batch": 2, "max_staleness": 3,
        "sample_bytes": LONGEST,
    }  # fmt: skip
    return Ledger(**(values | changes))


def used(ledger: Ledger) -> int:
    return ledger._books.room.used_bytes


def test_a_group_is_set_aside_at_its_longest_and_an_accepted_sample_counts_as_it_is() -> None:
    ledger = make(max_bytes=10 * GROUP)
    (lease,) = ledger.lease("a", V0, 1, now=0)  # one sample of two: the whole group is set aside
    assert used(ledger) == GROUP
    ledger.accept(envelope(lease.group.sample(0), lease.lease, "a", V0), now=0)
    gauges = ledger.gauges(now=0)
    assert (gauges["queue/bytes"], gauges["queue/reserved_bytes"]) == (6, LONGEST)
    assert gauges["queue/limit_bytes"] == 10 * GROUP
    assert used(ledger) == 6 + SAMPLE_OVERHEAD + LONGEST


def test_what_does_not_fit_is_held_back_and_woken_when_there_is_room() -> None:
    ledger = make(max_bytes=3 * GROUP)
    leases = ledger.lease("a", V0, 99, now=0)
    assert len(leases) == 3
    assert ledger.held_back("a") == "bytes"
    gauges = ledger.gauges(now=0)
    assert gauges["needs_bytes/a"] == GROUP
    assert "needs_version/a" not in gauges
    epoch = ledger.work_epoch
    ledger.accept(envelope(leases[0].group.sample(0), leases[0].lease, "a", V0), now=0)
    assert ledger.work_epoch == epoch  # not yet room for a whole group
    for k in (0, 1):
        ledger.accept(envelope(leases[1].group.sample(k), leases[1].lease, "a", V0), now=0)
    assert ledger.work_epoch == epoch  # three samples take SAMPLE_OVERHEAD each
    give_all(ledger, leases[2])
    assert ledger.work_epoch == epoch
    ledger.accept(envelope(leases[0].group.sample(1), leases[0].lease, "a", V0), now=0)
    assert ledger.assign(1) is not None
    ledger.commit(1)
    assert ledger.work_epoch == epoch + 1
    assert len(ledger.lease("a", V0, 99, now=0)) == 2
    assert used(ledger) <= 3 * GROUP


def test_short_samples_make_room_for_more_groups() -> None:
    ledger = make(max_bytes=2 * 20 * LONGEST, sample_bytes=10 * LONGEST, max_staleness=9)
    leases = ledger.lease("a", V0, 99, now=0)
    assert len(leases) == 2
    epoch = ledger.work_epoch
    give_all(ledger, leases[0])
    assert ledger.work_epoch == epoch
    give_all(ledger, leases[1])
    assert ledger.work_epoch == epoch + 1
    assert len(ledger.lease("a", V0, 99, now=0)) == 1
    assert ledger.held_back("a") == "bytes"


def test_a_lease_that_expires_is_taken_up_whatever_the_bytes() -> None:
    ledger = make(max_bytes=2 * GROUP, lease_timeout_s=10.0)
    leases = ledger.lease("a", V0, 99, now=0)
    assert used(ledger) == 2 * GROUP
    assert ledger.expire(now=10) == len(leases) == 2
    assert used(ledger) == 2 * GROUP  # both groups are still to be produced
    again = ledger.lease("b", V0, 99, now=11)
    assert [lease.group for lease in again] == [lease.group for lease in leases]


def test_without_room_a_batch_is_produced_after_the_one_before_it() -> None:
    ledger = make(max_bytes=0)
    first = ledger.lease("a", V0, 99, now=0)
    assert len(first) == 2  # G groups: without them nothing would ever be trained
    for lease in first:
        give_all(ledger, lease)
    assert ledger.lease("a", V0, 99, now=0) == []
    assert ledger.assign(1) is not None
    assert ledger.lease("a", V0, 99, now=0) == []
    assert ledger.held_back("a") == "bytes"
    ledger.commit(1)
    assert len(ledger.lease("a", V0, 99, now=0)) == 2


def test_a_failed_group_and_a_member_given_up_free_what_was_set_aside() -> None:
    ledger = make(max_bytes=10**9, group_size=3, max_attempts=1)
    first, second = ledger.lease("a", V0, 6, now=0)
    ledger.fail("a", first.lease, first.group.sample(0), FailureKind.REWARD, "no", now=0)
    assert used(ledger) == 5 * LONGEST
    ledger.fail("a", first.lease, first.group.sample(1), FailureKind.REWARD, "no", now=0)
    assert used(ledger) == 3 * LONGEST
    give_all(ledger, second)
    assert ledger.gauges(now=0)["queue/reserved_bytes"] == 0


def test_a_result_longer_than_what_was_set_aside_is_refused() -> None:
    ledger = make(max_bytes=10**9)
    (lease,) = ledger.lease("a", V0, 2, now=0)
    h = header(lease.group.sample(0), lease.lease, "a", V0)
    assert ledger.accept(Envelope(h, bytes(1001)), now=0) == "unknown"
    assert ledger.counts()["protocol_errors"] == 1
    (again,) = ledger.lease("a", V0, 1, now=0)
    h = header(again.group.sample(0), again.lease, "a", V0)
    assert ledger.accept(Envelope(h, bytes(1000)), now=0) == "accepted"
    assert ledger.conserved()


def test_waits_name_the_bytes_and_the_setting() -> None:
    gib = 2**30
    ledger = make(
        max_bytes=4 * gib, sample_bytes=gib, bytes_setting="buffer.memory_gib=4", group_size=3,
        groups_per_batch=1, max_staleness=5,
    )  # fmt: skip
    (lease,) = ledger.lease("actor-3", V0, 99, now=0)
    for k in lease.samples:
        h = header(lease.group.sample(k), lease.lease, "actor-3", V0)
        assert ledger.accept(Envelope(h, bytes(600 << 20)), now=0) == "accepted"
    assert ledger.assign(1) is not None
    assert ledger.lease("actor-3", V0, 99, now=0) == []
    assert ledger.waiting_for(2, now=0) == (
        "3 samples of batch 2; 3 not leased: bytes: 1.76 GiB held and 0 set aside leave no room "
        "for a group of up to 3 within buffer.memory_gib=4"
    )


def test_capacity_is_what_admission_and_bytes_allow() -> None:
    assert make().gauges(now=0)["queue/capacity"] == 16
    assert "queue/limit_bytes" not in make().gauges(now=0)
    assert make(max_bytes=5 * GROUP).gauges(now=0)["queue/capacity"] == 10
    assert make(max_bytes=0).gauges(now=0)["queue/capacity"] == 4


def test_senseless_limits_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs sample_bytes=0 to be at least 1"):
        make(max_bytes=1, sample_bytes=0)
    with pytest.raises(ConfigError, match="max_bytes=-1 must be at least 0"):
        make(max_bytes=-1)


@settings(max_examples=60, deadline=None)
@given(
    S=st.integers(0, 3), G=st.integers(1, 3), n_pub=st.integers(1, 2), size=st.integers(1, 3),
    groups=st.floats(0, 20), replay=st.integers(0, 2), retain=st.booleans(), data=st.data(),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_no_limit_stops_a_run_and_none_is_exceeded_by_more_than_a_batch(
    S: int, G: int, n_pub: int, size: int, groups: float, replay: int, retain: bool,
    data: st.DataObject, seed: int,
) -> None:  # fmt: skip
    limit = int(groups * size * LONGEST)
    batch_bytes = G * size * LONGEST

    def check(ledger: Ledger) -> None:
        ledger.lease("full", Version(0, 0), 0, 0.0)  # whoever asks, the pool is trimmed
        b = ledger._books
        kept = [e for a, _ in b.kept.values() for e in a.envelopes]
        kept += [e for a, _ in b.assigned.values() for e in a.replayed if retain]
        uncovered = sum({id(e): e.nbytes + SAMPLE_OVERHEAD for e in kept}.values())
        assert b.room.used_bytes <= max(limit, batch_bytes + uncovered)
        held = {id(e): e.nbytes for e in everything(ledger)}
        assert ledger.gauges(0.0)["queue/bytes"] == sum(held.values())
        if retain and rng.random() < 0.02:
            ledger.covered(ledger.committed)

    rng = random.Random(seed)
    walk = Walk(
        rng, check, group_size=size, groups_per_batch=G, batches_per_publication=n_pub,
        max_staleness=S, window=data.draw(st.integers(1, S * G * n_pub + 1)), max_bytes=limit,
        sample_bytes=LONGEST, replay_groups=replay, replay_max_staleness=2, retain=retain,
        filter_zero_variance=size > 1 and data.draw(st.booleans()),
    )  # fmt: skip
    assert walk.run(10), walk.ledger.waiting_for_next(walk.now)
    assert walk.ledger.conserved()


def everything(ledger: Ledger) -> list[Envelope]:
    """Every sample that the ledger can still hand out."""
    b = ledger._books
    held = [m.envelope for g in b.groups.values() for m in g.members if m.envelope is not None]
    for assignment, _ in [*b.assigned.values(), *b.kept.values()]:
        held += assignment.envelopes
    return held + [e for g in b.pool.values() for e in g.envelopes]
