"""The ledger from what asyncrl.buffer.snapshot wrote: what was left out is worked out anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import msgspec

from asyncrl.buffer import batches
from asyncrl.buffer.books import Books
from asyncrl.buffer.cursor import Cursor
from asyncrl.buffer.dispatch import (
    RETIRED,
    BatchAssignment,
    Dispatch,
    Group,
    LeaseRecord,
    Member,
    Phase,
    State,
    Trained,
)
from asyncrl.buffer.room import Key, key_of
from asyncrl.buffer.saved import (
    FORMAT,
    MAY_DIFFER,
    SavedBatch,
    SavedCursor,
    SavedFacts,
    SavedGroup,
    SavedLease,
    SavedState,
)
from asyncrl.errors import ConfigError, DamagedStoreError, StoreError
from asyncrl.types import Envelope, GroupId, Prompt, SampleHeader, Version


class _Versioned(msgspec.Struct, array_like=True):
    format: int
    state: msgspec.Raw


_decoder = msgspec.msgpack.Decoder(SavedState)
_versioned = msgspec.msgpack.Decoder(_Versioned)


def load(
    b: Books, data: bytes, envelope: Callable[[SampleHeader, int], Envelope], now: float
) -> None:
    """Fill new books (see `Ledger.restore`)."""
    state = _read(data)
    _check_rules(state.rules, asdict(b.rules))
    _set(b, state.facts)
    _set(b.cursor, state.cursor)
    # Of a complete group too: a rewind may have its samples produced again.
    wanted = {g.id for g in state.groups if g.phase in (Phase.OPEN, Phase.COMPLETE)}
    prompts = b.cursor.skip(wanted)
    _Loader(b, state, {key_of(e): e for e in (envelope(s.header, s.nbytes) for s in state.samples)},
            prompts, now).load()  # fmt: skip
    if not b.census.conserved() or b.census.by_state != state.by_state:
        raise DamagedStoreError("the ledger's stored state does not add up: it is damaged")


def _set(record: Books | Cursor, stored: SavedFacts | SavedCursor) -> None:
    """Set the attributes that are stored under their names."""
    for name in stored.__struct_fields__:
        kind, value = type(getattr(record, name)), getattr(stored, name)
        setattr(record, name, kind(dict(value)) if issubclass(kind, dict) else value)


def _read(data: bytes) -> SavedState:
    try:
        versioned = _versioned.decode(data)
        if versioned.format != FORMAT:
            raise StoreError(
                f"the ledger's stored state has format {versioned.format}, this version reads "
                f"{FORMAT}: go on with the version of asyncrl that wrote it"
            )
        return _decoder.decode(versioned.state)
    except (msgspec.DecodeError, ValueError) as e:
        raise DamagedStoreError(f"the ledger's stored state cannot be read: {e}") from e


def _check_rules(stored: dict[str, Any], rules: dict[str, Any]) -> None:
    for name in sorted(stored.keys() | rules.keys()):
        was, now = stored.get(name), rules.get(name)
        if name not in MAY_DIFFER and was != now:
            raise ConfigError(
                f"{name}={now} differs from {name}={was}, with which the stored run was made: "
                "set it back, or start a new run"
            )


class _Loader:
    """Builds the records of one state; each step needs those before it."""

    def __init__(
        self,
        b: Books,
        state: SavedState,
        samples: dict[Key, Envelope],
        prompts: dict[GroupId, Prompt],
        now: float,
    ) -> None:
        self._b, self._state, self._samples = b, state, samples
        self._prompts, self._now = prompts, now
        self._groups: dict[int, Group] = {}

    def load(self) -> None:
        b, state = self._b, self._state
        for g in state.groups:
            prompt = self._prompts.get(g.id) or Prompt()
            self._groups[g.ordinal] = Group(
                g.id, prompt, g.ordinal, members=[], pending=[], unresolved=0, phase=g.phase,
                place=g.place,
            )  # fmt: skip
        for lease in state.leases:
            self._lease(lease)
        b.groups |= {g.id: g for g in self._groups.values() if g.phase not in RETIRED}
        for stored in state.groups:
            self._members(stored)
        live = [g for g in b.groups.values() if g.phase is not Phase.ASSIGNED]
        b.order.restore(state.before, state.ordinals, live)
        b.assigned |= {x.batch: self._batch(x) for x in state.assigned}
        b.kept |= {x.batch: self._batch(x) for x in state.kept}
        for trained in state.pool:
            envelopes = tuple(self._samples[key] for key in trained.samples)
            b.pool[trained.id] = Trained(trained.id, envelopes)
        for envelope in self._holdings():
            b.room.hold(envelope)
        self._count()

    def _lease(self, lease: SavedLease) -> None:
        b, group = self._b, self._groups[lease.group]
        record = LeaseRecord(
            lease.number, lease.actor, lease.version, group, self._now,
            self._now + b.rules.lease_timeout_s,
        )  # fmt: skip
        record.dispatches = {k: Dispatch(record, k, state) for k, state in lease.dispatches}
        record.leased = sum(state is State.LEASED for _, state in lease.dispatches)
        b.leases[record.number] = record
        if record.leased:
            b.open_leases[record.number] = record
            b.in_flight[record.actor] += record.leased
        if group.phase not in RETIRED:
            group.leases.append(record)

    def _members(self, stored: SavedGroup) -> None:
        b, group = self._b, self._groups[stored.ordinal]
        for k, m in enumerate(stored.members):
            member = Member(failures=m.failures, given_up=m.given_up)
            if m.state is not None:
                member.dispatch = self._accepted(group, m.lease, k, m.state)
                member.accepted_s = self._now
                member.envelope = self._samples[m.lease, k] if m.held else None
            group.members.append(member)
        busy = {k for r in group.leases for k, d in r.dispatches.items() if d.state is State.LEASED}
        group.pending = [k for k in range(len(group.members)) if group.wants(k) and k not in busy]
        group.unresolved = sum(not (m.dispatch or m.given_up) for m in group.members)
        if group.phase is Phase.OPEN:
            b.restore_open(group)
        b.complete += group.phase is Phase.COMPLETE

    def _accepted(self, group: Group, lease: int, sample: int, state: State) -> Dispatch:
        """The dispatch whose result was accepted; its lease may be folded already."""
        if (record := self._b.leases.get(lease)) is not None:
            return record.dispatches[sample]
        folded = LeaseRecord(lease, "", Version(0, 0), group, self._now, self._now)
        return Dispatch(folded, sample, state)

    def _batch(self, stored: SavedBatch) -> tuple[BatchAssignment, list[Group]]:
        groups = [self._groups[ordinal] for ordinal in stored.groups]
        fresh = [m.envelope for g in groups for m in g.members if m.envelope is not None]
        envelopes = (*fresh, *(self._samples[key] for key in stored.replayed))
        manifest = tuple(e.header for e in envelopes)
        parts = stored.parts
        if len(parts) != self._b.rules.ranks:
            parts = batches.deal(manifest, self._b.rules.ranks)
            batches.place(groups, parts)
        return BatchAssignment(stored.batch, envelopes, manifest, parts, len(fresh)), groups

    def _holdings(self) -> Iterator[Envelope]:
        """Every sample as often as it is held."""
        b = self._b
        for group in self._groups.values():
            yield from (m.envelope for m in group.members if m.envelope is not None)
        for trained in b.pool.values():
            yield from trained.envelopes
        for assignment, _ in (*b.assigned.values(), *b.kept.values()):
            yield from assignment.replayed

    def _count(self) -> None:
        """The census: what is retired was counted, what is not is listed."""
        b = self._b
        dispatches = {d for r in b.leases.values() for d in r.dispatches.values()
                      if r.group.phase not in RETIRED or d.state is State.LEASED}  # fmt: skip
        for group in b.groups.values():
            dispatches |= {m.dispatch for m in group.members if m.dispatch is not None}
        b.census.restore(self._state.dispatched, self._state.retired, dispatches)
