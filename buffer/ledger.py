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

And after a learner went back to the checkpoint of batch b, as incarnation i + 1. Nothing above
speaks of more than numbers: positions, batches, V, v. A rewind changes none of what is accepted:
batch k > b has the same groups and the same V again, and who comes after them the same position.
What is not accepted yet is judged by number: leases end with the incarnation, new ones go to
actors that run the new one, whose numbers rise from there, and a late result is taken only if the
lowest number of its tokens admits the position that its group has now. So V - v <= S for every
token that is ever trained, whatever incarnations V and v are of.

Why it moves. When all assigned batches (c groups) are committed, an actor that applied what was
published is at v = floor(c / G / n_pub). The first G groups that are not consumed have positions
p <= c + G - 1, and p + W <= c + G + S * G * n_pub <= (v + S + 1) * G * n_pub by W - 1 <= S * G *
n_pub, which the constructor demands: that actor may lease all that the next batch needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Self

from asyncrl.buffer import batches, intake, leasing, restoring, retention, snapshot
from asyncrl.buffer.books import Books, HeldBack
from asyncrl.buffer.dispatch import BatchAssignment
from asyncrl.buffer.facts import Facts
from asyncrl.buffer.intake import Status
from asyncrl.buffer.rules import Rules, filtered_cap
from asyncrl.buffer.shelf import payload_key
from asyncrl.errors import LedgerError
from asyncrl.recording import Retired
from asyncrl.types import (
    BatchPart,
    Envelope,
    FailureKind,
    GroupId,
    Lease,
    Prompt,
    SampleHeader,
    SampleId,
    Version,
)


class Ledger(Facts):
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
        groups_per_batch: int,
        max_filtered_in_a_row: int | None = None,
        **settings: Any,
    ) -> None:
        rules = Rules(
            groups_per_batch=groups_per_batch,
            max_filtered_in_a_row=filtered_cap(max_filtered_in_a_row, groups_per_batch),
            **settings,
        )
        self._books = Books(rules, iter(prompts))

    def state(self) -> bytes:
        """All that the ledger knows, without payloads and times (asyncrl.buffer.snapshot)."""
        return snapshot.dump(self._books)

    def copy(self, batch: int) -> tuple[bytes, dict[bytes, Envelope]]:
        """What the checkpoint of `batch` needs: the state, as if it were covered, and its samples.

        Raises:
            LedgerError: the batch is not committed, or one after it is not kept.
        """
        b = self._books
        if not b.covered <= batch <= b.committed:
            raise LedgerError(
                f"a copy for the checkpoint of batch {batch}: the last committed is "
                f"{b.committed}, and batches up to {b.covered} are not kept any more"
            )
        samples = snapshot.samples_of(b, batch).values()
        return snapshot.dump(b, batch), {payload_key(e.header): e for e in samples}

    @classmethod
    def restore(
        cls,
        data: bytes,
        *,
        prompts: Iterator[tuple[GroupId, Prompt]],
        envelope: Callable[[SampleHeader, int], Envelope],
        now: float,
        **settings: Any,
    ) -> Self:
        """The ledger whose `state` this is; every lease has its full time again.

        Args:
            data: the state.
            prompts: the same source from its beginning; what had been taken is skipped.
            envelope: makes a sample's envelope from its header and the bytes of its payload.
            now: of the clock that the ledger's calls use from here on.
            settings: as in the constructor.

        Raises:
            ConfigError: a setting that matters differs from the one in the state.
            DataError: these are not the prompts of the state.
            StoreError: the state cannot be read, or does not add up.
        """
        ledger = cls(prompts=prompts, **settings)
        restoring.load(ledger._books, data, envelope, now)
        return ledger

    # --- actors ------------------------------------------------------------------------------

    def lease(self, actor: str, applied: Version, capacity: int, now: float) -> list[Lease]:
        """Grant up to `capacity` samples: missing ones of open groups first, then new groups.

        A group that does not fit is granted in part; the rest is pending, for whoever asks next.
        None is granted past what admission allows for `applied`, or to an earlier incarnation.
        """
        return leasing.lease(self._books, actor, applied, capacity, now)

    def held_back(self, actor: str) -> HeldBack:
        """What cut the actor's last request short: "admission" or "bytes"; "" if neither did."""
        return self._books.asked[actor][1] if actor in self._books.asked else ""

    def take_quarantined(self) -> list[tuple[str, int, str]]:
        """Prompts left out since the last call: source, index and why."""
        cursor, news = self._books.cursor, self._books.cursor.news
        cursor.news = []
        return [(*key, cursor.quarantined[key]) for key in news]

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
        return self.release(leasing.overdue(self._books, now))

    def drop_actor(self, actor: str) -> int:
        """End all leases of an actor that is gone. Returns how many."""
        self._books.asked.pop(actor, None)
        return self.release(leasing.held_by(self._books, actor))

    def resume_actor(self, actor: str, known: Collection[int]) -> int:
        """End the leases of an actor of which it does not know. Returns how many."""
        held = leasing.held_by(self._books, actor)
        return self.release([number for number in held if number not in known])

    def release(self, leases: Collection[int]) -> int:
        """End these open leases; their samples are free again. Returns how many.

        Raises:
            LedgerError: one of them is not open.
        """
        leasing.release(self._books, leases)
        return len(leases)

    # --- the learner ---------------------------------------------------------------------------

    def assign(self, batch: int) -> BatchAssignment | None:
        """Batch k (from 1, ascending), or None while it cannot be filled or an earlier one waits.

        Several batches may be assigned and not committed. Asking again gives the same batch, also
        when it is committed and kept.

        Raises:
            LedgerError: the batch is committed and not kept, or is no batch number.
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
        return BatchPart(
            batch, rank, a.manifest, mine, tuple(a.envelopes[i] for i in mine),
            fresh=a.fresh,
        )  # fmt: skip

    def assigned(self, batch: int) -> bool:
        """Whether batch k is fixed and not committed."""
        return batch in self._books.assigned

    def commit(self, batch: int, dropped: tuple[SampleId, ...] = ()) -> None:
        """Batch k is trained, less `dropped`. In order; committing a batch again does nothing.

        Raises:
            LedgerError: the batch is not the next one, not assigned, or lacks a dropped id.
        """
        batches.commit(self._books, batch, dropped)

    def covered(self, batch: int) -> None:
        """A checkpoint covers the batches up to this one: they are kept no longer.

        With `Rules.retain`; without it no batch is kept beyond its commit. Less than was covered
        before changes nothing.

        Raises:
            LedgerError: the batch is not committed.
        """
        retention.covered(self._books, batch)

    def rewind(self, batch: int, incarnation: int) -> None:
        """The learner restarted from the checkpoint that covers `batch`: it commits the next again.

        Later batches that were committed are assigned once more, unchanged. All leases end; late
        results may still be accepted. The version is (incarnation, what `batch` made it). The
        same rewind again, before any commit, changes nothing.

        Raises:
            LedgerError: the incarnation does not rise, or the batch is not committed, or one after
                it is not kept.
        """
        retention.rewind(self._books, batch, incarnation)

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
