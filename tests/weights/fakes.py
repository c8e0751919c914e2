"""Actors without vLLM: weight services over scripted engines, with gloo's real collectives."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from asyncrl.actors.announce import Announcer
from asyncrl.actors.gloo_receiver import GlooReceiver, damaged
from asyncrl.actors.relay.memory import Offer, mapped
from asyncrl.actors.relay.receiver import RelayReceiver
from asyncrl.actors.weight_service import WeightService
from asyncrl.actors.weights import EngineWeights
from asyncrl.errors import WeightSyncError
from asyncrl.learner.layout import Layout
from asyncrl.learner.publication.members import Members
from asyncrl.learner.publication.publish import BroadcastPublisher
from asyncrl.types import Version
from asyncrl.weights import ParamSpec, TransferPlan, refuse_damaged

T = TypeVar("T")

N = 1 << 16
"""Elements of the one parameter that a fake fleet takes."""
TIMEOUT_S = 8.0
"""Of a publication: 2 s for each step."""


class FakeEngine:
    """Records the steps; `fails` names the one that raises, `hangs` the one that never ends."""

    def __init__(self, fails: str = "", hangs: str = "") -> None:
        self.applied = Version(0, 0)
        self.versions: list[Version] = []
        """All that it has run."""
        self.steps: list[str] = []
        self.times: list[float] = []
        """When each step was asked for (time.monotonic)."""
        self.broken: str | None = None
        self.infos: list[dict[str, Any]] = []
        self.fails, self.hangs = fails, hangs
        self.thawed = asyncio.Event()
        self.on_step: Callable[[str], None] = lambda name: None

    async def _step(self, name: str) -> None:
        self.steps.append(name)
        self.times.append(time.monotonic())
        self.on_step(name)
        if name == self.fails:
            raise RuntimeError(f"no {name} today")
        if name == self.hangs:
            await self.thawed.wait()

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
        self.versions.append(version)

    async def abandon_update(self) -> None:
        await self._step("abandon")

    def fail(self, reason: str) -> None:
        self.broken = reason


class GlooEngine(FakeEngine):
    """A fake engine whose bytes come by the real gloo transfer; `weights` is what it loaded."""

    def __init__(self, **script: str) -> None:
        from asyncrl.actors.gloo_transfer import Buffers

        super().__init__(**script)
        self.gloo, self.buffers = GlooReceiver(), Buffers()
        self.weights: torch.Tensor | None = None

    async def join_transfer(self, info: Mapping[str, Any]) -> None:
        await super().join_transfer(info)
        await asyncio.to_thread(self.gloo.join, info)

    async def receive_update(self, info: Mapping[str, Any]) -> None:
        await super().receive_update(info)
        plan = TransferPlan.from_info(info)
        self.buffers.fit(plan)
        await asyncio.to_thread(
            self.gloo.receive, plan, self.buffers,
            bucket_bytes=info["bucket_bytes"], timeout_s=info["timeout_s"],
        )  # fmt: skip
        refuse_damaged([damaged(plan, self.buffers.raw(), info["checksums"])])

    async def commit_update(self, version: Version) -> None:
        await super().commit_update(version)
        self.weights = self.buffers.flat["float32"].clone()


class ScriptedRelay(RelayReceiver, FakeEngine):
    """A relay that follows a fake engine's script; `weights` is what it offers."""

    def __init__(self, offer_path: Path, **script: str) -> None:
        FakeEngine.__init__(self, **script)
        RelayReceiver.__init__(self, str(offer_path))

    @property
    def weights(self) -> torch.Tensor:
        offer = Offer.read(self._path)
        assert offer is not None
        assert offer.version == self.applied
        fd = offer.open()
        try:
            return mapped(f"/proc/self/fd/{fd}", TransferPlan.from_info(offer.info))["float32"]
        finally:
            os.close(fd)

    async def _refuse(self, name: str) -> None:
        try:
            await FakeEngine._step(self, name)
        except RuntimeError as e:
            raise WeightSyncError(f"relay: {name} failed: {e}") from e

    async def join(self, info: Mapping[str, Any]) -> None:
        await self._refuse("join")
        await super().join(info)

    async def begin(self, version: Version) -> None:
        await self._refuse("begin")
        await super().begin(version)

    async def receive(self, info: Mapping[str, Any]) -> None:
        await self._refuse("receive")
        await super().receive(info)

    async def commit(self, version: Version) -> None:
        await self._refuse("commit")
        await super().commit(version)
        self.versions.append(version)


class MappingEngine(FakeEngine):
    """A fake engine that loads what a relay offers; `weights` is what it loaded."""

    weights: torch.Tensor | None = None
    _mapped: torch.Tensor | None = None

    async def receive_update(self, info: Mapping[str, Any]) -> None:
        await super().receive_update(info)
        self._mapped = mapped(info["path"], TransferPlan.from_info(info))["float32"]

    async def commit_update(self, version: Version) -> None:
        assert self._mapped is not None
        await super().commit_update(version)
        self.weights, self._mapped = self._mapped.clone(), None


