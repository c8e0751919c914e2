"""How asyncrl sets vLLM up: environment, engine arguments, sampling parameters, tokenizer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any

from asyncrl.config.schema import CPU_KV_CACHE_GIB, Config
from asyncrl.errors import EngineError
from asyncrl.protocols import GenerationRequest
from asyncrl.roles import name_process

STREAM_INTERVAL = 8
"""Tokens between two outputs of a request: progress, without an event per token."""

MIN_TEMPERATURE = 0.01
"""vLLM raises a lower one to this without a word, and the learner's would differ."""

HOST_PID_ENV = "ASYNCRL_ENGINE_HOST_PID"
"""Pid of the process that started the engine; the engine's processes end when it does."""

_WORKER_EXTENSION = "asyncrl.actors.gloo_transfer.WorkerExtension"

PRIMITIVES_ENV, PRIMITIVES = "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256"
"""oneDNN keeps what it has made for each shape of a product, by default 1024 of them. A step of an
engine has any number of tokens, so that it fills up over minutes: half a GiB with the preset tiny,
whose pace was the same with 1 of them."""


def engine_environment(*, device: str, threads: int, eager: bool) -> dict[str, str]:
    """What vLLM, torch and OpenMP must find in the environment when they are imported."""
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if device == "cpu":
        env |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            PRIMITIVES_ENV: os.environ.get(PRIMITIVES_ENV, PRIMITIVES),
        }
        if eager:
            # Else the first request pays 11-14 s for a compiled sampler helper.
            env["TORCHDYNAMO_DISABLE"] = "1"
    return env


def prepare_environment(*, device: str, threads: int, eager: bool) -> None:
    """Set `engine_environment` and this process as the engine's host, before vllm is imported."""
    os.environ.update(engine_environment(device=device, threads=threads, eager=eager))
    os.environ[HOST_PID_ENV] = str(os.getpid())


@contextlib.contextmanager
def forked_core() -> Iterator[None]:
    """An engine started within is forked from this process, which has imported all it needs.

    vLLM spawns its CPU engines' processes, and each imports everything again: for a process
    without OpenMP threads or a GPU, as a role of the fork server is, there is no need.
    """
    import torch
    from vllm.v1.engine import utils

    from asyncrl.actors.gloo_transfer import end_with_host

    class Core(ForkProcess):
        def run(self) -> None:
            # A spawned core reads it on import; a fork keeps the count of the fork server.
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
            end_with_host()  # which a spawned core does by importing gloo_transfer
            name_process(f"{Path('/proc/self/comm').read_text().strip()}-core")
            super().run()

    class Context(ForkContext):
        Process = Core

    theirs = utils.get_mp_context
    utils.get_mp_context = Context
    try:
        yield
    finally:
        utils.get_mp_context = theirs


_IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def engine_arguments(
    config: Config, model_path: str, device: str, seed: int, weight_backend: str
) -> dict[str, Any]:
    """AsyncEngineArgs of a run."""
    from vllm.config import WeightTransferConfig

    engine = config.engine
    kv_cache_gib = engine.kv_cache_gib or (CPU_KV_CACHE_GIB if device == "cpu" else None)
    arguments: dict[str, Any] = {
        "model": model_path,
        "trust_remote_code": config.model.trust_remote_code,
        "skip_tokenizer_init": not _has_tokenizer(model_path),
        "dtype": engine.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.rollout.max_in_flight,
        "tensor_parallel_size": engine.tensor_parallel,
        "enforce_eager": engine.enforce_eager,
        "enable_prefix_caching": True,  # emptied by every publication's pause
        "logprobs_mode": "processed_logprobs",
        "seed": seed,
        "stream_interval": STREAM_INTERVAL,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "weight_transfer_config": WeightTransferConfig(backend=weight_backend),
        "worker_extension_cls": _WORKER_EXTENSION,
    }
    if kv_cache_gib is not None:
        arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * 2**30)
    if device == "cpu":
        # The prefix cache holds whole blocks only: with vLLM's 128 tokens a group's samples
        # would each compute their (short) common prompt. 32 is the least its kernels take.
        arguments["block_size"] = 32
        if engine.tensor_parallel == 1:
            # The worker inside the engine's process. vLLM's own choice on CPU puts it in another
            # one, and the two then spin for each other's messages on cores that training needs.
            arguments["distributed_executor_backend"] = _IN_PROCESS
    else:
        arguments["gpu_memory_utilization"] = engine.gpu_memory_utilization
    return arguments


def sampling_params(request: GenerationRequest) -> Any:
    """SamplingParams of one response, streamed in steps, text left to the caller.

    Raises:
        EngineError: a temperature that vLLM would silently change.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if 0 < request.temperature < MIN_TEMPERATURE:
        raise EngineError(
            f"temperature {request.temperature} is below {MIN_TEMPERATURE}, where vLLM would "
            f"use {MIN_TEMPERATURE}: raise it, or use 0 for greedy"
        )
    return SamplingParams(
        n=1,
        temperature=request.temperature,
        max_tokens=request.max_new_tokens,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _has_tokenizer(model_path: str) -> bool:
    """Whether there is text to speak of; a Hub name counts as having a tokenizer."""
    folder = Path(model_path)
    return not folder.is_dir() or any(folder.glob("tokenizer*"))


def load_tokenizer(model_path: str, config: Config) -> Any:
    """The model's tokenizer; None for a folder without one."""
    if not _has_tokenizer(model_path):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        model_path, trust_remote_code=config.model.trust_remote_code
    )
