"""Tiny models and configurations for tests that start a real vLLM engine on CPU."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import warnings
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, TypeVar

import psutil
import torch
import uvloop

from asyncrl.actors.announce import Announcer
from asyncrl.actors.relay.receiver import RelayReceiver
from asyncrl.actors.relay.watch import RelayWatch
from asyncrl.actors.vllm_engine import VllmEngine
from asyncrl.actors.weight_service import WeightService
from asyncrl.actors.weights import EngineWeights
from asyncrl.config.schema import Config, EngineConfig, RolloutConfig
from asyncrl.learner.layout import Layout
from asyncrl.learner.publication.members import Members
from asyncrl.learner.publication.publish import BroadcastPublisher
from asyncrl.protocols import Generation, GenerationRequest
from asyncrl.types import Version
from asyncrl.weights import ParamSpec
from tests.helpers.eventually import eventually
from tests.helpers.forks import forked_cores

T = TypeVar("T")

VOCAB = 128


def tiny_model(kind: str, *, tied: bool, seed: int = 0, **overrides: Any) -> torch.nn.Module:
    """A random Hugging Face causal LM ("llama" or "qwen3") of under a million parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    classes: dict[str, Any] = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    config_class, model_class = classes[kind]
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    } | overrides
    torch.manual_seed(seed)
    model: torch.nn.Module = model_class(config_class(**settings)).eval()
    return model


def save_model(model: Any, folder: Path, *, tokenizer: bool = False) -> str:
    """Write the model (and a word-level tokenizer, "t0 t1 ...") where the engine reads it."""
    model.save_pretrained(folder)
    if tokenizer:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import WhitespaceSplit
        from transformers import PreTrainedTokenizerFast

        words = WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0")
        raw = Tokenizer(words)
        raw.pre_tokenizer = WhitespaceSplit()
        PreTrainedTokenizerFast(
            tokenizer_object=raw, eos_token="t2", pad_token="t2"
        ).save_pretrained(folder)
    return str(folder)


def engine_config(*, max_in_flight: int = 16, context: int = 384, **engine: Any) -> Config:
    """A configuration for a tiny fp32 engine with little key-value cache."""
    settings = {"dtype": "float32", "enforce_eager": True, "kv_cache_gib": 0.0625} | engine
    return Config(
        rollout=RolloutConfig(
            max_prompt_tokens=context // 2,
            max_new_tokens=context - context // 2,
            max_in_flight=max_in_flight,
        ),
        engine=EngineConfig(**settings),
    )


