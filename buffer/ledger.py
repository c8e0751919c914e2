"""The ledger: who may produce which sample, and which batch trains it. Pure: no I/O, no clock.

    prompts ─► lease ─► accept ─► complete groups ─► assign ─► commit
                 ▲         │                                     │
                 │         └── fail, expire: leased again        └── trained, dropped_stale
                 └── admission: p + W <= (v_a + S + 1) * G * n_pub

Why the bound is exact. A group's position p is the number of groups before it in cursor order
that were not removed, so it never rises. A group q may be consumed before an unfinished p < q
only if q - p < W; look at the overtaker that is last in cursor order: when it was consumed, fewer
than W groups that were not removed stood after p up to and including it, and all overtakers of p
are among them. So at most W - 1 groups overtake p, and p is consumed with at most p + W - 1
groups before it (the overtakers must not count in the position of what they overtook: it would
rise and allow further ones without end). Batch k, with V = floor((k - 1) / n_pub), consumes the
groups (k - 1) * G to k * G - 1 in order of consumption, so V <= floor((p + W - 1) / (G * n_pub)),
which is at most v_a + S exactly if p + W <= (v_a + S + 1) * G * n_pub. An actor's version only
rises, so every token of the sample has v >= v_a and V - v <= S.

Why it moves. When all assigned batches (c groups) are committed, an actor that applied what was
published is at v = floor(c / G / n_pub). The first G groups that are not consumed have positions
p <= c + G - 1, and p + W <= c + G + S * G * n_pub <= (v + S + 1) * G * n_pub by W - 1 <= S * G *
n_pub, which the constructor demands: that actor may lease all that the next batch needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from asyncrl.buffer import batches, explain, intake, leasing
from asyncrl.buffer.books import Books
from asyncrl.buffer.dispatch import BatchAssignment, Phase, State
from asyncrl.buffer.intake import Status
from asyncrl.buffer.rules import FailedMember, Rules, filtered_cap
from asyncrl.errors import LedgerError
from asyncrl.recording import Retired
from asyncrl.types import (
    BatchPart,
    Envelope,
    FailureKind,
    GroupId,
    Lease,
    Prompt,
    SampleId,
    Version,
)


class Ledger:
    """Leases, admission, order, group assembly, assignment and conservation (docs/architecture.md).

    Every `now` is in seconds of one clock of the caller's, and must not go back. `prompts` may
    end; each group id in it is new. The other settings are those of `Rules`;
    `max_filtered_in_a_row` has the default of `rules.filtered_cap`.

    Raises:
        ConfigError: a setting out of range, or one that would stop the run.
    """

    def __init__(
        self,
        *,
        prompts: Iterator[tuple[GroupId, Prompt]],
        group_size: int,
        groups_per_batch: int,
        batches_per_publication: int = 1,
        max_staleness: int,
        window: int = 1,
        ranks: int = 1,
        lease_timeout_s: float = 120.0,
        max_attempts: int = 3,
        failed_member: FailedMember = "shrink",
        filter_zero_variance: bool = False,
        max_filtered_in_a_row: int | None = None,
        prompts_end: str = "",
    ) -> None:
        rules = Rules(
            group_size=group_size,
            groups_per_batch=groups_per_batch,
            batches_per_publication=batches_per_publication,
            max_staleness=max_staleness,
            window=window,
            ranks=ranks,
            lease_timeout_s=lease_timeout_s,
            max_attempts=max_attempts,
            failed_member=failed_member,
            filter_zero_variance=filter_zero_variance,
            max_filtered_in_a_row=filtered_cap(max_filtered_in_a_row, groups_per_batch),
            prompts_end=prompts_end,
        )
        self._books = Books(rules, iter(prompts))

    # --- actors ------------------------------------------------------------------------------

    def lease(self, actor: str, applied: Version, capacity: int, now: float) -> list[Lease]:
        """Grant up to `capacity` samples: missing ones of open groups first, then new groups.

        A group that does not fit is granted in part; the rest is pending, for whoever asks next.
        None is granted past what admission allows for `applied`, or to an earlier incarnation.
        """
        return leasing.lease(self._books, actor, applied, capacity, now)

    def held_back(self, actor: str) -> bool:
        """Whether admission, not a lack of prompts or room, ended the actor's last request."""
        return self._books.asked.get(actor, (Version(0, 0), False))[1]

    def accept(self, envelope: Envelope, now: float) -> Status:
        """Take a result; the first one of a sample wins, also when its lease has expired.

        "duplicate": the sample or this dispatch of it already has an outcome. "unknown": no such
        dispatch, or a result that must not be trained: its oldest version is below what admission
        counted on, or its reward is not finite (counted as `protocol_errors`; the sample is
        leased again).
        """
        return intake.accept(self._books, envelope, now)

    def fail(
        self,
        actor: str,
        lease: int,
        sample: SampleId,
        kind: FailureKind,
        reason: str,
        now: float,
    ) -> Status:
        """A leased sample brings no result.

        A fault of the machinery frees the sample for any actor. A fault of the prompt or reward is
        tried again up to `max_attempts` times; then the group goes on without this member, or is
        removed: always with failed_member="drop", else when fewer than two would remain.
        "duplicate": the dispatch had already ended.
        """
        return intake.fail(self._books, actor, lease, sample, kind, reason, now)

    def progress(self, actor: str, tokens: Mapping[int, int], now: float) -> None:
        """Tokens produced so far by lease number: a number that grows renews its lease."""
        leasing.progress(self._books, actor, tokens, now)

    def expire(self, now: float) -> int:
        """End the leases whose deadline passed; their samples are free again. Returns how many."""
        return leasing.release(self._books, lambda record: record.deadline_s <= now)

    def drop_actor(self, actor: str) -> int:
        """End all leases of an actor that is gone. Returns how many."""
        self._books.asked.pop(actor, None)
        return leasing.release(self._books, lambda record: record.actor == actor)

    # --- the learner ---------------------------------------------------------------------------

    def assign(self, batch: int) -> BatchAssignment | None:
        """Batch k (from 1, ascending), or None while it cannot be filled or an earlier one waits.

        Several batches may be assigned and not committed. Asking again gives the same batch.

        Raises:
            LedgerError: the batch is committed, or is no batch number.
        """
        return batches.assign(self._books, batch)

    def part(self, batch: int, rank: int) -> BatchPart | None:
        """What `rank` trains of batch k, or None (see `assign`).

        Raises:
            LedgerError: no such rank, or see `assign`.
        """
        if not 0 <= rank < self._books.rules.ranks:
            raise LedgerError(f"rank {rank} is outside 0..{self._books.rules.ranks - 1}")
        a = self.assign(batch)
        if a is None:
            return None
        mine = a.parts[rank]
        return BatchPart(batch, rank, a.manifest, mine, tuple(a.envelopes[i] for i in mine))

    def assigned(self, batch: int) -> bool:
        """Whether batch k is fixed and not committed."""
        return batch in self._books.assigned

    def commit(self, batch: int, dropped: tuple[SampleId, ...] = ()) -> None:
        """Batch k is trained, less `dropped`. In order; committing a batch again does nothing.

        Raises:
            LedgerError: the batch is not the next one, not assigned, or lacks a dropped id.
        """
        batches.commit(self._books, batch, dropped)

    def published(self, version: Version) -> None:
        """The learner cut the snapshot of this version.

        Raises:
            LedgerError: the version is below the current one.
        """
        if version < self._books.version:
            raise LedgerError(f"version {version} published after {self._books.version}")
        self._books.version = version

    # --- recording ------------------------------------------------------------------------------

    def keep_retired(self) -> None:
        """From now on keep what became of accepted samples, for `take_retired`."""
        if self._books.retired is None:
            self._books.retired = []

    def take_retired(self) -> list[Retired]:
        """Samples whose fate was settled since the last call, each once; drain it often."""
        taken = self._books.retired
        if not taken:
            return []
        self._books.retired = []
        return taken

    def tell_held(self) -> None:
        """No batch will be committed any more: what is still accepted retires as "held"."""
        for group in self._books.groups.values():
            for _, member in group.accepted():
                self._books.tell(group, member)

    # --- facts -----------------------------------------------------------------------------------

    @property
    def rules(self) -> Rules:
        """The settings."""
        return self._books.rules

    @property
    def version(self) -> Version:
        """The learner's version, as last published."""
        return self._books.version

    @property
    def committed(self) -> int:
        """The last committed batch, 0 before the first."""
        return self._books.committed

    @property
    def work_epoch(self) -> int:
        """Rises when an actor that got nothing might get something now."""
        return self._books.work_epoch

    @property
    def exhausted(self) -> bool:
        """Whether no further batch can be filled: the prompts ended with too few groups left."""
        b = self._books
        return b.order.live < b.rules.groups_per_batch and not b.has_prompt()

    def over(self) -> str:
        """Why the run has to end in order, in a line; empty while it may go on.

        Never reads a prompt: that these have ended is known once somebody asked for one.
        """
        return explain.over(self._books)

    def hopeless(self) -> str:
        """Why batches will not fill although prompts go on, in a line; empty while they may."""
        return explain.hopeless(self._books)

    def exhausted_reason(self) -> str:
        """Why no further batch can be filled, in a line."""
        return explain.exhausted_reason(self._books)

    def position(self, group: GroupId) -> int | None:
        """The position of a group that is not yet in a batch; None for others."""
        found = self._books.groups.get(group)
        if found is None or found.phase not in (Phase.OPEN, Phase.COMPLETE):
            return None
        return self._books.order.position(found)

    def counts(self) -> dict[str, int]:
        """The terms of the conservation law, the parts of `held`, and further totals.

        completed: results ever accepted. Not in the law: groups_{trained,filtered,failed},
        unknown_results (no such dispatch), repeated_results (the dispatch had its outcome),
        protocol_errors (results refused for what they say).
        """
        totals = self._books.totals
        names = ["completed", "groups_trained", "groups_filtered", "groups_failed"]
        names += ["unknown_results", "repeated_results", "protocol_errors"]
        return self._books.census.counts() | {name: totals[name] for name in names}

    def conserved(self) -> bool:
        """Whether the conservation law holds, by enumeration (asyncrl.buffer.counts)."""
        b = self._books
        by_state = b.census.by_state
        leased = sum(r.leased for r in b.open_leases.values())
        assigned = sum(len(a.envelopes) for a, _ in b.assigned.values())
        return (
            b.census.conserved()
            and leased == by_state[State.LEASED] == b.in_flight.total()
            and assigned == by_state[State.ASSIGNED]
        )

    def records(self) -> int:
        """Dispatches and leases that are remembered: bounded by what is open, not by the run."""
        return self._books.census.live + len(self._books.leases)

    def gauges(self, now: float) -> dict[str, float]:
        """Sizes of what is held (names and meaning: `explain.gauges`)."""
        return explain.gauges(self._books, now)

    def metrics(self, now: float) -> dict[str, float]:
        """The buffer's metrics of a record, by name."""
        return explain.metrics(self._books, self.counts(), now)

    def waiting_for(self, batch: int, now: float) -> str:
        """What batch k lacks and who holds it, in a line."""
        return explain.waiting_for(self._books, batch, now)

    def waiting_for_next(self, now: float) -> str:
        """What the next batch to be assigned lacks and who holds it; empty when complete."""
        return explain.waiting_for_next(self._books, now)
