"""The ledger as bytes: what a restarted buffer starts from (the rest is the journal).

Books ─ dump ─► msgpack ─ load (asyncrl.buffer.restoring) ─► Books that go on as these would
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

import msgspec

from asyncrl.buffer.books import Books
from asyncrl.buffer.cursor import Cursor
from asyncrl.buffer.dispatch import RETIRED, BatchAssignment, Group, LeaseRecord, Member
from asyncrl.buffer.room import key_of
from asyncrl.buffer.saved import (
    FORMAT,
    SavedBatch,
    SavedCursor,
    SavedFacts,
    SavedGroup,
    SavedLease,
    SavedMember,
    SavedSample,
    SavedState,
    SavedTrained,
)


def dump(b: Books) -> bytes:
    """The state; equal states give equal bytes."""
    closed = {id(r.group): r.group for r in b.leases.values() if r.group.phase in RETIRED}
    for _, groups in b.kept.values():
        closed |= {id(g): g for g in groups}
    groups = sorted((*b.groups.values(), *closed.values()), key=lambda g: g.ordinal)
    state = SavedState(
        rules=asdict(b.rules),
        facts=_facts(b),
        cursor=_cursor(b.cursor),
        before=b.order.before,
        ordinals=b.order.ordinals,
        dispatched=b.census.dispatched,
        retired=b.census.retired,
        by_state=b.census.by_state,
        samples=_samples(b, groups),
        groups=[_group(g) for g in groups],
        leases=[_lease(b.leases[number]) for number in sorted(b.leases)],
        assigned=[_batch(*b.assigned[k]) for k in sorted(b.assigned)],
        kept=[_batch(*b.kept[k]) for k in sorted(b.kept)],
        pool=[SavedTrained(t.id, [key_of(e) for e in t.envelopes]) for t in b.pool.values()],
    )
    return msgspec.msgpack.encode((FORMAT, state))


def _facts(b: Books) -> SavedFacts:
    values = {name: getattr(b, name) for name in SavedFacts.__struct_fields__}
    for name in ("totals", "lengths"):  # a count of 0 is as good as none
        values[name] = {key: n for key, n in sorted(values[name].items()) if n}
    values |= {name: dict(sorted(values[name].items())) for name in ("replayed", "last_versions")}
    return SavedFacts(**values)


def _cursor(cursor: Cursor) -> SavedCursor:
    failures, quarantined = sorted(cursor.failures.items()), list(cursor.quarantined.items())
    return SavedCursor(cursor.taken, cursor.last_taken, failures, quarantined)


def _samples(b: Books, groups: Iterable[Group]) -> list[SavedSample]:
    """Every sample that somebody holds, once."""
    found = {key_of(m.envelope): m.envelope for g in groups for m in g.members if m.envelope}
    for trained in b.pool.values():
        found |= {key_of(e): e for e in trained.envelopes}
    for assignment, _ in (*b.assigned.values(), *b.kept.values()):
        found |= {key_of(e): e for e in assignment.replayed}
    return [SavedSample(found[key].header, found[key].nbytes) for key in sorted(found)]


def _group(group: Group) -> SavedGroup:
    members = [_member(m) for m in group.members]
    return SavedGroup(group.ordinal, group.id, group.phase, group.place, members)


def _member(m: Member) -> SavedMember:
    if m.dispatch is None:
        return SavedMember(0, None, False, m.failures, m.given_up)
    lease, held = m.dispatch.lease.number, m.envelope is not None
    return SavedMember(lease, m.dispatch.state, held, m.failures, m.given_up)


def _lease(r: LeaseRecord) -> SavedLease:
    states = [(k, d.state) for k, d in r.dispatches.items()]
    return SavedLease(r.number, r.actor, r.version, r.group.ordinal, states)


def _batch(a: BatchAssignment, groups: list[Group]) -> SavedBatch:
    replayed = [key_of(e) for e in a.replayed]
    return SavedBatch(a.batch, [g.ordinal for g in groups], replayed, a.parts)
