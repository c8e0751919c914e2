"""One training step on tiny models: independence of the partition, corner cases, metrics."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.learning import OptimConfig
from asyncrl.errors import AsyncRLError, ConfigError, ModelError, StalenessError
from asyncrl.learner.step import Trainer
from asyncrl.types import Trajectory, Version
from tests.helpers.metric_names import undocumented
from tests.helpers.tiny_model import VOCAB, make_batch, make_part, save_tiny_model
from tests.learner.trained import (
    assert_same_gradient,
    capture,
    learner_config,
    partition_batch,
)

pytestmark = pytest.mark.usefixtures("one_rank")

V2 = Version(0, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


# --- against a plain loop ------------------------------------------------------------------


def _reference_gradient(
    model: Path, batch: list[Trajectory], aggregation: str, cap: float = 2.0
) -> tuple[float, dict[str, np.ndarray[Any, Any]]]:
    """Loss and gradient by one Hugging Face forward per sample and the formulas as written."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    rewards: dict[Any, list[float]] = {}
    for t in batch:
        rewards.setdefault(t.header.id.group, []).append(t.header.reward)
    finite = [np.isfinite(t.behaviour_logprobs) & (t.loss_mask == 1) for t in batch]
    tokens, sequences = sum(f.sum() for f in finite), sum(f.any() for f in finite)
    total = torch.zeros(())
    for t, counted in zip(batch, finite, strict=True):
        group = np.array(rewards[t.header.id.group])
        advantage = (t.header.reward - group.mean()) / (group.std(ddof=1) + 1e-6)
        ids = torch.tensor(np.concatenate([t.prompt_ids, t.response_ids])[None].astype(np.int64))
        logits = policy(ids).logits[0, len(t.prompt_ids) - 1 : -1] / t.header.temperature
        logp = torch.log_softmax(logits, -1)[
            torch.arange(len(t.response_ids)), torch.tensor(t.response_ids.astype(np.int64))
        ]
        for k in np.flatnonzero(counted):
            w = min(cap, math.exp(logp[k].item() - t.behaviour_logprobs[k]))
            c = 1 / tokens if aggregation == "token-mean" else 1 / (sequences * counted.sum())
            total = total - c * w * advantage * (logp[k] - logp[k].detach()).exp()
    total.backward()  # type: ignore[no-untyped-call]
    grads = {f"grad/{n}": p.grad.numpy() for n, p in policy.named_parameters()}
    return total.item(), grads


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_loss_and_gradient_equal_a_plain_loop(model: Path, aggregation: str) -> None:
    batch = partition_batch()
    got = capture(learner_config({"aggregation": aggregation}), model, batch)
    loss, grads = _reference_gradient(model, batch, aggregation)
    assert got.metrics["loss/policy"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
    assert_same_gradient({k: v for k, v in got.arrays.items() if k in grads}, grads, rtol=2e-5)


# --- corner cases ------------------------------------------------------------------------------


def _with_own_logprobs(model: Path, batch: list[Trajectory]) -> list[Trajectory]:
    """The batch as if the model itself had sampled it."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    out = []
    for t in batch:
        ids = torch.tensor(np.concatenate([t.prompt_ids, t.response_ids])[None].astype(np.int64))
        with torch.no_grad():
            logits = policy(ids).logits[0, len(t.prompt_ids) - 1 : -1]
        logp = torch.log_softmax(logits, -1).gather(1, ids[0, len(t.prompt_ids) :, None])
        out.append(replace(t, behaviour_logprobs=logp[:, 0].numpy()))
    return out


def test_on_policy_data_has_weight_one(model: Path) -> None:
    batch = _with_own_logprobs(model, make_batch(1, groups=4, group_size=4))
    metrics = capture(learner_config(), model, batch).metrics
    assert metrics["is/ess_frac"] == pytest.approx(1, abs=1e-5)
    assert metrics["is/ratio_raw/max"] == pytest.approx(1, abs=1e-4)
    assert metrics["kl/mismatch_k3"] == pytest.approx(0, abs=1e-6)
    assert "kl/drift_k3" not in metrics
    assert metrics["is/by_staleness/0/count"] == metrics["loss/tokens"]


def test_a_wrong_temperature_shows_in_the_mismatch(model: Path) -> None:
    batch = _with_own_logprobs(model, make_batch(1, groups=4, group_size=4))
    hot = [replace(t, header=replace(t.header, temperature=1.5)) for t in batch]
    assert capture(learner_config(), model, hot).metrics["kl/mismatch_k3"] > 1e-3


def test_mismatch_and_drift_are_told_apart(model: Path) -> None:
    old = make_batch(1, groups=2, group_size=4, version=Version(0, 1))
    new = [
        replace(t, header=replace(t.header, id=t.header.id._replace(index=9)))
        for t in make_batch(2, groups=1, group_size=4, version=V2)
    ]
    result = capture(learner_config(), model, old + new, version=V2).result
    assert result.metrics["kl/drift_k3"] != result.metrics["kl/mismatch_k3"]
    assert result.metrics["staleness/head/max"] == 1
    assert result.hist["staleness/head"] == {"edges": [0.0, 1.0, 2.0], "counts": [4.0, 8.0]}
    counts = [result.metrics[f"is/by_staleness/{k}/count"] for k in (0, 1)]
    assert sum(counts) == result.metrics["loss/tokens"]


def test_stale_samples_are_dropped_or_raise(model: Path) -> None:
    batch = make_batch(4, groups=3, group_size=4, version=V2)
    late = replace(batch[1], header=replace(batch[1].header, version_min=Version(0, 0)))
    with_late = [batch[0], late, *batch[2:]]
    config = learner_config()
    got = capture(config, model, with_late, version=Version(0, 3))
    assert got.result.dropped == (late.header.id,)
    assert got.metrics["staleness/violations"] == 1
    assert got.result.samples == 11
    want = capture(config, model, [batch[0], *batch[2:]], version=Version(0, 3))
    assert_same_gradient(got.arrays, want.arrays)
    strict = config.model_copy(
        update={"buffer": config.buffer.model_copy(update={"on_stale": "raise"})}
    )
    with pytest.raises(StalenessError, match="max_staleness=2"):
        capture(strict, model, with_late, version=Version(0, 3))


def test_a_batch_with_nothing_to_train_leaves_the_weights_alone(model: Path) -> None:
    config = learner_config()
    old = capture(config, model, make_batch(4, 2, 2), version=Version(0, 9))
    equal = [
        replace(t, header=replace(t.header, reward=1.0)) for t in make_batch(4, 2, 2, version=V2)
    ]
    same = capture(config, model, equal, version=V2)
    before = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for captured in (old, same):
        for name, p in before.named_parameters():
            np.testing.assert_array_equal(captured.arrays[f"param/{name}"], p.detach().numpy())
    assert len(old.result.dropped) == 4
    assert "loss/policy" not in old.metrics
    assert same.metrics["loss/policy"] == 0
    assert same.metrics["loss/entropy"] > 0  # looked at without a backward pass


def test_mostly_missing_logprobs_are_refused(model: Path) -> None:
    batch = make_batch(6, groups=2, group_size=4)
    for t in batch[:6]:
        t.behaviour_logprobs[:] = np.nan
    with pytest.raises(AsyncRLError, match="behaviour log-probabilities of the batch are not"):
        capture(learner_config(), model, batch)


@pytest.mark.parametrize("field", ["prompt_ids", "response_ids"])
@pytest.mark.parametrize("odd", [-1, VOCAB])
def test_a_token_that_the_model_lacks_is_refused(model: Path, field: str, odd: int) -> None:
    batch = make_batch(6, groups=2, group_size=2)
    getattr(batch[1], field)[0] = odd
    with pytest.raises(ModelError, match=rf"token id {odd}, but .* 0 to {VOCAB - 1}"):
        capture(learner_config(), model, batch)


def test_impossible_log_probabilities_count_as_missing(model: Path) -> None:
    batch = make_batch(6, groups=2, group_size=4)
    batch[0].behaviour_logprobs[0] = 0.5
    batch[1].behaviour_logprobs[0] = 0.001  # the engine's rounding
    missing = capture(learner_config(), model, batch).metrics["is/missing"]
    assert missing == 1


def test_a_sample_that_does_not_fit_is_refused(model: Path) -> None:
    batch = make_batch(6, groups=1, group_size=2, prompt=(40, 41))
    with pytest.raises(ConfigError, match="raise it to"):
        capture(learner_config(max_tokens_per_microbatch=40), model, batch)


def test_a_broken_gradient_is_skipped_and_counted(model: Path) -> None:
    trainer = Trainer(learner_config(), model, rank=0, world=1, device="cpu")
    with torch.no_grad():
        next(iter(trainer.policy.trainable.policy.values())).to_local()[5] = math.nan
    before = {n: p.clone() for n, p in trainer.full_parameters(torch.float32)}
    result = trainer.train(make_part(make_batch(4, 2, 4)), Version(0, 0))
    assert result.skipped == 1
    assert result.metrics["loss/skipped"] == 1
    assert all(math.isfinite(v) for v in result.metrics.values())
    for name, p in trainer.full_parameters(torch.float32):
        np.testing.assert_array_equal(p.numpy(), before[name].numpy())


@pytest.mark.parametrize("epochs", [1, 3])
def test_training_raises_the_likelihood_of_what_was_rewarded(model: Path, epochs: int) -> None:
    """bf16, several batches: the policy moves towards rewarded answers, ratios stay sane."""
    config = learner_config(dtype="bfloat16", epochs=epochs, optim=OptimConfig(lr=3e-3))
    trainer = Trainer(config, model, rank=0, world=1, device="cpu")
    batch = _with_own_logprobs(model, make_batch(8, groups=4, group_size=6))
    first = trainer.train(make_part(batch), Version(0, 0)).metrics
    for _ in range(4):
        last = trainer.train(make_part(batch), Version(0, 0)).metrics
    assert first["is/ratio_raw/mean"] == pytest.approx(1, abs=0.1)
    assert last["loss/policy"] < first["loss/policy"] - 0.05
    assert undocumented(last) == []
    assert ("loss/clip_frac" in last) == (epochs > 1)
    if epochs > 1:
        assert last["loss/clip_frac"] > 0


@pytest.mark.parametrize("tied", [True, False])
def test_the_saved_folder_is_the_trained_policy(tmp_path: Path, tied: bool) -> None:
    folder = save_tiny_model(tmp_path / "in", tied=tied)
    trainer = Trainer(learner_config(), folder, rank=0, world=1, device="cpu")
    trainer.train(make_part(make_batch(4, 2, 4)), Version(0, 0))
    names = [n for n, _ in trainer.full_parameters(torch.bfloat16)]
    assert ("lm_head.weight" in names) != tied
    stale = tmp_path / "out.partial" / "stale"  # of a process that was killed
    stale.mkdir(parents=True)
    trainer.policy.save_hf(tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]
    assert not (tmp_path / "out" / "stale").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    state = loaded.state_dict()
    assert type(loaded).__name__ == "LlamaForCausalLM"
    assert loaded.dtype == torch.float32
    for name, p in trainer.full_parameters(torch.float32):
        assert torch.equal(state[name], p)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    (tmp_path / "out" / "old").touch()  # of the run before it went on
    with pytest.raises(OSError, match="not empty"):
        trainer.save_hf(tmp_path / "out")
    trainer.save_hf(tmp_path / "out", replace=True)
    assert not (tmp_path / "out" / "old").exists()


def test_a_save_that_fails_leaves_no_half_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(learner_config(), model, rank=0, world=1, device="cpu")

    def cut(_: Any, folder: Path, **kwargs: Any) -> None:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", cut)
    with pytest.raises(OSError, match="disk full"):
        trainer.save_hf(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_parameters_are_the_float32_ones_after_passes_without_gradient(model: Path) -> None:
    """No gathered bf16 copy may stand in for the weights: publication would lose their tail."""
    trainer = Trainer(learner_config(dtype="bfloat16"), model, rank=0, world=1, device="cpu")
    before = {n: p.clone() for n, p in trainer.full_parameters(torch.float32)}
    equal = [replace(t, header=replace(t.header, reward=1.0)) for t in make_batch(4, 2, 2)]
    trainer.train(make_part(equal), Version(0, 0))
    for name, p in trainer.full_parameters(torch.float32):
        assert torch.equal(p, before[name]), name
