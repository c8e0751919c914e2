"""Staleness arithmetic against its definitions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl import staleness
from asyncrl.errors import ConfigError, StalenessError
from asyncrl.types import FinishReason, SampleHeader, SampleId, Version

small = st.integers(1, 5)


def sample(
    low: int, high: int, dispatch: int, finish: int, incarnation: int = 0, index: int = 0
) -> SampleHeader:
    return SampleHeader(
        id=SampleId("p", 0, index, 0), lease=7, actor="actor-2", prompt_tokens=1,
        response_tokens=2, policy_tokens=2, version_min=Version(incarnation, low),
        version_max=Version(incarnation, high), version_dispatch=Version(incarnation, dispatch),
        version_finish=Version(incarnation, finish), reward=0.0, finish_reason=FinishReason.STOP,
        temperature=1.0,
    )  # fmt: skip


@given(batch=st.integers(1, 100), n=small)
def test_the_version_of_a_batch_counts_the_publications_before_it(batch: int, n: int) -> None:
    published = sum(k % n == 0 for k in range(1, batch))
    assert staleness.version_of_batch(batch, n) == published


@given(p=st.integers(0, 200), W=small, v=st.integers(0, 9), S=st.integers(0, 4), G=small, n=small)
def test_admission_is_exactly_the_bound(p: int, W: int, v: int, S: int, G: int, n: int) -> None:
    # At worst the group is consumed after p + W - 1 others: in the batch that holds that place.
    worst_batch = (p + W - 1) // G + 1
    admitted = p <= staleness.max_admissible_position(W, v, S, G, n)
    assert admitted == (staleness.version_of_batch(worst_batch, n) - v <= S)


@given(p=st.integers(0, 200), W=small, S=st.integers(0, 4), G=small, n=small)
def test_the_version_needed_is_the_lowest_admitted(p: int, W: int, S: int, G: int, n: int) -> None:
    needed = staleness.version_needed(p, W, S, G, n)
    assert p <= staleness.max_admissible_position(W, needed, S, G, n)
    assert needed == 0 or p > staleness.max_admissible_position(W, needed - 1, S, G, n)


def test_windows_out_of_range_are_refused_with_the_fix() -> None:
    staleness.check_window(9, 2, 2, 2)
    with pytest.raises(ConfigError, match=r"window=10 is outside 1\.\.9.*set it to at most 9"):
        staleness.check_window(10, 2, 2, 2)
    with pytest.raises(ConfigError, match="window=0"):
        staleness.check_window(0, 2, 2, 2)


def test_each_staleness_of_a_sample() -> None:
    got = staleness.sample_staleness(sample(3, 5, 3, 6), Version(0, 7), batches_per_publication=4)
    assert got == staleness.SampleStaleness(
        head=4, tail=2, span=2, dispatch=4, in_flight=3, in_queue=1, steps=16,
        prior_incarnation=False,
    )  # fmt: skip


def test_after_a_restart_nothing_is_negative_and_the_sample_is_marked() -> None:
    got = staleness.sample_staleness(sample(5, 9, 5, 9), Version(1, 7))
    assert (got.head, got.tail, got.in_queue, got.span) == (2, 0, 0, 4)
    assert got.prior_incarnation
    assert not staleness.sample_staleness(sample(5, 7, 5, 7, 1), Version(1, 7)).prior_incarnation


def test_a_restart_within_a_sample_marks_it_and_counts_by_number() -> None:
    # Tokens 0:6, 1:5, 1:6, 1:7: none of version_min, version_max and version_finish is of
    # incarnation 0.
    over = replace(sample(5, 7, 6, 7, incarnation=1), version_dispatch=Version(0, 6))
    got = staleness.sample_staleness(over, Version(1, 8))
    assert (got.head, got.tail, got.span, got.dispatch) == (3, 1, 2, 2)
    assert got.prior_incarnation
    assert staleness.check_bound([over], Version(1, 8), 3) == ()
    assert staleness.check_bound([over], Version(1, 8), 2) == (0,)


def test_the_check_names_samples_over_the_bound() -> None:
    manifest = [sample(v, v + 1, v, v, index=v) for v in (4, 1, 2, 3)]
    assert staleness.check_bound(manifest, Version(0, 4), 2) == (1,)
    assert staleness.check_bound(manifest, Version(0, 4), 1) == (1, 2)
    assert staleness.check_bound(manifest, Version(0, 4), 3, "raise") == ()
    with pytest.raises(
        StalenessError,
        match=r"2 of 4 samples exceed buffer\.max_staleness=1 at version 0:4; worst: p/0/1/0 with "
        r"head staleness 3 \(tokens 0:1 to 0:2, dispatched at 0:1, lease 7, actor-2\)",
    ):
        staleness.check_bound(manifest, Version(0, 4), 1, "raise")


def test_token_staleness_is_per_token_and_never_negative() -> None:
    versions = np.array([3, 4, 6], np.int32)
    got = staleness.token_staleness(versions, Version(1, 5))
    assert got.dtype == np.int64
    assert got.tolist() == [2, 1, 0]
    heads = staleness.sample_staleness(sample(3, 6, 3, 6), Version(1, 5))
    assert (got.max(), got.min()) == (heads.head, heads.tail)