class Actor:
    """A weight service over `engine`, announced as `name`; made and used in the fleet's loop."""

    def __init__(self, engine: FakeEngine, name: str, fleet_endpoint: str, timeout_s: float):
        self.engine, self.name = engine, name
        self.told: list[tuple[Version | None, str]] = []
        """Versions that it was not brought to, and why."""

        def tell(version: Version | None, reason: str) -> None:
            self.told.append((version, reason))

        self.subscriber: Any = engine
        if not isinstance(engine, RelayReceiver):
            self.subscriber = EngineWeights(
                engine, timeout_s=timeout_s, staged=True, on_given_up=tell
            )
        self.service = WeightService(self.subscriber, on_failure=tell)
        self.service.start()
        self.announcer = Announcer(
            fleet_endpoint, self.service, name=name, workers=1, applied=lambda: engine.applied
        )
        self._announcing = asyncio.create_task(self.announcer.run())

    async def close(self) -> None:
        """End as a process does: nothing listens any more, its transfer connections close."""
        self._announcing.cancel()
        await asyncio.gather(self._announcing, return_exceptions=True)
        self.announcer.close()
        await self.service.close()
        if isinstance(self.engine, RelayReceiver):
            self.engine.close()
            return
        self.subscriber._unwatch()
        if isinstance(self.engine, GlooEngine):
            self.engine.gloo.leave()


class Fleet:
    """Actors on an event loop in a thread. Use as a context manager."""

    def __init__(self, fleet_endpoint: str, timeout_s: float = 60.0) -> None:
        self._fleet_endpoint, self._timeout_s = fleet_endpoint, timeout_s
        self.actors: dict[str, Actor] = {}
        self.relays: Path | None = None
        """Where relays offer what they have, if that is what `add` makes."""

    def __enter__(self) -> Fleet:
        self.loop = asyncio.new_event_loop()
        self._executor = ThreadPoolExecutor(32)  # members of one group wait for each other
        self.loop.set_default_executor(self._executor)
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for name in list(self.actors):
            self.kill(name)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(30)
        self._executor.shutdown()
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def add(self, name: str, engine: FakeEngine | None = None) -> FakeEngine:
        async def make() -> Actor:
            made = engine
            if made is None and self.relays is not None:
                made = ScriptedRelay(self.relays / f"{name}.json")
            return Actor(
                made or GlooEngine(), name, self._fleet_endpoint, timeout_s=self._timeout_s
            )

        self.actors[name] = self.run(make())
        return self.actors[name].engine

    def kill(self, name: str) -> None:
        self.run(self.actors.pop(name).close())

    def dies_at(self, name: str, step: str) -> None:
        """The actor's process ends when its engine is asked for `step`."""
        actor = self.actors.pop(name)

        def die(now: str) -> None:
            if now == step:
                actor.engine.on_step = lambda name: None
                actor.engine.hangs = step
                self._dying = self.loop.create_task(actor.close())

        actor.engine.on_step = die

    def thaw(self, name: str) -> None:
        engine = self.actors[name].engine
        engine.hangs = ""
        self.loop.call_soon_threadsafe(engine.thawed.set)


def subscriber(engine: FakeEngine, **settings: Any) -> EngineWeights:
    return EngineWeights(engine, **({"timeout_s": 30.0, "staged": True} | settings))


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


class Learner:
    """A publisher whose one parameter is filled with the version."""

    def __init__(self, fleet: Fleet, members: Members, timeout_s: float) -> None:
        self.fleet, self.members = fleet, members
        self.filled: list[int] = []
        self.version = Version(0, 0)
        self.publisher = BroadcastPublisher(
            members, source=self._source, layout=Layout.whole([ParamSpec("w", "float32", (N,))]),
            backend="gloo", device=torch.device("cpu"), timeout_s=timeout_s, bucket_bytes=1 << 14,
        )  # fmt: skip

    def _source(self) -> list[tuple[str, torch.Tensor]]:
        self.filled.append(self.version.version)
        return [("w", torch.full((N,), float(self.version.version)))]

    def start(self, *names: str) -> None:
        for name in names:
            self.fleet.add(name)
        assert self.members.wait_for(len(names), 30)

    def start_three(self, phase: str) -> None:
        """Start a, b and c; in one group, unless the next thing is to join."""
        self.start("a", "b", "c")
        if phase != "join":
            self.publish()
            self.publisher.wait()

    def publish(self) -> Version:
        self.version = Version(0, self.version.version + 1)
        self.publisher.publish(self.version)
        return self.version

    def events(self, what: str) -> list[dict[str, Any]]:
        return [e for e in self.publisher.take_events() if e["event"] == what]

    def check(self, *names: str) -> None:
        """These engines run the last version, whole."""
        for name in names:
            engine: Any = self.fleet.actors[name].engine
            assert engine.applied == self.version, name
            assert torch.equal(engine.weights, torch.full((N,), float(self.version.version))), name
            assert engine.broken is None
