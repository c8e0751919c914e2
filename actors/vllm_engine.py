"""vLLM's AsyncLLM behind the Engine protocol, with the update steps that `weights.py` drives.

    generate() ──► AsyncLLM ──► engine core ──► worker(s)         processes (on CPU: in one)
        ▲                           │
        └── tokens, log mu, version labels ("i:v") of each token ◄─┘

The labels are vLLM's own: the engine core attaches its current label to the output of every
forward pass, and the label changes only while generation is paused with no pass in flight, so
that a token's label is that of the weights that produced it. (vLLM's asynchronous
scheduling keeps that: a pause ends its queue first. On CPU vLLM turns it off.)
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import psutil

from asyncrl.actors.engine_memory import EngineMemory
from asyncrl.actors.in_flight import InFlight
from asyncrl.actors.vllm_parts import Parts
from asyncrl.actors.vllm_setup import (
    engine_arguments,
    forked_core,
    load_tokenizer,
    prepare_environment,
    sampling_params,
)
from asyncrl.config.schema import Config
from asyncrl.errors import AsyncRLError, EngineError
from asyncrl.protocols import Generation, GenerationRequest
from asyncrl.types import INITIAL, Version
from asyncrl.weights import refuse_damaged

SHUTDOWN_S = 5.0
"""Seconds the engine's processes get to end by themselves, before they are killed."""


def stall_limit_s(config: Config) -> float:
    """Seconds without a token, although requests are under way, after which an engine is stuck.

    A publication may hold it up for its own deadline, twice if it is repeated; other engines'
    requests too, where it waits for them.
    """
    weights = config.weights
    held_up = 3 * weights.timeout_s + 2 * weights.drain_s
    return max(120.0, 2 * config.rollout.lease_timeout_s, held_up)


