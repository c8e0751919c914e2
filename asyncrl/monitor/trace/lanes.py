"""Spans that overlap, side by side: slices of one lane must lie in or behind one another."""

from __future__ import annotations


class Lanes:
    """Gives each span of a track a lane, from 0 on. Spans come by begin, the longer one first.

    >>> lanes = Lanes(nested=True)
    >>> [lanes.put(0, 10), lanes.put(2, 5), lanes.put(4, 12), lanes.put(12, 13)]
    [0, 0, 1, 0]
    >>> lanes = Lanes(nested=False)
    >>> [lanes.put(0, 10), lanes.put(2, 5), lanes.put(5, 6)]
    [0, 1, 1]
    """

    def __init__(self, nested: bool) -> None:
        self._nested = nested
        self._open: list[list[int]] = []
        """Of each lane, when what is open there ends, the innermost last."""

    def put(self, at: int, end: int) -> int:
        """The lane of a span that lasts from `at` to `end`."""
        for lane, ends in enumerate(self._open):
            while ends and ends[-1] <= at:
                ends.pop()
            if not ends or (self._nested and end <= ends[-1]):
                ends.append(end)
                return lane
        self._open.append([end])
        return len(self._open) - 1
