"""Which batches belong together in a run that went back to an older checkpoint.

    incarnation 0   1 ─ 2 ─ 3 ─ 4 ─ 5 ─ 6     4 to 6: a branch that the run left at batch 3
    incarnation 1           └── 4 ─ 5         the run's line is 1 to 3, and these

Each incarnation of the learner goes on from a checkpoint of an earlier one. What that one trained
beyond it stays on the disk: checkpoints, records, samples. None of it may be taken for the run's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

END = sys.maxsize
"""Of the newest incarnation: no batch of it is left behind."""


class Base(NamedTuple):
    """Where an incarnation began."""

    incarnation: int | None
    """Of the learner that wrote the checkpoint; None: the initial model."""
    batch: int


class Branches:
    """A run's incarnations.

    >>> run = Branches(1, {1: Base(0, 3)})
    >>> run.incarnation_at(3), run.incarnation_at(4), run.left_at(0, 6), run.left_at(1, 5)
    (0, 1, 3, None)
    """

    def __init__(self, newest: int, bases: Mapping[int, Base]) -> None:
        self.newest = newest
        """The incarnation that the run is, or was last."""
        self._bases = bases
        self._line = self._path(newest, END)

    @classmethod
    def told(cls, newest: int, entries: Iterable[Any]) -> Branches:
        """Of lineage.json: [incarnation, that of its checkpoint or null, batch] each; an entry that
        makes no sense is as if it were not there."""
        bases = {}
        for entry in entries:
            match entry:
                case [int(one), None, int(batch)]:
                    bases[one] = Base(None, batch)
                case [int(one), int(of), int(batch)] if of < one:
                    bases[one] = Base(of, batch)
        return cls(newest, bases)

    def incarnation_at(self, batch: int) -> int | None:
        """Who trained this batch of the run's line; None: that is not known."""
        # A later incarnation begins where the line leaves the earlier one.
        holders = [one for one, until in self._line.items() if batch <= until]
        first = min(holders, default=self.newest)
        return first if self._known(first, batch) else None

    def left_at(self, incarnation: int, batch: int) -> int | None:
        """Where the run left the branch of this incarnation's batch; None: it did not, as far as is
        known."""
        oldest = min(self._line)
        if batch <= self._line.get(incarnation, -1) or incarnation > self.newest:
            return None
        if incarnation < oldest and not self._known(oldest, 0):
            return None
        path = self._path(incarnation, batch)
        return max((min(path[i], self._line[i]) for i in path.keys() & self._line), default=0)

    def _known(self, incarnation: int, batch: int) -> bool:
        base = self._base(incarnation)
        return base is not None and (batch > base.batch or base.incarnation is None)

    def _base(self, incarnation: int) -> Base | None:
        return Base(None, 0) if incarnation == 0 else self._bases.get(incarnation)

    def _path(self, incarnation: int, batch: int) -> dict[int, int]:
        """This incarnation and those that it goes back to, each with the last batch taken of it."""
        found = {incarnation: batch}
        while (base := self._base(incarnation)) is not None and base.incarnation is not None:
            incarnation = base.incarnation
            found[incarnation] = base.batch
        return found
