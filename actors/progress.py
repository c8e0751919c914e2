"""What renews an actor's leases."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """What the buffer is told of a lease: a number that renews it when it grows."""

    open: int
    """Samples whose task has not ended."""
    leaving: int = 0
    """Samples that have left the engine and wait for their reward or their push."""
    number: int = 0
    told: int = 0

    def report(self) -> bool:
        """Whether the number grew since the last report.

        Samples that queue for the reward or the buffer bring no tokens, and both have deadlines
        of their own: each report counts one for them. One that is stuck in the engine gets none.
        """
        self.number += self.leaving > 0
        grew, self.told = self.number > self.told, self.number
        return grew
