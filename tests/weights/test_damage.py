"""Bytes that change on their way: refused by checksum, fetched again, never loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.learner.publication.round import DAMAGED_TRIES
from asyncrl.types import Version
from tests.weights.fakes import GlooEngine, Learner, N, ScriptedRelay


class Noisy:
    """A process group whose next `engine.bad_copies` publications arrive with one bit flipped."""

    def __init__(self, group: Any, engine: NoisyEngine | NoisyRelay) -> None:
        self._group, self._engine = group, engine

    def broadcast(self, parts: list[torch.Tensor], options: Any) -> Noisy:
        self._group.broadcast(parts, options).wait()
        if self._engine.damage_due:
            self._engine.damage_due = False
            parts[0].view(torch.uint8)[7] ^= 1
        return self

    def wait(self) -> None: ...


class NoisyEngine(GlooEngine):
    """Tells at each step what it serves."""

    def __init__(self, bad_copies: int) -> None:
        super().__init__()
        self.bad_copies = bad_copies
        self.damage_due = False
        self.served: list[tuple[str, float | None]] = []

    async def join_transfer(self, info: Mapping[str, Any]) -> None:
        await super().join_transfer(info)
        self.gloo.group = Noisy(self.gloo.group, self)  # type: ignore[assignment]

    async def receive_update(self, info: Mapping[str, Any]) -> None:
        self.damage_due = self.bad_copies > 0
        self.bad_copies -= 1
        await super().receive_update(info)

    async def _step(self, name: str) -> None:
        serves = None if self.weights is None else float(self.weights[0])
        assert self.weights is None or torch.equal(self.weights, torch.full((N,), serves))
        self.served.append((name, serves))
        await super()._step(name)


class NoisyRelay(ScriptedRelay):
    """A relay of which the next `bad_copies` publications arrive with one bit flipped."""

    bad_copies = 0
    damage_due = False

    async def join(self, info: Mapping[str, Any]) -> None:
        await super().join(info)
        self.gloo.group = Noisy(self.gloo.group, self)  # type: ignore[assignment]

    async def receive(self, info: Mapping[str, Any]) -> None:
        self.damage_due = self.bad_copies > 0
        self.bad_copies -= 1
        await super().receive(info)


def start(learner: Learner, bad_copies: int) -> NoisyEngine:
    """Two sound members and one that gets damaged copies; all run version 1."""
    engine = NoisyEngine(0)
    learner.fleet.add("b", engine)
    learner.start("a", "c")
    assert learner.members.wait_for(3, 30)
    learner.publish()
    learner.publisher.wait()
    learner.check("a", "b", "c")
    engine.bad_copies = bad_copies
    engine.served.clear()
    return engine


def test_a_damaged_copy_is_refused_and_fetched_again(learner: Learner) -> None:
    engine = start(learner, 1)
    before = {n: a.engine.steps.count("begin") for n, a in learner.fleet.actors.items()}
    learner.publish()
    learner.publisher.wait()
    learner.check("a", "b", "c")
    assert engine.served == [
        ("begin", 1), ("receive", 1), ("abandon", 1),  # the old version goes on
        ("join", 1), ("begin", 1), ("receive", 1), ("commit", 1),
    ]  # fmt: skip
    begins = {n: a.engine.steps.count("begin") - before[n] for n, a in learner.fleet.actors.items()}
    assert begins == {"a": 1, "b": 2, "c": 1}, "the others took it once, and went on"
    timings = learner.publisher.take_timings()
    assert (timings["sync/checksum_fail"], timings["sync/retries"]) == (1, 1)
    (event,) = learner.publisher.take_events()
    assert (event["event"], event["actor"], event["version"]) == ("weights_damaged", "b", "0:2")
    assert "1 tensors did not arrive as they were sent (checksums differ): w" in event["reason"]


def test_a_relay_offers_no_damaged_copy(learner: Learner, tmp_path: Path) -> None:
    relay = NoisyRelay(tmp_path / "b.json")
    learner.fleet.add("b", relay)
    learner.start("a")
    assert learner.members.wait_for(2, 30)
    learner.publish()
    learner.publisher.wait()
    learner.check("a", "b")
    relay.bad_copies = DAMAGED_TRIES
    learner.publish()
    learner.publisher.wait()
    assert (relay.applied, float(relay.weights[7])) == (Version(0, 1), 1.0), "the last one stays"
    learner.check("a")
    (cut,) = learner.events("weights_cut_out")
    assert (cut["actor"], cut["phase"]) == ("b", "receive")
    assert learner.publisher.finish(60.0) == []
    learner.check("a", "b")
    assert learner.publisher.take_timings()["sync/checksum_fail"] == DAMAGED_TRIES


def test_a_link_that_always_damages_cuts_its_member_out(learner: Learner) -> None:
    engine = start(learner, DAMAGED_TRIES)
    learner.publish()
    learner.publisher.wait()
    learner.check("a", "c")
    timings = learner.publisher.take_timings()
    assert timings["sync/checksum_fail"] == DAMAGED_TRIES
    assert timings["sync/retries"] == DAMAGED_TRIES - 1
    (cut,) = learner.events("weights_cut_out")
    assert (cut["actor"], cut["phase"]) == ("b", "receive")
    assert learner.publisher.finish(60.0) == []  # the next copy is a good one
    learner.check("a", "b", "c")
    assert ("commit", 1) in engine.served
    assert learner.publisher.take_timings()["sync/checksum_fail"] == DAMAGED_TRIES


def test_what_the_sender_s_side_damages_is_refused_by_all(learner: Learner) -> None:
    learner.start("a", "b")
    snapshot = learner.publisher._snapshot
    buckets = snapshot.buckets

    def damaged() -> Iterator[torch.Tensor]:
        del snapshot.buckets  # type: ignore[method-assign]  # the next copy is a good one
        for number, bucket in enumerate(buckets()):
            sent = bucket.clone()
            if number == 1:
                sent.view(torch.uint8)[0] ^= 0x80
            yield sent

    snapshot.buckets = damaged  # type: ignore[method-assign]
    learner.publish()
    learner.publisher.wait()
    learner.check("a", "b")
    assert learner.publisher.take_timings()["sync/checksum_fail"] == 2
    assert {e["actor"] for e in learner.events("weights_damaged")} == {"a", "b"}


@pytest.mark.parametrize("learner", [80.0], indirect=True)
def test_a_death_beside_the_damage_blames_the_dead_alone(learner: Learner) -> None:
    start(learner, 1)
    learner.fleet.dies_at("c", "receive")
    learner.publish()
    learner.publisher.wait()
    learner.check("a", "b")
    (cut,) = learner.events("weights_cut_out")
    assert cut["actor"] == "c"
