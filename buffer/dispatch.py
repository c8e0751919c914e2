"""The ledger's records: what is known of each dispatch, lease, member and group.

Group ── Member × n ── the accepted Dispatch, if any
  └───── LeaseRecord ── Dispatch per sample (one try of one sample by one actor)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from asyncrl.types import Envelope, GroupId, Prompt, SampleHeader, Version


class State(StrEnum):
    """Where a dispatch is; it is in exactly one state, and ends in one of `TERMS`."""

    LEASED = "leased"
    """An actor is producing it."""
    ASSEMBLING = "assembling"
    """Accepted; its group still misses members."""
    QUEUED = "queued"
    """Accepted; its group is complete and waits for a batch."""
    ASSIGNED = "assigned"
    """In a batch that is not committed."""
    TRAINED = "trained"
    """Committed with a batch."""
    DROPPED_STALE = "dropped_stale"
    """In a committed batch, left out by the learner's staleness check."""
    FILTERED = "filtered"
    """Accepted, but its group was filtered out."""
    FAILED = "failed"
    """Its prompt or reward failed, or its group was given up."""
    REQUEUED = "requeued"
    """Lost (lease expired, actor gone or machinery failed); the sample is leased again."""
    DUPLICATE = "duplicate"
    """Another dispatch of the same sample was accepted first."""


HELD = (State.LEASED, State.QUEUED, State.ASSEMBLING, State.ASSIGNED)
TERMS = (
    State.TRAINED,
    State.DROPPED_STALE,
    State.FILTERED,
    State.FAILED,
    State.REQUEUED,
    State.DUPLICATE,
)


class Phase(StrEnum):
    """Where a group is."""

    OPEN = "open"
    """Misses members."""
    COMPLETE = "complete"
    """Waits for a batch."""
    ASSIGNED = "assigned"
    """In a batch that is not committed."""
    CONSUMED = "consumed"
    """Its batch is committed."""
    FILTERED = "filtered"
    FAILED = "failed"


RETIRED = (Phase.CONSUMED, Phase.FILTERED, Phase.FAILED)


@dataclass(slots=True, eq=False)
class Dispatch:
    """One try of one sample under one lease."""

    lease: LeaseRecord
    sample: int
    state: State = State.LEASED


@dataclass(slots=True, eq=False)
class Member:
    """One of a group's samples."""

    dispatch: Dispatch | None = None
    """The dispatch whose result was accepted."""
    envelope: Envelope | None = None
    """That result, until its batch is committed."""
    accepted_s: float = 0.0
    failures: int = 0
    """Data and reward failures so far."""
    given_up: bool = False
    told: bool = False
    """Its fate was handed out for the recording."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a group went when its batch was assigned."""

    batch: int
    position: int
    ranks: dict[int, int]
    """Sample index to the learner rank that trains it."""


@dataclass(slots=True, eq=False)
class Group:
    """One prompt and its samples."""

    id: GroupId
    prompt: Prompt
    ordinal: int
    """Place in the cursor's order, removed groups included."""
    members: list[Member]
    pending: list[int]
    """Samples that nobody produces now and that are still wanted, ascending."""
    unresolved: int
    """Members neither accepted nor given up."""
    phase: Phase = Phase.OPEN
    place: Place | None = None
    """From its assignment on."""
    leases: list[LeaseRecord] = field(default_factory=list)

    def accepted(self) -> list[tuple[int, Member]]:
        """(sample index, member) of each accepted member, by sample index."""
        return [(k, m) for k, m in enumerate(self.members) if m.dispatch is not None]

    def dispatches(self) -> list[Dispatch]:
        """The dispatch of each accepted member, by sample index."""
        return [m.dispatch for m in self.members if m.dispatch is not None]

    def wants(self, sample: int) -> bool:
        """Whether a result for this sample would still be accepted."""
        member = self.members[sample]
        return self.phase is Phase.OPEN and member.dispatch is None and not member.given_up


@dataclass(slots=True, eq=False)
class LeaseRecord:
    """A lease as the ledger keeps it; kept until its group is retired and nothing is leased."""

    number: int
    actor: str
    version: Version
    """The applied version that admission counted on."""
    group: Group
    granted_s: float
    deadline_s: float
    """Clock time at which it expires."""
    tokens: int = 0
    """Progress reported so far."""
    dispatches: dict[int, Dispatch] = field(default_factory=dict)
    leased: int = 0
    """Dispatches still in state LEASED."""


@dataclass(frozen=True, slots=True)
class BatchAssignment:
    """A batch, fixed: every pull of it gives the same.

    `parts[r]` holds the indexes into `manifest` (ascending) of the samples of rank r.
    `manifest[:fresh]` are fresh samples, `manifest[fresh:]` were trained before and are replayed.
    """

    batch: int
    envelopes: tuple[Envelope, ...]
    """In the order of consumption."""
    manifest: tuple[SampleHeader, ...]
    """Their headers."""
    parts: tuple[tuple[int, ...], ...]
    fresh: int
    """Fresh samples, the first of the manifest; the others are replayed."""

    @property
    def replayed(self) -> tuple[Envelope, ...]:
        """The samples that were trained before, whole groups."""
        return self.envelopes[self.fresh :]


@dataclass(frozen=True, slots=True)
class Trained:
    """A trained group that may be replayed."""

    id: GroupId
    envelopes: tuple[Envelope, ...]
    """The samples that were trained."""

    @property
    def version(self) -> int:
        """The lowest version number of a token: the one that the bound is about."""
        return min(e.header.version_min.version for e in self.envelopes)

    @property
    def spread(self) -> float:
        """Mean of |r - mean r|: what its advantages come to before they are normalised."""
        rewards = [e.header.reward for e in self.envelopes]
        mean = math.fsum(rewards) / len(rewards)
        return math.fsum(abs(r - mean) for r in rewards) / len(rewards)
