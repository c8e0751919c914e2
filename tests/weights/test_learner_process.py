"""A learner as a process of its own, killed or stopped at each point of a publication."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.actors.gloo_receiver import GlooReceiver
from asyncrl.actors.intake import WeightIntake
from asyncrl.actors.weights import STEP_MARGIN_S
from asyncrl.config.schema import Config, WeightsConfig
from asyncrl.errors import WeightSyncError
from asyncrl.learner.publication import publish as publish_module
from asyncrl.learner.publication.members import Member
from asyncrl.learner.publication.weight_fleet import FleetClient
from asyncrl.metrics import TimeShares
from asyncrl.roles import RoleSettings
from asyncrl.types import Version
from tests.helpers.eventually import eventually
from tests.weights.fakes import Actor, FakeEngine, Fleet, Learner, N, ScriptedRelay
from tests.weights.learner_process import POINTS, LearnerProcess, value_of

ACTOR_S = 3.0
"""How long an engine waits for the next step."""
BOUND_S = 2 * ACTOR_S + STEP_MARGIN_S
"""Twice the longest deadline, and what the machine may need."""
ENGINES = ("actor-0", "actor-1")
FIRST, STRUCK = Version(0, 1), Version(0, 2)
PAUSED = {
    "begin": ENGINES[:1], "begun": ENGINES, "receive": ENGINES, "received": ENGINES,
    "commit": ENGINES[1:],
}  # fmt: skip
"""Whose engine is paused, and is not told to go on."""


class Struck:
    """Two engines and a machine's receiver, and the learner that brings them versions."""

    def __init__(self, fleet: Fleet, learner: LearnerProcess, folder: Path) -> None:
        self.fleet, self.learner = fleet, learner
        for name in ENGINES:
            fleet.add(name)
        fleet.add("relay-0", ScriptedRelay(folder / "relay-0.json"))

    @property
    def actors(self) -> dict[str, Actor]:
        return self.fleet.actors

    def publish(self, version: Version) -> None:
        """To all of them, in one group or after each other."""
        self.learner.wait_for(3)
        self.learner.publish(version)
        assert self.learner.finish() == []
        self.check(version)

    def check(self, *allowed: Version) -> None:
        """Each runs one of these, whole."""
        for name, actor in self.actors.items():
            engine: Any = actor.engine
            assert engine.applied in allowed, name
            assert torch.equal(engine.weights, torch.full((N,), value_of(engine.applied))), name
            assert engine.broken is None

    def at_rest(self) -> bool:
        """Whether nobody is held up by a publication, and all is told of it."""
        weights = [self.actors[name].subscriber for name in ENGINES]
        return all(a.service.ready for a in self.actors.values()) and not any(
            w.updating or w._steps.locked() for w in weights
        )

    def check_they_went_on(self, point: str, log: pytest.LogCaptureFixture) -> None:
        """Without the learner, by their deadlines; and who had to wait says for whom."""
        eventually(self.at_rest, "all went on", 60)
        self.check(FIRST, STRUCK)
        ran = {n for n, a in self.actors.items() if a.engine.applied == STRUCK}
        assert ran == ({"actor-0"} if point == "commit" else set())
        for name in ENGINES:
            actor, engine = self.actors[name], self.actors[name].engine
            if name not in PAUSED.get(point, ()):
                assert "abandon" not in engine.steps
                continue
            assert engine.steps[-1] == "abandon"
            last_begin = max(i for i, s in enumerate(engine.steps) if s == "begin")
            assert engine.times[-1] - engine.times[last_begin] < BOUND_S
            version, reason = actor.told[-1]
            assert version == STRUCK
            if point == "receive":
                assert reason.startswith(f"receive of {STRUCK} from learner-0 failed after ")
            else:
                after = "receive" if point in ("received", "commit") else "begin"
                assert reason.startswith(f"no step after {after} from learner-0 within 3 s, paused")
            assert reason in log.text
        if point in ("arrived", "rendezvous"):
            for name, actor in self.actors.items():
                (told,) = actor.told
                assert told[0] is None, name
                assert told[1].startswith("join from learner-0 failed after ")


@pytest.fixture
def struck(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Struck]:
    # It points file descriptor 1 elsewhere for a moment, which several threads must not do.
    monkeypatch.setattr("vllm.distributed.utils.suppress_stdout", contextlib.nullcontext)
    ranks = getattr(request, "param", 1)
    learner = LearnerProcess(store=tmp_path / "store" if ranks == 2 else None)
    with Fleet(learner.endpoint, timeout_s=ACTOR_S) as fleet:
        made = Struck(fleet, learner, tmp_path)
        yield made
        made.learner.end()


def strike(struck: Struck, point: str, how: signal.Signals) -> None:
    """When one group has had a version; joining, a new one forms."""
    struck.publish(FIRST)
    if point in ("arrived", "rendezvous"):
        struck.learner.regroup()

    def all_receive() -> bool:
        return all(a.engine.steps[-1] == "receive" for a in struck.actors.values())

    struck.learner.struck(STRUCK, point, how, all_receive)


def succeed(struck: Struck, store: Path | None = None) -> None:
    """The learner ends; another process, the next incarnation, brings a version to all."""
    port = struck.learner.port
    struck.learner.end()
    struck.learner = LearnerProcess(port, store)
    struck.publish(Version(1, 1))


def cases(quick: str) -> list[Any]:
    return [pytest.param(p, marks=() if p == quick else pytest.mark.soak) for p in POINTS]


