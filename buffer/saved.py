"""What a stored ledger looks like: asyncrl.buffer.snapshot writes it, `restoring` reads it.

Written is what cannot be had from the rest. Payloads are not in it: a sample is its header and a
number of bytes. Nor are times, since clocks do not outlive a machine.
"""

from __future__ import annotations

from typing import Any

import msgspec

from asyncrl.buffer.books import Books
from asyncrl.buffer.counts import Census
from asyncrl.buffer.cursor import Cursor, PromptKey
from asyncrl.buffer.dispatch import (
    BatchAssignment,
    Dispatch,
    Group,
    LeaseRecord,
    Member,
    Phase,
    Place,
    State,
    Trained,
)
from asyncrl.buffer.order import Order
from asyncrl.buffer.room import Key, Room
from asyncrl.types import FailureKind, GroupId, SampleHeader, Version

FORMAT = 1
"""Of the state and of the journal's entries; another one is refused."""
MAY_DIFFER = frozenset(
    (
        "lease_timeout_s", "max_filtered_in_a_row", "prompts_end", "max_bytes", "bytes_setting",
        "ranks",
    )
)  # fmt: skip
"""Rules that a restored ledger may have otherwise: they decide nothing that is decided already.
With other ranks a batch is dealt anew."""

_STORED = """version next_batch committed covered rewound_to last_versions last_failure
attempts_in_vain failed_in_a_row filtered_in_a_row replayed prior totals lengths next_ordinal
next_lease rules cursor census order groups leases assigned kept room pool"""
_DERIVED = "complete open_leases in_flight _with_pending _by_ordinal"
_OF_THIS_PROCESS = "asked short_of_bytes retired work_epoch refused"
KNOWN: dict[type, str] = {
    Books: f"{_STORED} {_DERIVED} {_OF_THIS_PROCESS}",
    Cursor: """taken last_taken failures quarantined news ended all_quarantined _prompts
        _quarantine_after _peeked _read _skipping_since""",
    Census: "dispatched by_state moves _live _retired",
    Order: "before ordinals _live",
    Room: "payload_bytes missing _holders _rules",
    Group: "id prompt ordinal members pending unresolved phase place leases",
    Member: "dispatch envelope accepted_s failures given_up told",
    LeaseRecord: "number actor version group granted_s deadline_s tokens dispatches leased",
    Dispatch: "lease sample state",
    BatchAssignment: "batch envelopes manifest parts fresh",
    Trained: "id envelopes",
    Place: "batch position ranks",
}
"""Every attribute of the ledger's records, so that a test notices one that is not considered."""


class SavedSample(msgspec.Struct, array_like=True, gc=False):
    """A sample that somebody holds."""

    header: SampleHeader
    nbytes: int
    """Of its payload."""


class SavedMember(msgspec.Struct, array_like=True, gc=False):
    """One of a group's samples."""

    lease: int
    """Of the dispatch whose result was accepted, or 0."""
    state: State | None
    """Of that dispatch."""
    held: bool
    """Whether its group holds the sample."""
    failures: int
    given_up: bool


class SavedGroup(msgspec.Struct, array_like=True, gc=False):
    """A group that is not retired, is kept, or was retired while a lease of it is open."""

    ordinal: int
    """By which the others name it."""
    id: GroupId
    phase: Phase
    place: Place | None
    members: list[SavedMember]


class SavedLease(msgspec.Struct, array_like=True, gc=False):
    """A lease whose record is kept."""

    number: int
    actor: str
    version: Version
    group: int
    """Its ordinal."""
    dispatches: list[tuple[int, State]]
    """By sample."""


class SavedBatch(msgspec.Struct, array_like=True, gc=False):
    """A batch that is assigned, or committed and kept."""

    batch: int
    groups: list[int]
    """Their ordinals, in the order of consumption."""
    replayed: list[Key]
    parts: tuple[tuple[int, ...], ...]


class SavedTrained(msgspec.Struct, array_like=True, gc=False):
    """A group of the replay pool."""

    id: GroupId
    samples: list[Key]


class SavedCursor(msgspec.Struct):
    """Attributes of Cursor."""

    taken: int
    last_taken: GroupId | None
    failures: list[tuple[PromptKey, int]]
    quarantined: list[tuple[PromptKey, str]]


class SavedFacts(msgspec.Struct):
    """Attributes of Books that are written as they are, under their names."""

    version: Version
    next_ordinal: int
    next_lease: int
    next_batch: int
    committed: int
    covered: int
    rewound_to: int
    last_versions: dict[int, int]
    last_failure: tuple[FailureKind, str] | None
    attempts_in_vain: int
    failed_in_a_row: int
    filtered_in_a_row: int
    replayed: dict[int, int]
    totals: dict[str, int]
    lengths: dict[str, int]
    prior: dict[int, int] = {}


class SavedState(msgspec.Struct, kw_only=True):
    """All of it."""

    rules: dict[str, Any]
    facts: SavedFacts
    cursor: SavedCursor
    before: int
    """Of the order, as the next one."""
    ordinals: list[int]
    dispatched: int
    """Of the census, as the next two."""
    retired: dict[State, int]
    by_state: dict[State, int]
    samples: list[SavedSample]
    groups: list[SavedGroup]
    leases: list[SavedLease]
    assigned: list[SavedBatch]
    kept: list[SavedBatch]
    pool: list[SavedTrained]
