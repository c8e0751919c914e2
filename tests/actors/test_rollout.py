"""The rollout loop against a real buffer server; the engine is a fake that keeps the rules."""

import asyncio
import itertools

import numpy as np
import pytest

from asyncrl.actors import rollout
from asyncrl.actors.progress import Progress
from asyncrl.actors.rollout import RolloutLoop
from asyncrl.actors.trajectories import build_trajectory
from asyncrl.buffer.client import AsyncBufferClient, BufferClient
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.server import BufferServer
from asyncrl.config.learning import LearnerConfig
from asyncrl.config.schema import Config, RolloutConfig
from asyncrl.errors import EngineError, RewardError
from asyncrl.idlog import IdLog
from asyncrl.metrics import TimeShares
from asyncrl.monitor.trace.reading import read_spans
from asyncrl.protocols import Generation
from asyncrl.spans import span_log
from asyncrl.types import BatchPart, FinishReason, GroupId, Prompt, SampleId, Version
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.runs import read_ids

GROUP, BATCH = 4, 8
DEADLINE_S = 60
LEASE_S = 60.0


async def until(condition):
    while not condition():
        await asyncio.sleep(0)


class Scorer:
    def __init__(self, fail_on=()):
        self.fail_on = set(fail_on)
        self.waiting = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def score(self, prompt, response, finish_reason):
        self.waiting += 1
        await self.gate.wait()
        self.waiting -= 1
        if prompt.text in self.fail_on:
            raise RewardError(f"no reward for {prompt.text}")
        return float(len(response))


class Actor:
    """A buffer server, one actor's loop and the learner's end, in one event loop."""

    def __init__(
        self, tmp_path, *, S=1, scorer=None, encode=None, max_attempts=2, engine=None, **rollout
    ):
        self.config = Config(
            rollout=RolloutConfig(group_size=GROUP, max_prompt_tokens=8, max_new_tokens=8,
                                  max_in_flight=6, max_attempts=max_attempts, **rollout),
            learner=LearnerConfig(batch_size=BATCH),
        )  # fmt: skip
        prompts = ((GroupId("toy", 0, i), Prompt(text=f"p{i}")) for i in itertools.count())
        self.ledger = Ledger(
            prompts=prompts, group_size=GROUP, groups_per_batch=BATCH // GROUP,
            batches_per_publication=1, max_staleness=S, window=1, ranks=1,
            lease_timeout_s=LEASE_S, max_attempts=max_attempts, filter_zero_variance=False,
        )  # fmt: skip
        self.now = 0.0  # the buffer's clock
        self.server = BufferServer(self.ledger, run_id="t", clock=lambda: self.now)
        self.engine = engine or FakeEngine()
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
            reward=self.scorer, encode=self.encode, ids=self.ids,
            shares=TimeShares(spans=span_log(str(self.ids_path.parent), "actor", 0, "t", 1.0)),
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
            await until(lambda: a.loop.in_flight == 6)
            for _ in range(200):
                await asyncio.sleep(0)
                assert len(a.engine.in_use) <= 6
            a.engine.gate.set()
            await a.train(1)

    run(scenario)


def test_an_actor_without_room_asks_for_nothing_and_hears_the_stop(tmp_path, monkeypatch):
    asked = []
    lease = AsyncBufferClient.lease

    async def spy(client, actor, applied, capacity, wait_s):
        asked.append(capacity)
        return await lease(client, actor, applied, capacity, wait_s)

    monkeypatch.setattr(AsyncBufferClient, "lease", spy)

    async def scenario():
        engine = FakeEngine()
        engine.gate.clear()
        async with Actor(tmp_path, S=8, engine=engine) as a:
            await until(lambda: len(engine.in_use) == 6 and asked[-1] == 0)
            before = len(asked)
            for _ in range(5):
                a.loop.on_applied(a.engine.applied)  # something to wake up for
                await asyncio.to_thread(a.learner.stats)
            assert len(asked) == before
            engine.gate.set()
            await until(lambda: len(asked) > before)
            assert asked[before] > 0  # there is room again
            engine.gate.clear()
            await until(lambda: len(engine.in_use) == 6 and asked[-1] == 0)
            await asyncio.to_thread(a.learner.stop, "interrupted")
            assert (await a.running).state == "stopping"

    run(scenario)


