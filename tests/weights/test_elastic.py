"""Publication to a fleet that changes: deaths, silence, joiners, restarts. No vLLM, real gloo."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from asyncrl.learner.publication import members as members_module
from asyncrl.learner.publication import publish as publish_module
from asyncrl.learner.publication import snapshot as snapshot_module
from asyncrl.learner.publication.members import Member
from asyncrl.learner.publication.round import _blame
from asyncrl.learner.publication.weight_fleet import Failure, FleetClient
from asyncrl.weights import TransferPlan
from tests.helpers.eventually import eventually
from tests.weights.fakes import TIMEOUT_S, FakeEngine, GlooEngine, Learner, N

PHASES = ["join", "begin", "receive", "commit"]


@pytest.mark.parametrize("learner", [80.0], indirect=True)  # 10 s for each step
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", ["actor", "relay"])
def test_a_death_at_any_phase_costs_the_others_nothing(
    learner: Learner, phase: str, kind: str, tmp_path: Path
) -> None:
    learner.fleet.relays = tmp_path if kind == "relay" else None
    learner.start_three(phase)
    learner.fleet.dies_at("b", phase)
    started = time.monotonic()
    version = learner.publish()
    learner.publisher.wait()
    assert time.monotonic() - started < 8, "the death was not noticed at once"
    learner.check("a", "c")
    (cut,) = learner.events("weights_cut_out")
    assert (cut["actor"], cut["phase"], cut["version"]) == ("b", phase, str(version))
    assert cut["reason"] == "its connection closed"
    assert learner.publisher.take_timings()["sync/retries"] == (0 if phase == "commit" else 1)
    learner.publish()
    learner.publisher.wait()
    learner.check("a", "c")
    assert learner.events("weights_cut_out") == []


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        *(("actor", phase) for phase in PHASES),
        *(pytest.param("relay", phase, marks=pytest.mark.soak) for phase in PHASES),
    ],
)
def test_silence_at_any_phase_is_cut_out_and_comes_back(
    learner: Learner, kind: str, phase: str, tmp_path: Path
) -> None:
    learner.fleet.relays = tmp_path if kind == "relay" else None
    learner.start_three(phase)
    learner.fleet.actors["b"].engine.hangs = phase
    before = learner.fleet.actors["a"].engine.steps.count("begin")
    started = time.monotonic()
    version = learner.publish()
    learner.publisher.wait()
    assert time.monotonic() - started < TIMEOUT_S
    learner.check("a", "c")
    (cut,) = learner.events("weights_cut_out")
    assert (cut["actor"], cut["phase"], cut["version"]) == ("b", phase, str(version))
    assert "did not answer within" in cut["reason"]
    # Those that were paused stay so for the second try, unless the broadcast itself broke.
    begins = learner.fleet.actors["a"].engine.steps.count("begin") - before
    if kind == "actor":
        assert begins == (2 if phase == "receive" else 1)
    assert learner.publisher.finish(0.0) == ["b"]
    assert learner.publisher.waiting_for() == ""
    learner.publish()  # it is busy, and nobody asks it
    learner.publisher.wait()
    learner.check("a", "c")
    assert learner.events("weights_cut_out") == []
    with ThreadPoolExecutor(1) as pool:
        finished = pool.submit(learner.publisher.finish, 60.0)
        eventually(lambda: learner.publisher.waiting_for() == "b", "the end waits for b", 30)
        learner.fleet.thaw("b")
        assert finished.result(90) == []
    learner.check("a", "b", "c")
    assert [e["actor"] for e in learner.events("weights_joined")] == ["b"]
    if kind == "actor":
        # A commit that came late was applied all the same; who joins for the first time skips none.
        skipped = learner.fleet.actors["b"].subscriber.metrics()["sync/skipped"]
        assert skipped == (0 if phase in ("join", "commit") else 1)


def test_a_joiner_gets_the_version_while_the_others_generate(learner: Learner) -> None:
    learner.start("a", "b")
    for _ in range(2):
        learner.publish()
        learner.publisher.wait()
    learner.fleet.add("c")
    assert learner.members.wait_for(3, 30)
    assert learner.publisher.finish(60.0) == []
    learner.check("a", "b", "c")
    for name, begins in (("a", 2), ("b", 2), ("c", 1)):
        steps = learner.fleet.actors[name].engine.steps
        assert steps.count("begin") == steps.count("commit") == begins
        assert "abandon" not in steps
    (joined,) = learner.events("weights_joined")
    assert (joined["actor"], joined["version"]) == ("c", "0:2")
    assert joined["seconds"] > 0
    assert learner.fleet.actors["c"].subscriber.metrics()["sync/skipped"] == 0


def test_nobody_is_needed(learner: Learner) -> None:
    learner.publish()
    learner.publisher.wait()
    timings = learner.publisher.take_timings()
    assert set(timings) == {
        f"sync/{n}" for n in ("blocked_s", "total_s", "hash_s", "retries", "checksum_fail")
    }
    assert learner.publisher.finish(0.0) == []
    learner.fleet.add("a")
    assert learner.members.wait_for(1, 30)
    assert learner.publisher.finish(60.0) == []
    learner.check("a")
    assert learner.publisher.take_timings()["sync/version_lag"] == 0


def test_a_restarted_actor_is_another_member(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members_module, "BACKOFF_S", 3600.0)  # it holds for the dead one only
    learner.start("a", "b")
    learner.fleet.dies_at("b", "begin")
    learner.publish()
    learner.publisher.wait()
    monkeypatch.setattr("os.getpid", lambda: 1)  # what the announcer says
    learner.fleet.add("b")
    assert learner.members.wait_for(2, 30)
    assert learner.publisher.finish(60.0) == []
    learner.check("a", "b")
    assert {m.name: m.pid for m in learner.members.fresh()}["b"] == 1


def test_a_member_that_always_refuses_is_asked_less_and_less(learner: Learner) -> None:
    learner.start("a")
    refuses = learner.fleet.add("b", GlooEngine(fails="begin"))
    assert learner.members.wait_for(2, 30)
    seen: list[float] = []

    def heard(step: str) -> None:
        if step == "join":
            seen.append(time.monotonic())

    refuses.on_step = heard
    learner.publish()
    learner.publisher.wait()
    with learner.publisher._state:
        assert learner.publisher._state.wait_for(lambda: len(seen) >= 4, 60)
    pauses = [b - a for a, b in zip(seen, seen[1:], strict=False)]
    for pause, least in zip(pauses, (0.2, 0.4, 0.8), strict=False):
        assert pause >= least
    assert {(c["actor"], c["phase"]) for c in learner.events("weights_cut_out")} == {("b", "begin")}
    learner.check("a")


def test_a_snapshot_that_is_long_in_the_making_is_not_stuck(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a deadline of its own: merging and hashing grow with the weights."""
    monkeypatch.setattr(publish_module, "STUCK_MARGIN_S", 0.1)
    monkeypatch.setattr(snapshot_module, "BYTES_PER_S", 4 * N / 30)
    making, checksums = threading.Event(), TransferPlan.checksums

    def slowly(plan: TransferPlan, flat: Mapping[str, memoryview]) -> list[int]:
        making.set()
        time.sleep(0.5)  # the work itself: longer than STUCK_MARGIN_S
        return checksums(plan, flat)

    monkeypatch.setattr(TransferPlan, "checksums", slowly)
    learner.publish()
    assert making.wait(30)
    learner.publisher.wait()


