"""The actor's side of a publication without an engine: order, failures, deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import zmq
import zmq.asyncio

from asyncrl import wire
from asyncrl.actors import weights as actor_weights
from asyncrl.actors.weight_service import WeightService
from asyncrl.actors.weights import EngineWeights
from asyncrl.errors import AlreadyAppliedError, AsyncRLError, EngineError, WeightSyncError
from asyncrl.types import Version
from tests.weights.fakes import FakeEngine, Services, subscriber

INFO = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2]]}
V1, V2 = Version(0, 1), Version(0, 2)


async def publish(subscriber: EngineWeights, version: Version = V1) -> None:
    await subscriber.begin(version)
    await subscriber.receive(INFO)
    await subscriber.commit(version)


def test_whole_publication_is_applied_and_reported() -> None:
    engine, applied = FakeEngine(), []
    asyncio.run(publish(subscriber(engine, on_applied=applied.append)))
    assert engine.steps == ["begin", "receive", "commit"]
    assert engine.applied == V1
    assert applied == [V1]
    assert engine.broken is None


@pytest.mark.parametrize("step", ["begin", "receive"])
def test_failure_before_loading_goes_back_to_the_old_version(step: str) -> None:
    engine = FakeEngine(fails=step)

    async def run() -> None:
        weights = subscriber(engine)
        with pytest.raises(WeightSyncError, match=f"{step} failed: no {step} today"):
            await publish(weights)
        engine.fails = ""
        await publish(weights)  # the next publication works

    asyncio.run(run())
    assert "abandon" in engine.steps
    assert engine.applied == V1
    assert engine.broken is None


@pytest.mark.parametrize("info", [{}, INFO | {"shapes": []}, INFO | {"adapters": {}}])
def test_nonsense_instead_of_a_plan_leaves_no_engine_paused(info: dict[str, Any]) -> None:
    engine = FakeEngine()

    async def run() -> None:
        weights = subscriber(engine)
        await weights.begin(V1)
        with pytest.raises((KeyError, WeightSyncError)):
            await weights.receive(info)
        assert not weights.updating
        await publish(weights)

    asyncio.run(run())
    assert engine.steps == ["begin", "abandon", "begin", "receive", "commit"]


@pytest.mark.parametrize(
    ("step", "staged"), [("commit", True), ("receive", False), ("begin", False)]
)
def test_failure_that_may_leave_half_a_version_ends_the_engine(step: str, staged: bool) -> None:
    engine = FakeEngine(fails=step)
    weights = subscriber(engine, staged=staged)
    with pytest.raises(EngineError, match=f"no {step} today"):
        asyncio.run(publish(weights))
    assert engine.broken is not None
    assert "no whole version" in engine.broken
    assert "abandon" not in engine.steps
    with pytest.raises(EngineError, match="broken by an earlier"):
        asyncio.run(weights.begin(V1))


@pytest.mark.parametrize("step", ["begin", "receive", "commit"])
def test_stuck_step_ends_the_engine(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor_weights, "STEP_MARGIN_S", 0.0)
    engine = FakeEngine(hangs=step)
    with pytest.raises(EngineError, match=f"{step} took over"):
        asyncio.run(publish(subscriber(engine, timeout_s=0.05)))
    assert engine.broken is not None


@pytest.mark.parametrize("received", [False, True])
def test_update_that_is_never_finished_is_given_up(received: bool) -> None:
    engine = FakeEngine()

    async def run() -> None:
        weights = subscriber(engine, timeout_s=0.05)
        await weights.begin(V1)
        if received:
            await weights.receive(INFO)
        async with asyncio.timeout(30):
            while "abandon" not in engine.steps:
                await asyncio.sleep(0.01)
        with pytest.raises(WeightSyncError, match="commit in state 'idle'"):
            await weights.commit(V1)

    asyncio.run(run())
    assert engine.applied == Version(0, 0)
    assert engine.broken is None


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (["receive"], "receive in state 'idle'"),
        (["commit"], "commit in state 'idle'"),
        (["begin", "receive", "begin"], "begin in state 'received'"),
        (["begin", "commit"], "commit in state 'begun'"),
    ],
)
def test_steps_out_of_order_are_refused(steps: list[str], says: str) -> None:
    async def run() -> None:
        weights = subscriber(FakeEngine())
        calls: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "begin": lambda: weights.begin(V1),
            "receive": lambda: weights.receive(INFO),
            "commit": lambda: weights.commit(V1),
        }
        for step in steps[:-1]:
            await calls[step]()
        with pytest.raises(WeightSyncError, match=says):
            await calls[steps[-1]]()
        await weights.close()

    asyncio.run(run())


def test_versions_only_rise() -> None:
    async def run() -> None:
        weights = subscriber(FakeEngine())
        await publish(weights, Version(0, 5))
        with pytest.raises(AlreadyAppliedError, match="0:5 is not above 0:5"):
            await weights.begin(Version(0, 5))
        await publish(weights, Version(1, 2))  # a new incarnation may go back

    asyncio.run(run())


@pytest.mark.parametrize("received", [False, True])
def test_paused_engine_joins_the_next_group_and_stays_paused(received: bool) -> None:
    """Another member broke the group: the version, or a newer one, comes through the next."""
    engine = FakeEngine()

    async def run() -> None:
        weights = subscriber(engine)
        await weights.begin(V1)
        if received:
            await weights.receive(INFO)
        await weights.join({})
        await publish(weights, V2)

    asyncio.run(run())
    expected = ["begin", *["receive"] * received, "join", "receive", "commit"]
    assert engine.steps == expected
    assert engine.applied == V2


def test_engine_that_has_loaded_cannot_join_another_group() -> None:
    engine = FakeEngine()

    async def run() -> None:
        weights = subscriber(engine, staged=False)
        await weights.begin(V1)
        await weights.join({})  # nothing has come yet
        await weights.receive(INFO)
        with pytest.raises(EngineError, match="loaded but not committed"):
            await weights.join({})

    asyncio.run(run())
    assert engine.broken is not None
    assert engine.steps == ["begin", "join", "receive"]


@pytest.mark.parametrize("step", ["join", "begin"])
def test_update_of_which_only_the_first_steps_come_again_is_given_up(step: str) -> None:
    engine = FakeEngine()

    async def run() -> None:
        weights = subscriber(engine, timeout_s=0.05)
        await weights.begin(V1)
        await (weights.join({}) if step == "join" else weights.begin(V2))
        async with asyncio.timeout(30):
            while "abandon" not in engine.steps:
                await asyncio.sleep(0.01)

    asyncio.run(run())
    assert engine.broken is None


@pytest.mark.parametrize("step", ["join", "begin"])
def test_no_engine_stays_paused_however_often_it_is_asked_to_join(step: str) -> None:
    engine = FakeEngine(fails="join")

    async def run() -> None:
        weights = subscriber(engine, timeout_s=0.2)
        await weights.begin(V1)
        async with asyncio.timeout(20):
            while "abandon" not in engine.steps:
                with contextlib.suppress(WeightSyncError):
                    await (weights.join({}) if step == "join" else weights.begin(V1))
                await asyncio.sleep(0.01)
        await weights.close()

    asyncio.run(run())
    assert engine.broken is None


def test_next_update_waits_until_the_last_one_has_been_given_up() -> None:
    """Else it would pause the engine, and the end of giving up would let it go on."""
    engine = FakeEngine(hangs="abandon")

    async def run() -> None:
        weights = subscriber(engine, timeout_s=0.05)
        await weights.begin(V1)
        async with asyncio.timeout(30):
            while "abandon" not in engine.steps:
                await asyncio.sleep(0.01)
            began = asyncio.create_task(weights.begin(V2))
            await asyncio.sleep(0)
            assert engine.steps == ["begin", "abandon"]
            engine.thawed.set()
            await began
        assert engine.steps == ["begin", "abandon", "begin"]
        await weights.close()

    asyncio.run(run())


def test_service_survives_nonsense() -> None:
    def ask(socket: zmq.Socket[bytes], frames: list[bytes]) -> wire.Message:
        socket.send_multipart(frames)
        assert socket.poll(30_000)
        return wire.decode(socket.recv_multipart())[0]

    with (
        Services([FakeEngine()]) as (endpoint,),
        zmq.Context() as context,
        context.socket(zmq.DEALER) as socket,
    ):
        socket.connect(endpoint)
        for frames in ([b"\xc1"], [b""], list(wire.encode(wire.StatsRequest(req=4)))):
            reply = ask(socket, [bytes(f) for f in frames])
            assert isinstance(reply, wire.Error)
            assert reply.error == "WireError"
        assert reply.req == 4
        begin = [bytes(f) for f in wire.encode(wire.WeightsBegin(req=5, version=V1))]
        assert ask(socket, begin) == wire.Ok(req=5)


def test_a_failure_that_nobody_foresaw_is_logged_with_its_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(version: Version) -> None:
        raise RuntimeError("a bug")

    async def run() -> None:
        weights = subscriber(FakeEngine())
        monkeypatch.setattr(weights, "begin", broken)
        service = WeightService(weights)
        frames = [bytes(f) for f in wire.encode(wire.WeightsBegin(req=1, version=V1))]
        reply = await service._answer(frames)
        assert isinstance(reply, wire.Error)
        assert (reply.error, reply.message) == ("EngineError", "RuntimeError: a bug")
        await service.close()

    asyncio.run(run())
    (logged,) = caplog.records
    assert logged.exc_info


def test_service_that_breaks_says_so_to_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def request(req: int) -> list[bytes]:
        return [bytes(f) for f in wire.encode(wire.StatsRequest(req=req))]

    async def broken(frames: list[bytes]) -> wire.Message:
        raise RuntimeError("a bug")

    async def run() -> None:
        service = WeightService(subscriber(FakeEngine()))
        service.start()
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(service.endpoint)
            async with asyncio.timeout(60):
                first, second = (asyncio.create_task(service.wait()) for _ in range(2))
                await asyncio.sleep(0)  # both wait
                first.cancel()
                await socket.send_multipart(request(1))
                assert wire.decode(await socket.recv_multipart())[0].req == 1  # still served
                monkeypatch.setattr(service, "_answer", broken)
                await socket.send_multipart(request(2))
                with pytest.raises(RuntimeError, match="a bug"):
                    await second
        await service.close()

    asyncio.run(run())


def test_service_is_ready_unless_it_serves() -> None:
    engine = FakeEngine(hangs="begin")

    async def run() -> None:
        service, idle = WeightService(subscriber(engine)), asyncio.Event()
        service.on_idle = idle.set
        service.start()
        assert service.ready
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.connect(service.endpoint)
            begin = wire.encode(wire.WeightsBegin(req=1, version=V1))
            async with asyncio.timeout(60):
                await socket.send_multipart([bytes(f) for f in begin])
                while not engine.steps:
                    await asyncio.sleep(0.01)
                assert not service.ready
                assert not idle.is_set()
                engine.thawed.set()
                await idle.wait()
                assert service.ready
                assert wire.decode(await socket.recv_multipart())[0] == wire.Ok(req=1)
        await service.close()

    asyncio.run(run())


def test_errors_of_steps_are_asyncrl_errors() -> None:
    """So that an actor can tell them from bugs."""
    for step, staged in itertools.product(("begin", "receive", "commit"), (True, False)):
        with pytest.raises(AsyncRLError):
            asyncio.run(publish(subscriber(FakeEngine(fails=step), staged=staged)))
