"""Publications to a real vLLM engine on CPU: same numbers, exact stamps, failures contained."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.errors import EngineError, WeightSyncError
from asyncrl.protocols import Generation, GenerationRequest
from asyncrl.types import FinishReason, Version
from tests.helpers.engines import (
    EngineHost,
    engine_config,
    hf_logprobs,
    metadata,
    publisher,
    save_model,
    tiny_model,
)

pytestmark = pytest.mark.engine

PROMPT = (5, 6, 7, 8)
UPDATE_TIMEOUT_S = 6.0


def forced(token: int) -> torch.nn.Module:
    """A Llama that emits `token` with probability 1, whatever it reads."""
    model = tiny_model("llama", tied=False)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "o_proj" in name or "down_proj" in name or "lm_head" in name:
                p.zero_()  # the hidden state is the embedding
            if "embed" in name or "norm" in name:
                p.fill_(1.0)
        model.lm_head.weight[token] = 1.0  # type: ignore[union-attr,index]
    return model


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHost]:
    """An untied Llama; its tests publish what they need, with rising versions."""
    path = save_model(forced(10), tmp_path_factory.mktemp("llama"))
    with EngineHost(engine_config(), path, update_timeout_s=UPDATE_TIMEOUT_S) as h:
        yield h


def next_version(host: EngineHost) -> Version:
    incarnation, version = host.engine.applied
    return Version(incarnation, version + 1)


class Load:
    """`n` requests always in flight, until `stop`."""

    def __init__(self, host: EngineHost, n: int, tokens: int) -> None:
        self._host, self._tokens = host, tokens
        self._ids = itertools.count()
        self._stopping = threading.Event()
        self._progress = threading.Condition()
        self._seen = 0
        self.done: list[Generation] = []
        self._loops = [host.submit(self._loop()) for _ in range(n)]

    async def _loop(self) -> None:
        while not self._stopping.is_set():
            request = GenerationRequest(f"load-{next(self._ids)}", PROMPT, self._tokens, 1.0)
            self.done.append(await self._host.engine.generate(request, self._heard))

    def _heard(self, n: int) -> None:
        with self._progress:
            self._seen += n
            self._progress.notify_all()

    def wait_for_tokens(self, n: int) -> None:
        with self._progress:
            target = self._seen + n
            assert self._progress.wait_for(lambda: self._seen >= target, timeout=60)

    def stop(self) -> list[Generation]:
        self._stopping.set()
        for loop in self._loops:
            loop.result(120)
        return self.done


def check_logprobs(host: EngineHost, model: torch.nn.Module, version: Version) -> None:
    g = host.generate(f"check-{version}", PROMPT, 24)
    expected = hf_logprobs(model, list(PROMPT), g.response_ids.tolist())
    np.testing.assert_allclose(g.logprobs, expected.numpy(), atol=1e-4)
    assert set(zip(g.incarnations.tolist(), g.versions.tolist(), strict=True)) == {version}


def publish_and_check(host: EngineHost, kind: str, *, tied: bool) -> None:
    """Two publications with requests in flight; then the engine's numbers are the new model's."""
    models = [tiny_model(kind, tied=tied, seed=seed) for seed in (1, 2)]
    current = [models[0]]
    pub = publisher([host.service.endpoint], lambda: current[0])
    load = Load(host, 4, 120)
    for model in models:
        load.wait_for_tokens(8)
        current[0] = model
        version = next_version(host)
        pub.publish(version)
        pub.wait()
        assert host.engine.applied == host.applied[-1] == version
        check_logprobs(host, model, version)
    pub.close()
    for g in load.stop():
        assert g.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert len(g.versions) == len(g.response_ids) == len(g.logprobs) > 0
        assert g.version_dispatch.version <= g.versions.min()
        assert np.all(np.diff(g.versions) >= 0)
        assert g.version_finish.version == g.versions[-1]
    assert pub.take_timings()["sync/bytes"] == sum(p.numel() * 4 for p in model.parameters())


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen3", False)])
def test_engine_equals_new_weights(kind: str, tied: bool, tmp_path: Path) -> None:
    path = save_model(tiny_model(kind, tied=tied), tmp_path)
    with EngineHost(engine_config(), path) as host:
        check_logprobs(host, tiny_model(kind, tied=tied), Version(0, 0))
        publish_and_check(host, kind, tied=tied)


def test_engine_equals_new_weights_untied_llama(host: EngineHost) -> None:
    publish_and_check(host, "llama", tied=False)


def test_every_stamp_matches_its_token_over_200_updates(host: EngineHost) -> None:
    models = {0: forced(10), 1: forced(11)}
    current = [models[0]]
    pub = publisher([host.service.endpoint], lambda: current[0])

    def publish(version: Version) -> None:
        current[0] = models[version.version % 2]
        pub.publish(version)
        pub.wait()

    first = Version(1, 0)
    publish(first)
    load = Load(host, 8, 200)
    for v in range(1, 201):
        load.wait_for_tokens(8)
        publish(Version(1, v))
    pub.close()
    seen: set[int] = set()
    for g in load.stop():
        assert set(g.incarnations.tolist()) == {1}
        np.testing.assert_array_equal(g.response_ids, 10 + g.versions % 2)
        np.testing.assert_allclose(g.logprobs, 0.0, atol=1e-5)
        seen |= set(g.versions.tolist())
    assert len(seen) > 150, "too few versions produced tokens for the test to mean much"
    assert max(len(set(g.versions.tolist())) for g in load.done) > 2


@pytest.mark.parametrize(
    ("sent", "says"),
    [(2, r"receive: actor-0 .*receive failed"), (None, "all actors answered: cut")],
    ids=["after two buckets", "after all buckets, before the commit"],
)
def test_broken_transfer_leaves_the_old_weights_serving(
    host: EngineHost, sent: int | None, says: str
) -> None:
    model = tiny_model("llama", tied=False, seed=3)
    old = next_version(host)
    pub = publisher([host.service.endpoint], lambda: model, bucket_bytes=1 << 18)
    pub.publish(old)
    pub.wait()
    buckets = list(pub._snapshot.buckets())
    assert len(buckets) > 3

    def leave_early() -> Iterator[torch.Tensor]:
        yield from buckets[:sent]
        raise RuntimeError("cut")

    pub._snapshot.buckets = leave_early
    pub._source = lambda: tiny_model("llama", tied=False, seed=4).named_parameters()
    load = Load(host, 4, 100)
    load.wait_for_tokens(8)
    pub.publish(next_version(host))
    with pytest.raises(WeightSyncError, match=says):
        pub.wait()
    check_logprobs(host, model, old)
    assert all(set(g.versions.tolist()) == {old.version} for g in load.stop())
    pub.close()  # says it no second time, and leaves
    publish_and_check(host, "llama", tied=False)  # a new one joins the same engine


def test_frozen_actor_is_named_and_goes_on_when_thawed(host: EngineHost) -> None:
    model = forced(12)
    pub = publisher([host.service.endpoint], lambda: model, timeout_s=2.0)
    old = host.engine.applied
    (process,) = host.engine.pids()  # engine core and worker in one
    os.kill(process, signal.SIGSTOP)
    try:
        started = time.monotonic()
        pub.publish(next_version(host))
        with pytest.raises(WeightSyncError, match=r"begin: actor-0 .*did not answer within"):
            pub.wait()
        assert time.monotonic() - started < 10
    finally:
        os.kill(process, signal.SIGCONT)
    pub.close()
    g = host.generate("thawed", PROMPT, 8)  # the update that never came was given up
    assert set(g.versions.tolist()) == {old.version}
    publish_and_check(host, "llama", tied=False)


def test_missing_parameter_breaks_the_engine_loudly(
    host: EngineHost, caplog: pytest.LogCaptureFixture
) -> None:
    """Last: it ends the engine of this module, whose model would be half a version."""
    model = tiny_model("llama", tied=False, seed=5)
    lacks = "model.layers.1.mlp.down_proj.weight"

    def source() -> Any:
        return ((n, p) for n, p in model.named_parameters() if n != lacks)

    specs = [s for s in metadata(model) if s.name != lacks]
    pub = publisher([host.service.endpoint], lambda: model, source=source, metadata=specs)
    waiting = host.submit(host.engine.generate(GenerationRequest("victim", PROMPT, 300, 1.0)))
    pub.publish(next_version(host))
    with pytest.raises(WeightSyncError, match=r"commit: actor-0 .*layers.1.mlp.down_proj.weight"):
        pub.wait()
    with pytest.raises(EngineError, match="no whole version"):
        waiting.result(60)
    assert "no whole version" in host.run(host.engine.died())
    pub.close()
    caplog.clear()  # vLLM's record of its death has a traceback that keeps the engine in memory
