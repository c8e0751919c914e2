"""Batches that are kept until a checkpoint covers them, and learners that go back to one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from asyncrl.buffer.ledger import Ledger
from asyncrl.errors import LedgerError
from asyncrl.types import BatchPart, Envelope, Lease, Version
from tests.buffer.samples import envelope, prompts

V0 = Version(0, 0)


def make(**changes: Any) -> Ledger:
    values: dict[str, Any] = {
        "prompts": prompts(), "group_size": 2, "groups_per_batch": 1, "max_staleness": 3,
        "lease_timeout_s": 10.0, "retain": True, "ranks": 2,
    }  # fmt: skip
    ledger = Ledger(**(values | changes))
    ledger.keep_retired()
    return ledger


def give(ledger: Ledger, lease: Lease, k: int, *, actor: str = "a", **fields: Any) -> str:
    sent = envelope(lease.group.sample(k), lease.lease, actor, lease.version, float(k))
    return ledger.accept(Envelope(replace(sent.header, **fields), sent.payload), 0.0)


def train(ledger: Ledger, batches: int) -> None:
    """Produce, assign and commit so many batches; publish after each n_pub."""
    for _ in range(batches):
        batch = ledger.committed + 1
        while ledger.assign(batch) is None:
            (lease,) = ledger.lease("a", ledger.version, 2, 0.0)
            for k in lease.samples:
                assert give(ledger, lease, k) == "accepted"
        ledger.commit(batch)
        version = batch // ledger.rules.batches_per_publication
        ledger.published(Version(ledger.version.incarnation, version))


def parts(ledger: Ledger, batch: int) -> list[BatchPart | None]:
    return [ledger.part(batch, rank) for rank in range(2)]


def test_a_committed_batch_is_served_again_until_a_checkpoint_covers_it() -> None:
    ledger = make()
    train(ledger, 1)
    first = parts(ledger, 1)
    train(ledger, 2)
    assert parts(ledger, 1) == first
    assert ledger.gauges(0.0)["queue/bytes"] == 3 * 18
    ledger.covered(1)
    with pytest.raises(LedgerError, match="batch 1 is already committed"):
        ledger.part(1, 0)
    assert parts(ledger, 2)[0] is not None
    assert ledger.gauges(0.0)["queue/bytes"] == 2 * 18
    ledger.covered(1)
    ledger.covered(0)  # less than before: nothing
    ledger.covered(3)
    assert ledger.gauges(0.0)["queue/bytes"] == 0
    assert ledger.counts()["trained"] == 6
    assert ledger.conserved()


def test_a_kept_batch_costs_no_records_and_takes_no_more_results() -> None:
    ledger = make()
    train(ledger, 5)
    assert ledger.records() == 0
    (lease,) = make().lease("a", V0, 2, 0.0)  # the first one of both
    assert give(ledger, lease, 0) == "duplicate"
    assert ledger.counts()["repeated_results"] == 1


def test_a_checkpoint_cannot_cover_what_is_not_committed() -> None:
    ledger = make()
    train(ledger, 1)
    with pytest.raises(LedgerError, match="covers batch 2, but the last committed is 1"):
        ledger.covered(2)


def test_without_retention_nothing_is_kept_and_a_learner_cannot_go_back() -> None:
    ledger = make(retain=False)
    train(ledger, 2)
    assert ledger.gauges(0.0)["queue/bytes"] == 0
    ledger.covered(2)
    with pytest.raises(LedgerError, match="rewind to batch 1: the last committed is 2, and batches"
                       " up to 2 are not kept any more"):  # fmt: skip
        ledger.rewind(1, 1)
    ledger.rewind(2, 1)
    assert ledger.version == Version(1, 2)


@pytest.mark.parametrize("n_pub", [1, 2])
def test_after_a_rewind_the_batches_are_assigned_again_unchanged(n_pub: int) -> None:
    ledger = make(batches_per_publication=n_pub)
    train(ledger, 5)
    (lease,) = ledger.lease("a", ledger.version, 2, 0.0)
    give(ledger, lease, 0)
    give(ledger, lease, 1)
    before, ahead = {k: parts(ledger, k) for k in range(1, 6)}, parts(ledger, 6)
    ledger.rewind(3, 1)
    assert (ledger.version, ledger.committed) == (Version(1, 3 // n_pub), 3)
    counts = ledger.counts()
    assert (counts["trained"], counts["assigned"], counts["groups_trained"]) == (6, 6, 3)
    assert ledger.conserved()
    assert {k: parts(ledger, k) for k in range(1, 6)} == before
    assert parts(ledger, 6) == ahead  # which was assigned and is still
    with pytest.raises(LedgerError, match=r"last committed is 3, assigned are \[4, 5, 6\]"):
        ledger.commit(5)
    train(ledger, 4)
    counts = ledger.counts()
    assert (counts["trained"], counts["dispatched"], counts["groups_trained"]) == (14, 14, 7)
    assert counts["completed"] == 14  # nothing was produced twice
    assert ledger.conserved()
    assert ledger.records() == 0


def test_what_the_check_dropped_may_be_trained_the_next_time() -> None:
    ledger = make(ranks=1)
    train(ledger, 1)
    (lease,) = ledger.lease("a", ledger.version, 2, 0.0)
    for k in lease.samples:
        give(ledger, lease, k)
    ledger.assign(2)
    ledger.commit(2, (lease.group.sample(0), lease.group.sample(1)))
    assert (ledger.counts()["dropped_stale"], ledger.counts()["groups_trained"]) == (2, 1)
    assert ledger.gauges(0.0)["trained_samples"] == 2
    ledger.rewind(1, 1)
    ledger.commit(2)
    counts = ledger.counts()
    assert (counts["dropped_stale"], counts["trained"], counts["groups_trained"]) == (0, 4, 2)
    gauges = ledger.gauges(0.0)
    assert (gauges["trained_samples"], gauges["generated_samples"]) == (4, 4)
    assert (gauges["trained_tokens"], gauges["generated_tokens"]) == (6, 6)


def test_what_became_of_a_sample_is_told_at_its_commit_and_again_after_a_rewind() -> None:
    ledger = make()
    train(ledger, 2)
    told = ledger.take_retired()
    assert [(t.batch, t.incarnation, t.outcome) for t in told] == [
        (1, 0, "trained"), (1, 0, "trained"), (2, 0, "trained"), (2, 0, "trained"),
    ]  # fmt: skip
    ledger.rewind(1, 3)
    assert ledger.take_retired() == []
    sample = told[2].envelope.header.id
    ledger.commit(2, (sample,))
    again = ledger.take_retired()
    assert [(t.envelope, t.batch, t.rank, t.position) for t in again] == [
        (t.envelope, t.batch, t.rank, t.position) for t in told[2:]
    ]
    assert [(t.incarnation, t.outcome) for t in again] == [(3, "dropped_stale"), (3, "trained")]
    ledger.covered(2)
    ledger.tell_held()
    assert ledger.take_retired() == []


def test_a_rewind_that_cannot_be_is_refused_with_its_numbers() -> None:
    ledger = make()
    train(ledger, 3)
    ledger.covered(1)
    for batch in (0, 4):
        with pytest.raises(LedgerError, match=f"rewind to batch {batch}: the last committed is 3, "
                           "and batches up to 1 are not kept any more: restart from a checkpoint "
                           "of batch 1 to 3"):  # fmt: skip
            ledger.rewind(batch, 1)
    with pytest.raises(LedgerError, match="incarnation 0: the last one was 0, and it must rise"):
        ledger.rewind(2, 0)
    ledger.rewind(1, 2)
    with pytest.raises(LedgerError, match="incarnation 1: the last one was 2"):
        ledger.rewind(1, 1)
    ledger.commit(2)
    with pytest.raises(LedgerError, match="incarnation 2: the last one was 2"):
        ledger.rewind(1, 2)  # not the same rewind any more
    assert ledger.committed == 2


def test_a_rewind_sent_again_changes_nothing() -> None:
    ledger = make()
    ledger.rewind(0, 0)  # a learner that starts with nothing
    train(ledger, 3)
    ledger.rewind(1, 1)
    (lease,) = ledger.lease("a", Version(1, 1), 2, 0.0)
    state = ledger.state()
    ledger.rewind(1, 1)
    assert ledger.state() == state
    assert give(ledger, lease, 0) == "accepted"


def test_an_earlier_incarnation_gets_nothing_until_it_runs_the_new_one() -> None:
    ledger = make()
    train(ledger, 3)
    (lease,) = ledger.lease("a", Version(0, 3), 1, 0.0)
    ledger.rewind(2, 1)
    counts = ledger.counts()
    assert (counts["leased"], counts["requeued"]) == (0, 1)
    assert ledger.lease("a", Version(0, 3), 9, 0.0) == []
    assert ledger.lease("a", Version(0, 99), 9, 0.0) == []
    assert ledger.held_back("a") == "admission"
    assert ledger.lease("a", Version(1, 2), 1, 0.0)[0].group == lease.group
    with pytest.raises(LedgerError, match="0:4 published after 1:2"):
        ledger.published(Version(0, 4))


def test_late_results_of_an_earlier_incarnation_count_if_their_version_number_is_high_enough() -> (
    None
):
    """G = 1 and S = 1: position p needs a version number of p - 1 at least."""
    ledger = make(max_staleness=1)
    train(ledger, 5)
    at_5, at_6 = ledger.lease("old", Version(0, 5), 4, 0.0)  # the groups of batches 6 and 7
    ledger.rewind(1, 1)
    # Batch 7 is trained at V = 6, whatever the learner trains now.
    for wrong in (
        {"version_min": Version(1, 1)},  # its last tokens are of the new incarnation
        {"version_min": Version(1, 2)},
        {"version_max": Version(0, 4)},  # below its lowest
        {"version_min": Version(0, 4)},  # below its lease's
    ):
        assert give(ledger, at_6, 0, actor="old", **wrong) == "unknown"
    assert ledger.counts()["protocol_errors"] == 4
    for lease in (at_5, at_6):
        for k in lease.samples:
            assert give(ledger, lease, k, actor="old") == "accepted"
    train(ledger, 6)
    part = ledger.part(7, 0)
    assert part is not None
    assert part.manifest[0].version_min == Version(0, 5)


def test_no_more_is_believed_of_an_incarnation_than_it_can_have_published() -> None:
    ledger = make(max_staleness=1)
    train(ledger, 3)
    leases = ledger.lease("old", Version(0, 3), 99, 0.0)
    far = leases[-1]  # position 4, which needs version 3
    assert ledger.position(far.group) == 4
    ledger.rewind(0, 1)
    ledger.rewind(0, 2)
    # Incarnation 1 published no version: 0:3 can be, 1:9 cannot.
    wrong = {"version_min": Version(1, 9), "version_max": Version(1, 9)}
    assert give(ledger, far, 0, actor="old", **wrong) == "unknown"
    assert give(ledger, far, 0, actor="old") == "accepted"
    assert ledger.lease("new", Version(2, 99), 99, 0.0) == []  # position 3, which needs version 2


def test_a_sample_of_two_incarnations_counts_by_its_lowest_number() -> None:
    """Its first tokens are of the higher number, its last of the newer incarnation."""
    ledger = make(max_staleness=4)
    train(ledger, 5)
    near, far = ledger.lease("old", Version(0, 5), 4, 0.0)  # positions 5 and 6
    ledger.rewind(1, 1)  # incarnation 1 starts with version 1, which admits positions up to 5
    both = {"version_min": Version(1, 1), "version_max": Version(0, 5)}
    assert give(ledger, near, 0, actor="old", **both) == "accepted"
    assert give(ledger, far, 0, actor="old", **both) == "unknown"
    assert give(ledger, far, 0, actor="old") == "accepted"


def test_samples_of_an_earlier_incarnation_are_counted_once_they_are_trained() -> None:
    ledger = make()
    train(ledger, 3)
    assert ledger.counts()["prior_incarnation"] == 0
    assert "samples/prior_incarnation" not in ledger.metrics(0.0)
    ledger.rewind(1, 1)
    train(ledger, 3)  # two of them once more, one that is new
    assert ledger.metrics(0.0)["samples/prior_incarnation"] == 4
    ledger.rewind(2, 2)
    assert ledger.counts()["prior_incarnation"] == 2
    train(ledger, 2)
    assert ledger.counts()["prior_incarnation"] == 6
    ledger.covered(4)
    assert ledger.counts()["prior_incarnation"] == 6


def test_with_drop_what_no_batch_has_is_produced_again() -> None:
    ledger = make(prior_incarnation="drop", max_staleness=9)
    train(ledger, 3)
    leases = [ledger.lease("a", ledger.version, 2, 0.0)[0] for _ in range(4)]
    first, second, third, fourth = leases
    for lease, k in ((first, 0), (first, 1), (second, 0), (second, 1), (third, 0)):
        assert give(ledger, lease, k) == "accepted"
    assert ledger.assign(4) is not None  # the first group
    ledger.take_retired()
    before = [part.manifest for part in (ledger.part(k, 0) for k in (3, 4)) if part]
    ledger.rewind(2, 1)
    taken = [(r.outcome, r.incarnation, r.envelope.header.id) for r in ledger.take_retired()]
    assert taken == [
        ("requeued", 0, second.group.sample(0)), ("requeued", 0, second.group.sample(1)),
        ("requeued", 0, third.group.sample(0)),
    ]  # fmt: skip
    assert give(ledger, fourth, 0) == "duplicate", "it comes too late"
    assert ledger.conserved()
    again = [part.manifest for part in (ledger.part(k, 0) for k in (3, 4)) if part]
    assert again == before, "what a batch had it has again"
    (lease,) = ledger.lease("a", Version(1, 2), 2, 0.0)
    assert (lease.group, lease.samples) == (second.group, (0, 1))
    assert give(ledger, lease, 0) == "accepted"
    restored = Ledger.restore(
        ledger.state(), prompts=prompts(), envelope=lambda h, n: Envelope(h, bytes(n)), now=0.0,
        **{k: getattr(ledger.rules, k) for k in ledger.rules.__slots__},
    )  # fmt: skip
    assert restored.state() == ledger.state()
    assert give(ledger, lease, 1) == "accepted"
    train(ledger, 6)
    assert (ledger.committed, ledger.conserved()) == (8, True)
    assert ledger.counts()["trained"] == 16
