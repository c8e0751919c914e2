"""The control plane of a publication without an engine: order, failures, deadlines, names."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

import pytest
import zmq
import zmq.asyncio

from asyncrl import wire
from asyncrl.actors import weights as actor_weights
from asyncrl.actors.weights import EngineWeights, WeightService
from asyncrl.errors import AsyncRLError, EngineError, WeightSyncError
from asyncrl.learner.weight_fleet import FleetClient, Receiver
from asyncrl.types import Version

INFO = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2]]}
V1 = Version(0, 1)


class FakeEngine:
    """Records the steps; `fails` names the one that raises, `hangs` the one that never ends."""

    def __init__(self, fails: str = "", hangs: str = "") -> None:
        self.applied = Version(0, 0)
        self.steps: list[str] = []
        self.broken: str | None = None
        self.infos: list[dict[str, Any]] = []
        self._fails, self._hangs = fails, hangs

    async def _step(self, name: str) -> None:
        self.steps.append(name)
        if name == self._fails:
            raise RuntimeError(f"no {name} today")
        if name == self._hangs:
            await asyncio.Event().wait()

    async def join_transfer(self, info: Mapping[str, Any]) -> None:
        self.infos.append(dict(info))
        await self._step("join")

    async def begin_update(self) -> None:
        await self._step("begin")

    async def receive_update(self, info: Mapping[str, Any]) -> None:
        await self._step("receive")

    async def commit_update(self, version: Version) -> None:
        await self._step("commit")
        self.applied = version

    async def abandon_update(self) -> None:
        await self._step("abandon")

    def fail(self, reason: str) -> None:
        self.broken = reason


async def publish(subscriber: EngineWeights, version: Version = V1) -> None:
    await subscriber.begin(version)
    await subscriber.receive(INFO)
    await subscriber.commit(version)


def subscriber(engine: FakeEngine, **settings: Any) -> EngineWeights:
    return EngineWeights(engine, **({"timeout_s": 30.0, "staged": True} | settings))


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
        engine._fails = ""
        await publish(weights)  # the next publication works

    asyncio.run(run())
    assert "abandon" in engine.steps
    assert engine.applied == V1
    assert engine.broken is None


@pytest.mark.parametrize(
    ("step", "staged"), [("commit", True), ("receive", False), ("begin", False)]
)
def test_failure_that_may_leave_half_a_version_ends_the_engine(step: str, staged: bool) -> None:
    engine = FakeEngine(fails=step)
    weights = subscriber(engine, staged=staged)
    with pytest.raises(WeightSyncError, match=f"no {step} today"):
        asyncio.run(publish(weights))
    assert engine.broken is not None
    assert "no whole version" in engine.broken
    assert "abandon" not in engine.steps
    with pytest.raises(WeightSyncError, match="'broken'"):
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
        (["begin", "begin"], "begin in state 'begun'"),
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
        with pytest.raises(WeightSyncError, match="0:5 is not above 0:5"):
            await weights.begin(Version(0, 5))
        await publish(weights, Version(1, 2))  # a new incarnation may go back

    asyncio.run(run())


# --- the fleet client against real sockets ---------------------------------------------------


class Services:
    """Weight services of fake engines on a loop in a thread."""

    def __init__(self, engines: list[FakeEngine]) -> None:
        self._engines = engines

    def __enter__(self) -> list[str]:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(30)
        return [s.endpoint for s in self._services]

    def __exit__(self, *exception: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _start(self) -> None:
        self._subscribers = [subscriber(e) for e in self._engines]
        self._services = [WeightService(s) for s in self._subscribers]
        for service in self._services:
            service.start()

    async def _stop(self) -> None:
        for service, weights in zip(self._services, self._subscribers, strict=True):
            await service.close()
            await weights.close()


@pytest.fixture
def silent() -> Iterator[zmq.Socket[bytes]]:
    """A socket that takes requests and never answers."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        yield socket


def fleet(
    endpoints: list[str], workers: list[int] | None = None, *, s: float = 30, first: int = 0
) -> FleetClient:
    names = [f"actor-{i + first}" for i in range(len(endpoints))]
    client = FleetClient(list(map(Receiver, names, endpoints, workers or [1] * len(endpoints))))
    client.version = V1
    client.deadline = time.monotonic() + s
    return client


def test_fleet_drives_every_actor_and_gives_each_its_ranks() -> None:
    engines = [FakeEngine() for _ in range(3)]
    with Services(engines) as endpoints:
        client = fleet(endpoints, [2, 1, 4])
        client.init_weight_transfer_engine({"port": 1, "rank_offset": 1})
        client.start_weight_update()
        client.update_weights(INFO)
        client.finish_weight_update()
        client.close()
    assert [e.infos[0]["rank_offset"] for e in engines] == [1, 3, 4]
    assert all(e.applied == V1 for e in engines)
    assert set(client.timings) == {"join", "begin", "receive", "commit"}


def test_fleet_names_who_refused_and_who_was_silent(silent: zmq.Socket[bytes]) -> None:
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    with Services([FakeEngine(), FakeEngine(fails="begin")]) as endpoints:
        # actor-0 was not ready in time: the names are the announced ones, not places in the list.
        client = fleet([*endpoints, f"tcp://127.0.0.1:{port}"], s=1.0, first=1)
        with pytest.raises(WeightSyncError) as e:
            client.start_weight_update()
        client.close()
    text = str(e.value)
    assert text.startswith("weights 0:1, begin: actor-2 ")
    assert "refused with WeightSyncError: weight update: begin failed: no begin today" in text
    assert f"actor-3 (tcp://127.0.0.1:{port}) did not answer within" in text
    assert "actor-0" not in text
    assert "actor-1" not in text


def test_fleet_notices_a_death_long_before_the_deadline(silent: zmq.Socket[bytes]) -> None:
    port = silent.bind_to_random_port("tcp://127.0.0.1")

    def die_on_request() -> None:
        silent.recv_multipart()
        silent.close()

    thread = threading.Thread(target=die_on_request)
    thread.start()
    client = fleet([f"tcp://127.0.0.1:{port}"], s=60.0)
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match="receive: actor-0 .*its connection closed"):
        client.update_weights(INFO)
    thread.join(30)
    with pytest.raises(WeightSyncError, match="commit: actor-0 .*nothing listens there"):
        client.finish_weight_update()
    assert time.monotonic() - started < 30
    client.close()


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


def test_errors_of_steps_are_asyncrl_errors() -> None:
    """So that an actor can tell them from bugs."""
    for step, staged in itertools.product(("begin", "receive", "commit"), (True, False)):
        with pytest.raises(AsyncRLError):
            asyncio.run(publish(subscriber(FakeEngine(fails=step), staged=staged)))
