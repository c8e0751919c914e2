"""The rollout loop against a real buffer server; the engine is a fake that keeps the rules."""

import asyncio
import itertools

import numpy as np
import pytest

from asyncrl.actors.rollout import RolloutLoop, build_trajectory
from asyncrl.buffer.client import AsyncBufferClient, BufferClient
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.server import BufferServer
from asyncrl.config.schema import Config, LearnerConfig, RolloutConfig
from asyncrl.errors import EngineError, RewardError
from asyncrl.idlog import IdLog
from asyncrl.metrics import TimeShares
from asyncrl.protocols import Generation
from asyncrl.types import BatchPart, FinishReason, GroupId, Prompt, SampleId, Version
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.runs import read_ids

GROUP, BATCH = 4, 8
DEADLINE_S = 60


class Scorer:
    def __init__(self, fail_on=()):
        self.fail_on = set(fail_on)

    async def score(self, prompt, response, finish_reason):
        if prompt.text in self.fail_on:
            raise RewardError(f"no reward for {prompt.text}")
        return float(len(response))


class Actor:
    """A buffer server, one actor's loop and the learner's end, in one event loop."""

    def __init__(self, tmp_path, *, S=1, scorer=None, encode=None, max_attempts=2):
        self.config = Config(
            rollout=RolloutConfig(group_size=GROUP, max_prompt_tokens=8, max_new_tokens=8,
                                  max_in_flight=6, max_attempts=max_attempts),
            learner=LearnerConfig(batch_size=BATCH),
        )  # fmt: skip
        prompts = ((GroupId("toy", 0, i), Prompt(text=f"p{i}")) for i in itertools.count())
        self.ledger = Ledger(
            prompts=prompts, group_size=GROUP, groups_per_batch=BATCH // GROUP,
            batches_per_publication=1, max_staleness=S, window=1, ranks=1,
            lease_timeout_s=60.0, max_attempts=max_attempts, filter_zero_variance=False,
        )  # fmt: skip
        self.server = BufferServer(self.ledger, run_id="t", drain_s=0.0)
        self.engine = FakeEngine()
        self.scorer = scorer or Scorer()
        self.encode = encode or (lambda prompt: [1, 2, 3])
        self.ids_path = tmp_path / "ids.tsv"

    async def __aenter__(self):
        endpoint = await self.server.start()
        self.serving = asyncio.create_task(self.server.run())
        self.client = AsyncBufferClient(endpoint, "t", "actor", 0)
        await self.client.hello()
        self.ids = IdLog(str(self.ids_path))
        self.loop = RolloutLoop(
            self.config, name="actor-0", engine=self.engine, client=self.client,
            reward=self.scorer, encode=self.encode, shares=TimeShares(), ids=self.ids,
        )  # fmt: skip
        self.running = asyncio.create_task(self.loop.run())
        self.learner = BufferClient(endpoint, "t", "learner", 0)
        await asyncio.to_thread(self.learner.hello)
        return self

    async def __aexit__(self, *_):
        self.running.cancel()
        self.serving.cancel()
        await asyncio.gather(self.running, self.serving, return_exceptions=True)
        self.client.close()
        self.learner.close()
        self.ids.close()

    async def pull(self, batch):
        return await asyncio.to_thread(self.learner.pull, batch, 10.0)

    async def train(self, batch):
        part = await self.pull(batch)
        assert isinstance(part, BatchPart), part
        await asyncio.to_thread(self.learner.commit, batch)
        self.engine.version = Version(0, batch)
        await asyncio.to_thread(self.learner.published, self.engine.version)
        self.loop.on_applied(self.engine.version)
        return part


def run(scenario):
    async def limited():
        async with asyncio.timeout(DEADLINE_S):
            await scenario()

    asyncio.run(limited())


def test_batches_flow_and_the_end_is_seen(tmp_path):
    async def scenario():
        async with Actor(tmp_path) as a:
            for batch in range(1, 11):
                part = await a.train(batch)
                assert len(part.manifest) == BATCH
                for header in part.manifest:
                    assert batch - 1 - header.version_min.version <= 1
                    assert header.reward == 6.0
                    assert header.response_tokens == header.policy_tokens == 6
            await asyncio.to_thread(a.learner.stop, "10 steps", Version(0, 10))
            reply = await a.running
            assert (reply.state, reply.final) == ("done", Version(0, 10))
            assert a.loop.in_flight == 0

    run(scenario)
    facts = read_ids(tmp_path / "ids.tsv")
    dispatched = [s for what, s, _ in facts if what == "dispatched"]
    pushed = [s for what, s, _ in facts if what == "pushed-accepted"]
    assert len(set(pushed)) == len(pushed) >= 80
    assert set(pushed) <= set(dispatched)


def test_staleness_zero_waits_for_each_version(tmp_path):
    async def scenario():
        async with Actor(tmp_path, S=0) as a:
            for batch in range(1, 6):
                part = await a.train(batch)
                assert {h.version_min for h in part.manifest} == {Version(0, batch - 1)}

    run(scenario)


def test_never_more_in_flight_than_allowed(tmp_path):
    async def scenario():
        async with Actor(tmp_path, S=8) as a:
            a.engine.gate.clear()
            while a.loop.in_flight < 6:
                await asyncio.sleep(0)
            for _ in range(200):
                await asyncio.sleep(0)
                assert len(a.engine.in_use) <= 6
            a.engine.gate.set()
            await a.train(1)

    run(scenario)


def test_a_failing_reward_is_counted_and_its_group_given_up(tmp_path):
    async def scenario():
        async with Actor(tmp_path, S=4, scorer=Scorer(fail_on=["p1"])) as a:
            part = await a.train(1)
            assert {h.id.index for h in part.manifest} == {0, 2}
            stats = await asyncio.to_thread(a.learner.stats)
            assert stats.counts["failed"] == GROUP * 2  # each member, max_attempts times
            assert stats.conserved
            assert a.loop.failures == {"reward": GROUP * 2}

    run(scenario)


def test_a_prompt_that_is_too_long_is_a_data_failure(tmp_path):
    def encode(prompt):
        return list(range(1, 20 if prompt.text == "p0" else 4))

    async def scenario():
        async with Actor(tmp_path, S=4, encode=encode) as a:
            part = await a.train(1)
            assert {h.id.index for h in part.manifest} == {1, 2}
            assert a.loop.failures == {"data": GROUP * 2}

    run(scenario)


def test_a_dead_engine_ends_the_loop(tmp_path):
    async def scenario():
        async with Actor(tmp_path) as a:
            await a.train(1)
            a.engine.failed = "an engine process died"
            with pytest.raises(EngineError, match="process died"):
                await a.running

    run(scenario)


def test_a_generation_without_tokens_or_stamps_is_refused():
    def trajectory(generation):
        return build_trajectory(SampleId("t", 0, 0, 0), 1, "actor-0", (1,), generation, 0.0, 1.0)

    none = np.zeros(0, np.int32)
    with pytest.raises(EngineError, match="no token"):
        trajectory(
            Generation(none, none.astype(np.float32), none, none, Version(0, 0), Version(0, 0),
                       FinishReason.STOP, "")
        )  # fmt: skip
    one = np.zeros(1, np.int32)
    with pytest.raises(EngineError, match="without a version"):
        trajectory(
            Generation(one, one.astype(np.float32), one - 1, one - 1, Version(0, 0), Version(0, 0),
                       FinishReason.STOP, "")
        )  # fmt: skip
