"""What becomes of requests under way at a publication, in each mode, with a real engine on CPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.actors.in_flight import InFlight
from asyncrl.config.schema import InFlightMode
from asyncrl.protocols import Generation
from asyncrl.types import FinishReason, Version
from tests.helpers.engines import (
    EngineHost,
    HostedPublisher,
    engine_config,
    hf_logprobs,
    publisher,
    save_model,
    tiny_model,
)
from tests.weights.load import Load, check_logprobs, forced, next_version

pytestmark = pytest.mark.engine

MODES: tuple[InFlightMode, ...] = ("keep", "keep_kv", "abort", "wait")
PROMPT = tuple(5 + i % 90 for i in range(70))
"""Two whole blocks of the prefix cache: what is left there of an older version shows."""
TOKENS = 100
DRAIN_S = 60.0


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineHost]:
    """One engine for all modes; its tests publish what they need, with rising versions."""
    path = save_model(tiny_model("llama", tied=False), tmp_path_factory.mktemp("llama"))
    with EngineHost(engine_config(), path, update_timeout_s=DRAIN_S) as h:
        yield h


class Models:
    """The models of a few versions in a row, the same ones again and again."""

    def __init__(self, models: list[torch.nn.Module]) -> None:
        self._models = models
        self.published = models[0]

    def of(self, version: int) -> torch.nn.Module:
        return self._models[version % len(self._models)]

    def publish(self, host: EngineHost, pub: HostedPublisher) -> Version:
        version = next_version(host)
        self.published = self.of(version.version)
        pub.publish(version)
        pub.wait()
        assert pub.take_events() == []
        return version


def different_models() -> Models:
    return Models([tiny_model("llama", tied=False, seed=seed) for seed in (1, 2, 3)])


def under_load(
    host: EngineHost,
    mode: InFlightMode,
    publications: int,
    models: Models,
    *,
    drain_s: float = DRAIN_S,
    check: bool = True,
    relays: Path | None = None,
) -> list[Generation]:
    """Publish under load; after each the engine equals the learner. All that was generated."""
    host.engine.in_flight = InFlight(mode, drain_s)
    pub = publisher([host], lambda: models.published, drain_s=DRAIN_S, relays=relays)
    models.publish(host, pub)
    load = Load(host, 4, TOKENS, PROMPT)
    for _ in range(publications):
        load.wait_for_tokens(64)
        version = models.publish(host, pub)
        if check:
            check_logprobs(host, models.of(version.version), version, PROMPT)
    done = load.stop()
    pub.close()
    assert len(done) == len(load.issued), "a request was lost, or answered twice"
    assert host.engine._llm.get_num_unfinished_requests() == 0
    for g in done:
        assert len(g.response_ids) == TOKENS or g.finish_reason is FinishReason.STOP
        assert len(g.versions) == len(g.response_ids) == len(g.logprobs) <= TOKENS
        assert np.all(np.diff(g.versions) >= 0)
        assert g.version_dispatch.version <= g.versions[0]
        assert g.version_finish.version == g.versions[-1]
    return done


def distances(g: Generation, models: Models) -> np.ndarray:
    """[T] between each token's log-probability and that of the version which it is stamped with."""
    found = np.zeros(len(g.versions))
    for version in set(g.versions.tolist()):
        expected = hf_logprobs(models.of(version), list(PROMPT), g.response_ids.tolist())
        mine = g.versions == version
        found[mine] = np.abs(g.logprobs - expected.numpy())[mine]
    return found


def versions_in(g: Generation) -> int:
    return len(set(g.versions.tolist()))


def check_mode(
    host: EngineHost, mode: InFlightMode, publications: int, relays: Path | None = None
) -> None:
    models = different_models()
    done = under_load(host, mode, publications, models, relays=relays)
    spanning = [g for g in done if versions_in(g) > 1]
    mixed = [g for g in done if g.kv_mixed]
    for g in done:
        if not g.kv_mixed:
            np.testing.assert_allclose(distances(g, models), 0.0, atol=1e-4)
    counts = host.engine.metrics()
    assert counts["actor/drain_timeouts"] == 0
    assert (counts["actor/resubmitted"] >= publications) == (mode == "abort")
    if mode == "wait":
        assert not spanning, "a request ran on over a publication"
    else:
        assert len(spanning) >= publications / 4, "too few requests met a publication"
    if mode == "keep_kv":
        assert all(g.kv_mixed for g in spanning)
        assert max(distances(g, models).max() for g in mixed) > 0.01, "nothing was mixed"
    else:
        assert not mixed


@pytest.mark.parametrize("mode", MODES)
def test_each_token_is_of_the_weights_that_it_is_stamped_with(
    host: EngineHost, mode: InFlightMode
) -> None:
    check_mode(host, mode, publications=4)


@pytest.mark.parametrize("mode", MODES)
def test_what_a_relay_offers_is_stamped_as_exactly(
    host: EngineHost, mode: InFlightMode, tmp_path: Path
) -> None:
    check_mode(host, mode, publications=2, relays=tmp_path)
    assert host.not_loaded == []


def test_stamps_of_kept_keys_and_values_change_with_the_weights(host: EngineHost) -> None:
    models = Models([forced(10), forced(11)])
    done = under_load(host, "keep_kv", 6, models, check=False)
    for g in done:
        np.testing.assert_array_equal(g.response_ids, 10 + g.versions % 2)
    assert max(map(versions_in, done)) > 1


def test_requests_that_outlast_the_deadline_go_on_with_the_new_weights(
    host: EngineHost, caplog: pytest.LogCaptureFixture
) -> None:
    models = different_models()
    done = under_load(host, "wait", 1, models, drain_s=0.0)
    assert any(versions_in(g) == 2 for g in done)
    for g in done:
        assert not g.kv_mixed
        np.testing.assert_allclose(distances(g, models), 0.0, atol=1e-4)
    assert host.engine.metrics()["actor/drain_timeouts"] >= 1
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any("weights.timeout_s" in w and "weights.in_flight=keep" in w for w in warnings)


@pytest.mark.soak
@pytest.mark.parametrize("strategy", ["broadcast", "relay"])
@pytest.mark.parametrize("mode", MODES)
def test_soak_fifty_publications(
    host: EngineHost, mode: InFlightMode, strategy: str, tmp_path: Path
) -> None:
    check_mode(host, mode, publications=50, relays=tmp_path if strategy == "relay" else None)
