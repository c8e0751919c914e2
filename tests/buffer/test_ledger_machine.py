"""The ledger against a slow literal model of docs/architecture.md, under any order of events.

Crashes among them: the ledger is thrown away and made anew from a snapshot and the journal.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from asyncrl.types import FailureKind
from tests.buffer.ledger_events import Events
from tests.buffer.ledger_model import ACTORS, ENDED, HELD, Key

SOAK_STEPS = 100_000


class LedgerMachine(Events, RuleBasedStateMachine):
    # --- many events -----------------------------------------------------------------------------

    @rule(seed=st.integers(0, 2**32), steps=st.integers(1, 80))
    def walk(self, seed: int, steps: int) -> None:
        """Many events, so that batches fill and old leases come back; checked after each."""
        rng = random.Random(seed)
        for _ in range(steps):
            self.event(rng)
            self.counts_are_the_models()
            self.positions_are_the_models()
            self.nothing_is_trained_twice()
            self.what_retires_is_told_once()
            self.memory_is_bounded_by_what_is_open()

    def event(self, rng: random.Random) -> None:
        leased = bool(self.of_state("leased"))
        reward = rng.choice((0.0, 1.0))
        events = {
            "lease": (4, True, lambda: self.lease(rng.choice(ACTORS), rng.randrange(8))),
            "leased": (9, leased, lambda: self.deliver_leased(rng, reward, rng.randrange(1, 7))),
            "any": (2, self.state, lambda: self.deliver(rng, reward)),
            "group": (3, leased, lambda: self.deliver_group(rng, rng.random() < 0.3)),
            "late": (4, self.late(), lambda: self.deliver_late(rng, reward)),
            "fail": (1.5, self.state, lambda: self.fail(rng, rng.choice(list(FailureKind)))),
            "time": (1.2, True, lambda: self.time_passes(rng.choice((1.0, 4.0, 11.0)))),
            "dies": (0.4, True, lambda: self.actor_dies(rng.choice(ACTORS))),
            "back": (0.4, True, lambda: self.actor_comes_back(rng.choice(ACTORS), rng)),
            "applies": (3, True, lambda: self.actor_applies(rng.choice(ACTORS), rng)),
            "all": (6, True, self.all_catch_up_and_lease),
            "assign": (6, True, lambda: self.assign(rng.randrange(3))),
            "again": (1, self.batches, lambda: self.serve_again(rng)),
            "commit": (9, self.assigned(), lambda: self.commit(rng)),
            "covered": (0.7, True, lambda: self.covered(rng)),
            "rewind": (0.5, True, lambda: self.rewind(rng)),
            "under way": (0.5, True, lambda: self.rewind_under_way(rng, rng.randrange(1, 6))),
            "snapshot": (0.5, True, self.take_snapshot),
            "crash": (0.5, True, self.crash),
        }
        possible = [name for name, (_, can, _) in events.items() if can]
        what = rng.choices(possible, [events[name][0] for name in possible])[0]
        events[what][2]()
        self.steps[what] += 1

    # --- what always holds ---------------------------------------------------------------------

    @invariant()
    def counts_are_the_models(self) -> None:
        if not hasattr(self, "ledger"):
            return
        assert self.ledger.conserved()
        assert (self.ledger.version, self.ledger.committed) == (self.version, self.committed)
        counts, states = self.ledger.counts(), Counter(self.state.values())
        assert counts["dispatched"] == len(self.state)
        assert {s: counts[s] for s in HELD + ENDED} == {s: states[s] for s in HELD + ENDED}
        assert counts["held"] == sum(states[s] for s in HELD)
        assert counts["dispatched"] == counts["held"] + sum(counts[s] for s in ENDED)
        assert counts["completed"] == self.completed
        assert counts["replayed"] == self.replayed
        by_status = Counter(g.status for g in self.groups)
        assert counts["groups_filtered"] == by_status["filtered"]
        assert counts["groups_failed"] == by_status["failed"]
        assert counts["groups_trained"] == len({i.group for i in self.trained()})

    @invariant()
    def positions_are_the_models(self) -> None:
        if hasattr(self, "ledger"):
            for group in self.groups:
                expected = self.position(group) if group.status == "live" else None
                assert self.ledger.position(group.id) == expected

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        """One result of a sample counts, in one committed batch of what became of the run."""
        if hasattr(self, "ledger"):
            trained = self.trained()
            assert len(set(trained)) == len(trained)
            assert all(self.place[i][0] <= self.committed for i in trained)

    @invariant()
    def what_retires_is_told_once(self) -> None:
        """Once a lineage: a batch that is trained again tells again, with the new incarnation."""
        if not hasattr(self, "ledger"):
            return
        groups = {g.id: g for g in self.groups}
        for gone in self.ledger.take_retired():
            sample = gone.envelope.header.id
            assert sample not in self.retired
            assert gone.envelope is self.sent[sample]
            assert gone.incarnation == self.version.incarnation
            self.retired[sample] = gone
            assert gone.outcome == self.state[groups[sample.group].winner[sample.sample]]
            if gone.outcome in ("trained", "dropped_stale"):
                batch, rank, position = self.place[sample]
                assert (gone.batch, gone.rank, gone.position) == (batch, rank, position)
                assert gone.version == self.learner_version(batch)
            else:
                assert (gone.batch, gone.rank, gone.position, gone.version) == (None,) * 4
        closed = ("kept", "gone", "filtered", "failed")
        assert len(self.retired) == sum(len(g.winner) for g in self.groups if g.status in closed)

    @invariant()
    def memory_is_bounded_by_what_is_open(self) -> None:
        if not hasattr(self, "ledger"):
            return
        dispatches: set[Key] = set(self.of_state("leased"))
        leases = {lease for lease, _ in dispatches}
        for key in self.state:
            group = self.leases[key[0]].group
            if group.status in ("live", "assigned") and not group.reopened:
                dispatches.add(key)
                leases.add(key[0])
        reopened = [g for g in self.groups if g.status == "assigned" and g.reopened]
        dispatches |= {key for g in reopened for key in g.winner.values()}
        assert self.ledger.records() == len(dispatches) + len(leases)
        held = sum(self.sent[i].nbytes for i in self.held_samples())
        assert self.ledger.gauges(self.now)["queue/bytes"] == held

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
        assert len(self.sent) + self.taken_back == self.completed


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def long_walk(seed: int, events: int = 450) -> LedgerMachine:
    """Far into a run: hundreds of events, most of them of actors and a learner that go on."""
    machine, rng = LedgerMachine(), random.Random(seed)
    machine.start(rng, prompts=rng.choice((60, 10_000, 10_000)))
    machine.walk(rng.randrange(2**32), events)
    assert machine.state
    machine.teardown()
    return machine


@pytest.mark.parametrize("seed", range(30))
def test_long_walks(seed: int) -> None:
    long_walk(seed)


@pytest.mark.soak
def test_soak() -> None:
    steps, seen = Counter[str](), Counter[str]()
    runs = 0
    while steps.total() < SOAK_STEPS:
        machine = long_walk(1000 + runs, events=700)
        steps, seen, runs = steps + machine.steps, seen + machine.seen, runs + 1
    print(f"{steps.total()} steps in {runs} runs: {dict(steps)}; {dict(seen)}")
    assert steps.total() >= SOAK_STEPS
    assert min(steps[what] for what in ("crash", "rewind", "covered", "late", "commit")) > 500
    assert min(seen.values()) > 50
