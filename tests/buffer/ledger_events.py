"""What the learner, and crashes of the buffer, do to a ledger and to its model alike."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from asyncrl.buffer.dispatch import Trained
from asyncrl.buffer.journal import Journaled, replay
from asyncrl.buffer.replay import draw
from asyncrl.errors import LedgerError
from asyncrl.types import Envelope, SampleHeader, Version
from tests.buffer.actor_events import ActorEvents
from tests.buffer.ledger_model import (
    ACTORS,
    TIMEOUT_S,
    MBatch,
    MGroup,
    Source,
    choose,
)


class Events(ActorEvents):
    """All that may happen."""

    # --- the learner -------------------------------------------------------------------------

    @rule(ahead=st.integers(0, 2))
    def assign(self, ahead: int) -> None:
        batch = self.committed + 1 + ahead
        if batch in self.batches:
            self.is_served_identical(batch)
            return
        expected = self.expected_batch() if batch == self.next_batch else None
        got = self.ledger.assign(batch)
        if expected is None:
            assert got is None
            return
        assert got is not None
        learner = self.learner_version(batch)
        for group in [g for g in self.pool.values() if learner - g.version > self.replay_S]:
            del self.pool[group.id]
        drawn = draw(self.pool.values(), self.R, self.by, learner, 7, batch)
        again = [e.header.id for g in drawn for e in g.envelopes]
        fresh = [i for g in expected for i in g.ids]
        assert [h.id for h in got.manifest] == fresh + again
        assert got.fresh == len(fresh)
        assert sorted(i for part in got.parts for i in part) == list(range(len(got.manifest)))
        ranks = {i: rank for rank, part in enumerate(got.parts) for i in part}
        groups = {g.id: g for g in expected}
        for i, h in enumerate(got.manifest[: got.fresh]):
            self.place[h.id] = (batch, ranks[i], self.position(groups[h.id.group]))
        self.batches[batch] = MBatch(expected, drawn, list(got.manifest), got.parts)
        self.keeps_the_bound(batch)
        for group in expected:
            group.status = "assigned"
            self.settle(group, "assigned")
        self.next_batch += 1

    def keeps_the_bound(self, batch: int) -> None:
        """By version number, whatever the incarnations."""
        fixed, learner = self.batches[batch], self.learner_version(batch)
        fresh = sum(len(g.rewards) for g in fixed.groups)
        for i, h in enumerate(fixed.headers):
            bound = self.S if i < fresh else self.replay_S
            assert learner - h.version_min.version <= bound

    def is_served_identical(self, batch: int) -> None:
        fixed, got = self.batches[batch], self.ledger.assign(batch)
        assert got is not None
        assert (list(got.manifest), got.parts) == (fixed.headers, fixed.parts)
        assert [e.header for e in got.envelopes] == fixed.headers
        assert all(e is self.sent[e.header.id] for e in got.envelopes)
        for rank in range(2):
            part = self.ledger.part(batch, rank)
            assert part is not None
            assert part.mine == fixed.parts[rank]
            assert part.envelopes == tuple(got.envelopes[i] for i in part.mine)

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def serve_again(self, data: Source) -> None:
        self.is_served_identical(choose(data, sorted(self.batches)))

    @precondition(lambda self: self.assigned())
    @rule(data=st.data())
    def commit(self, data: Source) -> None:
        batch = self.committed + 1
        fixed = self.batches[batch]
        self.keeps_the_bound(batch)
        again = {e.header.id for g in fixed.replayed for e in g.envelopes}
        dropped = {h.id for h in fixed.headers if choose(data, range(8)) == 0}
        self.ledger.commit(batch, tuple(sorted(dropped)))
        self.ledger.commit(batch)  # a resend changes nothing
        for group in fixed.groups:
            group.status = "kept"
            for k, key in group.winner.items():
                stale = group.id.sample(k) in dropped
                self.state[key] = "dropped_stale" if stale else "trained"
            self.pool_in(group)
        fixed.trained_again = len(again - dropped)
        self.replayed += fixed.trained_again
        self.seen["replayed"] += fixed.trained_again
        self.seen["trained"] += len(fixed.headers)
        self.committed = batch
        if not self.retain:
            self.let_go(batch)
        if batch // self.n_pub > self.version.version:
            self.version = Version(self.version.incarnation, batch // self.n_pub)
            self.ledger.published(self.version)

    def pool_in(self, group: MGroup) -> None:
        ids = [i for i in group.ids if self.state[group.winner[i.sample]] == "trained"]
        if self.R and ids:
            self.pool[group.id] = Trained(group.id, tuple(self.sent[i] for i in ids))

    @rule(data=st.data())
    def covered(self, data: Source) -> None:
        batch = choose(data, range(max(0, self.covered_to - 1), self.committed + 1))
        with pytest.raises(LedgerError, match=f"the last committed is {self.committed}"):
            self.ledger.covered(self.committed + 1)
        self.ledger.covered(batch)
        self.let_go(batch)

    @rule(data=st.data())
    def rewind(self, data: Source) -> None:
        """The learner died and restarted from one of its checkpoints."""
        lowest = max(self.covered_to, self.committed - choose(data, (1, 2, 9)))
        batch = choose(data, range(lowest, self.committed + 1))
        incarnation = self.version.incarnation + choose(data, (1, 2))
        for wrong in (self.covered_to - 1, self.committed + 1):
            with pytest.raises(LedgerError, match=f"rewind to batch {wrong}"):
                self.ledger.rewind(wrong, incarnation)
        with pytest.raises(LedgerError, match="must rise"):
            self.ledger.rewind(batch, self.version.incarnation - 1)
        for _ in range(2):  # the second is a resend
            self.ledger.rewind(batch, incarnation)
        for key in self.of_state("leased"):
            self.end(key)
        for k in range(batch + 1, self.committed + 1):
            fixed = self.batches[k]
            self.replayed -= fixed.trained_again
            self.seen["rewound"] += 1
            for group in fixed.groups:
                group.status, group.reopened = "assigned", True
                self.settle(group, "assigned")
                self.pool.pop(group.id, None)
                for i in group.ids:
                    del self.retired[i]  # it will be told again
        if self.prior_drop:
            self.take_back()
        self.committed = batch
        self.last_versions[self.version.incarnation] = self.version.version
        self.version = self.restarted_at = Version(incarnation, batch // self.n_pub)
        for k in list(self.batches):
            self.keeps_the_bound(k)
            self.is_served_identical(k)

    def take_back(self) -> None:
        """What is in no batch is produced again; each result is told as that, once."""
        expected = set()
        for group in self.groups:
            if group.status == "live":
                expected |= set(group.ids)
                self.settle(group, "requeued")
                group.rewards.clear()
                group.winner.clear()
        told = self.ledger.take_retired()
        assert {gone.envelope.header.id for gone in told} == expected
        assert len(told) == len(expected)
        for gone in told:
            assert (gone.outcome, gone.batch) == ("requeued", None)
            assert gone.incarnation == self.version.incarnation
            assert gone.envelope is self.sent.pop(gone.envelope.header.id)
        self.taken_back += len(told)
        self.seen["taken back"] += len(told)
        self.pool.clear()

    @rule(data=st.data(), most=st.integers(1, 5))
    def rewind_under_way(self, data: Source, most: int) -> None:
        """Actors go on with what they had, in the learner's new incarnation, and deliver it."""
        self.rewind(data)
        for actor in ACTORS:
            self.history[actor].append(self.version)
        for _ in range(most):
            if late := self.late():
                self.accept(choose(data, late), data, float(choose(data, (0, 1))))

    # --- the buffer ----------------------------------------------------------------------------

    @rule()
    def take_snapshot(self) -> None:
        self.snapshot, self.entries = self.ledger.state(), []
        self.ledger.take()

    @rule()
    def crash(self) -> None:
        """The buffer's process dies; its successor has the snapshot and the entries since."""
        self.entries += self.ledger.take()
        if self.snapshot is None:
            ledger = Journaled(prompts=self.prompts(), **self.settings)
        else:
            ledger = Journaled.restore(
                self.snapshot, prompts=self.prompts(), envelope=self.stored, now=self.now,
                **self.settings,
            )  # fmt: skip
        assert replay(ledger, self.entries, envelope=self.stored, now=self.now) == []
        assert ledger.state() == self.ledger.state()
        assert ledger.take() == []
        ledger.keep_retired()
        self.ledger = ledger
        for number, _ in self.of_state("leased"):
            self.leases[number].deadline_s = self.now + TIMEOUT_S
        for lease in self.leases.values():
            lease.tokens = 0

    def stored(self, header: SampleHeader, nbytes: int) -> Envelope:
        """The payload that was stored for a sample; of a refused result there is none."""
        sent = self.sent.get(header.id)
        if sent is None or sent.header.lease != header.lease:
            return Envelope(header, bytes(nbytes))
        assert (sent.header, sent.nbytes) == (header, nbytes)
        return sent
