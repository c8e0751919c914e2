"""Which learner rank gets which samples of a batch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balance(groups: Sequence[Sequence[int]], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Split a batch over ranks, balanced by tokens: largest first onto the lightest rank.

    Groups stay whole when there are at least as many as ranks (their samples then share the
    prompt's computation); otherwise samples are dealt one by one. Ties go to the earlier item and
    the lower rank, so that equal inputs give equal splits. Every rank gets a sample if there are
    enough.

    Args:
        groups: token count of each sample, by group, in the order of consumption.
        ranks: number of learner ranks L.

    Returns:
        For each rank the indexes of its samples in the flattened order, ascending.

    >>> balance([[5, 5], [9], [2]], 2)
    ((0, 1), (2, 3))
    """
    sizes = [tokens for group in groups for tokens in group]
    items: list[list[int]] = []
    index = 0
    for group in groups:
        members = list(range(index, index + len(group)))
        index += len(group)
        items.extend([members] if len(groups) >= ranks else [[i] for i in members])
    # An item weighs at least 1, so that a rank without any is always the lightest.
    weights = [max(1, sum(sizes[i] for i in item)) for item in items]
    loads = [(0, rank) for rank in range(ranks)]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for at in sorted(range(len(items)), key=lambda a: -weights[a]):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + weights[at], rank))
        parts[rank].extend(items[at])
    return tuple(tuple(sorted(part)) for part in parts)
