"""One actor: an engine, its weights service, its reward worker and the rollout loop.

setup: engine ► reward worker ► weights service bound
run:   eval of version 0 ► announced to the learner ► (restarted, late) current version applied
       rollout loop, beside that eval and until the run is over
       ► (run stopped) weights served until the learner has ended ► last version applied ► last eval
       ► (told to leave) announced as such ► an update under way is ended

An actor is announced only when version 0 is evaluated: no publication then replaces it meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time

from asyncrl import tasks
from asyncrl.actors.evaluate import evaluate
from asyncrl.actors.intake import WeightIntake
from asyncrl.actors.meter import ActorMeter
from asyncrl.actors.rewards import InlineReward, RewardWorker
from asyncrl.actors.rollout import RolloutLoop
from asyncrl.actors.tokens import encode_prompt
from asyncrl.buffer.client import AsyncBufferClient, patience_s
from asyncrl.config.schema import Config
from asyncrl.errors import DeadlineError, EngineError, EngineMemoryError
from asyncrl.gpu import gpu_meter
from asyncrl.hub import HubClient
from asyncrl.idlog import IdLog
from asyncrl.metrics import TimeShares, process_began
from asyncrl.out_of_memory import SETTINGS
from asyncrl.pulse import Pulse
from asyncrl.roles import RoleSettings
from asyncrl.types import INITIAL, Prompt, Version
from asyncrl.waits import Waits

log = logging.getLogger(__name__)

STOP_POLL_S = 0.2
LAST_VERSION_S = 10.0
"""How long the last version may be on its way: the learner has sent it before it says "done"."""


class ActorWorker:
    """Owns everything an actor holds; `setup` and `run` share one event loop."""

    def __init__(self, config: Config, settings: RoleSettings) -> None:
        self.config = config
        self.settings = settings
        spans = settings.span_log(config.trace.kept_mib)
        self.shares = TimeShares(since=process_began(), spans=spans)
        self.waits = Waits(settings.name, warn_s=config.log.wait_warn_s)

    async def setup(self) -> None:
        """Start the engine and the reward worker.

        Raises:
            EngineError, UserError: vLLM or the reward function cannot be started.
        """
        from asyncrl.actors.vllm_engine import VllmEngine

        s = self.settings
        began = time.monotonic()
        # First of all: a core that is forked must find no thread and no socket here.
        self.engine = await VllmEngine.start(
            self.config, s.model_path, device=s.device, threads=s.threads,
            seed=self.config.run.seed + s.rank, weight_backend=s.weight_backend,
            fork=s.forked,
        )  # fmt: skip
        self.hub = HubClient(s.hub_endpoint, "actor", s.rank, keys=s.keys)
        self._startup("engine", began)
        began = time.monotonic()
        self.reward = (InlineReward if s.inline_reward else RewardWorker)(self.config.task)
        await self.reward.start()

        def encode(prompt: Prompt) -> list[int]:
            return encode_prompt(self.engine.tokenizer, prompt, self.config.task.chat)

        self.encode = encode
        self.ids = IdLog(s.ids_path)
        self._applied_event = asyncio.Event()
        self.loop: RolloutLoop | None = None
        self.weights = WeightIntake(
            self.config, s, self.engine, shares=self.shares, on_applied=self._on_applied,
            on_failure=lambda version, reason: self._event(
                "weights_not_loaded", not_loaded=str(version or ""), reason=reason
            ),
        )  # fmt: skip
        self._startup("reward", began)

    async def run(self, buffer: str, fleet: str, at_least: Version, first: bool) -> None:
        """Produce samples until the run is over, or this actor is to leave it.

        Args:
            buffer: the buffer's endpoint.
            fleet: where the actor announces itself to learner rank 0.
            at_least: the version that the learner has published: no lease comes before it.
            first: whether this is the first process of this actor, which evaluates version 0.

        Raises:
            EngineError, DeadlineError: the engine, the buffer or a version is missing.
            EngineMemoryError: the engine ran out of memory.
        """
        s = self.settings
        self.client = AsyncBufferClient(
            buffer, s.run_id, "actor", s.rank, timeout_s=patience_s(self.config),
            keys=s.keys,
        )  # fmt: skip
        self.loop = RolloutLoop(
            self.config, name=s.name, engine=self.engine, client=self.client,
            reward=self.reward, encode=self.encode, shares=self.shares, ids=self.ids,
            waits=self.waits,
        )  # fmt: skip
        self.pulse = self._make_pulse()
        self.weights.start(fleet)
        await self.client.hello()
        background = [
            asyncio.create_task(self._watch_engine()),
            asyncio.create_task(self.weights.wait()),
        ]
        main = asyncio.create_task(self._main(at_least, first))
        try:
            await asyncio.wait({main, *background}, return_when=asyncio.FIRST_COMPLETED)
            for task in background:
                if task.done():
                    task.result()
                    raise EngineError(f"{s.name}: a background task ended early")
            await main
        except EngineError as e:
            if why := self.engine.memory_fault():
                raise EngineMemoryError(f"{s.name}: {why}: {SETTINGS}") from e
            raise
        finally:
            for task in (main, *background):
                task.cancel()
            await asyncio.gather(main, *background, return_exceptions=True)
            await self.close()

    async def _watch_engine(self) -> None:
        raise EngineError(f"{self.settings.name}: {await self.engine.died()}")

    async def _main(self, at_least: Version, first: bool) -> None:
        assert self.loop is not None
        told = asyncio.create_task(self._tell_first_token())
        evaluated = asyncio.create_task(self._introduce(first and self.config.eval.at_start))
        try:
            if at_least > self.engine.applied:
                await evaluated
                await self._catch_up(at_least)
            reply = await self.loop.run()
            await evaluated
        finally:
            for task in (evaluated, told):
                task.cancel()
        if reply.leave:
            await self.weights.leave(self.waits)
            return
        final, evaluate = reply.final, reply.evaluate
        if reply.state == "stopping":
            final, evaluate = await self._serve_until_done()
        evals = self.config.eval
        known = first and evals.at_start and final == INITIAL  # nothing was trained
        if final is not None and evaluate and evals.at_end and evals.samples and not known:
            what = f"the last version, {final}"
            with self.waits.on(what, self.weights.sender, LAST_VERSION_S):
                came = await self._reaches(final, LAST_VERSION_S)
            if came:
                await self._evaluate(reply.actors)
            else:
                self._event("eval_skipped", reason=f"{final} did not come", runs=str(final))

    async def _tell_first_token(self) -> None:
        """The end of the start, as far as this actor is concerned."""
        assert self.loop is not None
        began = time.monotonic()
        await self.loop.first_token.wait()
        self._startup("first_token", began)

    async def _introduce(self, evaluate: bool) -> None:
        """Evaluate version 0 if asked to, then take part in publications."""
        if evaluate:
            await self._evaluate()
        self.weights.introduce()

    async def _serve_until_done(self) -> tuple[Version | None, bool]:
        """Take weights while the learner ends; the last version, and whether to evaluate it.

        The deadline is renewed by whatever the ledger counts, e.g. the last batch.
        """
        timeout = self.config.weights.timeout_s * 10
        seen, deadline = None, time.monotonic() + timeout
        with self.waits.on("the end of the run", "learner-0", timeout) as wait:
            while (stats := await self.client.stats()).state != "done":
                if stats.counts != seen:
                    seen, deadline = stats.counts, time.monotonic() + timeout
                    wait.renew(timeout)
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"{self.settings.name} waited {timeout:.0f} s after the stop for learner-0 "
                        "to end its step and its last publication: see the learner's log"
                    )
                await asyncio.sleep(STOP_POLL_S)
        return stats.final, stats.evaluate

    async def _catch_up(self, version: Version) -> None:
        """Wait for the learner to send what it has published, unless the run ends first."""
        weights, what = self.config.weights, f"the current version, {version}"
        timeout = 2 * weights.timeout_s + weights.drain_s
        if version.incarnation > self.engine.applied.incarnation:  # the learner is being set up
            timeout += self.config.cluster.ready_timeout_s
        deadline = time.monotonic() + timeout
        sender = self.weights.sender
        with self.waits.on(what, owner=sender, deadline_s=timeout):
            while not await self._reaches(version, STOP_POLL_S):
                if (await self.client.stats()).state == "done":
                    return
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"{self.settings.name} waited {timeout:.0f} s for {sender} to send "
                        f"{what}; it still runs {self.engine.applied}"
                    )

    async def _reaches(self, version: Version, within_s: float) -> bool:
        """Whether the engine runs `version`, or a newer one, by the deadline."""
        try:
            async with asyncio.timeout(within_s):
                while self.engine.applied < version:
                    self._applied_event.clear()
                    await self._applied_event.wait()
        except TimeoutError:
            return False
        return True

    async def _evaluate(self, actors: int = 0) -> None:
        """Evaluate this actor's share of the prompts, of `actors` or as many as at the launch."""
        actors = actors or self.config.cluster.actors
        if not self.config.eval.samples or self.settings.rank >= actors:
            return
        prompts = tasks.eval_prompts(self.config)
        mine = prompts[self.settings.rank :: actors]
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
        if self.loop is not None:
            self.loop.on_applied(version)

    def _startup(self, phase: str, began: float) -> None:
        self._event("startup", phase=phase, seconds=round(time.monotonic() - began, 2))

    def _event(self, what: str, **fields: object) -> None:
        v = self.engine.applied
        self.hub.emit(
            step=self._step_of(v), version=v.version, incarnation=v.incarnation,
            event={"event": what, **fields},
        )  # fmt: skip

    def _step_of(self, v: Version) -> int:
        """The step that made a version; the last may come after fewer batches than the others."""
        return min(v.version * self.config.learner.batches_per_publication, self.config.run.steps)

    def _make_pulse(self) -> Pulse:
        assert self.loop is not None
        meter = ActorMeter(self.loop, self.reward, self.shares)
        return Pulse(
            self.hub, waits=self.waits,
            metrics=[
                meter.read, self.engine.metrics, self.weights.metrics, self.shares.spans.flush,
                *([gpu_meter()] if self.settings.device == "cuda" else []),
            ],
            position=lambda: (self._step_of(self.engine.applied), self.engine.applied),
            children=True,
        )  # fmt: skip

    async def close(self) -> None:
        """End the engine, the reward worker and every socket; safe to call twice."""
        if self.loop is not None:
            self.pulse.close()
        for part in (self.weights.close, self.reward.close, self.engine.shutdown):
            try:
                async with asyncio.timeout(20):
                    await part()
            except Exception:
                log.exception("%s: %s failed", self.settings.name, part.__qualname__)
        self.ids.close()
        if self.loop is not None:
            self.client.close()
        self.hub.close()