def test_a_snapshot_is_not_overwritten_while_it_is_sent(learner: Learner) -> None:
    learner.start("a")
    learner.publish()
    learner.publisher.wait()
    joiner = learner.fleet.add("b")
    sending = threading.Event()
    joiner.on_step = lambda step: sending.set() if step == "receive" else None
    joiner.hangs = "receive"
    assert sending.wait(60)
    assert "receive: no answer yet from b" in learner.publisher.waiting_for()
    thread = threading.Thread(target=learner.publish)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    assert learner.filled == [1]
    learner.fleet.thaw("b")
    thread.join(60)
    assert learner.filled == [1, 2]
    learner.publisher.wait()
    assert learner.publisher.waiting_for() == ""
    assert learner.publisher.finish(60.0) == []
    learner.check("a", "b")


@pytest.mark.parametrize("seed", [1, 2])
def test_any_fleet_ends_at_the_last_version(learner: Learner, seed: int) -> None:
    rng = random.Random(seed)
    fleet, alive = learner.fleet, 0

    def join() -> None:
        nonlocal alive
        fleet.add(f"actor-{alive}")
        alive += 1

    def leave() -> None:
        fleet.kill(rng.choice(sorted(fleet.actors)))

    def die() -> None:
        fleet.dies_at(rng.choice(sorted(fleet.actors)), rng.choice(PHASES))

    def refuse_once() -> None:
        engine = fleet.actors[rng.choice(sorted(fleet.actors))].engine
        engine.fails = rng.choice(["join", "begin", "receive"])
        refusing.append(engine)

    refusing: list[FakeEngine] = []
    for _ in range(3):
        join()
    for _ in range(25):
        moves: list[Callable[[], None]] = [join, refuse_once, lambda: None]
        if len(fleet.actors) > 2:
            moves += [leave, die]
        rng.choice(moves)()
        learner.publish()
        if rng.random() < 0.5:
            learner.publisher.wait()
        for engine in refusing:
            engine.fails = ""
    learner.publisher.wait()
    assert learner.publisher.finish(120.0) == []
    learner.check(*fleet.actors)
    assert len(fleet.actors) >= 2


# --- who is to blame -----------------------------------------------------------------------------

A, B, C = (
    Member(name, 1, f"tcp://127.0.0.1:{port}", 1) for name, port in zip("abc", "123", strict=True)
)


def blamed(failures: dict[Member, Failure], error: str = "cut") -> set[str]:
    client = FleetClient([A, B, C])
    client.failures = failures
    try:
        return {m.name for m in _blame(client, [A, B, C], error)}
    finally:
        client.close()


def test_who_broke_the_group_is_blamed_and_whom_that_hit_is_not() -> None:
    hit = Failure("receive", "refused", "connection closed by peer")
    assert blamed({A: hit, B: Failure("receive", "gone", "died"), C: hit}) == {"b"}
    assert blamed({A: hit, B: Failure("receive", "dead", "no engine"), C: hit}) == {"b"}
    assert blamed({C: hit, B: hit}) == {"c"}  # who refuses first
    assert blamed({A: Failure("begin", "refused", "no"), B: Failure("begin", "silent", "")}) == {
        "a",
        "b",
    }
    assert blamed({}) == {"a", "b", "c"}  # the sender is at fault: all wait
    assert blamed({}, error="") == set()
