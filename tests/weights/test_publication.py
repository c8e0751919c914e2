"""Publications to real vLLM engines on CPU: same numbers, exact stamps, failures contained."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.config.learning import LoraConfig
from asyncrl.errors import EngineError
from asyncrl.types import FinishReason, Version
from tests.helpers.engines import (
    EngineHost,
    engine_config,
    metadata,
    publisher,
    save_model,
    tiny_model,
)
from tests.weights.adapting import adapter_learner
from tests.weights.load import Load, check_logprobs, forced, next_version

pytestmark = pytest.mark.engine

UPDATE_TIMEOUT_S = 6.0


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHost]:
    """An untied Llama; its tests publish what they need, with rising versions."""
    path = save_model(forced(10), tmp_path_factory.mktemp("llama"))
    with EngineHost(engine_config(), path, update_timeout_s=UPDATE_TIMEOUT_S) as h:
        yield h


def publish_and_check(
    host: EngineHost, kind: str, *, tied: bool, relays: Path | None = None
) -> None:
    """Two publications with requests in flight; then the engine's numbers are the new model's."""
    models = [tiny_model(kind, tied=tied, seed=seed) for seed in (1, 2)]
    current = [models[0]]
    pub = publisher([host], lambda: current[0], relays=relays)
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
        # All linear layers, or part of one that vLLM has fused and another.
        targets = None if kind == "llama" else ("q_proj", "mlp.down_proj")
        with adapter_learner(host, path, LoraConfig(rank=2, targets=targets)) as learner:
            if kind == "llama":
                learner.check_without_the_base(path)
            learner.check(publications=3)
            if kind == "llama":
                learner.check_a_joiner()
                learner.check_a_damaged_copy()
            assert learner.share < (0.1 if targets is None else 0.02)
        publish_and_check(host, kind, tied=tied)
        publish_and_check(host, kind, tied=tied, relays=tmp_path)
        with adapter_learner(host, path, LoraConfig(rank=2), relays=tmp_path) as learner:
            learner.check(publications=1)
        assert host.not_loaded == []


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("qwen3", False)])
def test_soak_fifty_publications_of_adapters(kind: str, tied: bool, tmp_path: Path) -> None:
    path = save_model(tiny_model(kind, tied=tied), tmp_path)
    with (
        EngineHost(engine_config(), path) as host,
        adapter_learner(host, path, LoraConfig(rank=4)) as learner,
    ):
        learner.check(publications=50)


def test_engine_equals_new_weights_untied_llama(host: EngineHost) -> None:
    publish_and_check(host, "llama", tied=False)


def test_every_stamp_matches_its_token_over_200_updates(host: EngineHost) -> None:
    models = {0: forced(10), 1: forced(11)}
    current = [models[0]]
    pub = publisher([host], lambda: current[0])

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


def cut_after(pub: Any, sent: int | None) -> Any:
    """Let the sender fail after so many buckets; returns how to mend it."""
    buckets = list(pub._snapshot.buckets())
    assert len(buckets) > 3

    def leave_early() -> Iterator[torch.Tensor]:
        yield from buckets[:sent]
        raise RuntimeError("cut")

    pub._snapshot.buckets = leave_early
    return lambda: vars(pub._snapshot).pop("buckets")


def test_broken_transfer_leaves_the_old_weights_serving(host: EngineHost) -> None:
    models = [tiny_model("llama", tied=False, seed=seed) for seed in (3, 4)]
    current = [models[0]]
    old = next_version(host)
    pub = publisher([host], lambda: current[0], bucket_bytes=1 << 18)
    pub.publish(old)
    pub.wait()
    mend = cut_after(pub, 2)
    current[0] = models[1]
    load = Load(host, 4, 100)
    load.wait_for_tokens(8)
    pub.publish(new := next_version(host))
    pub.wait()
    cut = pub.take_events()[0]
    assert (cut["event"], cut["actor"], cut["phase"]) == ("weights_cut_out", "actor-0", "receive")
    assert "receive failed" in cut["reason"]
    check_logprobs(host, models[0], old)
    assert all(set(g.versions.tolist()) == {old.version} for g in load.stop())
    mend()
    assert pub.finish(60.0) == []  # it announces itself, and gets what it lacks
    check_logprobs(host, models[1], new)
    pub.close()


def test_damaged_bytes_are_never_loaded(host: EngineHost) -> None:
    models = [tiny_model("llama", tied=False, seed=seed) for seed in (10, 11)]
    current = [models[0]]
    old = next_version(host)
    pub = publisher([host], lambda: current[0], bucket_bytes=1 << 18)
    pub.publish(old)
    pub.wait()
    buckets = pub._snapshot.buckets

    def damaged() -> Iterator[torch.Tensor]:
        for bucket in buckets():
            sent = bucket.clone()
            sent.view(torch.uint8)[-1] ^= 1
            yield sent

    pub._snapshot.buckets = damaged  # type: ignore[method-assign]
    current[0] = models[1]
    load = Load(host, 4, 100)
    load.wait_for_tokens(8)
    pub.publish(new := next_version(host))
    pub.wait()
    assert [e["event"] for e in pub.take_events()] == ["weights_damaged"] * 3 + ["weights_cut_out"]
    assert pub.take_timings()["sync/checksum_fail"] == 3
    check_logprobs(host, models[0], old)
    assert all(set(g.versions.tolist()) == {old.version} for g in load.stop())
    del pub._snapshot.buckets
    assert pub.finish(60.0) == []
    check_logprobs(host, models[1], new)
    pub.close()


def test_collective_that_fails_when_all_have_all_is_no_failure(host: EngineHost) -> None:
    model = tiny_model("llama", tied=False, seed=6)
    pub = publisher([host], lambda: model, bucket_bytes=1 << 18)
    cut_after(pub, None)
    pub.publish(version := next_version(host))
    pub.wait()
    assert pub.take_events() == []
    check_logprobs(host, model, version)
    pub.close()
    publish_and_check(host, "llama", tied=False)


def test_frozen_engine_is_named_and_gets_the_version_when_thawed(host: EngineHost) -> None:
    model = tiny_model("llama", tied=False, seed=7)
    pub = publisher([host], lambda: model, timeout_s=8.0)  # 2 s to pause
    (process,) = host.engine.pids()  # engine core and worker in one
    pub.publish(next_version(host))
    pub.wait()
    os.kill(process, signal.SIGSTOP)
    try:
        started = time.monotonic()
        pub.publish(version := next_version(host))
        pub.wait()
        assert time.monotonic() - started < 8
        (cut,) = pub.take_events()
        assert (cut["actor"], cut["phase"]) == ("actor-0", "begin")
        assert "did not answer within" in cut["reason"]
    finally:
        os.kill(process, signal.SIGCONT)
    assert pub.finish(60.0) == []
    check_logprobs(host, model, version)
    pub.close()


def test_late_joiner_and_survivor_of_a_death_equal_the_learner(
    host: EngineHost, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # vLLM's record of the death has a traceback, which would keep the engine in memory.
    caplog.set_level(logging.CRITICAL, "vllm.v1.engine.async_llm")
    models = [tiny_model("llama", tied=False, seed=seed) for seed in (8, 9)]
    current = [models[0]]
    pub = publisher([host], lambda: current[0], bucket_bytes=1 << 18)
    pub.publish(version := next_version(host))
    pub.wait()
    with EngineHost(engine_config(), save_model(forced(10), tmp_path)) as joiner:
        pub.add(joiner)
        assert pub.members.wait_for(2, 30)
        assert pub.finish(60.0) == []
        check_logprobs(joiner, models[0], version)
        buckets = list(pub._snapshot.buckets())

        def kill_midway() -> Iterator[torch.Tensor]:
            del pub._snapshot.buckets
            yield from buckets[:2]
            for process in joiner.engine.pids():
                os.kill(process, signal.SIGKILL)
            yield from buckets[2:]

        pub._snapshot.buckets = kill_midway
        current[0] = models[1]
        load = Load(host, 4, 100)
        load.wait_for_tokens(8)
        pub.take_events()
        started = time.monotonic()
        pub.publish(version := next_version(host))
        pub.wait()
        assert time.monotonic() - started < 7, "the death was not noticed before a deadline"
        check_logprobs(host, models[1], version)
        cut = pub.take_events()[0]
        assert (cut["actor"], cut["phase"]) == ("actor-1", "receive")
        assert pub.take_timings()["sync/retries"] == 1
        assert all(g.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for g in load.stop())
        pub.close()


def test_missing_parameter_breaks_the_engine_loudly(
    host: EngineHost, caplog: pytest.LogCaptureFixture
) -> None:
    """Last: it ends the engine of this module, whose model would be half a version."""
    model = tiny_model("llama", tied=False, seed=5)
    lacks = "model.layers.1.mlp.down_proj.weight"

    def source() -> Any:
        return ((n, p) for n, p in model.named_parameters() if n != lacks)

    specs = [s for s in metadata(model) if s.name != lacks]
    pub = publisher([host], lambda: model, source=source, metadata=specs)
    load = Load(host, 1, 200)
    load.wait_for_tokens(8)
    pub.publish(next_version(host))
    pub.wait()
    cut = pub.take_events()[0]
    assert (cut["actor"], cut["phase"]) == ("actor-0", "commit")
    assert "layers.1.mlp.down_proj.weight" in cut["reason"]
    with pytest.raises(EngineError, match="no whole version"):
        load.stop()
    assert "no whole version" in host.run(host.engine.died())
    pub.close()
    caplog.clear()  # vLLM's record of its death has a traceback that keeps the engine in memory
