"""A slow, literal model of the ledger (docs/architecture.md): what test_ledger_machine expects."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hypothesis import strategies as st

from asyncrl.buffer.dispatch import Trained
from asyncrl.types import Envelope, GroupId, Prompt, SampleHeader, SampleId, Version

TIMEOUT_S = 10.0
ACTORS = ("actor-0", "actor-1", "actor-2")
HELD = ("leased", "assembling", "queued", "assigned")
ENDED = ("trained", "dropped_stale", "filtered", "failed", "requeued", "duplicate")

Source = st.DataObject | random.Random
T = TypeVar("T")
Key = tuple[int, int]
"""A dispatch: (lease, sample)."""


def choose(source: Source, options: Sequence[T]) -> T:
    """One of the options, by hypothesis (which can shrink it) or by a seeded walk."""
    if isinstance(source, random.Random):
        return source.choice(options)
    return source.draw(st.sampled_from(options))


@dataclass(eq=False)
class MGroup:
    """`status` is live, assigned, kept (its batch is committed), gone, filtered or failed."""

    id: GroupId
    size: int
    status: str = "live"
    rewards: dict[int, float] = field(default_factory=dict)
    winner: dict[int, Key] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    failures: Counter[int] = field(default_factory=Counter)
    reopened: bool = False
    """It was committed and is assigned again."""

    def wants(self, k: int) -> bool:
        return self.status == "live" and k not in self.rewards and k not in self.given_up

    @property
    def complete(self) -> bool:
        return len(self.rewards) + len(self.given_up) == self.size

    @property
    def ids(self) -> list[SampleId]:
        return [self.id.sample(k) for k in sorted(self.rewards)]


@dataclass
class MLease:
    actor: str
    version: Version
    since: int
    """How many versions its actor had applied when it was granted."""
    group: MGroup
    deadline_s: float
    tokens: int = 0


@dataclass
class MBatch:
    groups: list[MGroup]
    replayed: list[Trained]
    headers: list[SampleHeader]
    parts: Any
    trained_again: int = 0
    """Replayed samples that were trained."""


class Model:
    """State and rules, written down as the documentation has them."""

    def begin(self, data: Source, prompts: int | None = None) -> None:
        self.S, self.G = choose(data, (0, 1, 2, 4)), choose(data, (1, 2, 3))
        self.n_pub, self.size = choose(data, (1, 2)), choose(data, (1, 2, 3))
        self.W = choose(data, range(1, self.S * self.G * self.n_pub + 2))
        self.filter = self.size > 1 and choose(data, (False, True))
        self.attempts, self.quarantine_after = choose(data, (1, 2)), choose(data, (1, 2))
        self.drop, self.retain = choose(data, (False, True)), choose(data, (False, True, True))
        self.prior_drop = choose(data, (False, False, True))
        self.R, self.replay_S = choose(data, (0, 0, 1, 2)), choose(data, (1, 2, 4))
        self.by = choose(data, ("uniform", "advantage", "fresh"))
        total, per_epoch = prompts or choose(data, (3, 12, 1000)), choose(data, (15, 10_000))
        self.source = [GroupId("p", i // per_epoch, i % per_epoch) for i in range(total)]
        self.settings: dict[str, Any] = dict(
            group_size=self.size, groups_per_batch=self.G, batches_per_publication=self.n_pub,
            max_staleness=self.S, window=self.W, ranks=2, lease_timeout_s=TIMEOUT_S,
            max_attempts=self.attempts, filter_zero_variance=self.filter,
            failed_member="drop" if self.drop else "shrink", retain=self.retain,
            prior_incarnation="drop" if self.prior_drop else "keep",
            quarantine_after=self.quarantine_after, replay_groups=self.R,
            replay_max_staleness=self.replay_S, replay_by=self.by, seed=7,
        )  # fmt: skip
        self.now = 0.0
        self.groups: list[MGroup] = []  # in the order of the prompts
        self.leases: dict[int, MLease] = {}
        self.state: dict[Key, str] = {}
        self.history = {actor: [Version(0, 0)] for actor in ACTORS}  # versions applied
        self.version, self.restarted_at = Version(0, 0), Version(0, 0)
        self.last_versions: dict[int, int] = {}
        self.batches: dict[int, MBatch] = {}  # assigned or kept
        self.next_batch, self.committed, self.covered_to = 1, 0, 0
        self.pool: dict[GroupId, Trained] = {}
        self.replayed = 0
        self.completed, self.taken_back = 0, 0
        self.group_failures: Counter[int] = Counter()
        self.sent: dict[SampleId, Envelope] = {}  # accepted results
        self.place: dict[SampleId, tuple[int, int, int]] = {}  # batch, rank, position

    def prompts(self) -> Iterator[tuple[GroupId, Prompt]]:
        return ((group, Prompt(text=str(group))) for group in self.source)

    # --- admission ------------------------------------------------------------------------------

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

    def quarantined(self, prompt: GroupId) -> bool:
        return self.group_failures[prompt.index] >= self.quarantine_after

    def next_prompts(self) -> Iterator[GroupId]:
        start = self.source.index(self.groups[-1].id) + 1 if self.groups else 0
        return (p for p in self.source[start:] if not self.quarantined(p))

    def expected_grants(self, applied: Version, capacity: int) -> list[tuple[GroupId, list[int]]]:
        grants: list[tuple[GroupId, list[int]]] = []
        if applied.incarnation < self.version.incarnation:
            return grants
        for group in self.groups:
            if group.status == "live" and self.pending(group) and capacity > 0:
                if not self.admitted(self.position(group), applied.version):
                    return grants
                taken = self.pending(group)[:capacity]
                capacity -= len(taken)
                grants.append((group.id, taken))
        place = sum(g.status not in ("filtered", "failed") for g in self.groups)
        for prompt in self.next_prompts():
            if capacity <= 0 or not self.admitted(place, applied.version):
                break
            taken = list(range(min(capacity, self.size)))
            grants.append((prompt, taken))
            capacity, place = capacity - len(taken), place + 1
        return grants

    # --- results --------------------------------------------------------------------------------

    def of_state(self, state: str) -> list[Key]:
        return sorted(key for key, s in self.state.items() if s == state)

    def end(self, key: Key) -> None:
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

    def given_up(self, group: MGroup, k: int) -> None:
        group.given_up.add(k)
        if self.drop or self.size - len(group.given_up) < 2:
            group.status = "failed"
            self.settle(group, "failed")
            self.group_failures[group.id.index] += 1
        elif group.complete:
            self.completed_group(group)

    # --- batches --------------------------------------------------------------------------------

    def learner_version(self, batch: int) -> int:
        return (batch - 1) // self.n_pub

    def expected_batch(self) -> list[MGroup] | None:
        chosen: list[MGroup] = []
        live = [g for g in self.groups if g.status == "live"]
        for q in live:
            overtaken = [p for p in live if self.position(p) < self.position(q) and not p.complete]
            if q.complete and all(self.position(q) - self.position(p) < self.W for p in overtaken):
                chosen.append(q)
        return chosen[: self.G] if len(chosen) >= self.G else None

    def assigned(self) -> list[int]:
        return [k for k in self.batches if k > self.committed]

    def let_go(self, batch: int) -> None:
        """A checkpoint covers the batches up to this one."""
        for k in range(self.covered_to + 1, batch + 1):
            for group in self.batches.pop(k).groups:
                group.status = "gone"
        self.covered_to = max(self.covered_to, batch)

    def trained(self) -> list[SampleId]:
        return [
            g.id.sample(k) for g in self.groups for k, key in g.winner.items()
            if self.state[key] == "trained"
        ]  # fmt: skip

    def held_samples(self) -> set[SampleId]:
        """Samples that may be asked for: their payload is kept."""
        held = {i for g in self.groups if g.status in ("live", "assigned", "kept") for i in g.ids}
        groups = [*self.pool.values(), *(t for b in self.batches.values() for t in b.replayed)]
        return held | {e.header.id for g in groups for e in g.envelopes}
