"""The groups in cursor order, and their positions.

The position of a group is the number of groups before it in cursor order that were not removed:
those consumed (assigned or trained) and those still live. A removal lowers all later positions by
one; consumption changes none, also when a later group is consumed first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from asyncrl.buffer.dispatch import Group


class Order:
    """Positions in O(log n), with n the groups from the oldest live one on."""

    def __init__(self) -> None:
        self.before = 0
        """Consumed groups that are no longer listed."""
        self.ordinals: list[int] = []
        """Of the listed groups, ascending: the live ones, and those consumed ahead of them."""
        self._live: dict[int, Group] = {}  # by ordinal, ascending

    @property
    def next_position(self) -> int:
        """The position of the group that would be opened next."""
        return self.before + len(self.ordinals)

    @property
    def live(self) -> int:
        """Groups open or complete, not yet in a batch."""
        return len(self._live)

    def position(self, group: Group) -> int:
        """The position of a listed group."""
        return self.before + bisect_left(self.ordinals, group.ordinal)

    def append(self, group: Group) -> None:
        """Open a group: it goes last."""
        self.ordinals.append(group.ordinal)
        self._live[group.ordinal] = group

    def remove(self, group: Group) -> None:
        """Take out a live group that is filtered or failed: later positions fall by one."""
        del self.ordinals[bisect_left(self.ordinals, group.ordinal)]
        del self._live[group.ordinal]
        self._trim()

    def consumed(self, groups: list[Group]) -> None:
        """The groups went into a batch."""
        for group in groups:
            del self._live[group.ordinal]
        self._trim()

    def live_groups(self) -> Iterator[tuple[int, Group]]:
        """(position, group) of the groups not yet in a batch, in cursor order."""
        for position, ordinal in enumerate(self.ordinals, self.before):
            group = self._live.get(ordinal)
            if group is not None:
                yield position, group

    def restore(self, before: int, ordinals: list[int], live: list[Group]) -> None:
        """Put back what `before`, `ordinals` and the live groups were."""
        self.before, self.ordinals = before, ordinals
        self._live = {group.ordinal: group for group in sorted(live, key=lambda g: g.ordinal)}

    def _trim(self) -> None:
        """Forget consumed groups ahead of the oldest live one."""
        oldest = next(iter(self._live), None)
        done = len(self.ordinals) if oldest is None else bisect_left(self.ordinals, oldest)
        if done:
            del self.ordinals[:done]
            self.before += done
