"""Snapshot and journal: from any snapshot and the entries after it comes the same ledger."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.buffer import saved
from asyncrl.buffer.books import Books
from asyncrl.buffer.entries import Stopped
from asyncrl.buffer.journal import Journaled, replay
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.rules import Rules
from asyncrl.errors import ConfigError, DataError, StoreError
from asyncrl.types import (
    SAMPLE_OVERHEAD,
    Envelope,
    FailureKind,
    GroupId,
    Lease,
    Prompt,
    SampleHeader,
    Version,
)
from tests.buffer.samples import envelope, prompts
from tests.buffer.test_ledger_machine import LedgerMachine
from tests.buffer.walks import Walk

V0 = Version(0, 0)
SETTINGS: dict[str, Any] = {
    "group_size": 2, "groups_per_batch": 2, "max_staleness": 1, "lease_timeout_s": 10.0,
    "retain": True,
}  # fmt: skip


class Elsewhere(Envelope):
    """A sample whose payload must not be asked for."""

    __slots__ = ("size",)

    def __init__(self, header: SampleHeader, size: int) -> None:
        self.header, self.size = header, size

    @property
    def payload(self) -> bytes:
        raise AssertionError("nobody may read a payload here")

    @property
    def nbytes(self) -> int:
        return self.size


def make(**changes: Any) -> Journaled:
    return Journaled(**({"prompts": prompts()} | SETTINGS | changes))


def restored(state: bytes, now: float = 0.0, source: Any = None, **changes: Any) -> Journaled:
    return Journaled.restore(
        state, prompts=prompts() if source is None else source, envelope=Elsewhere, now=now,
        **(SETTINGS | changes),
    )  # fmt: skip


def give(ledger: Ledger, lease: Lease, k: int, reward: float | None = None, **fields: Any) -> str:
    reward = float(k) if reward is None else reward
    sent = envelope(lease.group.sample(k), lease.lease, "a", lease.version, reward)
    return ledger.accept(Envelope(replace(sent.header, **fields), sent.payload), 0.0)


def some_run() -> Journaled:
    """A batch committed and kept, one assigned, one group complete, one open, one leased in part.

    Its entries are not taken.
    """
    ledger = make(max_staleness=3, max_attempts=1)
    leases = ledger.lease("a", V0, 13, 0.0)
    for lease in leases[:5]:
        for k in lease.samples:
            give(ledger, lease, k)
    give(ledger, leases[5], 0)
    ledger.assign(1)
    ledger.commit(1, (leases[0].group.sample(1),))
    ledger.published(Version(0, 1))
    ledger.assign(2)
    return ledger


def replayed(entries: list[bytes], **changes: Any) -> Journaled:
    ledger = make(**({"max_staleness": 3, "max_attempts": 1} | changes))
    replay(ledger, entries, envelope=Elsewhere, now=0.0)
    return ledger


class Uncrashed(LedgerMachine):
    """A walk of which every state is noted, with the entries up to it."""

    def start(self, *args: Any, **kwargs: Any) -> None:
        super().start(*args, **kwargs)
        self.noted = [(self.ledger.state(), 0)]

    def take_snapshot(self) -> None:
        """Nothing: the test does it."""

    def crash(self) -> None:
        """Nothing: the test does it."""

    def event(self, rng: random.Random) -> None:
        super().event(rng)
        self.entries += self.ledger.take()
        self.noted.append((self.ledger.state(), len(self.entries)))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_snapshot_and_the_entries_up_to_any_later_moment_give_the_state_of_then(
    seed: int,
) -> None:
    machine, rng = Uncrashed(), random.Random(seed)
    machine.start(rng, prompts=10_000)
    machine.walk(rng.randrange(2**32), 150)
    for _ in range(6):
        first, then = sorted(rng.sample(range(len(machine.noted)), 2))
        (state, done), (expected, upto) = machine.noted[first], machine.noted[then]
        ledger = Journaled.restore(
            state, prompts=machine.prompts(), envelope=machine.stored, now=machine.now,
            **machine.settings,
        )  # fmt: skip
        assert ledger.state() == state
        entries = machine.entries[done:upto]
        replay(ledger, entries, envelope=machine.stored, now=machine.now)
        assert ledger.state() == expected
        assert ledger.conserved()


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), room=st.integers(1, 12))
def test_a_run_short_of_bytes_is_restored_also_under_another_limit(seed: int, room: int) -> None:
    """What was forgotten for replay, and what was granted, is replayed and not decided again."""
    rules: dict[str, Any] = {
        "group_size": 2, "groups_per_batch": 2, "max_staleness": 2, "window": 2, "retain": False,
        "replay_groups": 2, "replay_max_staleness": 4, "max_attempts": 2,
        "sample_bytes": 4096 + SAMPLE_OVERHEAD, "lease_timeout_s": 10.0,
    }  # fmt: skip
    limit = room * 2 * (4096 + SAMPLE_OVERHEAD)
    walk = Walk(random.Random(seed), max_bytes=limit, **rules)
    walk.ledger = ledger = Journaled(prompts=prompts(), max_bytes=limit, **rules)
    state, entries, now = ledger.state(), list[bytes](), 0.0
    for step in range(300):
        walk.event()
        entries += ledger.take()
        if step == 100:
            state, entries, now = ledger.state(), [], walk.now
    for other in (limit, None, 1):
        again = Journaled.restore(
            state, prompts=prompts(), envelope=Elsewhere, now=now, max_bytes=other, **rules
        )
        replay(again, entries, envelope=Elsewhere, now=now)
        assert again._books.order.next_position == ledger._books.order.next_position
        assert _without_limits(again) == _without_limits(ledger)


def _without_limits(ledger: Ledger) -> Any:
    state = msgspec.msgpack.decode(ledger.state(), strict=False)[1]
    del state["rules"]["max_bytes"]
    return state


def test_every_attribute_of_the_records_is_considered() -> None:
    """Who adds one sees to it that it is stored, worked out anew or of no use elsewhere."""
    books = Books(Rules(group_size=1, groups_per_batch=1, max_staleness=0, max_filtered_in_a_row=1),
                  prompts())  # fmt: skip
    parts = (books, books.cursor, books.census, books.order, books.room)
    instances = {type(x): vars(x) for x in parts}
    for kind, known in saved.KNOWN.items():
        there = instances.get(kind) or kind.__slots__  # type: ignore[attr-defined]
        assert sorted(there) == sorted(known.split()), kind


def test_calls_without_an_effect_write_nothing() -> None:
    ledger = some_run()
    ledger.take()
    state = ledger.state()
    (lease, *_) = restored(state, max_staleness=3, max_attempts=1).lease("a", Version(0, 1), 1, 0.0)
    give(ledger, lease, 0)  # of which this ledger does not know
    ledger.accept(envelope(GroupId("p", 0, 0).sample(0), 1, "a", V0), 0.0)
    ledger.lease("old", Version(-1, 0), 9, 0.0)
    ledger.lease("a", V0, 0, 0.0)
    ledger.fail("a", 1, GroupId("p", 0, 0).sample(0), FailureKind.DATA, "no", 0.0)
    ledger.progress("a", {7: 5}, 0.0)
    ledger.expire(1.0)
    ledger.drop_actor("b")
    ledger.resume_actor("a", [6, 7])
    ledger.assign(1), ledger.assign(2), ledger.assign(3)  # kept, assigned, not complete
    ledger.commit(1)
    ledger.published(Version(0, 1))
    ledger.covered(0)
    ledger.part(2, 0)
    assert ledger.take() == []
    assert ledger.state() == state
    assert ledger.counts()["unknown_results"] + ledger.counts()["repeated_results"] == 3


def test_each_effect_is_one_entry_and_each_entry_is_needed() -> None:
    ledger = some_run()
    entries = ledger.take()
    kinds = Counter(msgspec.msgpack.decode(e)[0] for e in entries)
    assert kinds == {"leased": 1, "accepted": 11, "assigned": 2, "committed": 1, "published": 1}
    assert replayed(entries).state() == ledger.state()
    for missing in range(len(entries)):
        assert _outcome(entries[:missing] + entries[missing + 1 :]) != ledger.state()


def _outcome(entries: list[bytes]) -> bytes | None:
    """The state, or None where an entry does not fit."""
    try:
        return replayed(entries).state()
    except StoreError:
        return None


@pytest.mark.parametrize("reward", [float("nan"), 1e31])
def test_a_refused_result_of_a_lease_is_replayed_as_refused(reward: float) -> None:
    ledger = make()
    (lease,) = ledger.lease("a", V0, 2, 0.0)
    assert give(ledger, lease, 0, reward=reward) == "unknown"
    entries = ledger.take()
    again = make()
    replay(again, entries, envelope=Elsewhere, now=0.0)
    assert again.counts()["requeued"] == 1
    assert again.state() == ledger.state()


def test_who_asked_for_the_end_is_handed_back() -> None:
    ledger = make()
    ledger.stopped("enough", None, True)
    ledger.lease("a", V0, 2, 0.0)
    ledger.stopped("done", Version(0, 3), False)
    stops = replay(make(), ledger.take(), envelope=Elsewhere, now=0.0)
    assert stops == [Stopped("enough", None, True), Stopped("done", Version(0, 3), False)]


def test_a_damaged_journal_is_refused_with_the_number_of_the_entry() -> None:
    entries = some_run().take()
    for bad, kind in (
        (b"", "cannot be read"),
        (entries[5][:-3], "cannot be read"),
        (msgspec.msgpack.encode(["granted", "a"]), "cannot be read"),
        (msgspec.msgpack.encode(["released", [99]]), r"Released.*lease 99 is not open"),
        (msgspec.msgpack.encode(["committed", 7, []]), r"Committed.*batch 7 cannot be committed"),
        (entries[0], r"Leased.*another effect"),
        (entries[4], r"Accepted.*another effect"),
        (entries[-1], r"Assigned.*another effect|Assigned.*does not fit"),
    ):
        with pytest.raises(StoreError, match=rf"entry 6 of the journal \(.*{kind}"):
            replayed([*entries[:5], bad])


def test_a_restored_ledger_goes_on() -> None:
    ledger = some_run()
    copy = restored(ledger.state(), now=100.0, max_staleness=3, max_attempts=1)
    assert copy.state() == ledger.state()
    assert copy.expire(109.9) == 0
    assert copy.gauges(101.0)["queue/age_s"] == 1.0
    assert copy.part(1, 0).manifest == ledger.part(1, 0).manifest  # type: ignore[union-attr]
    for one in (ledger, copy):
        assert one.drop_actor("a") == 2
        leases = one.lease("b", Version(0, 1), 5, 0.0)
        assert [(x.lease, x.group.index, x.samples) for x in leases] == [
            (8, 5, (1,)), (9, 6, (0, 1)), (10, 7, (0, 1)),
        ]  # fmt: skip
        assert leases[1].prompt == Prompt(text="6 + 1 =", answer="7")
    assert copy.state() == ledger.state()


@pytest.mark.parametrize(
    ("name", "value"),
    [("group_size", 3), ("window", 2), ("max_staleness", 2), ("retain", False), ("seed", 1),
     ("replay_groups", 1), ("quarantine_after", 2), ("filter_zero_variance", True)],
)  # fmt: skip
def test_another_setting_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name}={value} differs from {name}="):
        restored(make().state(), **{name: value})


def test_settings_that_decide_nothing_any_more_may_differ() -> None:
    state = make().state()
    changes = {"lease_timeout_s": 3.0, "max_filtered_in_a_row": 1, "prompts_end": "stop.epochs=1"}
    restored(state, **changes)
    with pytest.raises(ConfigError, match=r"^sample_bytes=9 differs from sample_bytes=0"):
        restored(state, max_bytes=1, sample_bytes=9)


def shuffled() -> Any:
    return iter(sorted(prompts(100), key=lambda p: (p[0].index == 5, p[0].index)))


@pytest.mark.parametrize("source", [prompts(5), shuffled(), iter(())], ids=["few", "order", "none"])
def test_other_prompts_are_refused(source: Any) -> None:
    state = some_run().state()
    with pytest.raises(DataError, match=r"the prompts are not those of the stored run: .*taken 7 "):
        restored(state, source=source, max_staleness=3, max_attempts=1)


@pytest.mark.parametrize("cut", [0, 1, 2, 40, -1])
def test_a_damaged_state_is_refused(cut: int) -> None:
    state = some_run().state()
    with pytest.raises(StoreError, match="stored state cannot be read"):
        restored(state[:cut], max_staleness=3, max_attempts=1)


def test_a_state_of_another_format_or_that_does_not_add_up_is_refused() -> None:
    version, content = msgspec.msgpack.decode(some_run().state())
    other = msgspec.msgpack.encode([version + 1, {"anything": 1}])
    with pytest.raises(StoreError, match=f"has format {version + 1}, this version reads {version}"):
        restored(other)
    content["dispatched"] += 1
    wrong = msgspec.msgpack.encode([version, content])
    with pytest.raises(StoreError, match="does not add up"):
        restored(wrong, max_staleness=3, max_attempts=1)
