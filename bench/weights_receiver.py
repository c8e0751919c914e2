"""An actor of the weights bench: a process that takes weights into an engine or a stand-in.

    learner ──announce, begin, receive, commit──► EngineWeights ──► vLLM (engine) or a stand-in
            └──────────────► a relay ──its offer──► RelayWatch ──┘
    bench   ──commands over a pipe──► load, pauses, the raw broadcast, a reload from files

A stand-in receives with the code that runs in vLLM's workers (gloo, staging, checksums), and its
loading is one copy of every tensor. It has no requests. An engine takes what is broadcast and what
the relay of the bench offers, whichever comes; the relay is a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from asyncrl.actors.announce import Announcer
from asyncrl.actors.relay.watch import RelayWatch
from asyncrl.actors.weight_service import WeightService
from asyncrl.actors.weights import EngineWeights
from asyncrl.types import INITIAL, Version
from asyncrl.weights import TransferPlan, refuse_damaged

TIMEOUT_S = 120.0
ENGINE = (
    "rollout.max_prompt_tokens=64", "rollout.max_new_tokens=256", "rollout.max_in_flight=16",
    "engine.dtype=bfloat16", "engine.enforce_eager=true", "engine.kv_cache_gib=0.5",
)  # fmt: skip
PROMPT = tuple(range(1000, 1032))


class StandIn:
    """What `EngineWeights` asks of an engine, without one."""

    def __init__(self) -> None:
        from asyncrl.actors.gloo_receiver import GlooReceiver
        from asyncrl.actors.gloo_transfer import Buffers

        self.applied = INITIAL
        self._gloo, self._buffers = GlooReceiver(), Buffers()
        self._model: dict[str, torch.Tensor] = {}

    async def join_transfer(self, info: Mapping[str, Any]) -> None:
        """Join the group."""
        await asyncio.to_thread(self._gloo.join, info)

    async def begin_update(self) -> None:
        """There is nothing to pause."""

    async def receive_update(self, info: Mapping[str, Any]) -> None:
        """The bytes, verified."""
        refuse_damaged([await asyncio.to_thread(self._receive, info)])

    def _receive(self, info: Mapping[str, Any]) -> list[str]:
        from asyncrl.actors.gloo_receiver import damaged

        plan = TransferPlan.from_info(info)
        self._buffers.fit(plan)
        self._gloo.receive(
            plan, self._buffers, bucket_bytes=info["bucket_bytes"], timeout_s=info["timeout_s"]
        )
        return damaged(plan, self._buffers.raw(), info["checksums"])

    async def commit_update(self, version: Version) -> None:
        """Copy what came."""
        await asyncio.to_thread(self._load)
        self.applied = version

    def _load(self) -> None:
        for dtype, tensor in self._buffers.flat.items():
            if dtype in self._model:
                self._model[dtype].copy_(tensor)
            else:
                self._model[dtype] = tensor.clone()

    async def abandon_update(self) -> None:
        """Keep the old."""

    def fail(self, reason: str) -> None:
        """End the process."""
        raise SystemExit(reason)

    async def shutdown(self) -> None:
        """Leave the group."""
        self._gloo.leave()


class Timed:
    """An engine, and for how long each update has held it up: pause to going on."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.pauses: list[tuple[float, float]] = []
        """Of each update: all, and the load of it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def begin_update(self) -> None:
        """From here."""
        self._began = time.monotonic()
        await self._engine.begin_update()

    async def commit_update(self, version: Version) -> None:
        """To here."""
        began = time.monotonic()
        await self._engine.commit_update(version)
        now = time.monotonic()
        self.pauses.append((now - self._began, now - began))


class Receiver:
    """The process's parts, and what the bench may ask of it."""

    def __init__(self, engine: Any) -> None:
        self._timed = Timed(engine)
        self._raw: Any = None
        self._loads: list[asyncio.Task[None]] = []

    async def serve(self, pipe: Connection, endpoint: str, name: str, offer: str) -> None:
        """Announce the engine and answer the bench until it says `end`.

        Args:
            offer: where a relay offers what it has, for an engine.
        """
        engine: Any = self._timed
        weights = EngineWeights(engine, timeout_s=TIMEOUT_S, staged=True)
        service = WeightService(weights)
        service.start()
        announcer = Announcer(
            endpoint, service, name=name, workers=1, applied=lambda: self._timed.applied
        )
        announcing = asyncio.create_task(announcer.run())
        watch = RelayWatch(offer, weights, applied=lambda: self._timed.applied)
        watching = asyncio.create_task(watch.run())
        pipe.send("ready")
        while (command := await asyncio.to_thread(pipe.recv))[0] != "end":
            pipe.send(await getattr(self, command[0])(*command[1:]))
        await self.unload()
        for task in (announcing, watching):
            task.cancel()
        await asyncio.gather(announcing, watching, return_exceptions=True)
        announcer.close()
        await service.close()
        await weights.close()
        await self._timed.shutdown()

    async def applied(self, version: Version) -> None:
        """Returns when the engine runs it."""
        while self._timed.applied < version:
            await asyncio.sleep(0.001)

    async def reload(self, folder: str, version: int) -> None:
        """Load files as vLLM does by itself, in the same pause as other updates have."""
        engine = self._timed
        await engine.in_flight.pause(engine._llm)
        await engine._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        await engine._llm.update_weight_version(f"1:{version}")
        await engine.in_flight.resume(engine._llm)

    async def pauses(self) -> list[tuple[float, float]]:
        """Seconds of each update since the last call, and of its load."""
        taken, self._timed.pauses = self._timed.pauses, []
        return taken

    async def load(self, requests: int) -> None:
        """Keep so many requests in flight; returns when each has got tokens."""
        from asyncrl.protocols import GenerationRequest

        ids, started = itertools.count(), asyncio.Semaphore(0)

        async def one() -> None:
            while True:
                request = GenerationRequest(f"bench-{next(ids)}", PROMPT, 256, 1.0)
                await self._timed.generate(request, lambda _: started.release())

        self._loads = [asyncio.create_task(one()) for _ in range(requests)]
        for _ in range(4 * requests):
            await started.acquire()

    async def unload(self) -> None:
        """No more requests."""
        for task in self._loads:
            task.cancel()
        await asyncio.gather(*self._loads, return_exceptions=True)
        self._loads = []

    async def raw_join(self, address: str, port: int, rank: int, world: int, nbytes: int) -> None:
        """Join a bare gloo group."""
        self._raw = await asyncio.to_thread(raw_group, address, port, rank, world)
        self._buffer = torch.empty(nbytes, dtype=torch.uint8)

    async def raw_receive(self) -> None:
        """One broadcast; the barrier behind it is the reply."""

        def receive() -> None:
            self._raw.broadcast([self._buffer], raw_options()).wait()
            self._raw.barrier().wait()

        self._receiving = asyncio.create_task(asyncio.to_thread(receive))

    async def raw_leave(self) -> None:
        """Leave it."""
        with contextlib.suppress(RuntimeError):
            await self._receiving
        self._raw = None


