"""Replay: what is drawn, how often, under which bound, and that it touches no fresh sample."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.buffer.dispatch import BatchAssignment, Trained
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.replay import draw
from asyncrl.errors import ConfigError, LedgerError
from asyncrl.types import SAMPLE_OVERHEAD, Envelope, GroupId, Version
from tests.buffer.samples import envelope, prompts
from tests.buffer.walks import Walk, give_all


def make(**changes: Any) -> Ledger:
    """Two fresh groups of two samples a batch, and one that is replayed."""
    values: dict[str, Any] = {
        "prompts": prompts(), "group_size": 2, "groups_per_batch": 2, "max_staleness": 1,
        "lease_timeout_s": 10.0, "replay_groups": 1, "replay_max_staleness": 2,
    }  # fmt: skip
    return Ledger(**(values | changes))


def fill(ledger: Ledger, batch: int, rewards: Any = None) -> BatchAssignment:
    """Produce what batch k needs at the learner's version, and assign it."""
    for lease in ledger.lease("a", ledger.version, 4, now=0):
        give_all(ledger, lease, rewards=rewards)
    assignment = ledger.assign(batch)
    assert assignment is not None
    return assignment


def train(ledger: Ledger, batch: int, rewards: Any = None) -> BatchAssignment:
    assignment = fill(ledger, batch, rewards)
    ledger.commit(batch)
    ledger.published(Version(ledger.version.incarnation, batch))
    return assignment


def indexes(envelopes: tuple[Envelope, ...]) -> list[int]:
    """Prompt of each group, in order."""
    return list(dict.fromkeys(e.header.id.index for e in envelopes))


def trained(index: int, version: int = 0, rewards: tuple[float, ...] = (0.0, 1.0)) -> Trained:
    group = GroupId("p", 0, index)
    at = Version(0, version)
    samples = (envelope(group.sample(k), 1 + index, "a", at, r) for k, r in enumerate(rewards))
    return Trained(group, tuple(samples))


# --- the draw ---------------------------------------------------------------------------------


def test_the_draw_is_a_pure_function_of_seed_batch_and_pool() -> None:
    pool = [trained(i) for i in range(50)]
    first = draw(pool, 5, "uniform", 0, 7, 3)
    assert draw(pool, 5, "uniform", 0, 7, 3) == first
    assert len({g.id for g in first}) == 5
    assert [g.id for g in first] == sorted(g.id for g in first)  # in the order of the pool
    others = [draw(pool, 5, "uniform", 0, seed, batch) for seed, batch in ((7, 4), (8, 3))]
    assert first not in others
    # Fixed by what random.Random makes of a string, on every machine.
    assert [g.id.index for g in first] == DRAWN


DRAWN = [13, 14, 18, 21, 27]


def test_a_pool_too_small_gives_what_it_has() -> None:
    assert draw([], 3, "uniform", 0, 0, 1) == []
    assert len(draw([trained(1), trained(2)], 3, "fresh", 0, 0, 1)) == 2


@pytest.mark.parametrize(
    ("by", "shares"),
    [
        ("uniform", (1, 1, 1, 1)),
        ("fresh", (8, 4, 2, 1)),  # versions 3, 2, 1 and 0 at version 3
        ("advantage", (0.001, 0.251, 0.501, 0.501)),  # spreads 0, 1/4, 1/2 and 1/2
    ],
)
def test_groups_are_drawn_by_weight(by: Any, shares: tuple[float, ...]) -> None:
    rewards = ((1.0, 1.0), (0.5, 1.0), (0.0, 1.0), (0.0, 1.0))
    pool = [trained(i, version=3 - i, rewards=rewards[i]) for i in range(4)]
    n = 20_000
    counts = Counter(
        group.id.index for batch in range(n) for group in draw(pool, 1, by, 3, 0, batch)
    )
    expected = [n * share / sum(shares) for share in shares]
    # Within five standard deviations of a binomial count.
    for index, mean in enumerate(expected):
        assert abs(counts[index] - mean) < 5 * max(1.0, mean) ** 0.5


# --- batches -----------------------------------------------------------------------------------


