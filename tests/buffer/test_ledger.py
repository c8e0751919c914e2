"""The ledger's rules one by one, liveness, and what it says about waits."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.buffer.ledger import Ledger
from asyncrl.errors import ConfigError, LedgerError
from asyncrl.types import Envelope, FailureKind, Lease, Version
from tests.buffer.samples import envelope, prompts

V0 = Version(0, 0)


def make(**changes: Any) -> Ledger:
    """G = 2 groups of n = 2 samples, S = 1: positions 0 to 3 are open to version 0."""
    values: dict[str, Any] = {
        "prompts": prompts(), "group_size": 2, "groups_per_batch": 2, "max_staleness": 1,
        "lease_timeout_s": 10.0,
    }  # fmt: skip
    return Ledger(**(values | changes))


def give(
    ledger: Ledger, lease: Lease, k: int, actor: str = "a", now: float = 0.0, **header: Any
) -> str:
    """Deliver sample k of a lease, with changes to its header."""
    sent = envelope(lease.group.sample(k), lease.lease, actor, lease.version, reward=float(k))
    return ledger.accept(Envelope(replace(sent.header, **header), sent.payload), now)


def give_all(ledger: Ledger, lease: Lease, actor: str = "a", now: float = 0.0) -> None:
    for k in lease.samples:
        assert give(ledger, lease, k, actor, now) == "accepted"


def test_leases_fill_the_capacity_and_split_a_group() -> None:
    ledger = make()
    first = ledger.lease("a", V0, 3, now=0)
    second = ledger.lease("b", V0, 9, now=0)
    assert [(x.group.index, x.samples) for x in first] == [(0, (0, 1)), (1, (0,))]
    assert [(x.group.index, x.samples) for x in second] == [(1, (1,)), (2, (0, 1)), (3, (0, 1))]
    assert ledger.held_back("b")
    assert not ledger.held_back("a")


def test_an_actor_that_lags_is_held_back_alone() -> None:
    ledger = make()
    ledger.lease("a", V0, 8, now=0)
    assert ledger.lease("a", V0, 8, now=0) == []
    assert ledger.gauges(now=0)["needs_version/a"] == 1
    assert [x.group.index for x in ledger.lease("b", Version(0, 1), 8, now=0)] == [4, 5]
    assert ledger.held_back("b")
    assert ledger.gauges(now=0)["needs_version/b"] == 2


def test_an_earlier_incarnation_gets_nothing() -> None:
    ledger = make()
    ledger.published(Version(1, 0))
    assert ledger.lease("a", Version(0, 5), 4, now=0) == []
    assert ledger.held_back("a")
    assert ledger.lease("a", Version(1, 0), 4, now=0)


@pytest.mark.parametrize(("window", "passes"), [(2, False), (3, True)])
def test_a_group_overtakes_within_the_window_only(window: int, passes: bool) -> None:
    ledger = make(window=window)
    leases = ledger.lease("a", V0, 8, now=0)[:3] + ledger.lease("a", Version(0, 1), 4, now=0)
    give_all(ledger, leases[1])
    give_all(ledger, leases[2])  # groups 1 and 2 are complete, group 0 is not
    assignment = ledger.assign(1)
    assert (assignment is not None) == passes
    assert ledger.position(leases[0].group) == 0  # what overtook it does not shift it
    if assignment is not None:
        assert [h.id.index for h in assignment.manifest] == [1, 1, 2, 2]


def test_a_window_that_would_deadlock_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"buffer\.window=4 is outside 1\.\.3"):
        make(window=4)
    make(window=3)


def test_an_unreachable_filter_is_refused() -> None:
    with pytest.raises(ConfigError, match="group_size=1"):
        make(group_size=1, filter_zero_variance=True)


def test_progress_and_results_renew_a_lease_and_silence_ends_it() -> None:
    ledger = make()
    (lease,) = ledger.lease("a", V0, 2, now=0)
    ledger.progress("a", {lease.lease: 5}, now=8)
    ledger.progress("b", {lease.lease: 50}, now=17)  # not its actor
    assert ledger.expire(now=17.9) == 0
    give(ledger, lease, 0, now=17.9)
    assert ledger.expire(now=27.8) == 0
    assert ledger.expire(now=27.9) == 1
    assert ledger.counts()["requeued"] == 1
    (again,) = ledger.lease("b", V0, 1, now=28)
    assert (again.group, again.samples) == (lease.group, (1,))


def test_a_token_count_that_does_not_grow_renews_nothing() -> None:
    ledger = make()
    (lease,) = ledger.lease("a", V0, 2, now=0)
    ledger.progress("a", {lease.lease: 5}, now=8)
    ledger.progress("a", {lease.lease: 5, 99: 1}, now=17)
    assert ledger.expire(now=18) == 1


def test_a_result_under_anothers_name_is_unknown() -> None:
    ledger = make()
    (lease,) = ledger.lease("a", V0, 2, now=0)
    assert give(ledger, lease, 0, actor="b") == "unknown"
    sample, kind = lease.group.sample(0), FailureKind.DATA
    assert ledger.fail("b", lease.lease, sample, kind, "no", now=0) == "unknown"
    counts = ledger.counts()
    assert (counts["unknown_results"], counts["leased"]) == (2, 2)


def test_a_failure_renews_its_lease() -> None:
    ledger = make()
    (lease,) = ledger.lease("a", V0, 2, now=0)
    sample = lease.group.sample(0)
    ledger.fail("a", lease.lease, sample, FailureKind.REWARD, "timeout", now=9)
    assert ledger.expire(now=18) == 0


def test_a_late_result_wins_when_it_is_first() -> None:
    ledger = make()
    (old,) = ledger.lease("a", V0, 2, now=0)
    ledger.expire(now=10)
    (new,) = ledger.lease("b", V0, 1, now=10)
    assert give(ledger, old, 0) == "accepted"
    assert ledger.counts()["requeued"] == 1  # only sample 1 is still to be leased again
    assert give(ledger, new, 0, actor="b") == "duplicate"
    counts = ledger.counts()
    assert (counts["duplicate"], counts["completed"], counts["assembling"]) == (1, 1, 1)
    assert [x.samples for x in ledger.lease("b", V0, 1, now=11)] == [(1,)]


def test_a_late_result_that_nobody_repeated_is_not_leased_again() -> None:
    ledger = make()
    (old,) = ledger.lease("a", V0, 2, now=0)
    ledger.expire(now=10)
    give_all(ledger, old)
    assert ledger.lease("b", V0, 2, now=10)[0].group.index == 1


def test_the_same_push_again_is_a_duplicate_even_after_training() -> None:
    ledger = make(groups_per_batch=1)
    (lease,) = ledger.lease("a", V0, 2, now=0)
    give_all(ledger, lease)
    assert give(ledger, lease, 0) == "duplicate"
    ledger.assign(1)
    ledger.commit(1)
    assert give(ledger, lease, 0) == "duplicate"
    counts = ledger.counts()
    assert (counts["trained"], counts["duplicate"], counts["repeated_results"]) == (2, 0, 2)
    assert ledger.conserved()
    assert ledger.records() == 0


@pytest.mark.parametrize(
    "change",
    [{"version_min": V0}, *({"reward": float(r)} for r in ("nan", "inf", "-inf", "1.1e30"))],
    ids=str,
)
def test_a_result_that_must_not_be_trained_is_refused_and_made_again(change: Any) -> None:
    ledger = make()
    (lease,) = ledger.lease("a", Version(0, 1), 1, now=0)
    assert give(ledger, lease, 0, **change) == "unknown"
    assert ledger.counts()["protocol_errors"] == 1
    assert ledger.counts()["requeued"] == 1
    (again,) = ledger.lease("a", Version(0, 1), 1, now=0)
    assert again.samples == (0,)
    assert give(ledger, again, 0) == "accepted"
    assert ledger.conserved()


def test_a_newer_incarnation_with_too_low_a_version_is_not_trained() -> None:
    ledger = make()
    leases = ledger.lease("a", Version(0, 1), 12, now=0)
    assert give(ledger, leases[5], 0, version_min=Version(1, 0)) == "unknown"
    assert (
        give(ledger, leases[5], 1, version_min=Version(1, 1), version_max=Version(1, 1))
        == "accepted"
    )


def test_data_failures_shrink_a_group_then_remove_it() -> None:
    ledger = make(group_size=3, max_attempts=2)
    (lease,) = ledger.lease("a", V0, 3, now=0)

    def fail(one: Lease, k: int) -> str:
        sample = one.group.sample(k)
        return ledger.fail("a", one.lease, sample, FailureKind.REWARD, "boom", now=0)

    give(ledger, lease, 0)
    assert fail(lease, 1) == "accepted"
    assert fail(lease, 1) == "duplicate"
    (again,) = ledger.lease("a", V0, 1, now=0)
    assert fail(again, 1) == "accepted"  # the second failure: member 1 is given up
    give(ledger, lease, 2)
    assert ledger.counts()["queued"] == 2  # the group is complete with two of three
    assert ledger.lease("a", V0, 1, now=0)[0].group.index == 1


def test_the_last_failure_completes_a_group_that_waits_for_nobody_else() -> None:
    ledger = make(group_size=3, max_attempts=1)
    (lease,) = ledger.lease("a", V0, 3, now=0)
    give(ledger, lease, 0)
    give(ledger, lease, 2)
    ledger.fail("a", lease.lease, lease.group.sample(1), FailureKind.DATA, "no", now=0)
    assert ledger.counts()["queued"] == 2


def test_a_removed_group_lowers_positions_and_its_samples_end_as_failed() -> None:
    ledger = make(group_size=3, max_attempts=1)
    first, second = ledger.lease("a", V0, 6, now=0)
    assert ledger.position(second.group) == 1
    give(ledger, first, 0)
    for k in (1, 2):
        if k == 1:
            ledger.fail("a", first.lease, first.group.sample(1), FailureKind.DATA, "no", now=0)
    (third,) = ledger.lease("b", V0, 1, now=0)
    ledger.fail("b", third.lease, third.group.sample(0), FailureKind.DATA, "no", now=0)
    assert ledger.counts()["groups_failed"] == 0
    # Sample 0 is in, 1 is given up; the loss of 2 leaves one member, so the group goes.
    ledger.fail("a", first.lease, first.group.sample(2), FailureKind.DATA, "no", now=0)
    assert ledger.counts()["groups_failed"] == 1
    assert ledger.position(second.group) == 0
    assert ledger.counts()["failed"] == 4
    assert ledger.conserved()


def test_results_in_flight_of_a_failed_group_end_as_failed() -> None:
    ledger = make(max_attempts=1)
    (lease,) = ledger.lease("a", V0, 2, now=0)
    ledger.fail("a", lease.lease, lease.group.sample(0), FailureKind.DATA, "no", now=0)
    counts = ledger.counts()
    assert (counts["groups_failed"], counts["failed"], counts["leased"]) == (1, 1, 1)
    assert give(ledger, lease, 1) == "duplicate"
    assert ledger.counts()["failed"] == 2
    assert ledger.conserved()
    assert ledger.records() == 0


def test_groups_without_variance_are_filtered() -> None:
    ledger = make(filter_zero_variance=True)
    first, second = ledger.lease("a", V0, 4, now=0)
    for k in (0, 1):
        give(ledger, first, k, reward=1.0)
    give_all(ledger, second)
    counts = ledger.counts()
    assert (counts["filtered"], counts["groups_filtered"], counts["queued"]) == (2, 1, 2)
    assert ledger.position(second.group) == 0


def test_batches_are_assigned_ahead_and_committed_in_order() -> None:
    ledger = make(ranks=2)
    for lease in ledger.lease("a", V0, 8, now=0):
        give_all(ledger, lease)
    assert ledger.assign(2) is None  # batch 1 comes first
    one, two = ledger.assign(1), ledger.assign(2)
    assert one is not None
    assert ledger.assign(1) is one
    with pytest.raises(LedgerError, match="batch 2 cannot be committed: the last committed is 0"):
        ledger.commit(2)
    with pytest.raises(LedgerError, match="batch 1 holds no sample p/0/2/0"):
        ledger.commit(1, (two.manifest[0].id,))  # type: ignore[union-attr]
    ledger.commit(1, (one.manifest[0].id,))
    ledger.commit(1)
    counts = ledger.counts()
    assert (counts["trained"], counts["dropped_stale"], counts["assigned"]) == (3, 1, 4)
    with pytest.raises(LedgerError, match="batch 1 is already committed"):
        ledger.assign(1)
    with pytest.raises(LedgerError, match="already committed"):
        ledger.assign(0)
    with pytest.raises(LedgerError, match=r"rank 2 is outside 0\.\.1"):
        ledger.part(2, 2)
    parts = [ledger.part(2, rank) for rank in (0, 1)]
    assert sorted(i for p in parts if p for i in p.mine) == [0, 1, 2, 3]
    for p in parts:
        assert p is not None
        assert [e.header for e in p.envelopes] == [p.manifest[i] for i in p.mine]


def test_versions_do_not_go_back() -> None:
    ledger = make()
    ledger.published(Version(0, 2))
    ledger.published(Version(0, 2))
    with pytest.raises(LedgerError, match="0:1 published after 0:2"):
        ledger.published(Version(0, 1))


def test_a_broken_count_is_noticed() -> None:
    ledger = make()
    (lease,) = ledger.lease("a", V0, 2, now=0)
    assert ledger.conserved()
    books = ledger._books
    books.census.dispatched += 1
    assert not ledger.conserved()
    books.census.dispatched -= 1
    next(iter(books.leases[lease.lease].dispatches.values())).state = "queued"  # type: ignore
    assert not ledger.conserved()


def test_waits_name_what_is_missing_and_who_holds_it() -> None:
    ledger = make(max_staleness=0)
    assert ledger.waiting_for(1, now=0) == (
        "4 samples of batch 1; 4 not leased: no actor has asked for work"
    )
    one = ledger.lease("actor-3", V0, 3, now=0)
    give(ledger, one[0], 0, actor="actor-3")
    assert ledger.waiting_for(1, now=41) == (
        "3 samples of batch 1, held by actor-3 (lease 1, 41 s), actor-3 (lease 2, 41 s); "
        "1 not leased: no room at actor-3"
    )
    assert ledger.waiting_for(2, now=0).startswith("batch 2: batch 1 comes first")
    for lease in [*one, *ledger.lease("actor-3", V0, 9, now=0)]:
        for k in lease.samples:
            give(ledger, lease, k, actor="actor-3")
    assert ledger.waiting_for(1, now=41) == "batch 1 is complete"
    assert ledger.waiting_for_next(now=41) == ""
    ledger.assign(1)
    ledger.lease("actor-3", V0, 9, now=41)
    assert ledger.waiting_for_next(now=41) == (
        "4 samples of batch 2; 4 not leased: admission: actor-3 runs version 0, needs 1"
    )


def test_the_end_of_the_prompts_is_told() -> None:
    ledger = make(prompts=prompts(3), max_staleness=4, max_attempts=1)
    leases = ledger.lease("a", V0, 99, now=0)
    assert len(leases) == 3
    assert not ledger.held_back("a")
    assert ledger.gauges(now=0)["needs_prompts/a"] == 1
    assert not ledger.exhausted
    give_all(ledger, leases[0])
    give_all(ledger, leases[1])
    sample = leases[2].group.sample(0)
    ledger.fail("a", leases[2].lease, sample, FailureKind.REWARD, "boom", now=0)
    assert ledger.assign(1) is not None
    assert ledger.exhausted
    assert ledger.exhausted_reason() == (
        "prompts exhausted, 0 groups left, batch 2 needs 2 (1 groups failed; last failure: "
        "reward: boom)"
    )


def fail_groups(ledger: Ledger, count: int, kind: FailureKind) -> None:
    for _ in range(count):
        (lease,) = ledger.lease("a", V0, 2, now=0)
        for k in lease.samples:
            ledger.fail("a", lease.lease, lease.group.sample(k), kind, "boom", now=0)


def test_a_row_of_failures_is_hopeless_until_a_group_completes() -> None:
    ledger = make(groups_per_batch=5, max_attempts=1)
    fail_groups(ledger, 20, FailureKind.REWARD)  # 4 G
    assert ledger.hopeless() == ""
    fail_groups(ledger, 1, FailureKind.REWARD)
    assert ledger.hopeless() == (
        "21 groups in a row failed and none completed, the last for its reward (boom): check "
        "task.reward, task.reward_timeout_s and what the reward needs"
    )
    (lease,) = ledger.lease("a", V0, 2, now=0)
    give_all(ledger, lease)
    assert ledger.hopeless() == ""
    fail_groups(ledger, 20, FailureKind.REWARD)
    assert ledger.hopeless() == ""
    assert ledger.conserved()


def test_bad_prompts_are_hopeless_when_they_outnumber_all_that_may_be_alive() -> None:
    """They fail at once, long before the good ones among them can complete."""
    ledger = make(max_staleness=3, max_attempts=1)
    fail_groups(ledger, 32, FailureKind.DATA)  # 4 (S + 1) G
    assert ledger.hopeless() == ""
    fail_groups(ledger, 1, FailureKind.DATA)
    assert "33 groups in a row failed" in ledger.hopeless()
    assert ledger.hopeless().endswith("check the prompts and rollout.max_prompt_tokens")


def test_failures_of_the_machinery_are_not_counted_against_the_prompts() -> None:
    ledger = make(max_attempts=1)
    fail_groups(ledger, 100, FailureKind.INFRASTRUCTURE)
    assert ledger.hopeless() == ""


def finish_group(ledger: Ledger, varied: bool) -> None:
    (lease,) = ledger.lease("a", V0, 2, now=0)
    for k in lease.samples:
        give(ledger, lease, k, reward=float(k) if varied else 1.0)


@pytest.mark.parametrize(("setting", "cap"), [(None, 64), (7, 7)])
def test_a_long_row_of_filtered_groups_ends_the_run_unless_one_is_kept(
    setting: int | None, cap: int
) -> None:
    ledger = make(filter_zero_variance=True, max_filtered_in_a_row=setting)
    for _ in range(cap - 1):
        finish_group(ledger, varied=False)
    assert ledger.over() == ""
    finish_group(ledger, varied=True)
    for _ in range(cap - 1):
        finish_group(ledger, varied=False)
    assert ledger.over() == ""
    finish_group(ledger, varied=False)
    assert ledger.over() == (
        f"buffer.max_filtered_in_a_row={cap}: so many groups in a row had all rewards equal and "
        "were left out by buffer.filter_zero_variance: turn that off, or choose prompts that the "
        "model sometimes, not always, answers right"
    )
    assert ledger.hopeless() == ""
    assert ledger.conserved()


def test_a_default_cap_grows_with_the_batch() -> None:
    ledger = make(filter_zero_variance=True, groups_per_batch=5)
    for _ in range(16 * 5 - 1):
        finish_group(ledger, varied=False)
    assert ledger.over() == ""
    finish_group(ledger, varied=False)
    assert ledger.over()
    with pytest.raises(ConfigError, match="max_filtered_in_a_row=0 must be at least 1"):
        make(max_filtered_in_a_row=0)


def test_the_end_of_the_prompts_is_over_only_once_it_is_known_and_no_batch_can_fill() -> None:
    ledger = make(prompts=prompts(3), prompts_end="stop.epochs=2", max_staleness=4)
    leases = ledger.lease("a", V0, 6, now=0)
    for lease in leases:
        give_all(ledger, lease)
    ledger.assign(1)
    assert ledger.over() == ""  # nobody has asked for a fourth prompt
    assert ledger.lease("a", V0, 1, now=0) == []
    assert ledger.over() == (
        "stop.epochs=2: prompts exhausted, 1 groups left, batch 2 needs 2: not trained, their "
        "samples stay held"
    )
    ledger.commit(1)
    counts = ledger.counts()
    assert (counts["trained"], counts["held"], counts["queued"]) == (4, 2, 2)
    assert ledger.conserved()


def test_a_failed_member_drops_its_group_if_so_configured() -> None:
    ledger = make(group_size=3, max_attempts=2, failed_member="drop")
    (first, second) = ledger.lease("a", V0, 6, now=0)
    give(ledger, first, 0)
    kind, sample = FailureKind.REWARD, first.group.sample(1)
    ledger.fail("a", first.lease, sample, kind, "boom", now=0)
    (again,) = ledger.lease("a", V0, 1, now=0)
    assert again.samples == (1,)
    assert ledger.counts()["groups_failed"] == 0
    ledger.fail("a", again.lease, sample, kind, "boom", now=0)
    counts = ledger.counts()
    # Sample 0 was in, 1 failed twice, 2 is still produced: all of them end as failed.
    assert (counts["groups_failed"], counts["failed"], counts["leased"]) == (1, 3, 4)
    assert ledger.position(second.group) == 0
    assert give(ledger, first, 2) == "duplicate"
    assert ledger.counts()["failed"] == 4
    assert ledger.conserved()


def test_without_a_recording_nothing_is_kept() -> None:
    ledger = make(groups_per_batch=1)
    (lease,) = ledger.lease("a", V0, 2, now=0)
    give_all(ledger, lease)
    ledger.assign(1)
    ledger.commit(1)
    assert ledger.take_retired() == []


def test_gauges() -> None:
    ledger = make(groups_per_batch=1, filter_zero_variance=True)
    first, second = ledger.lease("a", V0, 4, now=0)
    assert "queue/age_s" not in ledger.gauges(now=3)
    give(ledger, first, 1, now=1)
    gauges = ledger.gauges(now=3)
    assert (gauges["queue/depth"], gauges["queue/age_s"], gauges["queue/bytes"]) == (1, 2, 12)
    assert (gauges["queue/capacity"], gauges["leased_samples"], gauges["in_flight/a"]) == (4, 3, 3)
    give(ledger, first, 0)
    for k in (0, 1):  # filtered: generated, not trained
        give(ledger, second, k, reward=0.0, response_tokens=9)
    ledger.assign(1)
    assert "samples/len_bias" not in ledger.gauges(now=3)
    ledger.commit(1)
    gauges = ledger.gauges(now=3)
    assert gauges["samples/len_bias"] == pytest.approx((3 / 2) / (21 / 4))
    assert gauges["queue/bytes"] == 0


@settings(max_examples=40, deadline=None)
@given(
    S=st.integers(0, 3), G=st.integers(1, 3), n_pub=st.integers(1, 3), size=st.integers(1, 3),
    data=st.data(), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_with_actors_that_go_on_every_batch_completes(
    S: int, G: int, n_pub: int, size: int, data: st.DataObject, seed: int
) -> None:
    window = data.draw(st.integers(1, S * G * n_pub + 1), "window")
    ahead = data.draw(st.integers(0, 2), "prefetched batches")
    rng = random.Random(seed)
    ledger = Ledger(
        prompts=prompts(), group_size=size, groups_per_batch=G, batches_per_publication=n_pub,
        max_staleness=S, window=window, lease_timeout_s=10.0, max_attempts=2,
        filter_zero_variance=size > 1 and data.draw(st.booleans(), "filter"),
    )  # fmt: skip
    now, version, batch, batches = 0.0, 0, 1, 12
    applied = [0, 0]
    held: list[tuple[int, Lease, int]] = []
    for _ in range(20_000):
        now += rng.random()
        ledger.expire(now)
        a = rng.randrange(2)
        what = rng.random()
        if what < 0.3:
            applied[a] = max(applied[a], version - rng.randrange(2))
            got = ledger.lease(f"actor-{a}", Version(0, applied[a]), rng.randrange(1, 6), now)
            held += [(a, lease, k) for lease in got for k in lease.samples]
        elif held and what < 0.9:
            a, lease, k = held.pop(rng.randrange(len(held)))
            sample = lease.group.sample(k)
            stamp = Version(0, rng.randint(lease.version.version, max(applied[a], version)))
            if rng.random() < 0.1:
                kind = rng.choice(list(FailureKind))
                ledger.fail(f"actor-{a}", lease.lease, sample, kind, "bad luck", now)
            elif rng.random() < 0.95:  # else it is lost, and its lease expires
                reward = rng.randrange(3)
                ledger.accept(envelope(sample, lease.lease, f"actor-{a}", stamp, reward), now)
        for k in range(batch, batch + ahead + 1):
            ledger.assign(k)
        assignment = ledger.assign(batch)
        if assignment is not None:
            learner = (batch - 1) // n_pub
            assert all(learner - h.version_min.version <= S for h in assignment.manifest)
            ledger.commit(batch)
            version = batch // n_pub
            ledger.published(Version(0, version))
            batch += 1
            if batch > batches:
                break
    assert batch > batches, ledger.waiting_for(batch, now)
    assert ledger.conserved()


def test_rewards_that_fail_without_one_success_are_given_up_early() -> None:
    ledger = make(group_size=2, max_attempts=3)
    failed = 0
    while not ledger.hopeless():
        for lease in ledger.lease("a", Version(0, 0), 8, now=0):
            for k in lease.samples:
                ledger.fail(
                    "a", lease.lease, lease.group.sample(k), FailureKind.REWARD, "took 10 s", now=0
                )
                failed += 1
        assert failed < 200
    assert failed <= 40
    assert "took 10 s" in ledger.hopeless()


def test_a_version_that_cannot_exist_admits_no_more_than_the_next_one() -> None:
    ledger = make()
    modest = make()
    wild = ledger.lease("a", Version(0, 10**6), 2**62, now=0)
    next_one = modest.lease("a", Version(0, 1), 2**62, now=0)
    assert len(wild) == len(next_one) > 0