def raw_group(address: str, port: int, rank: int, world: int, listener: Any = None) -> Any:
    """A bare gloo group of vLLM's helpers; `listener` is rank 0's bound socket."""
    from datetime import timedelta

    from torch.distributed.distributed_c10d import PrefixStore
    from vllm.distributed.utils import create_tcp_store, init_gloo_process_group

    timeout = timedelta(seconds=TIMEOUT_S)
    more = {} if listener is None else {"listen_socket": listener}
    store = create_tcp_store(
        address, port, world_size=world, is_master=rank == 0, wait_for_workers=False,
        timeout=timeout, **more,
    )  # fmt: skip
    return init_gloo_process_group(PrefixStore("raw", store), rank, world, timeout)


def raw_options() -> Any:
    """From rank 0."""
    from torch.distributed import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank = 0
    return options


async def _run(
    pipe: Connection, kind: str, endpoint: str, name: str, model: str, offer: str
) -> None:
    if kind == "relay":
        await _relay(pipe, endpoint, name, offer)
        return
    if kind == "engine":
        from asyncrl.actors.vllm_engine import VllmEngine
        from asyncrl.config.load import load

        config = load(None, list(ENGINE)).config
        engine: Any = await VllmEngine.start(
            config, model, device="cpu", threads=1, seed=0, weight_backend="gloo"
        )
    else:
        engine = StandIn()
    await Receiver(engine).serve(pipe, endpoint, name, offer)


async def _relay(pipe: Connection, endpoint: str, name: str, offer: str) -> None:
    from asyncrl.actors.relay.receiver import RelayReceiver

    receiver = RelayReceiver(offer)
    service = WeightService(receiver)
    service.start()
    announcer = Announcer(endpoint, service, name=name, workers=1, applied=lambda: receiver.applied)
    announcing = asyncio.create_task(announcer.run())
    pipe.send("ready")
    while (await asyncio.to_thread(pipe.recv))[0] != "end":
        pipe.send("a relay does as it is told by the learner")
    announcing.cancel()
    await asyncio.gather(announcing, return_exceptions=True)
    announcer.close()
    await service.close()
    receiver.close()


def main(pipe: Connection, kind: str, endpoint: str, name: str, model: str, offer: str) -> None:
    """The process; an error goes to the bench instead of a reply."""
    import os

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        asyncio.run(_run(pipe, kind, endpoint, name, model, offer))
    except BaseException as e:
        with contextlib.suppress(OSError):
            pipe.send(e if isinstance(e, Exception) else RuntimeError(repr(e)))
        raise