class VllmEngine:
    """An AsyncLLM that stamps every token and takes new weights at token boundaries."""

    def __init__(self, llm: Any, tokenizer: Any, version: Version) -> None:
        self._llm = llm
        self.tokenizer = tokenizer
        """Of its model; None for one without text."""
        self._applied = version
        self.in_flight = InFlight()
        self._processes: list[psutil.Process] = []
        self._cores: list[Any] = []
        self._memory = EngineMemory()
        self._failed: str | None = None
        self._closed = False
        self._open = 0  # requests under way
        self._moved = time.monotonic()  # when a request or an update last made progress
        self._stall_s = math.inf

    @classmethod
    async def start(
        cls,
        config: Config,
        model_path: str,
        *,
        device: Literal["cpu", "cuda"],
        threads: int,
        seed: int,
        weight_backend: Literal["gloo", "nccl"],
        version: Version = INITIAL,
        fork: bool = False,
    ) -> VllmEngine:
        """Start the engine's processes; its weights count as `version`.

        `fork`: as in `vllm_setup.forked_core`; only for a process without threads.

        Raises:
            EngineError: vLLM refused the model or the settings, with its own words.
            EngineMemoryError: there is no room for them.
        """
        prepare_environment(device=device, threads=threads, eager=config.engine.enforce_eager)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM's own, while it is imported
            from vllm import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

        arguments = engine_arguments(config, model_path, device, seed, weight_backend)
        engine = cls(None, load_tokenizer(model_path, config), version)
        engine._stall_s = stall_limit_s(config)
        engine.in_flight = InFlight(config.weights.in_flight, config.weights.drain_s)
        try:
            with forked_core() if fork else contextlib.nullcontext():
                engine._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except Exception as e:
            raise engine._memory.start_error(model_path, e) from e
        try:
            pids = await engine._llm.collective_rpc("asyncrl_pids")
            if manager := engine._llm.engine_core.resources.engine_manager:
                engine._cores = list(manager.processes)
            engine._processes = [psutil.Process(p) for p in sorted({p for w in pids for p in w})]
            await engine._llm.update_weight_version(str(version))
        except Exception as e:
            await engine.shutdown()
            raise EngineError(f"vLLM died while starting {model_path}: {e}") from e
        return engine

    @property
    def applied(self) -> Version:
        """The version that new forward passes run with."""
        return self._applied

    @property
    def held_up(self) -> bool:
        """Whether a weight update keeps requests from going on."""
        return self.in_flight.held_up

    def metrics(self) -> dict[str, float]:
        """What updates did to requests under way, so far (docs/metrics.md)."""
        done = self.in_flight
        return {
            "actor/resubmitted": float(done.resubmitted),
            "actor/drain_timeouts": float(done.drain_timeouts),
        }

    @property
    def dead(self) -> str | None:
        """Why the engine cannot be used any more; None while it can."""
        if self._failed is not None:
            return self._failed
        if self._closed:
            return "the engine was shut down"
        if self._llm.errored:
            return "an engine process died"
        stalled = time.monotonic() - self._moved if self._open else 0.0
        return (
            f"no token of {self._open} requests in {stalled:.0f} s"
            if (stalled > self._stall_s)
            else None
        )

    def memory_fault(self) -> str:
        """Why a dead engine has run out of memory, in words; "" if that is not why."""
        return self._memory.fault([core.exitcode for core in self._cores])

    async def died(self, poll_s: float = 0.25) -> str:
        """Wait until the engine is dead; returns why."""
        while (reason := self.dead) is None:
            await asyncio.sleep(poll_s)
        return reason

    def pids(self) -> list[int]:
        """Pids of the engine's processes that are alive."""
        return [p.pid for p in self._processes if _alive(p)]

    async def generate(
        self, request: GenerationRequest, on_tokens: Callable[[int], None] | None = None
    ) -> Generation:
        """Generate one response, each token stamped; see `protocols.Engine`.

        Greedy requests get the log-probabilities of temperature 1.

        Raises:
            EngineError: the engine died, or refused the request.
        """
        self._check_alive()
        dispatch = self._applied
        parts = Parts(request)
        self._moved = time.monotonic() if not self._open else self._moved
        self._open += 1
        try:
            while True:
                updates = self.in_flight.updates
                await self._stream(parts, on_tokens)
                if not self.in_flight.aborted(parts.finish_reason, updates):
                    break
                self.in_flight.resubmitted += 1
        except AsyncRLError:
            raise
        except Exception as e:
            reason = self.dead
            if reason is None:
                raise EngineError(f"request {request.request_id} failed: {e}") from e
            raise EngineError(f"engine is dead: {reason}") from e
        finally:
            self._open -= 1
        text = ""
        if self.tokenizer is not None:
            text = self.tokenizer.decode(parts.ids, skip_special_tokens=True)
        kv_mixed = self.in_flight.kv_mixed(parts.stamps(), dispatch)
        return parts.generation(dispatch, kv_mixed=kv_mixed, text=text)

    async def _stream(self, parts: Parts, on_tokens: Callable[[int], None] | None) -> None:
        """Ask vLLM for the response, or for the rest of it, and take what it gives."""
        request = parts.next_request()
        prompt = self.in_flight.prompt(request.prompt_ids, self._applied)
        async with contextlib.aclosing(
            self._llm.generate(prompt, sampling_params(request), request.request_id)
        ) as outputs:
            async for output in outputs:
                new = parts.add(output.outputs[0])
                self._moved = time.monotonic()
                if new and on_tokens is not None:
                    on_tokens(new)

    # --- weights: the steps of one publication, in this order (see weights.EngineWeights) ---

    async def join_transfer(self, info: Mapping[str, Any]) -> None:
        """All workers join the transfer group."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._check_alive()
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(dict(info)))

    async def begin_update(self) -> None:
        """Pause at a token boundary; requests under way fare as `weights.in_flight` says."""
        self._check_alive()
        await self.in_flight.pause(self._llm)
        await self._llm.start_weight_update()

    async def receive_update(self, info: Mapping[str, Any]) -> None:
        """All workers receive one publication.

        Raises:
            DamagedWeightsError: a tensor did not arrive as it was sent; nothing is staged.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._check_alive()
        await self._llm.update_weights(WeightTransferUpdateRequest(dict(info)))
        # Asked for, since an error of a worker arrives as text alone.
        refuse_damaged(await self._llm.collective_rpc("asyncrl_damaged"))

    async def commit_update(self, version: Version) -> None:
        """Load what was received, label it, and go on generating."""
        self._check_alive()
        await self._llm.finish_weight_update(weight_version=str(version))
        self._applied = version
        await self.in_flight.resume(self._llm)
        self._moved = time.monotonic()

    async def abandon_update(self) -> None:
        """Go on generating with the old weights; gloo only, which stages before it loads."""
        self._check_alive()
        await self._llm.collective_rpc("asyncrl_abandon_update")
        await self.in_flight.resume(self._llm)

    def fail(self, reason: str) -> None:
        """Mark the engine broken and kill it: all requests end with an EngineError."""
        if self._failed is None:
            self._failed = reason
            self._kill()

    async def shutdown(self) -> None:
        """End the engine and its processes."""
        if self._closed:
            return
        self._closed = True
        llm, self._llm = self._llm, None
        log = logging.getLogger("vllm.v1.engine.async_llm")
        level = log.level
        log.setLevel(logging.CRITICAL)  # it reports the engine's wanted end as a failure
        try:
            async with asyncio.timeout(2 * SHUTDOWN_S):
                await asyncio.to_thread(llm.shutdown, timeout=SHUTDOWN_S)
        except TimeoutError:
            pass
        finally:
            self._kill()
            await asyncio.to_thread(psutil.wait_procs, self._processes, SHUTDOWN_S)
            log.setLevel(level)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # vLLM leaves a zmq context open
                del llm
                gc.collect()  # its finalizer must not run when the interpreter is half gone

    def _kill(self) -> None:
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def _check_alive(self) -> None:
        if reason := self.dead:
            raise EngineError(f"engine is dead: {reason}")


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