def test_replayed_groups_ride_on_top_of_the_fresh_ones_and_are_balanced_with_them() -> None:
    ledger = make(ranks=2)
    first = train(ledger, 1)
    assert (first.fresh, first.replayed) == (4, ())  # nothing was trained before
    second = fill(ledger, 2)
    assert second.fresh == 4
    assert indexes(second.envelopes[:4]) == [2, 3]
    assert len(second.replayed) == 2  # one whole group
    assert set(indexes(second.replayed)) < {0, 1}
    assert second.manifest == tuple(e.header for e in second.envelopes)
    assert sorted(i for part in second.parts for i in part) == list(range(6))
    assert ledger.assign(2) is second
    for rank in (0, 1):
        part = ledger.part(2, rank)
        assert part is not None
        assert part.fresh == 4
        assert [e.header for e in part.envelopes] == [part.manifest[i] for i in part.mine]
    original = {e.header.id: e for e in first.envelopes}
    assert all(original[e.header.id] is e for e in second.replayed)


def test_replay_is_counted_apart_and_the_law_stays() -> None:
    ledger = make()
    train(ledger, 1)
    assert "replay/reuse" not in make().gauges(now=0)
    second = fill(ledger, 2)
    assert ledger.conserved()
    assert ledger.counts()["assigned"] == 4
    ledger.commit(2, dropped=(second.replayed[0].header.id,))
    counts = ledger.counts()
    assert (counts["trained"], counts["dropped_stale"], counts["completed"]) == (8, 0, 8)
    assert (counts["replayed"], counts["replay_dropped_stale"]) == (1, 1)
    metrics = ledger.metrics(now=0)
    assert metrics["samples/replayed"] == 1
    assert metrics["replay/reuse"] == pytest.approx(1 / 8)
    assert metrics["replay/pool_groups"] == 4
    assert ledger.conserved()


def test_without_replay_nothing_is_kept_or_told() -> None:
    ledger = make(replay_groups=0)
    for batch in (1, 2):
        assert train(ledger, batch).replayed == ()
    assert ledger.gauges(now=0)["queue/bytes"] == 0
    assert not any(name.startswith(("replay/", "samples/rep")) for name in ledger.metrics(now=0))


def test_what_was_dropped_is_not_replayed() -> None:
    ledger = make(replay_groups=2)
    first = fill(ledger, 1)
    ids = [e.header.id for e in first.envelopes]
    ledger.commit(1, dropped=(ids[0], ids[2], ids[3]))
    ledger.published(Version(0, 1))
    assert [e.header.id for e in fill(ledger, 2).replayed] == [ids[1]]


def test_a_group_is_forgotten_when_it_is_too_old_for_the_next_batch() -> None:
    """By version number: sampled at 0, it may be trained again at versions 1 and 2, not at 3."""
    ledger = make(replay_groups=99, max_staleness=0)
    got = [indexes(train(ledger, batch).replayed) for batch in range(1, 6)]
    assert got == [[], [0, 1], [0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7]]
    assert ledger.gauges(now=0)["replay/pool_groups"] == 6


def test_samples_of_an_earlier_incarnation_are_bounded_by_number() -> None:
    ledger = make(replay_groups=99, max_staleness=0, retain=True)
    for batch in (1, 2):
        train(ledger, batch)
    ledger.covered(2)
    ledger.rewind(2, 1)
    assert ledger.version == Version(1, 2)
    assert indexes(train(ledger, 3).replayed) == [0, 1, 2, 3]  # 0 and 1 are of version 0
    assert indexes(train(ledger, 4).replayed) == [2, 3, 4, 5]


# --- bytes ----------------------------------------------------------------------------------------


def test_the_oldest_groups_are_forgotten_when_bytes_are_short() -> None:
    longest = SAMPLE_OVERHEAD + 12
    ledger = make(max_bytes=2 * 4 * longest, sample_bytes=longest, replay_max_staleness=99)
    train(ledger, 1)
    assert list_pool(ledger) == [0, 1]
    train(ledger, 2)  # 4 groups are held, all of the limit
    assert list_pool(ledger) == [0, 1, 2, 3]
    (lease, *_) = ledger.lease("a", Version(0, 2), 1, now=0)
    assert list_pool(ledger) == [1, 2, 3]
    ledger.lease("a", Version(0, 2), 1, now=0)  # the rest of that group needs no room
    assert list_pool(ledger) == [1, 2, 3]
    assert lease.group.index == 4


