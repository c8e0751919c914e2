"""The learner's worker without a model: the version it trains at, its records, its end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncrl.config.learning import LearnerConfig
from asyncrl.config.schema import Config
from asyncrl.errors import AsyncRLError
from asyncrl.learner import records as records_module
from asyncrl.learner import worker as worker_module
from asyncrl.learner.diagnostics import manifest_metrics, token_metrics
from asyncrl.learner.microbatch import COLUMNS
from asyncrl.learner.records import Records
from asyncrl.learner.step import StepResult
from asyncrl.learner.worker import LearnerWorker
from asyncrl.roles import RoleSettings
from asyncrl.types import Version
from tests.helpers.metric_names import undocumented
from tests.helpers.tiny_model import make_batch, make_part

TIMINGS = {"sync/blocked_s": 0.1, "sync/total_s": 2.0, "sync/pause_s": 1.0,
           "sync/transfer_s": 0.5, "sync/bytes": 12.0}  # fmt: skip


@dataclass
class Fake:
    """Whatever the worker calls."""

    records: list[dict[str, Any]] = field(default_factory=list)
    trained_at: list[Version] = field(default_factory=list)
    timings: list[dict[str, float]] = field(default_factory=lambda: [TIMINGS])
    closed: list[str] = field(default_factory=list)
    broken: bool = False

    def train(self, part: Any, version: Version) -> StepResult:
        self.trained_at.append(version)
        return StepResult({"loss/policy": 0.5}, {}, (), samples=4, tokens=40)

    def emit(self, values: dict[str, float], **fields: Any) -> None:
        self.records.append(values)

    def take_timings(self) -> dict[str, float]:
        return self.timings.pop() if self.timings else {}

    def take_events(self) -> list[dict[str, Any]]:
        return []

    def close(self) -> None:
        self.closed.append("close")
        if self.broken:
            raise OSError("cannot close")

    def metrics(self) -> dict[str, float]:
        return {}

    def commit(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def add(self, *args: Any) -> None: ...
    def flush(self) -> None: ...


def make_worker(fake: Fake, **learner: Any) -> LearnerWorker:
    settings = RoleSettings(
        role="learner", rank=0, world=1, model_path="", device="cpu", threads=1,
        weight_backend="gloo", run_id="r", hub_endpoint="", run_dir="",
    )  # fmt: skip
    worker: Any = LearnerWorker(Config(learner=LearnerConfig(**learner)), settings)
    worker.trainer = worker.client = worker.hub = worker.ids = worker.publisher = fake
    worker.keeper = SimpleNamespace(
        trained=lambda *_, **__: None, take_timings=dict, close=fake.close
    )  # fmt: skip
    worker.records = Records(worker.hub, 0, worker.shares, lambda: (worker.step, worker.version))
    worker._pulled_s = 0.0
    made: LearnerWorker = worker
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=0.0)
    for module in (worker_module, records_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def test_a_batch_is_trained_at_its_version_or_not_at_all() -> None:
    fake = Fake()
    worker = make_worker(fake, batches_per_publication=2)
    batch = make_batch(1, 2, 2)
    worker._train(make_part(batch, k=1))
    worker._train(make_part(batch, k=2))
    with pytest.raises(
        AsyncRLError, match=r"batch 3 at version 0:0, by definition .* at version 1"
    ):
        worker._train(make_part(batch, k=3))
    assert fake.trained_at == [Version(0, 0)] * 2


def test_rates_count_waiting_and_publications_are_told_once(clock: SimpleNamespace) -> None:
    fake = Fake()
    worker = make_worker(fake, batches_per_publication=2)
    batch = make_batch(1, 2, 2)
    for k, at in ((1, 8.0), (2, 10.0)):
        clock.s = at
        worker._train(make_part(batch, k=k))
    first, second = fake.records
    assert (first["throughput/samples_s"], first["throughput/train_tok_s"]) == (0.5, 5.0)
    assert (second["throughput/samples_s"], second["throughput/train_tok_s"]) == (2.0, 20.0)
    assert (first["throughput/batch_s"], second["throughput/batch_s"]) == (8.0, 2.0)
    assert TIMINGS.items() <= first.items()
    assert not any(name.startswith("sync/") for name in second)


def test_groups_that_teach_nothing_are_counted() -> None:
    rewards = [0.5, 0.5, 0.0, 1.0, 1.0, 1.0, 0.25]  # three groups of two, one of one
    headers = [t.header for t in make_batch(1, 4, 2)][:7]
    headers = [replace(h, reward=r) for h, r in zip(headers, rewards, strict=True)]
    metrics, _ = manifest_metrics(headers, Version(0, 0), 1)
    assert metrics["reward/zero_std_frac"] == 3 / 4


def test_every_part_is_closed_whatever_fails() -> None:
    fake = Fake(broken=True)
    make_worker(fake).close()
    assert len(fake.closed) == 5
    unfinished = LearnerWorker(Config(), make_worker(fake).settings)
    unfinished.close()  # nothing was set up


def test_the_page_has_every_metric_of_the_learner() -> None:
    """The step's own names are checked with the step (test_step)."""
    fake = Fake()
    worker = make_worker(fake)
    batch = make_batch(1, 2, 2)
    worker._train(make_part(batch))
    names = set(fake.records[0])
    headers = [t.header for t in batch]
    mixed = [replace(headers[0], kv_mixed=True), *headers[1:]]
    of_headers, hist = manifest_metrics(mixed, Version(0, 1), 1)
    assert of_headers["rollout/kv_mixed_frac"] == 1 / len(headers)
    assert "rollout/kv_mixed_frac" not in manifest_metrics(headers, Version(0, 1), 1)[0]
    rows = [
        [-1.0, -1.1, 2.0, 0, 1, 0, 0.9, 1, 0, -1.2, 0.5, 1.0, 2.0],
        [-2.0, -1.0, 2.0, 3, 0, 0, 2.0, 0, 1, -1.0, 0.1, 0.0, -1.0],
    ]
    columns = np.array(rows, np.float32).T
    of_tokens, token_hist = token_metrics(dict(zip(COLUMNS, columns, strict=True)))
    assert {"kl/ref_k3", "value/explained_variance", "is/mask_frac"} <= of_tokens.keys()
    names |= of_headers.keys() | of_tokens.keys()
    names |= {f"{name}/mean" for name in hist | token_hist}  # a histogram has its statistics too
    assert len(names) > 60
    assert undocumented(names, ("Every learner", "Learner")) == []