@torch.no_grad()
def hf_logprobs(
    model: Any, prompt: list[int], response: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """[T] log-probability of each response token under `model`, in float32."""
    ids = torch.tensor([prompt + response])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    picked = torch.tensor(response)[:, None]
    return logits.log_softmax(-1).gather(1, picked)[:, 0]


class EngineHost:
    """An engine with its weight service, on an event loop in a thread of its own.

    Use as a context manager; `run(coroutine)` waits for a result with a deadline.
    """

    def __init__(
        self,
        config: Config,
        model_path: str,
        *,
        update_timeout_s: float = 30.0,
        device: Literal["cpu", "cuda"] = "cpu",
        weight_backend: Literal["gloo", "nccl"] = "gloo",
    ) -> None:
        self._config = config
        self._model_path = model_path
        self._update_timeout_s = update_timeout_s
        self.not_loaded: list[str] = []
        """Why a version that a relay offered was not loaded."""
        self._device, self._weight_backend = device, weight_backend
        self.applied: list[Version] = []
        self._announcers: list[Announcer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._relay: tuple[RelayReceiver, WeightService] | None = None

    def __enter__(self) -> EngineHost:
        self._environment = dict(os.environ)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-host")
        self._thread.start()
        try:
            self.run(self._start(), 300)
        except BaseException:
            self._stop_loop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        processes = [psutil.Process(p) for p in self.engine.pids()]
        self.run(self._stop(), 60)
        self._stop_loop()
        assert not psutil.wait_procs(processes, timeout=0)[1], "shutdown left processes"
        del self.engine, self.weights, self.service
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM leaves a zmq context open
            gc.collect()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def generate(self, request_id: str, prompt: tuple[int, ...], n: int) -> Generation:
        return self.run(self.engine.generate(GenerationRequest(request_id, prompt, n, 1.0)))

    def announce(self, fleet_endpoint: str, name: str, offer_path: Path | None = None) -> None:
        """Announce the engine there, and nowhere else, from now on.

        With `offer_path` a relay is announced beside it, from which the engine loads.
        """
        self.run(self._announce(fleet_endpoint, name, offer_path))

    def reaches(self, version: Version) -> None:
        """Wait until the engine has gone on with `version`, or a newer one."""
        eventually(lambda: self.applied[-1:] >= [version], f"{version} applied", 60)

    def silence(self) -> None:
        """Announce it no more."""
        self.run(self._silence())

    async def _announce(self, fleet_endpoint: str, name: str, offer_path: Path | None) -> None:
        await self._silence()
        self._announcers = [
            Announcer(
                fleet_endpoint, self.service, name=name, workers=0 if offer_path else 1,
                applied=lambda: self.engine.applied,
            )
        ]  # fmt: skip
        if offer_path is not None:
            receiver = RelayReceiver(str(offer_path))
            self._relay = receiver, WeightService(receiver)
            self._relay[1].start()
            self._announcers.append(Announcer(
                fleet_endpoint, self._relay[1], name=name.replace("actor", "relay"), workers=1,
                applied=lambda: receiver.applied,
            ))  # fmt: skip
            watch = RelayWatch(
                str(offer_path), self.weights, applied=lambda: self.engine.applied,
                on_failure=lambda version, reason: self.not_loaded.append(reason),
            )  # fmt: skip
            self._tasks.append(asyncio.create_task(watch.run()))
        self._tasks += [asyncio.create_task(a.run()) for a in self._announcers]

    async def _silence(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for announcer in self._announcers:
            announcer.close()
        if self._relay is not None:
            await self._relay[1].close()
            self._relay[0].close()
        self._announcers, self._tasks, self._relay = [], [], None

    async def _start(self) -> None:
        with forked_cores() if self._device == "cpu" else contextlib.nullcontext():
            self.engine = await VllmEngine.start(
                self._config,
                self._model_path,
                device=self._device,
                threads=1,
                seed=0,
                weight_backend=self._weight_backend,
            )
        self.weights = EngineWeights(
            self.engine,
            timeout_s=self._update_timeout_s,
            staged=self._weight_backend == "gloo",
            on_applied=self.applied.append,
        )
        self.service = WeightService(self.weights)
        self.service.start()

    async def _stop(self) -> None:
        await self._silence()
        await self.service.close()
        await self.weights.close()
        await self.engine.shutdown()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()
        os.environ.clear()
        os.environ.update(self._environment)


class HostedPublisher(BroadcastPublisher):
    """A publisher to the engines of some hosts; `add` brings in one more.

    Each host has a relay of its own below the folder `relays`, if that is given; a publication is
    over when the engines run it.
    """

    def __init__(
        self, hosts: list[EngineHost], *, relays: Path | None = None, **settings: Any
    ) -> None:
        self.hosts: list[EngineHost] = []
        self.members = Members()
        self._relays = relays
        for host in hosts:
            self.add(host)
        assert self.members.wait_for(len(hosts) * (1 if relays is None else 2), 30)
        whole = Layout.whole(settings.pop("metadata"))
        super().__init__(self.members, **({"layout": whole} | settings))

    def add(self, host: EngineHost) -> None:
        name = f"actor-{len(self.hosts)}"
        offer = None if self._relays is None else self._relays / f"{name}.json"
        host.announce(self.members.endpoint, name, offer)
        self.hosts.append(host)

    def wait(self) -> None:
        super().wait()
        if self._relays is not None and self._version is not None:
            for host in self.hosts:
                host.reaches(self._version)

    def close(self) -> None:
        try:
            super().close()
        finally:
            for host in self.hosts:
                host.silence()
            self.members.close()


def publisher(
    hosts: list[EngineHost], weights: Callable[[], Any], **overrides: Any
) -> HostedPublisher:
    """A gloo publisher of the named parameters of `weights()`."""
    settings: dict[str, Any] = {
        "source": lambda: weights().named_parameters(),
        "metadata": metadata(weights()),
        "backend": "gloo",
        "device": torch.device("cpu"),
        "timeout_s": 30.0,
    }
    return HostedPublisher(hosts, **(settings | overrides))


def metadata(model: torch.nn.Module) -> list[ParamSpec]:
    return [
        ParamSpec(name, str(p.dtype).removeprefix("torch."), tuple(p.shape))
        for name, p in model.named_parameters()
    ]
