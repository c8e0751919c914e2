"""The ledger's state and the elementary changes to it.

The rules are in leasing, intake, batches and retention. What is added to `Books` must be written
by asyncrl.buffer.snapshot and read by restoring, or be of this process alone: see `saved.KNOWN`,
which a test compares. The same calls must give the same state: no clock, no order of sets.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from typing import Literal

from asyncrl.buffer.counts import Census
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
from asyncrl.buffer.order import Order
from asyncrl.buffer.room import Room
from asyncrl.buffer.rules import Rules
from asyncrl.errors import LedgerError
from asyncrl.recording import Outcome, Retired
from asyncrl.staleness import version_of_batch
from asyncrl.types import FailureKind, GroupId, Prompt, Version

HeldBack = Literal["admission", "bytes", ""]
"""What kept an actor from getting more, if it was not a lack of prompts or of its own room."""

_OUTCOMES: dict[State, Outcome] = {
    State.TRAINED: "trained",
    State.DROPPED_STALE: "dropped_stale",
    State.FILTERED: "filtered",
    State.FAILED: "failed",
    State.ASSEMBLING: "held",
    State.QUEUED: "held",
    State.ASSIGNED: "held",
    State.REQUEUED: "requeued",
}


class Books:
    """Everything the ledger knows. Callers outside `asyncrl.buffer` go through `Ledger`."""

    def __init__(self, rules: Rules, prompts: Iterator[tuple[GroupId, Prompt]]) -> None:
        self.rules = rules
        self.census = Census()
        self.cursor = Cursor(prompts, rules.quarantine_after)
        self.order = Order()
        self.version = Version(0, 0)
        self.groups: dict[GroupId, Group] = {}  # not retired
        self.complete = 0  # groups in phase COMPLETE
        self.leases: dict[int, LeaseRecord] = {}
        self.open_leases: dict[int, LeaseRecord] = {}  # those with something leased
        self.in_flight: Counter[str] = Counter()  # leased samples by actor
        self.asked: dict[str, tuple[Version, HeldBack]] = {}  # actor -> applied, why no more
        self.assigned: dict[int, tuple[BatchAssignment, list[Group]]] = {}
        self.kept: dict[int, tuple[BatchAssignment, list[Group]]] = {}  # committed, not covered
        self.next_batch = 1
        self.committed = 0
        self.covered = 0  # batches up to this one are not kept any more
        self.rewound_to = 0  # committed batch from which the incarnation started
        self.last_versions: dict[int, int] = {}  # of earlier incarnations
        self.last_failure: tuple[FailureKind, str] | None = None  # of a prompt or reward
        self.attempts_in_vain = 0  # data or reward failures, since a sample was accepted
        self.failed_in_a_row = 0  # groups, since one got all its members
        self.filtered_in_a_row = 0  # groups, since one was kept
        self.room = Room(rules)
        self.short_of_bytes = False  # an actor got less for lack of bytes, and was not woken since
        self.pool: dict[GroupId, Trained] = {}  # for replay, in the order of commits
        self.replayed: dict[int, int] = {}  # samples that a batch trained again, while it is kept
        self.prior: dict[int, int] = {}  # of an earlier incarnation, by batch, while it is kept
        self.retired: list[Retired] | None = None  # not handed out yet; None: nobody wants them
        self.work_epoch = 0
        """Rises when work that a waiting actor could take may have appeared."""
        self.totals: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()  # results that changed nothing else
        self.lengths: Counter[str] = Counter()  # sums and numbers of response tokens
        self._with_pending: list[int] = []  # ordinals, ascending
        self._by_ordinal: dict[int, Group] = {}  # groups in phase OPEN
        self.next_ordinal = 0
        self.next_lease = 1

    # --- the order of groups ---------------------------------------------------------------

    def open_group(self) -> Group:
        """Open the cursor's next group; all its samples are pending."""
        group_id, prompt = self.cursor.take()
        if group_id in self.groups:
            raise LedgerError(f"prompt source gave {group_id} again while it is still in use")
        n = self.rules.group_size
        group = Group(
            id=group_id,
            prompt=prompt,
            ordinal=self.next_ordinal,
            members=[Member() for _ in range(n)],
            pending=list(range(n)),
            unresolved=n,
        )
        self.next_ordinal += 1
        self.groups[group_id] = group
        self._by_ordinal[group.ordinal] = group
        self.order.append(group)
        self.room.missing += n
        insort(self._with_pending, group.ordinal)
        return group

    def restore_open(self, group: Group) -> None:
        """An open group of a stored state, in any order of groups."""
        self._by_ordinal[group.ordinal] = group
        self.room.missing += group.unresolved
        if group.pending:
            insort(self._with_pending, group.ordinal)

    def first_pending(self) -> Group | None:
        """The oldest open group with samples that nobody produces."""
        return self._by_ordinal[self._with_pending[0]] if self._with_pending else None

    # --- leases ------------------------------------------------------------------------------

    def grant(
        self, actor: str, applied: Version, group: Group, most: int, now: float
    ) -> LeaseRecord:
        """Lease up to `most` pending samples of a group, lowest first."""
        record = LeaseRecord(
            number=self.next_lease,
            actor=actor,
            version=applied,
            group=group,
            granted_s=now,
            deadline_s=now + self.rules.lease_timeout_s,
        )
        self.next_lease += 1
        for k in group.pending[:most]:
            record.dispatches[k] = dispatch = Dispatch(record, k)
            self.census.dispatch(dispatch)
        record.leased = len(record.dispatches)
        self.in_flight[actor] += record.leased
        del group.pending[:most]
        if not group.pending:
            self._forget_pending(group)
        group.leases.append(record)
        self.leases[record.number] = self.open_leases[record.number] = record
        return record

    def was_granted(self, lease: int) -> bool:
        """Whether a lease of this number was ever granted."""
        return 1 <= lease < self.next_lease

    def settle(self, dispatch: Dispatch, state: State) -> None:
        """A dispatch moves on; a lease that has nothing leased any more is closed."""
        record = dispatch.lease
        was_leased = dispatch.state is State.LEASED
        self.census.move(dispatch, state)
        if not was_leased:
            return
        record.leased -= 1
        self.in_flight[record.actor] -= 1
        if not record.leased:
            del self.open_leases[record.number]
        if record.group.phase in RETIRED:
            self.census.retire(dispatch)
            if not record.leased:
                del self.leases[record.number]

    def lose(self, dispatch: Dispatch) -> None:
        """A leased dispatch brings no result, by nobody's fault: its sample is free again."""
        group, k = dispatch.lease.group, dispatch.sample
        if group.members[k].dispatch is not None:
            self.settle(dispatch, State.DUPLICATE)
        elif group.phase is Phase.FAILED:
            self.settle(dispatch, State.FAILED)
        else:
            self.settle(dispatch, State.REQUEUED)
            self.free(group, k)

    def free(self, group: Group, sample: int) -> None:
        """The sample may be leased again, if a result of it is still wanted."""
        if not group.wants(sample):
            return
        if not group.pending:
            insort(self._with_pending, group.ordinal)
        insort(group.pending, sample)
        self.work_epoch += 1

    def unfree(self, group: Group, sample: int) -> None:
        """The sample must not be leased again: a late result of it arrived."""
        if sample in group.pending:
            group.pending.remove(sample)
            if not group.pending:
                self._forget_pending(group)

    # --- groups ------------------------------------------------------------------------------

    def finish(self, group: Group) -> None:
        """The group has all its members: it waits for a batch."""
        group.phase = Phase.COMPLETE
        del self._by_ordinal[group.ordinal]
        self.complete += 1
        self.settle_accepted(group, State.QUEUED)

    def take_back(self, group: Group) -> None:
        """The accepted samples of a group that is in no batch do not count: all are free again."""
        if group.phase is Phase.COMPLETE:
            group.phase = Phase.OPEN
            self._by_ordinal[group.ordinal] = group
            self.complete -= 1
        for k, member in group.accepted():
            assert member.dispatch is not None
            assert member.envelope is not None
            self.census.move(member.dispatch, State.REQUEUED)
            self.tell(group, member)
            self.room.release(member.envelope)
            member.dispatch, member.envelope, member.told = None, None, False
            group.unresolved += 1
            self.room.missing += 1
            self.free(group, k)

    def settle_accepted(self, group: Group, state: State) -> None:
        """All accepted samples of a group move on."""
        for dispatch in group.dispatches():  # none of them is leased any more
            self.census.move(dispatch, state)

    def resolve(self, group: Group) -> None:
        """A member was accepted or given up: what was set aside for it is free."""
        group.unresolved -= 1
        self.room.missing -= 1
        if self.room.fits_group():
            self.wake_for_bytes()

    def wake_for_bytes(self) -> None:
        """Who got less for lack of bytes may get more now."""
        if self.short_of_bytes:
            self.short_of_bytes = False
            self.work_epoch += 1

    def remove(self, group: Group, phase: Phase, state: State) -> None:
        """Take a group out of the order; its accepted samples end as `state`."""
        self.room.missing -= group.unresolved
        if group.pending:
            group.pending.clear()
            self._forget_pending(group)
        self._by_ordinal.pop(group.ordinal, None)
        group.phase = phase
        self.order.remove(group)
        self.settle_accepted(group, state)
        self.close(group)
        self.drop_payloads(group)
        self.work_epoch += 1  # later positions fell

    def close(self, group: Group) -> None:
        """The fate of a group is settled: tell it, and fold the records of its dispatches."""
        if self.retired is not None:
            for _, member in group.accepted():
                self.tell(group, member)
        self._count_lengths(group, 1)
        for dispatch in group.dispatches():
            self.census.retire(dispatch)
        for record in group.leases:
            for k, dispatch in record.dispatches.items():
                if dispatch.state is not State.LEASED and dispatch is not group.members[k].dispatch:
                    self.census.retire(dispatch)
            if not record.leased:
                del self.leases[record.number]
        group.leases.clear()
        del self.groups[group.id]

    def reopen(self, group: Group) -> None:
        """Undo `close`, and the commit, for a group that is trained once more."""
        self.groups[group.id] = group
        group.phase = Phase.ASSIGNED
        self._count_lengths(group, -1)
        for member in group.members:
            member.told = False
        for dispatch in group.dispatches():
            self.census.revive(dispatch)
        self.settle_accepted(group, State.ASSIGNED)

    def drop_payloads(self, group: Group) -> None:
        """Nobody will ask for the group's samples again."""
        for member in group.members:
            if member.envelope is not None:
                self.room.release(member.envelope)
                member.envelope = None

    def tell(self, group: Group, member: Member) -> None:
        """Hand out what became of an accepted sample, once, if anybody wants to know."""
        if self.retired is None or member.told or not (member.dispatch and member.envelope):
            return
        member.told = True
        outcome, place = _OUTCOMES[member.dispatch.state], group.place
        if place is None or outcome == "held":
            gone = Retired(member.envelope, outcome, self.version.incarnation)
        else:
            gone = Retired(
                member.envelope,
                outcome,
                self.version.incarnation,
                version=version_of_batch(place.batch, self.rules.batches_per_publication),
                batch=place.batch,
                rank=place.ranks[member.dispatch.sample],
                position=place.position,
            )
        self.retired.append(gone)

    def _count_lengths(self, group: Group, times: int) -> None:
        """Add to (1) or take from (-1) the sums of lengths."""
        generated, trained = [], []
        for m in group.members:
            if m.envelope is not None and m.dispatch is not None:
                generated.append(m.envelope.header.response_tokens)
                if m.dispatch.state is State.TRAINED:
                    trained.append(generated[-1])
        for kind, lengths in (("generated", generated), ("trained", trained)):
            self.lengths[f"{kind}_tokens"] += times * sum(lengths)
            self.lengths[f"{kind}_samples"] += times * len(lengths)

    def _forget_pending(self, group: Group) -> None:
        del self._with_pending[bisect_left(self._with_pending, group.ordinal)]
