"""Receivers as processes of their own, killed or stopped at each phase of a publication."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.actors.relay.memory import Offer, mapped
from asyncrl.actors.relay.worker import RelayWorker
from asyncrl.config.schema import Config
from asyncrl.errors import WeightSyncError
from asyncrl.hub import Hub
from asyncrl.learner.publication.weight_fleet import FleetClient
from asyncrl.roles import RoleSettings
from asyncrl.types import Version
from asyncrl.weights import TransferPlan
from tests.helpers.eventually import eventually
from tests.helpers.forks import Process
from tests.weights.fakes import TIMEOUT_S, Learner, N

CALLS = {
    "join": "init_weight_transfer_engine", "begin": "start_weight_update",
    "receive": "update_weights", "commit": "finish_weight_update",
}  # fmt: skip


def serve(settings: RoleSettings, fleet: str) -> None:
    asyncio.run(RelayWorker(Config(), settings).run(fleet))


class Machines:
    """A receiver process for each of some machines, and what they told the hub."""

    def __init__(self, learner: Learner, folder: Path) -> None:
        self.learner, self._folder = learner, folder
        self.records: list[dict[str, Any]] = []
        self._hub = Hub([], run_id="r", listeners=[self.records.append])
        self.processes: dict[int, Process] = {}

    def start(self, rank: int) -> None:
        settings = RoleSettings(
            role="relay", rank=rank, world=1, model_path="", device="cpu", threads=1,
            weight_backend="gloo", run_id="r", hub_endpoint=self._hub.endpoint,
            run_dir=str(self._folder), relay=str(self.path(rank)),
        )  # fmt: skip
        process = Process(target=serve, args=(settings, self.learner.members.endpoint))
        process.start()
        self.processes[rank] = process

    def path(self, rank: int) -> Path:
        return self._folder / f"relay-{rank}.json"

    def offered(self, rank: int) -> tuple[Version, torch.Tensor]:
        """What an engine of that machine would load."""
        offer = Offer.read(self.path(rank))
        if offer is None:
            raise WeightSyncError("nothing is on offer")
        fd = offer.open()
        weights = mapped(f"/proc/self/fd/{fd}", TransferPlan.from_info(offer.info))["float32"]
        os.close(fd)
        return offer.version, weights

    def offers(self, rank: int, version: Version) -> bool:
        """Whether an engine of that machine could load it now."""
        with contextlib.suppress(WeightSyncError):
            return self.offered(rank)[0] == version
        return False

    def check(self, *ranks: int) -> None:
        """These offer the last version, whole."""
        for rank in ranks:
            version, weights = self.offered(rank)
            assert version == self.learner.version
            assert torch.equal(weights, torch.full((N,), float(version.version)))

    def end(self, rank: int) -> None:
        process = self.processes.pop(rank)
        process.kill()
        process.join(30)
        process.close()

    def close(self) -> None:
        for rank in list(self.processes):
            self.end(rank)
        self._hub.close()


@pytest.fixture
def machines(learner: Learner, tmp_path: Path) -> Iterator[Machines]:
    made = Machines(learner, tmp_path)
    for rank in range(3):
        made.start(rank)
    assert learner.members.wait_for(3, 120)
    learner.publish()
    learner.publisher.wait()
    made.check(0, 1, 2)
    yield made
    made.close()


def strike(
    monkeypatch: pytest.MonkeyPatch, learner: Learner, phase: str, blow: Callable[[], None]
) -> None:
    """Do it once, when the phase of the next publication begins; while bytes are on their way."""
    if phase == "join":
        learner.publisher._courier.leave()  # the group is there already
    call = CALLS[phase]
    original = getattr(FleetClient, call)

    def struck(client: FleetClient, *arguments: Any) -> None:
        monkeypatch.setattr(FleetClient, call, original)
        if phase != "receive":
            blow()
        original(client, *arguments)

    monkeypatch.setattr(FleetClient, call, struck)
    if phase == "receive":
        snapshot = learner.publisher._snapshot
        buckets = list(snapshot.buckets())

        def midway() -> Iterator[torch.Tensor]:
            del snapshot.buckets  # type: ignore[method-assign]
            yield from buckets[:2]
            blow()
            yield from buckets[2:]

        snapshot.buckets = midway  # type: ignore[method-assign]


def cases(quick: set[str]) -> list[Any]:
    return [pytest.param(p, marks=() if p in quick else pytest.mark.soak) for p in CALLS]


@pytest.mark.parametrize("learner", [80.0], indirect=True)  # 10 s for each step
@pytest.mark.parametrize("phase", cases({"receive"}))
def test_a_killed_receiver_is_cut_out_at_once_and_its_successor_caught_up(
    machines: Machines, learner: Learner, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, mapped_before = machines.offered(1)
    strike(monkeypatch, learner, phase, lambda: machines.end(1))
    learner.publisher.take_events()
    began = time.monotonic()
    version = learner.publish()
    learner.publisher.wait()
    assert time.monotonic() - began < 8, "the death was not noticed before a deadline"
    machines.check(0, 2)
    (cut,) = learner.events("weights_cut_out")
    assert (cut["actor"], cut["phase"], cut["version"]) == ("relay-1", phase, str(version))
    assert "its connection closed" in cut["reason"] or "nothing listens there" in cut["reason"]
    assert torch.equal(mapped_before, torch.full((N,), 1.0)), "who has it mapped goes on"
    machines.start(1)
    eventually(lambda: machines.offers(1, version), "its successor caught up", 60)
    learner.publish()
    learner.publisher.wait()
    machines.check(0, 1, 2)
    if phase == "receive":  # theirs broke as well, and each says so itself

        def said() -> set[int]:
            told = [r for r in machines.records if (r.get("event") or {}).get("not_loaded")]
            for event in (r["event"] for r in told):
                assert (event["event"], event["not_loaded"]) == ("weights_not_loaded", "0:2")
                assert event["reason"].startswith("receive of 0:2 from learner-0 failed after ")
            return {r["rank"] for r in told}

        eventually(lambda: said() == {0, 2}, "the others told of it", 30)
    heard = {(r["role"], r["rank"], r["version"]) for r in machines.records}
    assert {("relay", rank) for rank in range(3)} == {(role, rank) for role, rank, _ in heard}


@pytest.mark.parametrize("phase", cases({"begin"}))
def test_a_stopped_receiver_is_cut_out_by_the_deadline_and_comes_back(
    machines: Machines, learner: Learner, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = machines.processes[1].pid
    assert pid is not None
    strike(monkeypatch, learner, phase, lambda: os.kill(pid, signal.SIGSTOP))
    learner.publisher.take_events()
    began = time.monotonic()
    version = learner.publish()
    learner.publisher.wait()
    assert time.monotonic() - began < TIMEOUT_S
    machines.check(0, 2)
    (cut,) = learner.events("weights_cut_out")
    assert (cut["actor"], cut["phase"], cut["version"]) == ("relay-1", phase, str(version))
    assert "did not answer within" in cut["reason"]
    assert machines.offered(1)[1][0] in (1.0, 2.0), "engines can still load what it holds"
    os.kill(pid, signal.SIGCONT)
    assert learner.publisher.finish(60.0) == []
    machines.check(0, 1, 2)
