"""The groups in cursor order, and their positions.

The position of a group is the number of groups before it in cursor order that were not removed:
those consumed (assigned or trained) and those still live. A removal lowers all later positions by
one; consumption changes none, also when a later group is consumed first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from asyncrl.buffer.dispatch import Group, Phase


class Order:
    """Positions in O(log n), with n the groups from the oldest open one on."""

    def __init__(self) -> None:
        self._before = 0  # consumed groups that are no longer listed
        self._ordinals: list[int] = []  # ascending; parallel to _groups
        self._groups: list[Group] = []
        self._consumed = 0  # listed groups that were consumed ahead of an older one

    @property
    def next_position(self) -> int:
        """The position of the group that would be opened next."""
        return self._before + len(self._groups)

    @property
    def live(self) -> int:
        """Groups open or complete, not yet in a batch."""
        return len(self._groups) - self._consumed

    def position(self, group: Group) -> int:
        """The position of a listed group."""
        return self._before + bisect_left(self._ordinals, group.ordinal)

    def append(self, group: Group) -> None:
        """Open a group: it goes last."""
        self._ordinals.append(group.ordinal)
        self._groups.append(group)

    def remove(self, group: Group) -> None:
        """Take out a group that is filtered or failed: later positions fall by one."""
        at = bisect_left(self._ordinals, group.ordinal)
        del self._ordinals[at], self._groups[at]
        self._trim()

    def consumed(self, groups: list[Group]) -> None:
        """The groups (phase ASSIGNED) went into a batch."""
        self._consumed += len(groups)
        self._trim()

    def live_groups(self) -> Iterator[tuple[int, Group]]:
        """(position, group) of the groups not yet in a batch, in cursor order."""
        for at, group in enumerate(self._groups):
            if group.phase in (Phase.OPEN, Phase.COMPLETE):
                yield self._before + at, group

    def _trim(self) -> None:
        """Forget consumed groups ahead of the oldest live one."""
        done = 0
        while done < len(self._groups) and self._groups[done].phase not in (
            Phase.OPEN,
            Phase.COMPLETE,
        ):
            done += 1
        if done:
            del self._ordinals[:done], self._groups[:done]
            self._before += done
            self._consumed -= done
