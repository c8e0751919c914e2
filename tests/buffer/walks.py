"""A run of the ledger without processes: actors that go on, lose, fail and lag, and a learner."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from asyncrl.buffer.dispatch import BatchAssignment
from asyncrl.buffer.ledger import Ledger
from asyncrl.types import Envelope, FailureKind, Lease, Version
from tests.buffer.samples import envelope, header, prompts

ACTORS = ("actor-0", "actor-1")


class Walk:
    """One random run; `after` is called with the ledger after each event."""

    def __init__(
        self, rng: random.Random, after: Callable[[Ledger], None] | None = None, **settings: Any
    ) -> None:
        self.rng, self.after = rng, after
        self.n_pub = settings.get("batches_per_publication", 1)
        self.settings: dict[str, Any] = {
            "prompts": prompts(), "lease_timeout_s": 10.0, "max_attempts": 2,
        } | settings  # fmt: skip
        self.ledger = Ledger(**self.settings)
        self.longest = self.settings.get("sample_bytes") or 4096
        self.now, self.version, self.batch = 0.0, 0, 1
        self.applied = dict.fromkeys(ACTORS, 0)
        self.held: list[tuple[str, Lease, int]] = []
        self.committed: list[BatchAssignment] = []

    def run(self, batches: int, events: int = 20_000) -> bool:
        """Go on until so many batches are committed; whether they were, within `events`."""
        for _ in range(events):
            self.event()
            if self.after is not None:
                self.after(self.ledger)
            if self.batch > batches:
                return True
        return False

    def event(self) -> None:
        """One lease, result, failure or loss, and whatever the learner can do after it."""
        rng, ledger = self.rng, self.ledger
        self.now += rng.random()
        ledger.expire(self.now)
        what = rng.random()
        if what < 0.35:
            actor = rng.choice(ACTORS)
            self.applied[actor] = max(self.applied[actor], self.version - rng.randrange(2))
            at = Version(0, self.applied[actor])
            for lease in ledger.lease(actor, at, rng.randrange(1, 9), self.now):
                self.held += [(actor, lease, k) for k in lease.samples]
        elif self.held:
            self.end(*self.held.pop(rng.randrange(len(self.held))))
        if (assignment := ledger.assign(self.batch)) is not None:
            if rng.random() < 0.3:
                ledger.assign(self.batch + 1)  # another rank is ahead
            if rng.random() < 0.5:
                self.commit(assignment)

    def end(self, actor: str, lease: Lease, k: int) -> None:
        rng, sample = self.rng, lease.group.sample(k)
        if rng.random() < 0.1:
            kind = rng.choice(list(FailureKind))
            self.ledger.fail(actor, lease.lease, sample, kind, "bad luck", self.now)
        elif rng.random() < 0.95:  # else it is lost, and its lease expires
            stamp = Version(0, rng.randint(lease.version.version, self.applied[actor]))
            self.ledger.accept(self.result(actor, lease, k, stamp), self.now)

    def result(self, actor: str, lease: Lease, k: int, stamp: Version) -> Envelope:
        """A result of random size, up to the longest."""
        size = self.rng.randint(1, self.longest - 2048)
        h = header(lease.group.sample(k), lease.lease, actor, stamp, float(self.rng.randrange(3)))
        return Envelope(h, bytes(size))

    def commit(self, assignment: BatchAssignment) -> None:
        self.committed.append(assignment)
        self.ledger.commit(self.batch)
        self.version = self.batch // self.n_pub
        self.ledger.published(Version(0, self.version))
        self.batch += 1


def give_all(ledger: Ledger, lease: Lease, actor: str = "a", rewards: Any = None) -> None:
    """Deliver all samples of a lease; the reward of sample k is k, or rewards[k]."""
    for k in lease.samples:
        reward = float(k) if rewards is None else float(rewards[k])
        sent = envelope(lease.group.sample(k), lease.lease, actor, lease.version, reward)
        assert ledger.accept(sent, 0.0) == "accepted"