@pytest.fixture
def reports(monkeypatch):
    """Tokens of each report of progress that has reached the buffer; many a second."""
    monkeypatch.setattr(rollout, "PROGRESS_EVERY_S", 0.01)
    reports = []
    progress = AsyncBufferClient.progress

    async def spy(client, actor, tokens):
        await progress(client, actor, tokens)
        reports.append(tokens)

    monkeypatch.setattr(AsyncBufferClient, "progress", spy)
    return reports


async def keeps_its_leases(a, reports):
    """While nothing comes of its six samples, for several times as long as a lease."""
    for _ in range(4):
        a.now += 0.9 * LEASE_S
        # The first of the two may have been on its way already.
        enough = len(reports) + 2
        await until(lambda n=enough: len(reports) >= n)
    assert a.ledger.counts()["leased"] == 6
    assert a.ledger.counts()["requeued"] == 0


def test_samples_that_wait_for_their_reward_keep_their_leases(tmp_path, reports):
    async def scenario():
        scorer = Scorer()
        scorer.gate.clear()
        async with Actor(tmp_path, S=8, scorer=scorer) as a:
            await until(lambda: scorer.waiting == 6)
            await keeps_its_leases(a, reports)
            scorer.gate.set()
            await a.train(1)

    run(scenario)


def test_samples_that_a_weight_update_holds_up_keep_their_leases(tmp_path, reports):
    async def scenario():
        engine = FakeEngine()
        engine.gate.clear()
        engine.held_up = True
        async with Actor(tmp_path, S=8, engine=engine) as a:
            await until(lambda: len(engine.in_use) == 6)
            await keeps_its_leases(a, reports)
            engine.held_up = False
            engine.gate.set()
            await a.train(1)

    run(scenario)


class StuckEngine(FakeEngine):
    """Never brings a token of the first sample of a group."""

    async def generate(self, request, on_tokens=None):
        if request.request_id.endswith("-0"):
            await asyncio.Event().wait()
        return await super().generate(request, on_tokens)


def test_samples_that_are_stuck_in_the_engine_lose_their_leases(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout, "PROGRESS_EVERY_S", 0.01)
    looked = []  # a lease each time
    report = Progress.report

    def spy(progress):
        looked.append(progress)
        return report(progress)

    monkeypatch.setattr(Progress, "report", spy)

    async def scenario():
        async with Actor(tmp_path, S=8, engine=StuckEngine()) as a:
            # Five groups are done but for the sample that is stuck, the sixth's fills the room.
            await until(lambda: a.ledger.counts()["completed"] == 5 * (GROUP - 1))
            await until(lambda: a.ledger.counts()["leased"] == len(a.loop._progress) == 6)
            a.now += 0.6 * LEASE_S
            enough = len(looked) + 3 * 6  # a whole round, and its report has arrived
            await until(lambda: len(looked) >= enough)
            a.now += 0.6 * LEASE_S
            await until(lambda: a.ledger.counts()["requeued"] == 6)

    run(scenario)


def test_a_failing_reward_is_counted_and_its_group_given_up(tmp_path):
    async def scenario():
        async with Actor(tmp_path, S=4, scorer=Scorer(fail_on=["p1"])) as a:
            part = await a.train(1)
            assert {h.id.index for h in part.manifest} == {0, 2}
            stats = await asyncio.to_thread(a.learner.stats)
            # Each member max_attempts times; the group may end before the last of them.
            assert GROUP * 2 - 1 <= stats.counts["failed"] <= GROUP * 2
            assert stats.conserved
            await until(lambda: a.loop.failures == {"reward": a.ledger.counts()["failed"]})
            await until(lambda: a.loop.discarded_tokens >= 6 * a.loop.failures["reward"])
            await until(lambda: a.loop.scoring == 0)
            a.loop.shares.spans.flush()
            assert a.loop.generated_tokens >= a.loop.discarded_tokens > 0

    run(scenario)
    (process,) = read_spans(tmp_path).processes
    samples = [s for s in process.spans if s.track == "sample"]
    assert {s.fields["became"] for s in samples} >= {"accepted", "failed"}
    for s in samples:
        ends = s.ends()
        assert [s.at, *ends] == sorted([s.at, *ends])
        assert ends[-1] == s.end
        assert len(ends) == (3 if s.fields["became"] == "accepted" else 2)
        assert s.fields["tokens"] == 6
        assert (s.fields["id"][2] == 1) == (s.fields["became"] == "failed")


