"""The rules of batches: which groups, in which order, for which rank; commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count, groupby

from asyncrl.buffer import replay as replays
from asyncrl.buffer import retention
from asyncrl.buffer.balance import balance
from asyncrl.buffer.books import Books
from asyncrl.buffer.dispatch import BatchAssignment, Group, Phase, Place, State
from asyncrl.errors import LedgerError
from asyncrl.types import SampleHeader, SampleId


def assign(b: Books, batch: int) -> BatchAssignment | None:
    """Fix batch k, or find it fixed (see `Ledger.assign`)."""
    if fixed := b.assigned.get(batch) or b.kept.get(batch):
        return fixed[0]
    if batch <= b.committed:
        raise LedgerError(
            f"batch {batch} is already committed (the last one is {b.committed}): "
            f"ask for batch {b.committed + 1}"
        )
    groups = _choose(b) if batch == b.next_batch else None
    if groups is None:
        return None
    envelopes = [m.envelope for g in groups for _, m in g.accepted() if m.envelope is not None]
    fresh = len(envelopes)
    envelopes += [e for trained in replays.choose(b, batch) for e in trained.envelopes]
    manifest = tuple(e.header for e in envelopes)
    parts = deal(manifest, b.rules.ranks)
    assignment = BatchAssignment(batch, tuple(envelopes), manifest, parts, fresh)
    for group in groups:
        group.place = Place(batch, b.order.position(group), {})
        group.phase = Phase.ASSIGNED
        b.settle_accepted(group, State.ASSIGNED)
    place(groups, parts)
    b.complete -= len(groups)
    b.order.consumed(groups)
    b.assigned[batch] = (assignment, groups)
    b.next_batch += 1
    return assignment


def deal(manifest: Sequence[SampleHeader], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Which samples each rank trains, groups being what stands together in the manifest."""
    groups = groupby(manifest, key=lambda header: header.id.group)
    return balance([[header.tokens for header in group] for _, group in groups], ranks)


def place(groups: Iterable[Group], parts: tuple[tuple[int, ...], ...]) -> None:
    """Tell a batch's groups which rank trains each of their samples."""
    rank_of = {i: rank for rank, part in enumerate(parts) for i in part}
    indexes = count()
    for group in groups:
        assert group.place is not None
        ranks = {k: rank_of[next(indexes)] for k, _ in group.accepted()}
        group.place = replace(group.place, ranks=ranks)


def commit(b: Books, batch: int, dropped: tuple[SampleId, ...]) -> None:
    """End an assigned batch (see `Ledger.commit`)."""
    if 1 <= batch <= b.committed:
        return
    if batch != b.committed + 1 or batch not in b.assigned:
        raise LedgerError(
            f"batch {batch} cannot be committed: the last committed is {b.committed}, "
            f"assigned are {sorted(b.assigned)}"
        )
    assignment, groups = b.assigned[batch]
    stale = set(dropped)
    if stale and (stray := stale.difference(h.id for h in assignment.manifest)):
        raise LedgerError(f"batch {batch} holds no sample {'/'.join(map(str, min(stray)))}")
    b.kept[batch] = b.assigned.pop(batch)
    b.committed = batch
    for group in groups:
        group.phase = Phase.CONSUMED
        b.settle_accepted(group, State.TRAINED)
        for dispatch in group.dispatches() if stale else ():
            if group.id.sample(dispatch.sample) in stale:
                b.census.move(dispatch, State.DROPPED_STALE)
        b.totals["groups_trained"] += retention.trained(group)
        b.close(group)
    replays.committed(b, assignment, groups, stale)
    fresh = (h for h in assignment.manifest[: assignment.fresh] if h.id not in stale)
    prior = sum(h.version_dispatch.incarnation < b.version.incarnation for h in fresh)
    if prior:
        b.prior[batch] = prior
        b.totals["prior_incarnation"] += prior
    if not b.rules.retain:
        retention.covered(b, batch)
    b.wake_for_bytes()


def _choose(b: Books) -> list[Group] | None:
    """The next G groups in cursor order that the window lets pass, or None."""
    if b.complete < b.rules.groups_per_batch:
        return None
    chosen: list[Group] = []
    unfinished: int | None = None  # position of the oldest group that misses members
    for position, group in b.order.live_groups():
        if unfinished is not None and position - unfinished >= b.rules.window:
            return None
        if group.phase is Phase.COMPLETE:
            chosen.append(group)
            if len(chosen) == b.rules.groups_per_batch:
                return chosen
        elif unfinished is None:
            unfinished = position
    return None
