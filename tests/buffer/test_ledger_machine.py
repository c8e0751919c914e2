"""The ledger against a slow literal model of docs/architecture.md, under any order of events."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncrl.buffer.ledger import Ledger
from asyncrl.recording import Retired
from asyncrl.types import Envelope, FailureKind, GroupId, Prompt, SampleId, Version
from tests.buffer.samples import envelope

TIMEOUT_S = 10.0
ACTORS = ("actor-0", "actor-1", "actor-2")
HELD = ("leased", "assembling", "queued", "assigned")
ENDED = ("trained", "dropped_stale", "filtered", "failed", "requeued", "duplicate")


Source = st.DataObject | random.Random
T = TypeVar("T")


def choose(source: Source, options: Sequence[T]) -> T:
    """One of the options, by hypothesis (which can shrink it) or by a seeded walk."""
    if isinstance(source, random.Random):
        return source.choice(options)
    return source.draw(st.sampled_from(options))


@dataclass
class MGroup:
    """A group of the model: `status` is live, assigned, consumed, filtered or failed."""

    id: GroupId
    size: int
    status: str = "live"
    rewards: dict[int, float] = field(default_factory=dict)
    winner: dict[int, tuple[int, int]] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    failures: Counter[int] = field(default_factory=Counter)

    def wants(self, k: int) -> bool:
        return self.status == "live" and k not in self.rewards and k not in self.given_up

    @property
    def complete(self) -> bool:
        return len(self.rewards) + len(self.given_up) == self.size


@dataclass
class MLease:
    actor: str
    version: Version
    group: MGroup
    deadline_s: float
    tokens: int = 0


class LedgerMachine(RuleBasedStateMachine):
    @initialize(data=st.data())
    def start(self, data: Source, prompts: int | None = None) -> None:
        self.S, self.G = choose(data, range(4)), choose(data, (1, 2, 3))
        self.n_pub, self.size = choose(data, (1, 2)), choose(data, (1, 2, 3))
        self.W = choose(data, range(1, self.S * self.G * self.n_pub + 2))
        self.filter = self.size > 1 and choose(data, (False, True))
        self.attempts = choose(data, (1, 2))
        self.drop = choose(data, (False, True))
        self.total = prompts or choose(data, (3, 12, 1000))
        self.ledger = Ledger(
            prompts=((GroupId("p", 0, i), Prompt(text=str(i))) for i in range(self.total)),
            group_size=self.size, groups_per_batch=self.G, batches_per_publication=self.n_pub,
            max_staleness=self.S, window=self.W, ranks=2, lease_timeout_s=TIMEOUT_S,
            max_attempts=self.attempts, filter_zero_variance=self.filter,
            failed_member="drop" if self.drop else "shrink",
        )  # fmt: skip
        self.ledger.keep_retired()
        self.now = 0.0
        self.groups: list[MGroup] = []
        self.leases: dict[int, MLease] = {}
        self.state: dict[tuple[int, int], str] = {}  # (lease, sample) -> state
        self.applied = dict.fromkeys(ACTORS, Version(0, 0))
        self.published = 0
        self.assigned: dict[int, list[MGroup]] = {}
        self.next_batch, self.committed = 1, 0
        self.trained: list[SampleId] = []
        self.completed = 0
        self.sent: dict[SampleId, Envelope] = {}  # accepted results
        self.place: dict[SampleId, tuple[int, int, int]] = {}  # batch, rank, position
        self.retired: dict[SampleId, Retired] = {}

    # --- the model, literally ---------------------------------------------------------------

    def position(self, group: MGroup) -> int:
        before = self.groups[: self.groups.index(group)]
        return sum(g.status not in ("filtered", "failed") for g in before)

    def admitted(self, position: int, version: int) -> bool:
        return position + self.W <= (version + self.S + 1) * self.G * self.n_pub

    def pending(self, group: MGroup) -> list[int]:
        busy = {
            k for (n, k), s in self.state.items()
            if s == "leased" and self.leases[n].group is group
        }  # fmt: skip
        return [k for k in range(self.size) if group.wants(k) and k not in busy]

    def end(self, key: tuple[int, int]) -> None:
        """A leased dispatch ends without a result that is wanted, or its sample is free again."""
        group = self.leases[key[0]].group
        if key[1] in group.rewards:
            self.state[key] = "duplicate"
        elif group.status == "failed":
            self.state[key] = "failed"
        else:
            self.state[key] = "requeued"

    def settle(self, group: MGroup, state: str) -> None:
        for key in group.winner.values():
            self.state[key] = state

    def completed_group(self, group: MGroup) -> None:
        if self.filter and len(set(group.rewards.values())) == 1:
            group.status = "filtered"
            self.settle(group, "filtered")
        else:
            self.settle(group, "queued")

    def expected_grants(self, version: int, capacity: int) -> list[tuple[GroupId, list[int]]]:
        grants = []
        for group in self.groups:
            if group.status == "live" and self.pending(group) and capacity > 0:
                if not self.admitted(self.position(group), version):
                    return grants
                taken = self.pending(group)[:capacity]
                capacity -= len(taken)
                grants.append((group.id, taken))
        opened = len(self.groups)
        place = sum(g.status not in ("filtered", "failed") for g in self.groups)
        while capacity > 0 and opened < self.total and self.admitted(place, version):
            taken = list(range(min(capacity, self.size)))
            grants.append((GroupId("p", 0, opened), taken))
            capacity -= len(taken)
            opened, place = opened + 1, place + 1
        return grants

    def expected_batch(self) -> list[MGroup] | None:
        chosen: list[MGroup] = []
        live = [g for g in self.groups if g.status == "live"]
        for q in live:
            overtaken = [p for p in live if self.position(p) < self.position(q) and not p.complete]
            if q.complete and all(self.position(q) - self.position(p) < self.W for p in overtaken):
                chosen.append(q)
        return chosen[: self.G] if len(chosen) >= self.G else None

    # --- events -----------------------------------------------------------------------------

    @rule(actor=st.sampled_from(ACTORS), capacity=st.integers(0, 7))
    def lease(self, actor: str, capacity: int) -> None:
        version = self.applied[actor]
        expected = self.expected_grants(version.version, capacity)
        got = self.ledger.lease(actor, version, capacity, self.now)
        assert [(g.group, list(g.samples)) for g in got] == expected
        assert all(g.version == version and g.deadline_s == TIMEOUT_S for g in got)
        for grant in got:
            if grant.group.index == len(self.groups):
                self.groups.append(MGroup(grant.group, self.size))
            group = self.groups[grant.group.index]
            self.leases[grant.lease] = MLease(actor, version, group, self.now + TIMEOUT_S)
            for k in grant.samples:
                self.state[grant.lease, k] = "leased"

    @precondition(lambda self: self.state)
    @rule(data=st.data(), reward=st.sampled_from((0.0, 1.0)))
    def deliver(self, data: Source, reward: float) -> None:
        self.accept(choose(data, sorted(self.state)), data, reward)

    @precondition(lambda self: "leased" in self.state.values())
    @rule(data=st.data(), reward=st.sampled_from((0.0, 1.0)), most=st.integers(1, 9))
    def deliver_leased(self, data: Source, reward: float, most: int) -> None:
        for _ in range(most):
            leased = sorted(k for k, s in self.state.items() if s == "leased")
            if leased:
                self.accept(choose(data, leased), data, reward)

    @rule()
    def all_catch_up_and_lease(self) -> None:
        self.applied = dict.fromkeys(ACTORS, Version(0, self.published))
        for actor in ACTORS:
            self.lease(actor, 5)

    @precondition(lambda self: "leased" in self.state.values())
    @rule(data=st.data(), same=st.booleans())
    def deliver_group(self, data: Source, same: bool) -> None:
        leased = sorted(k for k, s in self.state.items() if s == "leased")
        group = self.leases[choose(data, leased)[0]].group
        for key in leased:
            if self.leases[key[0]].group is group:
                self.accept(key, data, 1.0 if same else float(key[1]))

    def accept(self, key: tuple[int, int], data: Source, reward: float) -> None:
        lease, group, before = self.leases[key[0]], self.leases[key[0]].group, self.state[key]
        version = choose(data, range(lease.version.version, self.applied[lease.actor].version + 1))
        result = envelope(group.id.sample(key[1]), key[0], lease.actor, Version(0, version), reward)
        status = self.ledger.accept(result, self.now)
        if group.wants(key[1]) and before in ("leased", "requeued"):
            assert status == "accepted"
            self.completed += 1
            self.sent[result.header.id] = result
            self.state[key] = "assembling"
            group.rewards[key[1]], group.winner[key[1]] = reward, key
            if before == "leased":
                lease.deadline_s = self.now + TIMEOUT_S
            if group.complete:
                self.completed_group(group)
        else:
            assert status == "duplicate"
            if before == "leased":
                self.end(key)

    @precondition(lambda self: self.state)
    @rule(data=st.data(), kind=st.sampled_from(FailureKind))
    def fail(self, data: Source, kind: FailureKind) -> None:
        key = choose(data, sorted(self.state))
        lease, group, k = self.leases[key[0]], self.leases[key[0]].group, key[1]
        wanted = group.wants(k)
        sample = group.id.sample(k)
        status = self.ledger.fail(lease.actor, key[0], sample, kind, "because", self.now)
        if self.state[key] != "leased" or not wanted:
            assert status == "duplicate"
            if self.state[key] == "leased":
                self.end(key)
            return
        assert status == "accepted"
        if kind is FailureKind.INFRASTRUCTURE:
            self.state[key] = "requeued"
            return
        lease.deadline_s = self.now + TIMEOUT_S
        self.state[key] = "failed"
        group.failures[k] += 1
        if group.failures[k] == self.attempts:
            group.given_up.add(k)
            if self.drop or self.size - len(group.given_up) < 2:
                group.status = "failed"
                self.settle(group, "failed")
            elif group.complete:
                self.completed_group(group)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), bad=st.sampled_from(("lease", "actor", "sample", "group")))
    def stray_result(self, data: Source, bad: str) -> None:
        number = choose(data, sorted(self.leases))
        lease = self.leases[number]
        sample = lease.group.id.sample(self.size if bad == "sample" else 0)
        if bad == "group":
            sample = sample._replace(source="other")
        stray = envelope(
            sample, 10**6 if bad == "lease" else number,
            "nobody" if bad == "actor" else lease.actor, Version(0, 99), 0.0,
        )  # fmt: skip
        before = self.ledger.counts()
        assert self.ledger.accept(stray, self.now) in ("unknown", "duplicate")
        after = self.ledger.counts()
        refused = ("unknown_results", "repeated_results")
        assert sum(after[n] - before[n] for n in refused) == 1
        assert {n: v for n, v in before.items() if n not in refused} == {
            n: v for n, v in after.items() if n not in refused
        }

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), tokens=st.integers(0, 5))
    def progress(self, data: Source, tokens: int) -> None:
        number = choose(data, sorted(self.leases))
        lease = self.leases[number]
        open_ = any(s == "leased" for (n, _), s in self.state.items() if n == number)
        self.ledger.progress(lease.actor, {number: tokens}, self.now)
        self.ledger.progress("nobody", {number: 99}, self.now)
        if open_ and tokens > lease.tokens:
            lease.tokens, lease.deadline_s = tokens, self.now + TIMEOUT_S

    @rule(seconds=st.sampled_from((1.0, 4.0, 11.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.expire(self.now)
        for key, state in sorted(self.state.items()):
            if state == "leased" and self.leases[key[0]].deadline_s <= self.now:
                self.end(key)

    @rule(actor=st.sampled_from(ACTORS))
    def actor_dies(self, actor: str) -> None:
        self.ledger.drop_actor(actor)
        for key, state in sorted(self.state.items()):
            if state == "leased" and self.leases[key[0]].actor == actor:
                self.end(key)

    @rule(actor=st.sampled_from(ACTORS), data=st.data())
    def actor_applies(self, actor: str, data: Source) -> None:
        low = self.applied[actor].version
        self.applied[actor] = Version(0, choose(data, range(low, self.published + 1)))

    @rule(ahead=st.integers(0, 2))
    def assign(self, ahead: int) -> None:
        batch = self.committed + 1 + ahead
        if batch in self.assigned:
            assert self.ledger.assign(batch) is self.ledger.assign(batch)
            return
        expected = self.expected_batch() if batch == self.next_batch else None
        got = self.ledger.assign(batch)
        if expected is None:
            assert got is None
            return
        assert got is not None
        ids = [g.id.sample(k) for g in expected for k in sorted(g.rewards)]
        assert [h.id for h in got.manifest] == ids
        assert sorted(i for part in got.parts for i in part) == list(range(len(ids)))
        ranks = {i: rank for rank, part in enumerate(got.parts) for i in part}
        for i, h in enumerate(got.manifest):
            self.place[h.id] = (batch, ranks[i], self.position(self.groups[h.id.index]))
        learner = (batch - 1) // self.n_pub
        assert all(learner - h.version_min.version <= self.S for h in got.manifest)
        for group in expected:
            group.status = "assigned"
            self.settle(group, "assigned")
        self.assigned[batch] = expected
        self.next_batch += 1

    @precondition(lambda self: self.assigned)
    @rule(data=st.data())
    def commit(self, data: Source) -> None:
        batch = self.committed + 1
        groups = self.assigned.pop(batch)
        ids = [g.id.sample(k) for g in groups for k in g.rewards]
        dropped = [i for i in ids if choose(data, range(8)) == 0]
        self.ledger.commit(batch, tuple(dropped))
        self.ledger.commit(batch)  # a resend changes nothing
        for group in groups:
            group.status = "consumed"
            for k, key in group.winner.items():
                stale = group.id.sample(k) in dropped
                self.state[key] = "dropped_stale" if stale else "trained"
        self.trained += [i for i in ids if i not in dropped]
        self.committed = batch
        if batch % self.n_pub == 0:
            self.published += 1
            self.ledger.published(Version(0, self.published))

    @rule(seed=st.integers(0, 2**32), steps=st.integers(1, 80))
    def walk(self, seed: int, steps: int) -> None:
        """Many events, so that batches fill and old leases come back; checked after each."""
        rng = random.Random(seed)
        for _ in range(steps):
            self.event(rng)
            self.counts_are_the_models()
            self.positions_are_the_models()
            self.what_retires_is_told_once()
            self.memory_is_bounded_by_what_is_open()

    def event(self, rng: random.Random) -> None:
        what = rng.choices(
            ("lease", "leased", "any", "group", "fail", "time", "dies", "applies", "all",
             "assign", "commit", "late"),
            (6, 9, 2, 3, 3, 2, 0.5, 4, 3, 6, 4, 4),
        )[0]  # fmt: skip
        leased = any(s == "leased" for s in self.state.values())
        if what == "lease":
            self.lease(rng.choice(ACTORS), rng.randrange(8))
        elif what == "leased" and leased:
            self.deliver_leased(rng, rng.choice((0.0, 1.0)), rng.randrange(1, 7))
        elif what == "any" and self.state:
            self.accept(rng.choice(sorted(self.state)[-40:]), rng, rng.choice((0.0, 1.0)))
        elif what == "group" and leased:
            self.deliver_group(rng, rng.random() < 0.3)
        elif what == "fail" and self.state:
            self.fail(rng, rng.choice(list(FailureKind)))
        elif what == "time":
            self.time_passes(rng.choice((1.0, 4.0, 11.0)))
        elif what == "dies":
            self.actor_dies(rng.choice(ACTORS))
        elif what == "applies":
            self.actor_applies(rng.choice(ACTORS), rng)
        elif what == "all":
            self.all_catch_up_and_lease()
        elif what == "assign":
            self.assign(rng.randrange(3))
        elif what == "commit" and self.assigned:
            self.commit(rng)
        elif what == "late" and leased:
            self.deliver_late(rng)

    def deliver_late(self, rng: random.Random) -> None:
        """A result of an expired lease, while another actor may be at the same sample."""
        late = sorted(
            key for key, state in self.state.items()
            if state == "requeued" and self.leases[key[0]].group.wants(key[1])
        )  # fmt: skip
        if late:
            self.accept(rng.choice(late), rng, rng.choice((0.0, 1.0)))

    # --- what always holds ---------------------------------------------------------------------

    @invariant()
    def counts_are_the_models(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.conserved()
        counts, states = self.ledger.counts(), Counter(self.state.values())
        assert counts["dispatched"] == len(self.state)
        assert {s: counts[s] for s in HELD + ENDED} == {s: states[s] for s in HELD + ENDED}
        assert counts["held"] == sum(states[s] for s in HELD)
        assert counts["dispatched"] == counts["held"] + sum(counts[s] for s in ENDED)
        assert counts["completed"] == self.completed
        by_status = Counter(g.status for g in self.groups)
        assert counts["groups_filtered"] == by_status["filtered"]
        assert counts["groups_failed"] == by_status["failed"]

    @invariant()
    def positions_are_the_models(self) -> None:
        if hasattr(self, "ledger"):
            for group in self.groups:
                expected = self.position(group) if group.status == "live" else None
                assert self.ledger.position(group.id) == expected

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        if hasattr(self, "ledger"):
            assert len(set(self.trained)) == len(self.trained)

    @invariant()
    def what_retires_is_told_once(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for gone in self.ledger.take_retired():
            sample = gone.envelope.header.id
            assert sample not in self.retired
            assert gone.envelope is self.sent[sample]
            group = self.groups[sample.index]
            self.retired[sample] = gone
            assert gone.outcome == self.state[group.winner[sample.sample]]
            if gone.outcome in ("trained", "dropped_stale"):
                batch, rank, position = self.place[sample]
                assert (gone.batch, gone.rank, gone.position) == (batch, rank, position)
                assert gone.version == (batch - 1) // self.n_pub
            else:
                assert (gone.batch, gone.rank, gone.position, gone.version) == (None,) * 4
        closed = ("consumed", "filtered", "failed")
        assert len(self.retired) == sum(len(g.winner) for g in self.groups if g.status in closed)

    def teardown(self) -> None:
        """At the end of the run what is left is told as held; then every result was told once."""
        if not hasattr(self, "ledger"):
            return
        for _ in range(2):
            self.ledger.tell_held()
        for gone in self.ledger.take_retired():
            sample = gone.envelope.header.id
            assert sample not in self.retired
            self.retired[sample] = gone
            assert (gone.outcome, gone.batch) == ("held", None)
        assert set(self.retired) == set(self.sent)
        assert len(self.sent) == self.completed

    @invariant()
    def memory_is_bounded_by_what_is_open(self) -> None:
        if not hasattr(self, "ledger"):
            return
        kept = {
            key for key, state in self.state.items()
            if state == "leased" or self.leases[key[0]].group.status in ("live", "assigned")
        }  # fmt: skip
        assert self.ledger.records() == len(kept) + len({lease for lease, _ in kept})
        open_ = [g for g in self.groups if g.status in ("live", "assigned")]
        held = sum(6 * (k + 1) for g in open_ for k in g.rewards)
        assert self.ledger.gauges(self.now)["queue/bytes"] == held


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("seed", range(40))
def test_long_walks(seed: int) -> None:
    """Far into a run: hundreds of events, most of them of actors and a learner that go on."""
    machine, rng = LedgerMachine(), random.Random(seed)
    machine.start(rng, prompts=rng.choice((40, 10_000)))
    for _ in range(3):
        machine.walk(rng.randrange(2**32), 150)
    assert machine.state
    machine.teardown()
