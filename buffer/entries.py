"""The entries of the journal: one class for every call that changes the ledger.

An entry tells what came of a call, not what was asked: a replay looks at no clock, no admission
and no limit. What is not in one means nothing to another process: deadlines (all are new after a
restart), progress, results that were refused without an effect, who asked for work.
"""

from __future__ import annotations

import msgspec

from asyncrl.types import FailureKind, GroupId, SampleHeader, SampleId, Version


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A change of the ledger."""


class Leased(Entry, frozen=True, array_like=True, tag="leased"):
    """Samples were leased: of the oldest groups that miss some, then of new groups."""

    actor: str
    applied: Version
    first: int
    """Number of the first lease; one a group, counted up."""
    samples: int
    """In all leases."""
    forgot: tuple[GroupId, ...] = ()
    """Groups that had to leave the replay pool for it."""


class Accepted(Entry, frozen=True, array_like=True, tag="accepted"):
    """A result came, and is the one that counts."""

    header: SampleHeader
    nbytes: int
    """Of its payload."""


class Lost(Entry, frozen=True, array_like=True, tag="lost"):
    """A result came that does not count, and with it a leased sample ended."""

    lease: int
    sample: int


class FailedSample(Entry, frozen=True, array_like=True, tag="failed"):
    """A sample brings no result."""

    actor: str
    lease: int
    id: SampleId
    kind: FailureKind
    reason: str


class Released(Entry, frozen=True, array_like=True, tag="released"):
    """Leases ended: they expired, or their actor is gone or does not know them."""

    leases: tuple[int, ...]


class Assigned(Entry, frozen=True, array_like=True, tag="assigned"):
    """A batch was fixed."""

    batch: int
    samples: int


class Committed(Entry, frozen=True, array_like=True, tag="committed"):
    """A batch was trained."""

    batch: int
    dropped: tuple[SampleId, ...]


class Published(Entry, frozen=True, array_like=True, tag="published"):
    """The learner cut a snapshot of the weights."""

    version: Version


class Covered(Entry, frozen=True, array_like=True, tag="covered"):
    """A checkpoint covers the batches up to this one."""

    batch: int


class Rewound(Entry, frozen=True, array_like=True, tag="rewound"):
    """The learner went back to the checkpoint of a batch."""

    batch: int
    incarnation: int


class Stopped(Entry, frozen=True, array_like=True, tag="stopped"):
    """Somebody ended the run; nothing of it is in the ledger."""

    reason: str
    final: Version | None
    evaluate: bool


class Resumed(Entry, frozen=True, array_like=True, tag="resumed"):
    """The run goes on after its end: whoever ended it before does so no more."""


AnyEntry = (
    Leased | Accepted | Lost | FailedSample | Released | Assigned | Committed | Published
    | Covered | Rewound | Stopped | Resumed
)  # fmt: skip
"""Whatever may be in a journal."""