def test_a_failing_reward_is_scored_by_config(tmp_path):
    async def scenario():
        scored = {"reward_failure": "score", "reward_failure_score": -2.0}
        async with Actor(tmp_path, S=4, scorer=Scorer(fail_on=["p1"]), **scored) as a:
            part = await a.train(1)
            rewards = {(h.id.index, h.reward) for h in part.manifest}
            assert rewards == {(0, 6.0), (1, -2.0)}
            assert (a.loop.scored_failures, a.loop.failures) == (GROUP, {})

    run(scenario)


def test_a_prompt_that_is_too_long_is_a_data_failure(tmp_path):
    def encode(prompt):
        return list(range(1, 20 if prompt.text == "p0" else 4))

    async def scenario():
        async with Actor(tmp_path, S=4, encode=encode) as a:
            part = await a.train(1)
            assert {h.id.index for h in part.manifest} == {1, 2}
            await until(lambda: a.loop.failures == {"data": a.ledger.counts()["failed"]})
            a.ids.flush()
            tries = [what for what, sample, _ in read_ids(a.ids_path) if sample[2] == 0]
            assert tries.count("dispatched") == a.loop.failures["data"] >= GROUP * 2 - 1

    run(scenario)


def test_a_dead_engine_ends_the_loop(tmp_path):
    async def scenario():
        async with Actor(tmp_path) as a:
            await a.train(1)
            a.engine.failed = "an engine process died"
            with pytest.raises(EngineError, match="process died"):
                await a.running

    run(scenario)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("stamps", "low", "high"),
    [
        ([(0, 3), (0, 3), (0, 4)], (0, 3), (0, 4)),
        ([(0, 8), (1, 7), (1, 8)], (1, 7), (1, 8)),  # 0:8 is the lower pair, 1:7 the lower number
        ([(0, 9), (1, 7), (1, 8)], (1, 7), (0, 9)),
        ([(0, 7), (1, 7)], (0, 7), (1, 7)),
    ],
)
def test_the_header_of_a_sample_sums_up_its_tokens(stamps, low, high, mixed):
    incarnations, versions = np.array(stamps, np.int32).T
    tokens = np.arange(len(stamps), dtype=np.int32)
    generation = Generation(
        tokens, -tokens.astype(np.float32), versions, incarnations, Version(*stamps[0]),
        Version(*stamps[-1]), FinishReason.STOP, "", kv_mixed=mixed,
    )  # fmt: skip
    sample = SampleId("t", 0, 0, 0)
    header = build_trajectory(sample, 1, "actor-0", (1,), generation, 0.0, 1.0).header
    assert (header.version_min, header.version_max) == (Version(*low), Version(*high))
    assert (header.version_dispatch, header.version_finish) == (stamps[0], stamps[-1])
    assert header.kv_mixed == mixed


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


def test_an_actor_that_is_to_leave_ends_with_what_it_has(tmp_path):
    async def scenario():
        engine = FakeEngine()
        engine.gate.clear()
        async with Actor(tmp_path, S=8, engine=engine) as a:
            await until(lambda: len(engine.in_use) == 6)
            launcher = BufferClient(a.learner._connection.peer.endpoint, "t", "launcher", 0)
            try:
                await asyncio.to_thread(launcher.hello)
                await asyncio.to_thread(launcher.scale, 1, ["actor-0"])
                leased = a.ledger.counts()["dispatched"]
                a.loop.on_applied(a.engine.applied)
                assert not a.running.done()
                engine.gate.set()
                reply = await a.running
            finally:
                launcher.close()
            assert (reply.leave, reply.state, reply.actors) == (True, "running", 1)
            assert a.loop.in_flight == 0
            counts = a.ledger.counts()
            assert (counts["dispatched"], counts["leased"]) == (leased, 0)
            assert counts["completed"] == leased

    run(scenario)
    facts = read_ids(tmp_path / "ids.tsv")
    assert {s for what, s, _ in facts if what == "pushed-accepted"} == {
        s for what, s, _ in facts if what == "dispatched"
    }


def test_an_actor_that_is_to_leave_still_hears_the_end_of_the_run(tmp_path):
    async def scenario():
        engine = FakeEngine()
        engine.gate.clear()
        async with Actor(tmp_path, S=8, engine=engine) as a:
            await until(lambda: len(engine.in_use) == 6)
            launcher = BufferClient(a.learner._connection.peer.endpoint, "t", "launcher", 0)
            try:
                await asyncio.to_thread(launcher.hello)
                await asyncio.to_thread(launcher.scale, 1, ["actor-0"])
            finally:
                launcher.close()
            await asyncio.to_thread(a.learner.stop, "interrupted")
            assert (await a.running).state == "stopping"

    run(scenario)
