"""Parts of a batch: what is promised of their balance, against brute force where it is small."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.buffer.balance import LEVEL, balance


def worst(parts: Sequence[Sequence[int]], sizes: Sequence[int]) -> int:
    return max(sum(sizes[i] for i in part) for part in parts)


def lowest(sizes: Sequence[int], ranks: int) -> int:
    """The lowest largest load of any way to deal single samples."""
    return min(
        max(sum(s for s, o in zip(sizes, owners, strict=True) if o == r) for r in range(ranks))
        for owners in itertools.product(range(ranks), repeat=len(sizes))
    )


def groups_of(groups: Sequence[Sequence[int]]) -> list[int]:
    """The group of each sample, in the flattened order."""
    return [g for g, group in enumerate(groups) for _ in group]


def is_whole(parts: Sequence[Sequence[int]], groups: Sequence[Sequence[int]]) -> bool:
    of = groups_of(groups)
    rank_of = {i: rank for rank, part in enumerate(parts) for i in part}
    return len({(of[i], rank_of[i]) for i in rank_of}) == len(groups)


GROUPS = st.lists(
    st.lists(st.integers(1, 500), min_size=1, max_size=5), min_size=1, max_size=8
)  # fmt: skip


@given(groups=GROUPS, ranks=st.integers(1, 5))
def test_every_sample_once_every_rank_served_and_pure(groups: list[list[int]], ranks: int) -> None:
    parts = balance(groups, ranks)
    flat = [tokens for group in groups for tokens in group]
    assert len(parts) == ranks
    assert sorted(i for part in parts for i in part) == list(range(len(flat)))
    assert all(list(part) == sorted(part) for part in parts)
    assert balance(tuple(map(tuple, groups)), ranks) == parts
    assert sum(map(bool, parts)) == min(ranks, len(flat))


@settings(max_examples=150, deadline=None)
@given(
    groups=st.lists(
        st.lists(st.integers(1, 12), min_size=1, max_size=3), min_size=1, max_size=4
    ).filter(lambda groups: sum(map(len, groups)) <= 8),
    ranks=st.integers(1, 3),
)
def test_never_worse_than_the_bound_of_lpt(groups: list[list[int]], ranks: int) -> None:
    flat = [tokens for group in groups for tokens in group]
    found, best = worst(balance(groups, ranks), flat), lowest(flat, ranks)
    assert found * 3 * ranks <= (4 * ranks - 1) * best


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 8), size=st.integers(1, 8))
def test_level_wherever_no_sample_is_long(seed: int, ranks: int, size: int) -> None:
    """No sample longer than 1/20 of the mean load: within LEVEL, however the lengths lie."""
    rng = random.Random(seed)
    longest = rng.randrange(1, 4000)
    groups: list[list[int]] = []
    while sum(map(sum, groups)) < 20 * longest * ranks:
        groups.append([rng.randint(1, longest) for _ in range(size)])
    flat = [tokens for group in groups for tokens in group]
    assert worst(balance(groups, ranks), flat) * ranks <= LEVEL * sum(flat)


@settings(deadline=None)
@given(groups=GROUPS, ranks=st.integers(1, 4))
def test_groups_are_whole_unless_splitting_them_levels(groups: list[list[int]], ranks: int) -> None:
    flat = [tokens for group in groups for tokens in group]
    parts = balance(groups, ranks)
    if not is_whole(parts, groups) and len(groups) >= ranks:
        # Whatever whole groups could do by dealing the largest first was not level, and worse.
        loads = [0] * ranks
        for group in sorted(groups, key=sum, reverse=True):
            loads[loads.index(min(loads))] += sum(group)
        assert max(loads) * ranks > LEVEL * sum(flat)
        assert worst(parts, flat) < max(loads)


def test_real_batches_are_level() -> None:
    """Long-tailed responses after prompts, 64 samples over 2 to 8 ranks."""
    for seed in range(50):
        rng = random.Random(seed)
        groups = []
        for _ in range(8):
            prompt = rng.randint(50, 500)
            groups.append([prompt + min(2048, int(rng.lognormvariate(5, 1))) for _ in range(8)])
        flat = [tokens for group in groups for tokens in group]
        for ranks in (2, 4, 8):
            longest = max(*flat, sum(flat) / ranks)  # no split can do better
            assert worst(balance(groups, ranks), flat) <= LEVEL * longest, (seed, ranks)


def test_examples() -> None:
    assert balance([[1], [1], [2]], 2) == ((2,), (0, 1))
    assert balance([[3, 1], [2]], 3) == ((0,), (2,), (1,))  # fewer groups than ranks: split
    # Dealt largest first these would give 3 + 2 + 2 and 3 + 2; a swap levels them.
    assert worst(balance([[3], [3], [2], [2], [2]], 2), [3, 3, 2, 2, 2]) == 6
    # Two groups of one long and one short sample each, and two short groups: split, level.
    assert balance([[9, 9], [2], [2]], 2) == ((0, 2), (1, 3))
    # A level split of whole groups is kept although splitting them would be more level still.
    assert balance([[50, 51], [49, 49]], 2) == ((0, 1), (2, 3))
    assert balance([[7]], 3) == ((0,), (), ())
