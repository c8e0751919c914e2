"""The ledger's state and the elementary changes to it; the rules: leasing, intake, batches."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator

from asyncrl.buffer.counts import Census
from asyncrl.buffer.dispatch import (
    RETIRED,
    BatchAssignment,
    Dispatch,
    Group,
    LeaseRecord,
    Member,
    Phase,
    State,
)
from asyncrl.buffer.order import Order
from asyncrl.buffer.rules import Rules
from asyncrl.errors import LedgerError
from asyncrl.recording import Outcome, Retired
from asyncrl.staleness import version_of_batch
from asyncrl.types import FailureKind, GroupId, Prompt, Version

_OUTCOMES: dict[State, Outcome] = {
    State.TRAINED: "trained",
    State.DROPPED_STALE: "dropped_stale",
    State.FILTERED: "filtered",
    State.FAILED: "failed",
    State.ASSEMBLING: "held",
    State.QUEUED: "held",
    State.ASSIGNED: "held",
}


class Books:
    """Everything the ledger knows. Callers outside `asyncrl.buffer` go through `Ledger`."""

    def __init__(self, rules: Rules, prompts: Iterator[tuple[GroupId, Prompt]]) -> None:
        self.rules = rules
        self.census = Census()
        self.order = Order()
        self.version = Version(0, 0)
        self.groups: dict[GroupId, Group] = {}  # not retired
        self.complete = 0  # groups in phase COMPLETE
        self.leases: dict[int, LeaseRecord] = {}
        self.open_leases: dict[int, LeaseRecord] = {}  # those with something leased
        self.in_flight: Counter[str] = Counter()  # leased samples by actor
        self.asked: dict[str, tuple[Version, bool]] = {}  # actor -> applied, held back?
        self.assigned: dict[int, tuple[BatchAssignment, list[Group]]] = {}
        self.next_batch = 1
        self.committed = 0
        self.last_failure: tuple[FailureKind, str] | None = None  # of a prompt or reward
        self.attempts_in_vain = 0  # data or reward failures, since a sample was accepted
        self.failed_in_a_row = 0  # groups, since one got all its members
        self.filtered_in_a_row = 0  # groups, since one was kept
        self.payload_bytes = 0
        self.retired: list[Retired] | None = None  # not handed out yet; None: nobody wants them
        self.work_epoch = 0
        """Rises when work that a waiting actor could take may have appeared."""
        self.totals: Counter[str] = Counter()
        self.lengths: Counter[str] = Counter()  # sums and numbers of response tokens
        self._with_pending: list[int] = []  # ordinals, ascending
        self._by_ordinal: dict[int, Group] = {}  # groups in phase OPEN
        self._prompts = prompts
        self._peeked: tuple[GroupId, Prompt] | None = None
        self._ended = False
        self._next_ordinal = 0
        self._next_lease = 1

    # --- the cursor ------------------------------------------------------------------------

    def has_prompt(self) -> bool:
        """Whether the cursor has another prompt (reads one ahead)."""
        if self._peeked is None and not self._ended:
            self._peeked = next(self._prompts, None)
            self._ended = self._peeked is None
        return self._peeked is not None

    @property
    def prompts_ended(self) -> bool:
        """Whether the cursor is known to have no further prompt (reads none)."""
        return self._ended

    def open_group(self) -> Group:
        """Open the cursor's next group; all its samples are pending."""
        if not self.has_prompt() or self._peeked is None:
            raise LedgerError("no prompt left to open a group for")
        (group_id, prompt), self._peeked = self._peeked, None
        if group_id in self.groups:
            raise LedgerError(f"prompt source gave {group_id} again while it is still in use")
        n = self.rules.group_size
        group = Group(
            id=group_id,
            prompt=prompt,
            ordinal=self._next_ordinal,
            members=[Member() for _ in range(n)],
            pending=list(range(n)),
            unresolved=n,
        )
        self._next_ordinal += 1
        self.groups[group_id] = group
        self._by_ordinal[group.ordinal] = group
        self.order.append(group)
        insort(self._with_pending, group.ordinal)
        return group

    def first_pending(self) -> Group | None:
        """The oldest open group with samples that nobody produces."""
        return self._by_ordinal[self._with_pending[0]] if self._with_pending else None

    # --- leases ------------------------------------------------------------------------------

    def grant(
        self, actor: str, applied: Version, group: Group, most: int, now: float
    ) -> LeaseRecord:
        """Lease up to `most` pending samples of a group, lowest first."""
        record = LeaseRecord(
            number=self._next_lease,
            actor=actor,
            version=applied,
            group=group,
            granted_s=now,
            deadline_s=now + self.rules.lease_timeout_s,
        )
        self._next_lease += 1
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
        return 1 <= lease < self._next_lease

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
        for _, member in group.accepted():
            if member.dispatch is not None:
                self.settle(member.dispatch, State.QUEUED)

    def remove(self, group: Group, phase: Phase, state: State) -> None:
        """Take a group out of the order; its accepted samples end as `state`."""
        if group.pending:
            group.pending.clear()
            self._forget_pending(group)
        self._by_ordinal.pop(group.ordinal, None)
        group.phase = phase
        self.order.remove(group)
        for _, member in group.accepted():
            if member.dispatch is not None:
                self.settle(member.dispatch, state)
        self.retire(group)
        self.work_epoch += 1  # later positions fell

    def retire(self, group: Group) -> None:
        """Free the payloads and fold the records of a group whose fate is settled."""
        for _, member in group.accepted():
            if member.envelope is None or member.dispatch is None:
                continue
            self.tell(group, member)
            length = member.envelope.header.response_tokens
            self._add_length("generated", length)
            if member.dispatch.state is State.TRAINED:
                self._add_length("trained", length)
            self.payload_bytes -= member.envelope.nbytes
            member.envelope = None
        for record in group.leases:
            for dispatch in record.dispatches.values():
                if dispatch.state is not State.LEASED:
                    self.census.retire(dispatch)
            if not record.leased:
                del self.leases[record.number]
        group.leases.clear()
        del self.groups[group.id]

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

    def _add_length(self, kind: str, length: int) -> None:
        self.lengths[f"{kind}_tokens"] += length
        self.lengths[f"{kind}_samples"] += 1

    def _forget_pending(self, group: Group) -> None:
        del self._with_pending[bisect_left(self._with_pending, group.ordinal)]
