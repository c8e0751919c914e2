"""Modes of an update with a scripted vLLM: what it is asked for, and requests that it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.actors import vllm_engine
from asyncrl.actors.in_flight import InFlight
from asyncrl.actors.vllm_engine import VllmEngine
from asyncrl.actors.weights import EngineWeights
from asyncrl.config.schema import InFlightMode
from asyncrl.protocols import Generation, GenerationRequest
from asyncrl.types import FinishReason, Version
from tests.weights.fakes import FakeEngine as Scripted

V0, V1 = Version(0, 0), Version(0, 1)
DEADLINE_S = 60


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def params(request: GenerationRequest) -> Any:
        return SimpleNamespace(max_tokens=request.max_new_tokens)

    monkeypatch.setattr(vllm_engine, "sampling_params", params)


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario

    asyncio.run(limited())


def output(ids: list[int], finish_reason: str | None = None, label: Version | None = None) -> Any:
    """What vLLM yields; the last one has the label of all tokens of the request."""
    flat = SimpleNamespace(logprobs=[-float(i) for i in ids], start_indices=list(range(len(ids))))
    spans = None if label is None else [SimpleNamespace(version=str(label), start=0, end=2)]
    delta = SimpleNamespace(
        token_ids=ids, logprobs=flat, finish_reason=finish_reason, weight_versions=spans
    )
    return SimpleNamespace(outputs=[delta])


class Llm:
    """Notes what it is asked for. Requests follow `script`; `drained` lets `wait` return."""

    errored = False

    def __init__(self) -> None:
        self.engine_core = self.renderer = self
        self.pauses: list[tuple[str, bool]] = []
        self.requests: list[tuple[str, dict[str, Any], int]] = []
        self.drained = asyncio.Event()
        self.on_pause: Callable[[], None] = lambda: None
        self.script: Callable[[int], AsyncIterator[Any]]

    async def clear_mm_cache_async(self) -> None: ...

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        self.pauses.append((mode, clear_cache))
        self.on_pause()
        if mode == "keep":
            self.drained.set()
        if mode == "wait":
            await self.drained.wait()

    async def resume_generation(self) -> None: ...

    async def start_weight_update(self) -> None: ...

    async def finish_weight_update(self, weight_version: str) -> None: ...

    async def generate(
        self, prompt: dict[str, Any], sampling: Any, request_id: str
    ) -> AsyncIterator[Any]:
        self.requests.append((request_id, prompt, sampling.max_tokens))
        async for item in self.script(len(self.requests)):
            yield item


def engine(llm: Llm, mode: InFlightMode) -> VllmEngine:
    made = VllmEngine(llm, None, V0)
    made.in_flight = InFlight(mode, drain_s=DEADLINE_S)
    return made


@pytest.mark.parametrize(
    ("mode", "asked"),
    [
        ("keep", [("keep", True)]),
        ("keep_kv", [("keep", False)]),
        ("abort", [("abort", True)]),
        ("wait", [("wait", True)]),
    ],
)
def test_vllm_is_paused_as_the_mode_says(mode: InFlightMode, asked: list[tuple[str, bool]]) -> None:
    async def scenario() -> None:
        llm = Llm()
        llm.drained.set()
        made = engine(llm, mode)
        await made.begin_update()
        assert made.held_up
        await made.commit_update(V1)
        assert not made.held_up
        assert llm.pauses == asked
        assert set(made.metrics().values()) == {0.0}

    run(scenario())


def test_waiting_for_requests_has_a_deadline() -> None:
    async def scenario() -> None:
        llm = Llm()
        made = engine(llm, "wait")
        made.in_flight.drain_s = 0.01
        await made.begin_update()
        assert llm.pauses == [("wait", True), ("keep", True)]
        assert made.metrics()["actor/drain_timeouts"] == 1

    run(scenario())


def test_each_version_has_a_prefix_cache_of_its_own_where_it_cannot_be_emptied() -> None:
    async def scenario() -> None:
        async def script(_: int) -> AsyncIterator[Any]:
            yield output([3, 4], "stop", V1)

        llm = Llm()
        llm.script = script
        made = engine(llm, "keep_kv")
        older = await made.generate(GenerationRequest("a", (1,), 5, 1.0))
        await made.begin_update()
        await made.commit_update(V1)
        newer = await made.generate(GenerationRequest("b", (1,), 5, 1.0))
        salts = [prompt["cache_salt"] for _, prompt, _ in llm.requests]
        assert salts == ["0:0", "0:1"]
        # Both have tokens of 0:1 alone, but the first may have found its prompt's part of 0:0.
        assert (older.kv_mixed, newer.kv_mixed) == (True, False)

    run(scenario())


async def ended_by_an_update(after: Callable[[VllmEngine], Coroutine[Any, Any, None]]) -> Llm:
    """A request that is ended with two tokens while `abort` pauses; `after` comes next."""
    llm = Llm()
    made = engine(llm, "abort")
    started, ended = asyncio.Event(), asyncio.Event()
    llm.on_pause = ended.set

    async def script(number: int) -> AsyncIterator[Any]:
        if number == 1:
            yield output([3])
            started.set()
            await ended.wait()
            await after(made)
            yield output([4], "abort", V0)
        else:
            yield output([5, 6], "length", V1)

    llm.script = script
    request = GenerationRequest("r", (1, 2), max_new_tokens=4, temperature=1.0)
    generating = asyncio.create_task(made.generate(request))
    await started.wait()
    await made.begin_update()
    await made.commit_update(V1)
    g: Generation = await generating
    assert g.response_ids.tolist() == [3, 4, 5, 6]
    assert g.logprobs.tolist() == [-3, -4, -5, -6]
    assert g.versions.tolist() == [0, 0, 1, 1]
    assert (g.version_dispatch, g.version_finish) == (V0, V1)
    assert g.finish_reason is FinishReason.LENGTH
    assert made.metrics()["actor/resubmitted"] == 1
    return llm


@pytest.mark.parametrize("late", [False, True])
def test_a_request_that_an_update_ends_is_continued(late: bool) -> None:
    async def after(made: VllmEngine) -> None:
        while late and made.held_up:
            await asyncio.sleep(0)

    async def scenario() -> None:
        llm = await ended_by_an_update(after)
        assert [(name, p["prompt_token_ids"], n) for name, p, n in llm.requests] == [
            ("r", [1, 2], 4),
            ("r+1", [1, 2, 3, 4], 2),
        ]

    run(scenario())


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_a_request_that_no_update_ended_is_not_issued_again(mode: InFlightMode) -> None:
    async def scenario() -> None:
        async def script(_: int) -> AsyncIterator[Any]:
            yield output([3, 4], "abort", V0)

        llm = Llm()
        llm.script = script
        g = await engine(llm, mode).generate(GenerationRequest("r", (1,), 5, 1.0))
        assert g.finish_reason is FinishReason.ABORT
        assert len(llm.requests) == 1

    run(scenario())


def test_an_engine_that_began_waits_for_those_that_wait_for_their_requests() -> None:
    async def scenario() -> None:
        alone, waiting = (
            EngineWeights(Scripted(), timeout_s=0.01, staged=True, drain_s=drain_s)
            for drain_s in (0.0, DEADLINE_S)
        )
        for weights in (waiting, alone):
            await weights.begin(V1)
        while alone._state != "idle":  # it is given up
            await asyncio.sleep(0)
        assert waiting._state == "begun"
        await waiting.close()

    run(scenario())
