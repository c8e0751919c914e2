"""An actor from set-up to end, with a fake engine, a real buffer and real weight messages."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from asyncrl import wire
from asyncrl.actors.announce import Announcer
from asyncrl.actors.vllm_engine import VllmEngine
from asyncrl.actors.weights import EngineWeights
from asyncrl.actors.worker import ActorWorker
from asyncrl.buffer.client import BufferClient
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.server import BufferServer
from asyncrl.config.schema import (
    Config,
    EvalConfig,
    LearnerConfig,
    RolloutConfig,
    RunConfig,
    TaskConfig,
    WeightsConfig,
)
from asyncrl.errors import DeadlineError, EngineError, WeightSyncError
from asyncrl.hub import Hub
from asyncrl.learner.publication.members import Member, Members
from asyncrl.learner.publication.weight_fleet import FleetClient
from asyncrl.metrics import TimeShares
from asyncrl.roles import RoleSettings
from asyncrl.types import BatchPart, GroupId, Prompt, Version
from tests.helpers.fake_engine import FakeEngine
from tests.weights.fakes import FakeEngine as ScriptedEngine

GROUP, BATCH = 2, 4
DEADLINE_S = 120
INFO = {"names": ["w"], "dtype_names": ["float32"], "shapes": [[2]]}


class Tokenizer:
    def encode(self, text: str) -> list[int]:
        return [1, 2, 3]


class UpdatableEngine(FakeEngine):
    """A fake engine that takes versions."""

    tokenizer = Tokenizer()

    async def died(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def join_transfer(self, info: Mapping[str, Any]) -> None: ...

    async def begin_update(self) -> None: ...

    async def receive_update(self, info: Mapping[str, Any]) -> None: ...

    async def abandon_update(self) -> None: ...

    async def commit_update(self, version: Version) -> None:
        self.version = version

    def fail(self, reason: str) -> None:
        self.failed = reason

    def metrics(self) -> dict[str, float]:
        return {}


class Records:
    """A sink that remembers."""

    def __init__(self) -> None:
        self.all: list[Mapping[str, Any]] = []

    def write(self, record: Mapping[str, Any]) -> None:
        self.all.append(record)

    def close(self) -> None: ...

    def evals(self) -> list[tuple[int, int]]:
        """(version, step) of each evaluation."""
        events = [r for r in self.all if r["event"] is not None]
        return [(r["version"], r["step"]) for r in events if r["event"]["event"] == "eval"]


def config(*, steps: int, n: int, timeout_s: float = 30.0) -> Config:
    return Config(
        run=RunConfig(steps=steps),
        task=TaskConfig(chat=False),
        rollout=RolloutConfig(
            group_size=GROUP, max_prompt_tokens=8, max_new_tokens=8, max_in_flight=4
        ),
        learner=LearnerConfig(batch_size=BATCH, batches_per_publication=n),
        eval=EvalConfig(samples=4),
        weights=WeightsConfig(timeout_s=timeout_s),
    )


class Host:
    """A buffer, a hub and one set-up actor in one event loop, and the learner's end."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.records = Records()
        self.version = Version(0, 0)

    async def start(self) -> None:
        c = self.config
        prompts = ((GroupId("toy", 0, i), Prompt(text="q", answer="1")) for i in itertools.count())
        ledger = Ledger(
            prompts=prompts, group_size=GROUP, groups_per_batch=c.groups_per_batch,
            batches_per_publication=c.learner.batches_per_publication, max_staleness=1,
        )  # fmt: skip
        server = BufferServer(ledger, run_id="t")
        endpoint = await server.start()
        self.hub = Hub([self.records], run_id="t")
        self.serving = asyncio.create_task(server.run())
        (self.folder / "logs").mkdir()
        settings = RoleSettings(
            role="actor", rank=0, world=1, model_path="none", device="cpu", threads=1,
            weight_backend="gloo", run_id="t",
            hub_endpoint=self.hub.endpoint, run_dir=str(self.folder),
        )  # fmt: skip
        self.worker = ActorWorker(c, settings)
        await self.worker.setup()
        self.endpoint, self.members = endpoint, Members()
        self.learner = BufferClient(endpoint, "t", "learner", 0)
        await asyncio.to_thread(self.learner.hello)

    def run(self, at_least: int = 0, first: bool = True) -> asyncio.Task[None]:
        """Start the worker's run."""
        return asyncio.create_task(
            self.worker.run(self.endpoint, self.members.endpoint, Version(0, at_least), first)
        )

    async def train(self, batch: int) -> None:
        part = await asyncio.to_thread(self.learner.pull, batch, 30.0)
        assert isinstance(part, BatchPart), part
        await asyncio.to_thread(self.learner.commit, batch)

    async def publish(self) -> None:
        self.version = Version(0, self.version.version + 1)
        await asyncio.to_thread(self._publish)
        await asyncio.to_thread(self.learner.published, self.version)

    def _publish(self) -> None:
        assert self.members.wait_for(1, 30.0), "not announced"
        fleet = FleetClient([Member("actor-0", 1, self.worker.weights.service.endpoint, 1)])
        fleet.start_round(self.version)
        try:
            fleet.start_weight_update()
            fleet.update_weights(INFO)
            fleet.finish_weight_update()
        finally:
            fleet.close()

    async def stop(self, reason: str = "over", evaluate: bool = True) -> None:
        final = self.version if reason == "over" else None
        await asyncio.to_thread(self.learner.stop, reason, final, evaluate)

    async def close(self) -> None:
        self.members.close()
        self.learner.close()
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """`async with hosted(config) as host`."""

    async def start(*args: Any, **kwargs: Any) -> UpdatableEngine:
        return UpdatableEngine()

    monkeypatch.setattr(VllmEngine, "start", start)

    @asynccontextmanager
    async def make(config: Config) -> AsyncIterator[Host]:
        host = Host(config, tmp_path)
        await host.start()
        try:
            yield host
        finally:
            await host.worker.close()
            await host.close()
            host.hub.close()

    return make


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario

    asyncio.run(limited())


