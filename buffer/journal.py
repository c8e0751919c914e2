"""The ledger's changes as entries, and the ledger again from a snapshot and entries.

    call ─► Journaled ─► ledger ─► it had an effect ─► entry ─► take() ─► the store
    start: snapshot ─► Ledger.restore ─► replay(the entries since) ─► the ledger as it was

A snapshot stands for all entries before it but `Stopped`, which the ledger does not know: write
that one again after the snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import msgspec

from asyncrl.buffer import intake, leasing
from asyncrl.buffer import replay as replays
from asyncrl.buffer.books import Books
from asyncrl.buffer.dispatch import BatchAssignment, Dispatch
from asyncrl.buffer.entries import (
    Accepted,
    AnyEntry,
    Assigned,
    Committed,
    Covered,
    Entry,
    FailedSample,
    Leased,
    Lost,
    Published,
    Released,
    Resumed,
    Rewound,
    Stopped,
)
from asyncrl.buffer.intake import Status
from asyncrl.buffer.ledger import Ledger
from asyncrl.errors import DamagedStoreError, LedgerError
from asyncrl.types import (
    Envelope,
    FailureKind,
    Lease,
    SampleHeader,
    SampleId,
    Version,
)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AnyEntry).decode


class Journaled(Ledger):
    """A ledger that writes an entry for every call that had an effect; `take` hands them out."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._entries: list[bytes] = []

    def take(self) -> list[bytes]:
        """The entries since the last call, in order."""
        taken, self._entries = self._entries, []
        return taken

    def stopped(self, reason: str, final: Version | None, evaluate: bool) -> None:
        """Write down that the run was ended (`replay` hands it back)."""
        self._write(Stopped(reason, final, evaluate))

    def resumed(self) -> None:
        """Write down that the run goes on: what `stopped` wrote before counts no more."""
        self._write(Resumed())

    def lease(self, actor: str, applied: Version, capacity: int, now: float) -> list[Lease]:
        """See `Ledger.lease`."""
        b = self._books
        pool, dispatched, first = tuple(b.pool), b.census.dispatched, b.next_lease
        try:
            return super().lease(actor, applied, capacity, now)
        finally:  # what was granted is, also when it ended with an error
            samples = b.census.dispatched - dispatched
            forgot = tuple(group for group in pool if group not in b.pool)
            if samples or forgot:
                self._write(Leased(actor, applied, first, samples, forgot))

    def accept(self, envelope: Envelope, now: float) -> Status:
        """See `Ledger.accept`."""
        census = self._books.census
        moves = census.moves
        status = super().accept(envelope, now)
        if status == "accepted":
            self._entries.append(_encode(Accepted(envelope.header, envelope.nbytes)))
        elif census.moves != moves:
            self._write(Lost(envelope.header.lease, envelope.header.id.sample))
        return status

    def fail(
        self,
        actor: str,
        lease: int,
        sample: SampleId,
        kind: FailureKind,
        reason: str,
        now: float,
    ) -> Status:
        """See `Ledger.fail`."""
        moves = self._books.census.moves
        status = super().fail(actor, lease, sample, kind, reason, now)
        if self._books.census.moves != moves:
            self._write(FailedSample(actor, lease, sample, kind, reason))
        return status

    def release(self, leases: Collection[int]) -> int:
        """See `Ledger.release`."""
        if leases:
            super().release(leases)
            self._write(Released(tuple(leases)))
        return len(leases)

    def assign(self, batch: int) -> BatchAssignment | None:
        """See `Ledger.assign`."""
        following = self._books.next_batch
        assignment = super().assign(batch)
        if assignment is not None and self._books.next_batch != following:
            self._write(Assigned(batch, len(assignment.manifest)))
        return assignment

    def commit(self, batch: int, dropped: tuple[SampleId, ...] = ()) -> None:
        """See `Ledger.commit`."""
        before = self.committed
        super().commit(batch, dropped)
        if self.committed != before:
            self._write(Committed(batch, dropped))

    def published(self, version: Version) -> None:
        """See `Ledger.published`."""
        before = self.version
        super().published(version)
        if self.version != before:
            self._write(Published(version))

    def covered(self, batch: int) -> None:
        """See `Ledger.covered`."""
        before = self._books.covered
        super().covered(batch)
        if self._books.covered != before:
            self._write(Covered(batch))

    def rewind(self, batch: int, incarnation: int) -> None:
        """See `Ledger.rewind`."""
        before = self.version
        super().rewind(batch, incarnation)
        if self.version != before:
            self._write(Rewound(batch, incarnation))

    def _write(self, entry: Entry) -> None:
        self._entries.append(_encode(entry))


