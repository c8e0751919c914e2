"""The ledger as bytes: what a restarted buffer starts from (the rest is the journal).

Books ─ dump ─► msgpack ─ load (asyncrl.buffer.restoring) ─► Books that go on as these would
"""

from __future__ import annotations

from dataclasses import asdict

import msgspec

from asyncrl.buffer.books import Books
from asyncrl.buffer.cursor import Cursor
from asyncrl.buffer.dispatch import RETIRED, BatchAssignment, Group, LeaseRecord, Member
from asyncrl.buffer.room import Key, key_of
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
from asyncrl.types import Envelope

_BY_NUMBER = ("replayed", "prior", "last_versions")
"""Facts whose keys are batches or incarnations."""


def dump(b: Books, covered: int = 0) -> bytes:
    """The state; equal states give equal bytes.

    Args:
        covered: a batch that is committed: the state is the one after `Ledger.covered` of it.
    """
    covered = max(covered, b.covered)
    kept = {k: b.kept[k] for k in sorted(b.kept) if k > covered}
    let_go = {id(g) for k in b.kept if k <= covered for g in b.kept[k][1]}
    closed = {id(r.group): r.group for r in b.leases.values() if r.group.phase in RETIRED}
    for _, groups in kept.values():
        closed |= {id(g): g for g in groups}
    groups = sorted((*b.groups.values(), *closed.values()), key=lambda g: g.ordinal)
    samples = samples_of(b, covered)
    state = SavedState(
        rules=asdict(b.rules),
        facts=_facts(b, covered),
        cursor=_cursor(b.cursor),
        before=b.order.before,
        ordinals=b.order.ordinals,
        dispatched=b.census.dispatched,
        retired=b.census.retired,
        by_state=b.census.by_state,
        samples=[SavedSample(samples[key].header, samples[key].nbytes) for key in sorted(samples)],
        groups=[_group(g, held=id(g) not in let_go) for g in groups],
        leases=[_lease(b.leases[number]) for number in sorted(b.leases)],
        assigned=[_batch(*b.assigned[k]) for k in sorted(b.assigned)],
        kept=[_batch(*kept[k]) for k in kept],
        pool=[SavedTrained(t.id, [key_of(e) for e in t.envelopes]) for t in b.pool.values()],
    )
    return msgspec.msgpack.encode((FORMAT, state))


def samples_of(b: Books, covered: int = 0) -> dict[Key, Envelope]:
    """Every sample that somebody holds, once; not those of batches that are `covered`."""
    kept = [b.kept[k] for k in sorted(b.kept) if k > covered]
    let_go = {id(g) for k in b.kept if k <= covered for g in b.kept[k][1]}
    groups = [*b.groups.values(), *(r.group for r in b.leases.values())]
    groups += [g for _, committed in kept for g in committed]
    found = {
        key_of(m.envelope): m.envelope
        for g in groups if id(g) not in let_go for m in g.members if m.envelope
    }  # fmt: skip
    for trained in b.pool.values():
        found |= {key_of(e): e for e in trained.envelopes}
    for assignment, _ in (*b.assigned.values(), *kept):
        found |= {key_of(e): e for e in assignment.replayed}
    return found


def _facts(b: Books, covered: int) -> SavedFacts:
    values = {name: getattr(b, name) for name in SavedFacts.__struct_fields__}
    values |= {
        "covered": covered,
        "replayed": {k: n for k, n in b.replayed.items() if k > covered},
        "prior": {k: n for k, n in b.prior.items() if k > covered},
    }
    for name in ("totals", "lengths"):  # a count of 0 is as good as none
        values[name] = {key: n for key, n in sorted(values[name].items()) if n}
    values |= {name: dict(sorted(values[name].items())) for name in _BY_NUMBER}
    return SavedFacts(**values)


def _cursor(cursor: Cursor) -> SavedCursor:
    failures, quarantined = sorted(cursor.failures.items()), list(cursor.quarantined.items())
    return SavedCursor(cursor.taken, cursor.last_taken, failures, quarantined)


def _group(group: Group, held: bool) -> SavedGroup:
    members = [_member(m, held) for m in group.members]
    return SavedGroup(group.ordinal, group.id, group.phase, group.place, members)


def _member(m: Member, held: bool) -> SavedMember:
    if m.dispatch is None:
        return SavedMember(0, None, False, m.failures, m.given_up)
    lease, held = m.dispatch.lease.number, held and m.envelope is not None
    return SavedMember(lease, m.dispatch.state, held, m.failures, m.given_up)


def _lease(r: LeaseRecord) -> SavedLease:
    states = [(k, d.state) for k, d in r.dispatches.items()]
    return SavedLease(r.number, r.actor, r.version, r.group.ordinal, states)


def _batch(a: BatchAssignment, groups: list[Group]) -> SavedBatch:
    replayed = [key_of(e) for e in a.replayed]
    return SavedBatch(a.batch, [g.ordinal for g in groups], replayed, a.parts)
