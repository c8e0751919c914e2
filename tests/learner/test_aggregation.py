"""The loss of a batch by each aggregation, against its definition, however the batch is cut."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from asyncrl.learner.maths.aggregation import Aggregation, BatchCounts, token_coefficients

AGGREGATIONS: tuple[Aggregation, ...] = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
)
NORM_TOKENS = 50


@dataclass(frozen=True)
class Sample:
    group: int
    losses: npt.NDArray[np.float64]
    counted: npt.NDArray[np.bool_]

    @property
    def values(self) -> list[float]:
        """What counts of it."""
        return [x for x, c in zip(self.losses.tolist(), self.counted.tolist(), strict=True) if c]


def _batch(seed: int, lengths: list[list[int]], missing: float) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        Sample(group, rng.standard_normal(n), rng.random(n) >= missing)
        for group, members in enumerate(lengths)
        for n in members
    ]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _literal(aggregation: Aggregation, batch: list[Sample]) -> float:
    counting = [s.values for s in batch if s.values]
    if aggregation == "token-mean":
        return _mean([x for values in counting for x in values])
    if aggregation == "seq-mean-token-mean":
        return _mean([_mean(values) for values in counting])
    if aggregation == "seq-mean-token-sum-norm":
        return _mean([sum(values) / NORM_TOKENS for values in counting])
    groups: dict[int, list[float]] = {}
    for s in batch:
        groups.setdefault(s.group, []).extend(s.values)
    return _mean([_mean(values) for values in groups.values() if values])


def _counts(batch: list[Sample], mine: list[Sample]) -> BatchCounts:
    """What a rank knows once all have counted."""
    of_group: dict[int, int] = {}
    for s in batch:
        of_group[s.group] = of_group.get(s.group, 0) + int(s.counted.sum())
    return BatchCounts(
        tokens=sum(of_group.values()),
        sequences=sum(bool(s.counted.any()) for s in batch),
        prompts=sum(n > 0 for n in of_group.values()),
        sample_tokens=np.array([s.counted.sum() for s in mine], np.int64),
        prompt_tokens=np.array([of_group[s.group] for s in mine], np.int64),
    )


def _pack(aggregation: Aggregation, mine: list[Sample], which: list[int], b: BatchCounts) -> float:
    """Sum of coefficient * loss over a pack of a rank's samples."""
    sample = np.repeat(np.array(which, np.int64), [len(mine[i].losses) for i in which])
    counted = np.concatenate([np.zeros(0, bool), *(mine[i].counted for i in which)])
    got = token_coefficients(aggregation, sample, counted, b, NORM_TOKENS)
    assert got.dtype == np.float32
    assert not got[~counted].any()
    return float(got @ np.concatenate([np.zeros(0), *(mine[i].losses for i in which)]))


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4),
    seed=st.integers(0, 2**20),
    missing=st.sampled_from([0.0, 0.3, 0.8, 1.1]),
)
def test_ranks_and_packs_add_up_to_the_definition(
    lengths: list[list[int]], seed: int, missing: float
) -> None:
    batch = _batch(seed, lengths, missing)
    rng = np.random.default_rng(seed)
    rank_of, pack_of = rng.integers(0, 2, len(batch)), rng.integers(0, 2, len(batch))
    for aggregation in AGGREGATIONS:
        total = 0.0
        for rank in range(2):
            rows = [i for i in range(len(batch)) if rank_of[i] == rank]
            mine = [batch[i] for i in rows]
            counts = _counts(batch, mine)
            for pack in range(2):
                which = [k for k, i in enumerate(rows) if pack_of[i] == pack]
                total += _pack(aggregation, mine, which, counts)
        assert total == pytest.approx(_literal(aggregation, batch), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("missing", [0.0, 0.2])
@pytest.mark.parametrize("lengths", [[[1]], [[4096]], [[4096, 1], [7], [300, 20]]])
def test_a_coefficient_is_what_a_loss_of_1_makes(
    aggregation: Aggregation, missing: float, lengths: list[list[int]]
) -> None:
    batch = _batch(1, lengths, missing)
    starts = np.cumsum([0, *(len(s.losses) for s in batch)])
    sample = np.repeat(np.arange(len(batch)), np.diff(starts))
    counted = np.concatenate([s.counted for s in batch])
    got = token_coefficients(aggregation, sample, counted, _counts(batch, batch), NORM_TOKENS)
    for k in {0, 3, 4095, *starts[:-1].tolist(), len(sample) - 1} & set(range(len(sample))):
        one = np.arange(len(sample)) == k
        alone = [
            Sample(s.group, one[low:high].astype(np.float64), s.counted)
            for s, low, high in zip(batch, starts, starts[1:], strict=False)
        ]
        assert got[k] == pytest.approx(_literal(aggregation, alone), rel=1e-6)


def test_a_known_batch() -> None:
    """Samples of 3, 1 and 2 tokens; the first two share a prompt; one token does not count."""
    sample = np.array([0, 0, 0, 1, 2, 2])
    counted = np.array([1, 0, 1, 1, 1, 1], bool)
    counts = BatchCounts(5, 3, 2, np.array([2, 1, 2]), np.array([3, 3, 2]))
    expected = {
        "token-mean": [1 / 5, 0, 1 / 5, 1 / 5, 1 / 5, 1 / 5],
        "seq-mean-token-mean": [1 / 6, 0, 1 / 6, 1 / 3, 1 / 6, 1 / 6],
        "seq-mean-token-sum-norm": [1 / 30, 0, 1 / 30, 1 / 30, 1 / 30, 1 / 30],
        "prompt-mean": [1 / 6, 0, 1 / 6, 1 / 6, 1 / 4, 1 / 4],
    }
    for aggregation in AGGREGATIONS:
        got = token_coefficients(aggregation, sample, counted, counts, norm_tokens=10)
        np.testing.assert_allclose(got, expected[aggregation], rtol=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_rejected_tokens_raise_the_others_only_when_the_counts_are_of_the_kept(
    aggregation: Aggregation,
) -> None:
    batch = _batch(3, [[4, 2], [5]], 0.0)
    kept = [Sample(s.group, s.losses, np.arange(len(s.losses)) % 2 == 0) for s in batch]
    everything = list(range(len(batch)))
    original = _pack(aggregation, kept, everything, _counts(batch, batch))
    of_kept = _pack(aggregation, kept, everything, _counts(kept, kept))
    assert of_kept == pytest.approx(_literal(aggregation, kept), rel=1e-6)
    zeroed = [Sample(s.group, np.where(k.counted, s.losses, 0), s.counted)
              for s, k in zip(batch, kept, strict=True)]  # fmt: skip
    assert original == pytest.approx(_literal(aggregation, zeroed), rel=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_that_counts_is_no_loss(aggregation: Aggregation) -> None:
    none = BatchCounts(0, 0, 0, np.zeros(2, np.int64), np.zeros(2, np.int64))
    sample, counted = np.array([0, 1, 1]), np.zeros(3, bool)
    assert token_coefficients(aggregation, sample, counted, none, 7).tolist() == [0.0, 0.0, 0.0]
    empty = BatchCounts(0, 0, 0, np.zeros(0, np.int64), np.zeros(0, np.int64))
    got = token_coefficients(aggregation, sample[:0], counted[:0], empty, 7)
    assert got.shape == (0,)
