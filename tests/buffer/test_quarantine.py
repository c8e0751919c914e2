"""Prompts that fail are left out in later epochs, counted and told; a run of none but them ends."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from asyncrl.buffer.ledger import Ledger
from asyncrl.types import FailureKind, GroupId, Lease, Prompt, Version
from tests.buffer.walks import give_all

V0 = Version(0, 0)


def epochs(size: int, count: int | None = None) -> Iterator[tuple[GroupId, Prompt]]:
    for epoch in itertools.count() if count is None else range(count):
        for index in range(size):
            yield GroupId("p", epoch, index), Prompt(text=str(index))


def make(size: int, count: int | None = None, **changes: Any) -> Ledger:
    values: dict[str, Any] = {
        "prompts": epochs(size, count), "group_size": 2, "groups_per_batch": 1,
        "max_staleness": 0, "lease_timeout_s": 10.0, "max_attempts": 1,
    }  # fmt: skip
    return Ledger(**(values | changes))


def fail(ledger: Ledger, lease: Lease, kind: FailureKind = FailureKind.REWARD) -> None:
    for k in lease.samples:
        ledger.fail("a", lease.lease, lease.group.sample(k), kind, "boom", now=0)


def groups(ledger: Ledger, bad: set[int], count: int) -> list[tuple[int, int]]:
    """(epoch, index) of the next groups produced; those of `bad` prompts fail."""
    got = []
    for _ in range(count):
        (lease,) = ledger.lease("a", Version(0, ledger.committed), 2, now=0)
        got.append((lease.group.epoch, lease.group.index))
        if lease.group.index in bad:
            fail(ledger, lease)
        else:
            give_all(ledger, lease)
            batch = ledger.committed + 1
            assert ledger.assign(batch) is not None
            ledger.commit(batch)
            ledger.published(Version(0, batch))
    return got


def test_a_prompt_whose_group_failed_is_left_out_from_the_next_epoch_on() -> None:
    ledger = make(3)
    expected = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 2), (3, 0)]
    assert groups(ledger, {1}, 8) == expected
    assert ledger.gauges(now=0)["prompts/quarantined"] == 1
    assert ledger.metrics(now=0)["prompts/quarantined"] == 1
    assert ledger.take_quarantined() == [("p", 1, "reward: boom")]
    assert ledger.take_quarantined() == []
    assert ledger.conserved()


def test_a_row_left_out_across_an_epochs_end_is_not_all_prompts() -> None:
    expected = [(0, 0), (0, 1), (0, 2), (1, 1), (2, 1), (3, 1)]
    assert groups(make(3), {0, 2}, 6) == expected


def test_it_takes_as_many_groups_as_configured() -> None:
    ledger = make(2, quarantine_after=2)
    assert groups(ledger, {1}, 6) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0)]


def test_a_prompt_read_ahead_is_left_out_too() -> None:
    """The cursor reads one ahead: it must not hand out what went into quarantine meanwhile."""
    ledger = make(2, groups_per_batch=2)
    first, second = ledger.lease("a", V0, 4, now=0)
    give_all(ledger, second)
    assert ledger._books.cursor.has_prompt()  # reads prompt 0 of epoch 1
    fail(ledger, first)
    (third,) = ledger.lease("a", V0, 2, now=0)
    assert (third.group.epoch, third.group.index) == (1, 1)


def test_faults_of_the_machinery_and_shrunk_groups_quarantine_nothing() -> None:
    ledger = make(4, group_size=3, groups_per_batch=4)
    first, second = ledger.lease("a", V0, 6, now=0)
    fail(ledger, first, FailureKind.INFRASTRUCTURE)
    ledger.fail("a", second.lease, second.group.sample(0), FailureKind.DATA, "no", now=0)
    assert ledger.gauges(now=0)["prompts/quarantined"] == 0


def test_when_all_prompts_are_left_out_the_run_fails_and_does_not_hang() -> None:
    ledger = make(3, max_staleness=2)
    for lease in ledger.lease("a", V0, 6, now=0):
        fail(ledger, lease)
    assert ledger.lease("a", V0, 2, now=0) == []  # prompts have no end: a whole epoch is skipped
    assert ledger.over() == ""
    assert not ledger.exhausted
    assert ledger.hopeless() == (
        "no prompt is left, 3 prompts in quarantine (rollout.quarantine_after=1) (3 groups failed; "
        "last failure: reward: boom)"
    )


def test_groups_that_are_left_are_trained_first() -> None:
    ledger = make(2, max_staleness=3)
    good, *bad = ledger.lease("a", V0, 8, now=0)
    give_all(ledger, good)
    for lease in bad:
        fail(ledger, lease)
    assert ledger.lease("a", V0, 2, now=0) == []
    assert ledger.hopeless() == ""  # batch 1 can fill
    assert ledger.assign(1) is not None
    assert "no prompt is left" in ledger.hopeless()


def test_prompts_that_end_still_end_the_run_in_order() -> None:
    ledger = make(2, count=2)
    assert groups(ledger, {1}, 3) == [(0, 0), (0, 1), (1, 0)]
    assert ledger.lease("a", Version(0, 2), 2, now=0) == []
    assert "prompts exhausted" in ledger.over()
    assert ledger.hopeless() == ""
