"""Which learner rank gets which samples of a batch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

LEVEL = 1.05
"""Largest load over mean load that counts as balanced."""

Parts = list[list[int]]


def balance(groups: Sequence[Sequence[int]], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Split a batch over ranks so that the largest load, in tokens, is near the mean.

    Groups stay whole (their samples then share the prompt's computation) if that is balanced
    within LEVEL; otherwise samples are dealt one by one, unless that is no better. Both ways place
    the largest first on the lightest rank (LPT), then move and swap single items while that lowers
    the largest load.

    What is promised, with m ranks: every rank gets a sample if there are m. The largest load is at
    most 4/3 - 1/(3m) times the lowest that dealing by samples can reach (Graham 1969, of LPT, which
    the rest only betters). It is within LEVEL of the mean if no sample is longer than 1/20 of the
    mean load: LPT places nothing on a rank that is at the mean already. With longer samples a
    split within LEVEL may exist and be missed (finding it is NP-hard).

    Ties go to the earlier item and the lower rank: equal inputs give equal splits.

    Args:
        groups: token count of each sample, by group, in the order of consumption.
        ranks: number of learner ranks m.

    Returns:
        For each rank the indexes of its samples in the flattened order, ascending.

    >>> balance([[5, 5], [9], [2]], 2)
    ((0, 1), (2, 3))
    >>> balance([[9, 9], [2], [2]], 2)
    ((0, 2), (1, 3))
    """
    # A sample weighs at least 1, so that a rank without any is always the lightest.
    sizes = [max(1, tokens) for group in groups for tokens in group]
    whole: Parts = []
    for group in groups:
        start = whole[-1][-1] + 1 if whole else 0
        if group:
            whole.append(list(range(start, start + len(group))))
    best = _split(whole, sizes, ranks) if len(whole) >= ranks else None
    if best is None or _worst(best, sizes) * ranks > LEVEL * sum(sizes):
        single = _split([[i] for i in range(len(sizes))], sizes, ranks)
        if best is None or _worst(single, sizes) < _worst(best, sizes):
            best = single
    return tuple(tuple(sorted(part)) for part in best)


def _worst(parts: Parts, sizes: Sequence[int]) -> int:
    return max(sum(sizes[i] for i in part) for part in parts)


def _split(items: Parts, sizes: Sequence[int], ranks: int) -> Parts:
    """Items (each some samples) over ranks: for each rank its samples."""
    weights = [sum(sizes[i] for i in item) for item in items]
    heap = [(0, rank) for rank in range(ranks)]
    held: Parts = [[] for _ in range(ranks)]  # items of each rank
    for at in sorted(range(len(items)), key=lambda a: -weights[a]):
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + weights[at], rank))
        held[rank].append(at)
    _refine(held, weights)
    return [[i for at in mine for i in items[at]] for mine in held]


def _refine(held: Parts, weights: Sequence[int]) -> None:
    """Move or swap one item between the heaviest rank and another while that levels the two.

    Each step lowers the heavier of the two loads, so that none can come back. A step is cheap: a
    rank that LPT left beyond LEVEL has few items, each of at least 1/20 of the mean load.
    """
    loads = [sum(weights[a] for a in mine) for mine in held]
    mean = sum(loads) / len(loads)
    for _ in range(4 * len(loads)):
        heavy = max(range(len(loads)), key=lambda r: loads[r])
        if loads[heavy] <= LEVEL * mean or not _step(held, loads, weights, heavy):
            return


def _step(held: Parts, loads: list[int], weights: Sequence[int], heavy: int) -> bool:
    """The move or swap that levels the heaviest rank and another best, if one does."""
    best: tuple[int, int, int, int | None] | None = None
    for rank, load in enumerate(loads):
        gap = loads[heavy] - load
        for gives in held[heavy] if gap > 1 else ():
            for takes in (None, *held[rank]):
                shift = weights[gives] - (0 if takes is None else weights[takes])
                if 0 < shift < gap:
                    after = max(loads[heavy] - shift, load + shift)
                    if best is None or after < best[0]:
                        best = (after, rank, gives, takes)
    if best is None:
        return False
    _, rank, gives, takes = best
    shift = weights[gives]
    held[heavy].remove(gives)
    held[rank].append(gives)
    if takes is not None:
        shift -= weights[takes]
        held[rank].remove(takes)
        held[heavy].append(takes)
    loads[heavy] -= shift
    loads[rank] += shift
    return True
