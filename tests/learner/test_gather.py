"""A snapshot of two ranks: own shards cut without a collective, gathered beside training."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from asyncrl.errors import WeightSyncError
from asyncrl.learner.layout import Layout, Part
from asyncrl.learner.publication.shards import Shards
from asyncrl.weights import ParamSpec
from tests.helpers.ranks import join, two_ranks
from tests.helpers.tiny_model import save_tiny_model
from tests.learner.gather_ranks import BROKEN_S

RANKS = "tests.learner.gather_ranks"
UNEVEN = {"vocab_size": 97, "intermediate_size": 63}
"""Rows that two ranks cannot share evenly."""


def test_the_snapshot_is_the_model_of_the_publish_moment_bit_for_bit(tmp_path: Path) -> None:
    """Tied and untied, rows that do not divide, fewer rows than ranks (adapters of rank 1)."""
    models = [
        save_tiny_model(tmp_path / "qwen3", "qwen3", tied=True, **UNEVEN),
        save_tiny_model(tmp_path / "llama", "llama", tied=False, **UNEVEN),
        save_tiny_model(tmp_path / "gpt2", "gpt2", vocab_size=97),  # layers are transposed
    ]
    with two_ranks(RANKS, tmp_path / "store", "equal", *models) as processes:
        join(processes)


@pytest.mark.parametrize(
    ("victim", "how", "says"),
    [
        (1, signal.SIGKILL, "weights 0:1: learner-0 to receive the shards of learner-1: failed"),
        (1, signal.SIGSTOP, "weights 0:1: learner-0 to receive the shards of learner-1: failed"),
        (0, signal.SIGKILL, "weights 0:1: learner-1 to send its shards to learner-0: failed"),
    ],
)
def test_a_rank_that_ends_in_the_gather_ends_the_other_with_one_error(
    tmp_path: Path, victim: int, how: signal.Signals, says: str
) -> None:
    with two_ranks(RANKS, tmp_path / "store", "broken", victim, int(how)) as processes:
        out, err = processes[1 - victim].communicate(timeout=120)
        assert processes[1 - victim].returncode == 0, err[-3000:]
        seconds, first, *more = out.splitlines()
        assert first.startswith(says)
        assert "has ended or is stuck" in first
        assert more[0].startswith(says), "the next publish says the same"
        assert float(seconds) < BROKEN_S + 5
        if how == signal.SIGKILL:
            assert float(seconds) < BROKEN_S - 1, "a death is noticed at once"


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 7])
def test_shards_are_cut_as_fsdp_cuts_them(rows: int, world: int) -> None:
    whole = torch.arange(rows * 3.0).view(rows, 3)
    part = Part(ParamSpec("w", "float32", (rows, 3)), sharded=True)
    chunks = [*whole.chunk(world), *[whole[:0]] * world][:world]
    assert [part.held(r, world)[1] - part.held(r, world)[0] for r in range(world)] == [
        c.numel() for c in chunks
    ]
    place = torch.zeros(rows * 3)
    rank_0 = Shards([part], rank=0, world=world, whole={"w": place})
    rank_0.cut([("w", chunks[0])])
    for rank in range(1, world):
        sender = Shards([part], rank=rank, world=world)
        sender.cut([("w", chunks[rank])])
        both = zip(rank_0.pieces(rank, 16), sender.pieces(rank, 16), strict=True)
        for target, piece in both:
            assert 0 < piece.nbytes <= 16
            target.copy_(piece)
    assert torch.equal(place.view(rows, 3), whole)


def test_what_is_frozen_leaves_once() -> None:
    specs = [ParamSpec(n, "float32", (4,)) for n in ("base", "trained")]
    parts = [Part(specs[0], sharded=True, frozen=True), Part(specs[1], sharded=True)]
    shards = Shards(parts, rank=1, world=2)
    shards.cut([("base", torch.ones(2)), ("trained", torch.ones(2))])
    assert len(shards.pieces(1, 64)) == 2
    shards.settled = True
    shards.cut([("base", torch.zeros(2)), ("trained", torch.zeros(2))])
    (only,) = shards.pieces(1, 64)
    assert only.tolist() == [0, 0]


def test_another_rank_refuses_what_the_layout_does_not_say() -> None:
    layout = Layout.whole([ParamSpec("w", "float32", (4, 2))])
    shards = Shards([p._replace(sharded=True) for p in layout.parts], rank=1, world=2)
    with pytest.raises(WeightSyncError, match=r"got w \(3, 2\), the plan says w \(2, 2\)"):
        shards.cut([("w", torch.ones(3, 2))])