@pytest.mark.parametrize("point", cases("commit"))
def test_a_killed_learner_leaves_nobody_paused_and_its_successor_reaches_all(
    struck: Struck, point: str, caplog: pytest.LogCaptureFixture
) -> None:
    strike(struck, point, signal.SIGKILL)
    struck.check_they_went_on(point, caplog)
    succeed(struck)


@pytest.mark.parametrize("point", cases("receive"))
def test_a_stopped_learner_leaves_nobody_paused_and_reaches_all_when_it_goes_on(
    struck: Struck, point: str, caplog: pytest.LogCaptureFixture
) -> None:
    strike(struck, point, signal.SIGSTOP)
    struck.check_they_went_on(point, caplog)
    struck.learner.go_on()
    struck.publish(Version(0, 3))
    events = struck.learner.events()
    cut = {e["actor"] for e in events if e["event"] == "weights_cut_out"}
    for name, actor in struck.actors.items():
        assert STRUCK in actor.engine.versions or name in cut, f"{name}: {events}"
    succeed(struck)


@pytest.mark.soak
@pytest.mark.parametrize("struck", [2], indirect=True)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_nobody_is_paused_for_a_version_whose_shards_do_not_come(
    struck: Struck, how: signal.Signals, tmp_path: Path
) -> None:
    struck.publish(FIRST)
    asked = {name: list(actor.engine.steps) for name, actor in struck.actors.items()}
    error = struck.learner.gather(STRUCK, "gather", how)
    assert error is not None
    assert error.startswith(f"weights {STRUCK}: learner-0 to receive the shards of learner-1: ")
    assert {name: actor.engine.steps for name, actor in struck.actors.items()} == asked
    struck.check(FIRST)
    succeed(struck, tmp_path / "successors")


def test_a_sender_that_stands_still_holds_nobody_past_the_deadline() -> None:
    """A host that listens, and whose process does not answer: as when it is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address, port = listener.getsockname()
        info = {"master_address": address, "master_port": port, "world_size": 2,
                "rank_offset": 1, "timeout_s": 0.3}  # fmt: skip
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"the sender stands still .* no group within 0.3 s"):
            GlooReceiver().join(info)
        assert time.monotonic() - began < 10, "torch's own wait has no end"
        listener.accept()[0].close()
    for thread in threading.enumerate():
        if thread.name == "weights-join":
            thread.join(60)
            assert not thread.is_alive(), "it ends with the sender"


def test_an_actor_tells_which_version_did_not_come(tmp_path: Path) -> None:
    """Whatever it was that failed: the learner, or a step."""
    told: list[tuple[Version | None, str]] = []
    engine = FakeEngine()
    settings = RoleSettings(
        role="actor", rank=0, world=1, model_path="", device="cpu", threads=1,
        weight_backend="gloo", run_id="r", hub_endpoint="", run_dir=str(tmp_path),
    )  # fmt: skip

    async def scenario() -> None:
        intake = WeightIntake(
            Config(weights=WeightsConfig(timeout_s=0.1)), settings, engine, shares=TimeShares(),
            on_applied=lambda _: None, on_failure=lambda *failure: told.append(failure),
        )  # fmt: skip
        intake.start("tcp://127.0.0.1:1")
        member = Member("actor-0", os.getpid(), intake.service.endpoint, 1)
        client = FleetClient([member])
        client.start_round(FIRST)
        await asyncio.to_thread(client.start_weight_update)
        async with asyncio.timeout(30):
            while not told:
                await asyncio.sleep(0.005)
        client.received = [member]
        with pytest.raises(WeightSyncError, match="commit in state 'idle'"):
            await asyncio.to_thread(client.finish_weight_update)
        engine.fails = "join"
        with pytest.raises(WeightSyncError, match="no join today"):
            await asyncio.to_thread(client.init_weight_transfer_engine, {})
        client.close()
        await intake.close()

    asyncio.run(scenario())
    assert engine.steps == ["begin", "abandon", "join"]
    expired, late, unjoined = told
    assert expired[0] == late[0] == FIRST
    assert expired[1].startswith("no step after begin from learner-0 within 0 s, paused for ")
    assert late[1].startswith(f"commit of {FIRST} from learner-0 failed after ")
    assert unjoined[0] is None
    assert unjoined[1].startswith("join from learner-0 failed after ")


class Clock:
    """The module `time`, as somebody sees it who stood still."""

    ahead_s, asked = 0.0, 0

    def monotonic(self) -> float:
        self.asked += 1
        return time.monotonic() + self.ahead_s


@pytest.mark.parametrize("learner", [80.0], indirect=True)  # 10 s for each step
def test_a_publisher_that_stood_still_is_not_stuck(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sending thread gets the time to go on, once the process does."""
    learner.start("a")
    learner.fleet.actors["a"].engine.hangs = "begin"
    clock = Clock()
    monkeypatch.setattr(publish_module, "time", clock)
    learner.publish()
    eventually(lambda: "begin" in learner.publisher.waiting_for(), "it is asked to begin", 30)
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(learner.publisher.wait)
        eventually(lambda: clock.asked, "it waits", 30)
        clock.ahead_s, clock.asked = 1000.0, 0
        eventually(lambda: clock.asked > 1 or waited.done(), "it has looked past its deadline", 30)
        learner.fleet.thaw("a")
        waited.result(60)
    learner.check("a")