def test_a_group_that_a_batch_replays_is_not_forgotten_for_bytes() -> None:
    longest = SAMPLE_OVERHEAD + 12
    ledger = make(
        max_bytes=6 * 2 * longest, sample_bytes=longest, max_staleness=3,
        replay_max_staleness=99, replay_groups=2,
    )  # fmt: skip
    train(ledger, 1)
    second = fill(ledger, 2)
    assert indexes(second.replayed) == [0, 1]
    leases = ledger.lease("a", Version(0, 1), 99, now=0)
    assert len(leases) == 2  # 4 groups are held, two of them by the pool and by the batch
    assert ledger.held_back("a") == "bytes"
    assert list_pool(ledger) == [0, 1]
    ledger.commit(2)
    assert len(ledger.lease("a", Version(0, 2), 4, now=0)) == 2
    assert list_pool(ledger) == [2, 3]


def list_pool(ledger: Ledger) -> list[int]:
    return [group.index for group in ledger._books.pool]


# --- retention and rewind -------------------------------------------------------------------------


def test_a_kept_batch_is_served_again_with_what_it_replayed() -> None:
    ledger = make(retain=True, replay_groups=2, replay_max_staleness=1)
    assignments = {batch: train(ledger, batch) for batch in (1, 2, 3, 4)}
    bytes_before = ledger.gauges(now=0)["queue/bytes"]
    ledger.rewind(1, 1)
    assert ledger.counts()["trained"] == 4
    assert ledger.counts()["replayed"] == 0
    assert list_pool(ledger) == []  # what will be trained once more is not yet to be replayed
    assert ledger.gauges(now=0)["queue/bytes"] == bytes_before  # batches 1 to 4 are still kept
    for batch in (2, 3, 4):
        assert ledger.assign(batch) is assignments[batch]
        assert ledger.conserved()
        ledger.commit(batch)
        ledger.published(Version(1, batch))
    replayed = sum(len(a.replayed) for a in assignments.values())
    assert replayed > 0
    assert ledger.counts()["replayed"] == replayed
    ledger.covered(4)
    pool = {e.header.id: e.nbytes for g in ledger._books.pool.values() for e in g.envelopes}
    assert ledger.gauges(now=0)["queue/bytes"] == sum(pool.values())


# --- everything at once ------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    S=st.integers(0, 2), G=st.integers(1, 3), n_pub=st.integers(1, 2), size=st.integers(2, 3),
    count=st.integers(1, 4), bound=st.integers(1, 3), retain=st.booleans(),
    by=st.sampled_from(("uniform", "advantage", "fresh")), seed=st.integers(0, 2**32),
)  # fmt: skip
def test_in_any_run_replay_keeps_its_bound_and_fresh_samples_are_trained_once(
    S: int, G: int, n_pub: int, size: int, count: int, bound: int, retain: bool, by: Any, seed: int
) -> None:  # fmt: skip
    walk = Walk(
        random.Random(seed), lambda ledger: check(ledger), group_size=size, groups_per_batch=G,
        batches_per_publication=n_pub, max_staleness=S, replay_groups=count,
        replay_max_staleness=bound, replay_by=by, retain=retain, seed=seed,
    )  # fmt: skip

    def check(ledger: Ledger) -> None:
        assert ledger.conserved()

    assert walk.run(12), walk.ledger.waiting_for_next(walk.now)
    fresh: list[Any] = []
    for a in walk.committed:
        version = (a.batch - 1) // n_pub
        seen = set(fresh)  # trained by an earlier batch
        fresh += [h.id for h in a.manifest[: a.fresh]]
        assert len({h.id for h in a.manifest}) == len(a.manifest)
        assert len({e.header.id.group for e in a.replayed}) <= count
        for h in a.manifest[a.fresh :]:
            assert h.id in seen
            assert version - h.version_min.version <= bound
        assert all(version - h.version_min.version <= S for h in a.manifest[: a.fresh])
    assert len(set(fresh)) == len(fresh)
    counts = walk.ledger.counts()
    assert counts["trained"] == len(fresh)
    assert counts["replayed"] == sum(len(a.replayed) for a in walk.committed)


def test_senseless_settings_are_refused() -> None:
    for wrong in ({"replay_groups": -1}, {"replay_max_staleness": 0}, {"quarantine_after": 0}):
        with pytest.raises(ConfigError, match="must be at least"):
            make(**wrong)


def test_a_dropped_id_must_be_of_the_batch() -> None:
    ledger = make()
    first = train(ledger, 1)
    second = fill(ledger, 2)
    absent = ({e.header.id for e in first.envelopes} - {h.id for h in second.manifest}).pop()
    with pytest.raises(LedgerError, match="batch 2 holds no sample"):
        ledger.commit(2, dropped=(absent,))
