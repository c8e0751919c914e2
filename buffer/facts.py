"""What the ledger tells of its state; nothing here changes it."""

from __future__ import annotations

from asyncrl.buffer import explain
from asyncrl.buffer.books import Books
from asyncrl.buffer.dispatch import Phase, State
from asyncrl.buffer.rules import Rules
from asyncrl.types import GroupId, Version


class Facts:
    """The reading half of `asyncrl.buffer.ledger.Ledger`."""

    _books: Books

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
    def kept_from(self) -> int:
        """The first batch that can still be served again: no checkpoint covers it."""
        return self._books.covered + 1

    @property
    def work_epoch(self) -> int:
        """Rises when an actor that got nothing might get something now."""
        return self._books.work_epoch

    @property
    def exhausted(self) -> bool:
        """Whether no further batch can be filled: the prompts ended with too few groups left."""
        b = self._books
        few = b.order.live < b.rules.groups_per_batch
        return few and not b.cursor.has_prompt() and not b.cursor.all_quarantined

    def lessees(self) -> set[str]:
        """Actors that hold leases."""
        return {record.actor for record in self._books.open_leases.values()}

    @property
    def wants_checkpoint(self) -> bool:
        """Whether batches that no checkpoint covers take the room of the next group."""
        return bool(self._books.kept) and not self._books.room.fits_group()

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
        protocol_errors (results refused for what they say), all three since the process began;
        replayed (samples trained again) and replay_dropped_stale (over the bound of replay);
        prior_incarnation (of the trained: leased before the learner was restarted).
        """
        totals = self._books.totals + self._books.refused
        names = ["completed", "groups_trained", "groups_filtered", "groups_failed"]
        names += ["unknown_results", "repeated_results", "protocol_errors"]
        names += ["replayed", "replay_dropped_stale", "prior_incarnation"]
        return self._books.census.counts() | {name: totals[name] for name in names}

    def conserved(self) -> bool:
        """Whether the conservation law holds, by enumeration (asyncrl.buffer.counts)."""
        b = self._books
        by_state = b.census.by_state
        leased = sum(r.leased for r in b.open_leases.values())
        assigned = sum(a.fresh for a, _ in b.assigned.values())
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
