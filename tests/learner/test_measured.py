"""Importance weights as they are told, against the same from recorded samples and saved weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.learning import OptimConfig
from asyncrl.config.schema import EngineConfig
from asyncrl.learner.step import Trainer
from asyncrl.recording import decode_sample, encode_sample
from asyncrl.types import Trajectory, Version
from asyncrl.wire import pack_trajectory, unpack_trajectory
from tests.helpers.tiny_model import make_batch, make_part, save_tiny_model
from tests.learner.trained import learner_config

pytestmark = pytest.mark.usefixtures("one_rank")


def loaded(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def logprobs(policy: Any, t: Trajectory) -> np.ndarray[Any, Any]:
    """Of each response token, by a plain forward pass in float32."""
    ids = torch.tensor(np.concatenate([t.prompt_ids, t.response_ids])[None].astype(np.int64))
    with torch.no_grad():
        logits = policy(ids).logits[0, len(t.prompt_ids) - 1 : -1] / t.header.temperature
    rows = torch.log_softmax(logits.double(), -1)
    chosen: np.ndarray[Any, Any] = rows.gather(1, ids[0, len(t.prompt_ids) :, None])[:, 0].numpy()
    return chosen


def recorded(batch: list[Trajectory]) -> list[Trajectory]:
    """As a recording gives them back."""
    return [unpack_trajectory(decode_sample(encode_sample(pack_trajectory(t)))) for t in batch]


def test_ess_and_ratios_are_those_of_the_recorded_tokens(tmp_path: Path) -> None:
    start = save_tiny_model(tmp_path / "v0")
    config = learner_config(optim=OptimConfig(lr=2e-2))
    config = config.model_copy(update={"engine": EngineConfig(dtype="float32")})
    trainer = Trainer(config, start, rank=0, world=1, device="cpu")
    first, second = make_batch(1, 4, 4), make_batch(2, 4, 4)
    version_0 = loaded(start)
    for t in (*first, *second):  # all sampled from version 0
        t.behaviour_logprobs[:] = logprobs(version_0, t)
    on_policy = trainer.train(make_part(first), Version(0, 0)).metrics
    assert on_policy["is/ess_frac"] == pytest.approx(1.0, abs=1e-4)
    trainer.save_hf(tmp_path / "v1")
    told = trainer.train(make_part(second, k=2), Version(0, 1)).metrics
    mine, version_1 = recorded(second), loaded(tmp_path / "v1")
    w = np.concatenate([
        np.exp(logprobs(version_1, t) - t.behaviour_logprobs.astype(np.float64))
        for t in mine
    ])  # fmt: skip
    assert told["is/ess_frac"] == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()), rel=1e-3)
    assert told["is/ess_frac"] < 0.97, "the policy has moved"
    assert told["is/ratio_raw/mean"] == pytest.approx(w.mean(), rel=1e-3)
    assert told["is/ratio_raw/p95"] == pytest.approx(np.quantile(w, 0.95), rel=1e-3)
    assert told["is/ratio_raw/max"] == pytest.approx(w.max(), rel=1e-3)
    assert told["is/chi2"] == pytest.approx((w**2).mean() - 1, rel=1e-2)
    assert told["kl/drift_k3"] == pytest.approx((w - 1 - np.log(w)).mean(), rel=1e-2)
    assert told["is/by_staleness/1/ess_frac"] == told["is/ess_frac"]
    assert told["loss/tokens"] == len(w)
    assert told["loss/lr"] == 2e-2 * told["loss/lr_factor"]
