"""The vLLM engine on CPU: stamps, progress, refusals, cancelling, death and clean-up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from asyncrl.actors.vllm_engine import VllmEngine
from asyncrl.errors import EngineError, EngineMemoryError
from asyncrl.protocols import Engine, Generation, GenerationRequest
from asyncrl.types import FinishReason, Version
from tests.helpers.engines import EngineHost, engine_config, hf_logprobs, save_model, tiny_model

pytestmark = pytest.mark.engine

PROMPT = (5, 6, 7, 8)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return save_model(tiny_model("llama", tied=True), folder, tokenizer=True)


@pytest.fixture(scope="module")
def other(path: str) -> Iterator[subprocess.Popen[str]]:
    """A process with an engine; it says the engine's pids."""
    script = Path(path).with_name("host.py")
    script.write_text(HOST_SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), path], stdout=subprocess.PIPE, text=True, env=_child_env()
    )
    yield process
    process.kill()
    process.wait(60)
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture(scope="module")
def host(path: str, other: subprocess.Popen[str]) -> Iterator[EngineHost]:
    """Forked; the other process, whose engine vLLM spawns, comes up at the same time."""
    with EngineHost(engine_config(), path) as h:
        yield h


def test_implements_the_protocol(host: EngineHost) -> None:
    assert isinstance(host.engine, Engine)
    assert host.engine.applied == Version(0, 0)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_generation_is_stamped_and_has_the_sampling_logprobs(
    host: EngineHost, temperature: float
) -> None:
    heard: list[int] = []
    request = GenerationRequest(f"t{temperature}", PROMPT, 30, temperature)
    g = host.run(host.engine.generate(request, heard.append))
    n = len(g.response_ids)
    assert sum(heard) == n > 0
    assert g.versions.tolist() == [0] * n == g.incarnations.tolist()
    assert g.version_dispatch == g.version_finish == Version(0, 0)
    assert (g.finish_reason is FinishReason.LENGTH) == (n == 30)
    words = [f"t{i}" for i in g.response_ids if i != 2]  # 2 ends a text and is not part of it
    assert g.text == " ".join(words)
    model = tiny_model("llama", tied=True)
    expected = hf_logprobs(model, list(PROMPT), g.response_ids.tolist(), temperature)
    np.testing.assert_allclose(g.logprobs, expected.numpy(), atol=1e-4)


def test_refused_requests_leave_the_engine_alive(host: EngineHost) -> None:
    with pytest.raises(EngineError, match="too-long"):
        host.generate("too-long", tuple(range(3, 100)) * 5, 8)
    with pytest.raises(EngineError, match="temperature"):
        host.run(host.engine.generate(GenerationRequest("cold", PROMPT, 8, 0.001)))
    assert host.engine.dead is None
    assert len(host.generate("after", PROMPT, 4).response_ids) > 0


def test_cancelling_aborts_in_the_engine(host: EngineHost) -> None:
    async def cancel_one() -> int:
        started = asyncio.Event()
        request = GenerationRequest("cancelled", PROMPT, 180, 0.0)
        task = asyncio.create_task(host.engine.generate(request, lambda _: started.set()))
        await asyncio.wait_for(started.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return int(host.engine._llm.get_num_unfinished_requests())

    assert host.run(cancel_one()) == 0


def test_death_of_the_engine_process_ends_all_requests(host: EngineHost) -> None:
    """Last: it ends the engine of this module."""

    async def kill_while_generating() -> list[Generation | BaseException]:
        started = asyncio.Event()
        requests = [
            asyncio.create_task(
                host.engine.generate(
                    GenerationRequest(f"victim-{i}", PROMPT, 180, 1.0), lambda _: started.set()
                )
            )
            for i in range(4)
        ]
        await asyncio.wait_for(started.wait(), 60)
        (process,) = host.engine.pids()
        os.kill(process, signal.SIGKILL)
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert "died" in await asyncio.wait_for(host.engine.died(), 60)
        return results

    results = host.run(kill_while_generating(), 120)
    assert any(isinstance(r, EngineError) for r in results)
    assert all(isinstance(r, EngineError | Generation) for r in results)
    with pytest.raises(EngineError, match="dead"):
        host.generate("too-late", PROMPT, 4)


HOST_SCRIPT = """
import asyncio, sys
from asyncrl.actors.vllm_engine import VllmEngine
from tests.helpers.engines import engine_config

async def main():
    engine = await VllmEngine.start(
        engine_config(), sys.argv[1], device="cpu", threads=1, seed=0, weight_backend="gloo"
    )
    print(*engine.pids(), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_no_process_outlives_a_killed_host(other: subprocess.Popen[str]) -> None:
    assert other.stdout is not None
    engine = [psutil.Process(int(p)) for p in other.stdout.readline().split()]
    assert len(engine) == 1  # the engine core, which holds the one worker
    everyone = [*engine, *psutil.Process(other.pid).children(recursive=True)]
    other.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(everyone, timeout=60)
    assert not alive


def _child_env() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("environment")
def test_unusable_model_is_an_engine_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="did not start"):
        asyncio.run(
            VllmEngine.start(
                engine_config(),
                str(tmp_path),
                device="cpu",
                threads=1,
                seed=0,
                weight_backend="gloo",
            )
        )


@pytest.mark.soak
@pytest.mark.usefixtures("environment")
def test_a_cache_that_holds_no_request_is_a_lack_of_memory(tmp_path: Path) -> None:
    """vLLM says so in its process's log alone."""
    save_model(tiny_model("llama", tied=False), tmp_path)
    with pytest.raises(
        EngineMemoryError, match=r"No available memory.*: raise engine\.kv_cache_gib"
    ):
        asyncio.run(
            VllmEngine.start(
                engine_config(kv_cache_gib=1e-5), str(tmp_path), device="cpu", threads=1, seed=0,
                weight_backend="gloo",
            )
        )  # fmt: skip