def replay(
    ledger: Ledger,
    entries: Iterable[bytes],
    *,
    envelope: Callable[[SampleHeader, int], Envelope],
    now: float,
) -> list[Stopped]:
    """Bring a ledger that was restored from a snapshot up to the last entry written after it.

    Args:
        entries: in the order in which they were written; nothing is written for them again.
        envelope: makes the envelope of a sample from its header and the bytes of its payload.
        now: of the clock that the ledger's calls use from here on.

    Returns:
        The `Stopped` among the entries, in order, since the run was resumed last.

    Raises:
        StoreError: an entry cannot be read, or does not fit the ledger.
    """
    stops: list[Stopped] = []
    for number, data in enumerate(entries, start=1):
        kind = "an entry that cannot be read"
        try:
            entry = _decode(data)
            kind = type(entry).__name__
            if isinstance(entry, Stopped):
                stops.append(entry)
            elif isinstance(entry, Resumed):
                stops.clear()
            elif not _applied(ledger, entry, envelope, now):
                raise LedgerError("it has another effect than it had")
        except (LedgerError, msgspec.DecodeError, ValueError) as e:
            raise DamagedStoreError(
                f"entry {number} of the journal ({kind}) does not fit the ledger: {e}: the journal "
                "is damaged, or not that of this snapshot and these settings"
            ) from e
    return stops


def _applied(
    ledger: Ledger, entry: AnyEntry, envelope: Callable[[SampleHeader, int], Envelope], now: float
) -> bool:
    """Apply an entry; whether it had its effect. Calls of `Ledger` itself journal nothing."""
    b = ledger._books
    match entry:
        case Leased():
            replays.forget(b, entry.forgot)
            first = b.next_lease
            leasing.grant_again(b, entry.actor, entry.applied, entry.samples, now)
            return first == entry.first
        case Accepted():
            dispatch = _dispatch(b, entry.header.lease, entry.header.id.sample)
            if dispatch is None or not dispatch.lease.group.wants(dispatch.sample):
                return False
            intake.take(b, dispatch, envelope(entry.header, entry.nbytes), now)
        case Lost():
            if (dispatch := _dispatch(b, entry.lease, entry.sample)) is None:
                return False
            b.lose(dispatch)
        case FailedSample():
            e, moves = entry, b.census.moves
            Ledger.fail(ledger, e.actor, e.lease, e.id, e.kind, e.reason, now)
            return b.census.moves != moves
        case Released():
            Ledger.release(ledger, entry.leases)
        case Assigned():
            assignment = Ledger.assign(ledger, entry.batch)
            return assignment is not None and len(assignment.manifest) == entry.samples
        case Committed():
            Ledger.commit(ledger, entry.batch, entry.dropped)
            return b.committed == entry.batch
        case Published():
            Ledger.published(ledger, entry.version)
        case Covered():
            Ledger.covered(ledger, entry.batch)
            return b.covered == entry.batch
        case Rewound():
            Ledger.rewind(ledger, entry.batch, entry.incarnation)
            return b.version.incarnation == entry.incarnation
    return True


def _dispatch(b: Books, lease: int, sample: int) -> Dispatch | None:
    """The dispatch of a sample under a lease, if the ledger knows it."""
    record = b.leases.get(lease)
    return record.dispatches.get(sample) if record is not None else None
