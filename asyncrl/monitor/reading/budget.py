"""What looking at a run may cost: it must not slow the run down."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Budget:
    """Work that can wait is done again only when what it took last time is earned back.

    >>> now, cpu = 0.0, 0.0
    >>> budget = Budget(0.01, clock=lambda: now, cpu=lambda: cpu)
    >>> with budget.spend():
    ...     cpu = 0.05
    >>> now = 4.9
    >>> budget.allows()
    False
    >>> now = 5.0
    >>> budget.allows()
    True
    """

    def __init__(
        self, share: float, *, clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:  # fmt: skip
        self._share, self._clock, self._cpu = share, clock, cpu
        self._free_at = float("-inf")

    def allows(self) -> bool:
        """Whether work may be done now."""
        return self._clock() >= self._free_at

    @contextmanager
    def spend(self) -> Iterator[None]:
        """The block's processor time, of this thread, is charged."""
        began = self._cpu()
        try:
            yield
        finally:
            cost = self._cpu() - began
            self._free_at = max(self._free_at, self._clock()) + cost / self._share