def test_a_run_to_its_end_is_evaluated_first_and_last(hosted: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with hosted(config(steps=3, n=2)) as host:
            running = host.run()
            for batch in (1, 2):
                await host.train(batch)
            await host.publish()
            # The first evaluation is over before anybody can publish.
            assert host.worker.shares.totals()["eval"] > 0
            await host.train(3)
            await host.publish()
            await host.stop()
            await running
        # Version 2 is that of step 3, the last, although versions have 2 steps each.
        assert host.records.evals() == [(0, 0), (2, 3)]

    run(scenario())


def test_an_interrupted_run_is_not_evaluated_again(hosted: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with hosted(config(steps=3, n=1)) as host:
            running = host.run()
            await host.train(1)
            await host.publish()
            await host.stop(evaluate=False)  # "done", as in a run that was not stopped
            await running
        assert host.records.evals() == [(0, 0)]

    run(scenario())


def test_a_late_actor_leases_nothing_before_it_has_the_current_version(
    hosted: Callable[..., Any],
) -> None:
    async def scenario() -> None:
        async with hosted(config(steps=3, n=1)) as host:
            running = host.run(at_least=1, first=False)
            assert await asyncio.to_thread(host.members.wait_for, 1, 30.0)
            waits = host.worker.waits.open()
            assert [w.what for w in waits] == ["the current version, 0:1"]
            assert (await asyncio.to_thread(host.learner.stats)).counts["dispatched"] == 0
            await host.publish()
            await host.train(1)
            await host.stop(evaluate=False)
            await running
        assert host.records.evals() == [], "a restarted actor evaluates nothing at its start"
        lines = (host.folder / "logs" / "actor-0.ids.tsv").read_text().splitlines()
        assert any(line.startswith("dispatched") for line in lines)

    run(scenario())


@asynccontextmanager
async def launcher(host: Any) -> AsyncIterator[BufferClient]:
    client = BufferClient(host.endpoint, "t", "launcher", 0)
    try:
        await asyncio.to_thread(client.hello)
        yield client
    finally:
        client.close()


def test_an_actor_that_is_to_leave_ends_and_takes_no_more_weights(
    hosted: Callable[..., Any],
) -> None:
    async def scenario() -> None:
        async with hosted(config(steps=3, n=1)) as host, launcher(host) as chief:
            running = host.run()
            await host.train(1)
            await host.publish()
            # An update under way is ended first: others may be in it.
            await host.worker.weights.subscriber.begin(Version(0, 2))
            await asyncio.to_thread(chief.scale, 1, ["actor-0"])
            while host.worker.waits.open() == () or "weight update" not in str(
                host.worker.waits.open()
            ):
                assert not running.done()
                await asyncio.sleep(0.01)
            await host.worker.weights.subscriber.receive(INFO)
            await host.worker.weights.subscriber.commit(Version(0, 2))
            await running
            assert host.worker.engine.version == Version(0, 2)
            # Its last word was that it is not ready: no publication waits for it.
            assert not await asyncio.to_thread(host.members.wait_for, 1, 0.0)
            stats = await asyncio.to_thread(host.learner.stats)
            assert (stats.state, stats.counts["leased"]) == ("running", 0)
        assert host.records.evals() == [(0, 0)], "no last evaluation"

    run(scenario())


@pytest.mark.parametrize(("actors", "prompts"), [(0, 4), (1, 4), (2, 2), (3, 2), (4, 1)])
def test_the_last_evaluation_is_shared_by_the_actors_that_there_are(
    hosted: Callable[..., Any], actors: int, prompts: int
) -> None:
    async def scenario() -> None:
        async with hosted(config(steps=3, n=1)) as host, launcher(host) as chief:
            running = host.run()
            if actors:
                await asyncio.to_thread(chief.scale, actors)
            await host.train(1)
            await host.publish()
            await host.stop()
            await running
        events = [r["event"] for r in host.records.all if r["event"] is not None]
        assert [e["prompts"] for e in events if e["event"] == "eval"] == [4, prompts]

    run(scenario())


def test_a_stop_that_no_learner_ends_has_a_deadline(hosted: Callable[..., Any]) -> None:
    async def scenario() -> None:
        async with hosted(config(steps=3, n=1, timeout_s=0.05)) as host:
            running = host.run()
            await host.stop("a rule")
            with pytest.raises(DeadlineError, match="actor-0 waited 0 s .* for learner-0 to end"):
                await running

    run(scenario())


def test_an_actor_whose_weights_service_breaks_ends(
    hosted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with hosted(config(steps=3, n=1)) as host:

            async def broken(frames: list[bytes]) -> wire.Message:
                raise RuntimeError("a bug in the service")

            monkeypatch.setattr(host.worker.weights.service, "_answer", broken)
            running = host.run()
            with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
                socket.connect(host.worker.weights.service.endpoint)
                await socket.send_multipart(wire.encode(wire.StatsRequest()))
                with pytest.raises(RuntimeError, match="a bug in the service"):
                    await running

    run(scenario())


def test_an_actor_that_announces_itself_no_more_ends(
    hosted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would get no weights, and soon no leases, and nobody would be told why."""

    def broken(announcer: Announcer) -> None:
        raise RuntimeError("a bug in the announcer")

    async def scenario() -> None:
        async with hosted(config(steps=3, n=1)) as host:
            monkeypatch.setattr(Announcer, "_announce", broken)
            with pytest.raises(RuntimeError, match="a bug in the announcer"):
                await host.run()

    run(scenario())


@pytest.mark.parametrize(
    ("fails", "seconds"), [("begin", 1.0), ("receive", 2.0), ("commit", 3.0), ("", 3.0)]
)
def test_the_time_of_an_update_ends_with_it_however_it_ends(fails: str, seconds: float) -> None:
    now = 0.0

    def tick(step: str) -> None:
        nonlocal now
        now += step in ("begin", "receive", "commit")

    async def publish() -> None:
        engine = ScriptedEngine(fails=fails)
        engine.on_step = tick
        weights = EngineWeights(engine, timeout_s=30.0, staged=True, shares=shares)
        await weights.begin(Version(0, 1))
        await weights.receive(INFO)
        await weights.commit(Version(0, 1))

    shares = TimeShares(clock=lambda: now)

    with pytest.raises((WeightSyncError, EngineError)) if fails else nullcontext():
        asyncio.run(publish())
    now += 10.0
    assert shares.totals()["sync"] == seconds
    assert shares.totals()["idle"] == 10.0


def test_the_time_of_an_update_that_is_given_up_ends_too() -> None:
    shares = TimeShares()

    async def scenario() -> None:
        weights = EngineWeights(UpdatableEngine(), timeout_s=0.01, staged=True, shares=shares)
        await weights.begin(Version(0, 1))
        async with asyncio.timeout(DEADLINE_S):
            while weights._state != "idle":
                await asyncio.sleep(0.005)

    asyncio.run(scenario())
    before = shares.totals()["sync"]
    assert before > 0
    assert shares.totals()["sync"] == before, "the engine generates again"
