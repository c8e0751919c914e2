"""One actor: an engine, its weights service, its reward worker and the rollout loop.

setup: engine ► weights service bound (announced) ► eval of version 0 ► ready
run:   rollout loop ► (run finished) last version applied ► last eval
                    ► (run stopped) weights served until the learner has ended

The first evaluation belongs to the set-up: learners begin when every set-up is over, and a
publication would replace the version that is evaluated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

import psutil

from asyncrl import tasks
from asyncrl.actors.evaluate import evaluate
from asyncrl.actors.rewards import RewardWorker
from asyncrl.actors.rollout import RolloutLoop
from asyncrl.actors.tokens import encode_prompt
from asyncrl.buffer.client import AsyncBufferClient
from asyncrl.config.schema import Config
from asyncrl.errors import DeadlineError, EngineError
from asyncrl.idlog import IdLog
from asyncrl.metrics import HubClient, IdleMeter, TimeShares
from asyncrl.protocols import WeightSubscriber
from asyncrl.roles import RoleSettings
from asyncrl.types import Prompt, Version

log = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0
STOP_POLL_S = 0.2


class TimedSubscriber:
    """A subscriber whose time from begin to commit, or to what failed, counts as `sync`."""

    def __init__(self, subscriber: WeightSubscriber, shares: TimeShares) -> None:
        self._subscriber, self._shares = subscriber, shares
        self._timing = False

    async def join(self, info: Mapping[str, Any]) -> None:
        """Join the transfer group."""
        with self._shares.state("sync"):
            await self._subscriber.join(info)

    async def begin(self, version: Version) -> None:
        """Pause; the time that counts begins here."""
        if not self._timing:
            self._timing = True
            self._shares.enter("sync")
        with self._ended_by_failure():
            await self._subscriber.begin(version)

    async def receive(self, info: Mapping[str, Any]) -> None:
        """Receive the weights."""
        with self._ended_by_failure():
            await self._subscriber.receive(info)

    async def commit(self, version: Version) -> None:
        """Load, stamp, go on; the time that counts ends here, however it went."""
        try:
            await self._subscriber.commit(version)
        finally:
            self._end()

    @contextlib.contextmanager
    def _ended_by_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        if self._timing:
            self._timing = False
            self._shares.leave("sync")


class ActorWorker:
    """Owns everything an actor holds; `setup` and `run` share one event loop."""

    def __init__(self, config: Config, settings: RoleSettings) -> None:
        self.config = config
        self.settings = settings
        self.shares = TimeShares()

    async def setup(self) -> dict[str, object]:
        """Start the engine and its services, evaluate; what the learner must know of them."""
        from transformers import AutoTokenizer

        from asyncrl.actors.vllm_engine import VllmEngine
        from asyncrl.actors.weights import EngineWeights, WeightService

        s = self.settings
        began = time.monotonic()
        tokenizer = AutoTokenizer.from_pretrained(
            s.model_path, trust_remote_code=self.config.model.trust_remote_code
        )
        self.engine = await VllmEngine.start(
            self.config, s.model_path, device=s.device, threads=s.threads,
            seed=self.config.run.seed + s.rank, weight_backend=s.weight_backend,
        )  # fmt: skip
        self.reward = RewardWorker(self.config.task)
        await self.reward.start()
        self.client = AsyncBufferClient(s.buffer_endpoint, s.run_id, "actor", s.rank)
        self.hub = HubClient(s.hub_endpoint, "actor", s.rank)

        def encode(prompt: Prompt) -> list[int]:
            return encode_prompt(tokenizer, prompt, self.config.task.chat)

        self.encode = encode
        self.ids = IdLog(s.ids_path)
        self.loop = RolloutLoop(
            self.config, name=s.name, engine=self.engine, client=self.client,
            reward=self.reward, encode=encode, shares=self.shares, ids=self.ids,
        )  # fmt: skip
        self._applied_event = asyncio.Event()
        subscriber = EngineWeights(
            self.engine, timeout_s=self.config.weights.timeout_s,
            staged=s.weight_backend == "gloo", on_applied=self._on_applied,
        )  # fmt: skip
        self.weights = WeightService(TimedSubscriber(subscriber, self.shares), host=s.host)
        await self.client.hello()
        self._event("actor_ready", seconds=round(time.monotonic() - began, 2))
        if self.config.eval.at_start:
            await self._evaluate()
        return {
            "endpoint": self.weights.endpoint,
            "workers": self.config.engine.tensor_parallel,
        }

    async def run(self) -> None:
        """Produce samples until the run is over.

        Raises:
            EngineError, DeadlineError: the engine, the buffer or the last version is missing.
        """
        self.weights.start()
        background = [
            asyncio.create_task(self._report()),
            asyncio.create_task(self._watch_engine()),
            asyncio.create_task(self.weights.wait()),
        ]
        main = asyncio.create_task(self._main())
        try:
            await asyncio.wait({main, *background}, return_when=asyncio.FIRST_COMPLETED)
            for task in background:
                if task.done():
                    task.result()
                    raise EngineError(f"{self.settings.name}: a background task ended early")
            await main
        finally:
            for task in (main, *background):
                task.cancel()
            await asyncio.gather(main, *background, return_exceptions=True)
            await self.close()

    async def _watch_engine(self) -> None:
        raise EngineError(f"{self.settings.name}: {await self.engine.died()}")

    async def _main(self) -> None:
        reply = await self.loop.run()
        if reply.state == "stopping":
            await self._serve_until_done()
        elif reply.final is not None and self._is_evaluated(reply.final):
            await self._wait_for(reply.final)
            await self._evaluate()

    def _is_evaluated(self, final: Version) -> bool:
        """A run that was stopped ends with an earlier version, whose score nobody waits for."""
        evals = self.config.eval
        return evals.at_end and evals.samples > 0 and final.version == self.config.last_version

    async def _serve_until_done(self) -> None:
        """Keep taking weights while the learner ends its step and its last publication."""
        timeout = self.config.weights.timeout_s * 2
        deadline = time.monotonic() + timeout
        while (await self.client.stats()).state != "done":
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"{self.settings.name} waited {timeout:.0f} s after the stop for learner-0 "
                    "to end its step and its last publication: see the learner's log"
                )
            await asyncio.sleep(STOP_POLL_S)

    async def _wait_for(self, final: Version) -> None:
        timeout = self.config.weights.timeout_s * 2
        try:
            async with asyncio.timeout(timeout):
                while self.engine.applied < final:
                    self._applied_event.clear()
                    await self._applied_event.wait()
        except TimeoutError:
            raise DeadlineError(
                f"{self.settings.name} waited {timeout:.0f} s for learner-0 to send version "
                f"{final}, it still runs {self.engine.applied}"
            ) from None

    async def _evaluate(self) -> None:
        if not self.config.eval.samples:
            return
        prompts = tasks.eval_prompts(self.config)
        mine = prompts[self.settings.rank :: self.config.cluster.actors]
        if not mine:
            return
        began = time.monotonic()
        with self.shares.state("eval"):
            result = await evaluate(
                self.config, self.engine, self.reward, self.encode, mine, self.settings.name
            )
        self._event(
            "eval", task=self.config.task.kind, prompts=result.prompts, total=result.total,
            errors=result.errors, seconds=round(time.monotonic() - began, 2),
        )  # fmt: skip

    def _on_applied(self, version: Version) -> None:
        self._applied_event.set()
        self.loop.on_applied(version)

    def _event(self, what: str, **fields: object) -> None:
        self._emit(event={"event": what, **fields})

    def _emit(
        self, metrics: Mapping[str, float] | None = None, event: Mapping[str, object] | None = None
    ) -> None:
        """Send a record of the version that the engine runs and of the step that made it."""
        v, config = self.engine.applied, self.config
        # The last version may come after fewer batches than the others.
        step = min(v.version * config.learner.batches_per_publication, config.run.steps)
        self.hub.emit(metrics, step=step, version=v.version, incarnation=v.incarnation, event=event)

    async def _report(self) -> None:
        idle = IdleMeter(self.shares)
        me = psutil.Process()
        tokens, last = 0, time.monotonic()
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            now, loop = time.monotonic(), self.loop
            values = self.shares.metrics() | {
                "throughput/gen_tok_s": (loop.generated_tokens - tokens) / (now - last),
                "actor/in_flight": loop.in_flight,
                "actor/generated_tokens": loop.generated_tokens,
                "actor/samples_pushed": loop.samples_pushed,
                "reward/timeouts": self.reward.timeouts,
                "reward/errors": self.reward.errors,
                "host/rss_bytes": me.memory_info().rss,
            }
            tokens, last = loop.generated_tokens, now
            share = idle.read()
            if share is not None:
                values["idle/actors_frac"] = share
            self._emit(values)

    async def close(self) -> None:
        """End the engine, the reward worker and every socket; safe to call twice."""
        self.ids.close()
        for part in (self.weights.close, self.reward.close, self.engine.shutdown):
            with contextlib.suppress(Exception):
                async with asyncio.timeout(20):
                    await part()
        self.client.close()
        self.hub.close()
