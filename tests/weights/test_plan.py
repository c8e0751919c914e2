"""Layout, buckets and snapshots: both ends compute the same, whatever the parameters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.errors import WeightSyncError
from asyncrl.learner.layout import Layout
from asyncrl.learner.publication.snapshot import Snapshot
from asyncrl.weights import DTYPE_BYTES, ParamSpec, TransferPlan

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
plans = st.lists(st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), shapes), max_size=8).map(
    lambda rows: TransferPlan(
        tuple(ParamSpec(f"p{i}", dtype, shape) for i, (dtype, shape) in enumerate(rows))
    )
)


@settings(deadline=None)
@given(plans, st.integers(1, 64))
def test_buckets_cover_each_buffer_once_and_in_order(plan: TransferPlan, limit: int) -> None:
    covered: dict[str, list[int]] = {}
    for dtype, start, stop in plan.buckets(limit):
        assert 0 < stop - start <= max(1, limit // DTYPE_BYTES[dtype])
        covered.setdefault(dtype, []).extend(range(start, stop))
    assert covered == {d: list(range(n)) for d, n in plan.sizes.items() if n}


@settings(deadline=None)
@given(plans, st.integers(1, 64))
def test_what_the_buckets_carry_is_what_the_snapshot_took(plan: TransferPlan, limit: int) -> None:
    weights = [
        (p.name, torch.rand(p.shape).to(getattr(torch, p.dtype)) + i)
        for i, p in enumerate(plan.params)
    ]
    sent = Snapshot(Layout.whole(plan.params), bucket_bytes=limit)
    sent.fill(weights)
    received = Snapshot(
        Layout.whole(TransferPlan.from_info(plan.to_info()).params), bucket_bytes=limit
    )
    for source, target in zip(sent.buckets(), received.buckets(), strict=True):
        target.copy_(source)
    for (name, tensor), (got_name, got) in zip(weights, received.tensors(), strict=True):
        assert got_name == name
        torch.testing.assert_close(got, tensor, rtol=0, atol=0)


def test_snapshot_casts_to_the_wire_dtype() -> None:
    snapshot = Snapshot(Layout.whole([ParamSpec("w", "bfloat16", (2,))]))
    snapshot.fill([("w", torch.tensor([1.0, 2.001]))])
    ((_, tensor),) = snapshot.tensors()
    assert tensor.dtype == torch.bfloat16
    assert tensor.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([("b", (2,))], r"got b \(2,\), the plan says a \(2,\)"),
        ([("a", (3,))], r"got a \(3,\), the plan says a \(2,\)"),
        ([("a", (2,))], "b and what follows it are missing"),
        ([("a", (2,)), ("b", (1,)), ("c", (1,))], "no further parameter"),
    ],
)
def test_snapshot_refuses_what_the_plan_does_not_say(
    weights: list[tuple[str, tuple[int, ...]]], says: str
) -> None:
    plan = TransferPlan((ParamSpec("a", "float32", (2,)), ParamSpec("b", "float32", (1,))))
    with pytest.raises(WeightSyncError, match=says):
        Snapshot(Layout.whole(plan.params)).fill(
            (name, torch.zeros(shape)) for name, shape in weights
        )


def test_plan_refuses_a_dtype_that_cannot_travel() -> None:
    with pytest.raises(WeightSyncError, match="w has dtype int8"):
        TransferPlan((ParamSpec("w", "int8", (1,)),))
    with pytest.raises(WeightSyncError, match="2 names, 1 dtypes"):
        TransferPlan.from_info({"names": ["a", "b"], "dtype_names": ["float32"], "shapes": [[1]]})
