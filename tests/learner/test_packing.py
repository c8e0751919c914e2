"""Packs hold every loss token once, without padding, and give what single sequences give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from asyncrl.errors import ConfigError, ModelError
from asyncrl.learner.packing import Pack, dummy_pack, make_packs
from asyncrl.learner.policy import attention
from asyncrl.learner.policy.loading import load_causal_lm
from asyncrl.types import Trajectory
from tests.helpers.tiny_model import make_batch, make_trajectory, save_tiny_model
from tests.learner.packed import load_packed, scores_of


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    groups=st.integers(1, 6),
    group_size=st.integers(1, 5),
    prefix=st.sampled_from([0, 5, 12]),
    extra=st.integers(0, 60),
    share=st.booleans(),
)
def test_pack_properties(
    seed: int, groups: int, group_size: int, prefix: int, extra: int, share: bool
) -> None:
    batch = make_batch(seed, groups, group_size, prefix=prefix)
    rng = np.random.default_rng(seed)
    batch = [
        replace(t, loss_mask=(rng.random(len(t.response_ids)) < 0.8).astype(np.uint8))
        for t in batch
    ]
    limit = max(t.header.tokens for t in batch) + extra
    packs = make_packs(batch, range(len(batch)), limit, share)
    again = make_packs(batch, range(len(batch)), limit, share)
    assert [p.input_ids.tolist() for p in packs] == [p.input_ids.tolist() for p in again]
    seen = []
    for pack in packs:
        assert len(pack.input_ids) == len(pack.position_ids) <= limit
        assert sum(s.tokens for s in pack.segments) == len(pack.input_ids)  # no padding
        assert [s.start for s in pack.segments] == _starts(pack)
        assert np.array_equal(pack.target, _tokens(batch, pack, "response_ids"))
        mu = _tokens(batch, pack, "behaviour_logprobs")
        assert np.array_equal(pack.behaviour_logprobs, mu)
        _check_predictors(batch, pack)
        seen += list(zip(pack.sample.tolist(), pack.offset.tolist(), strict=True))
    expected = [(i, o) for i, t in enumerate(batch) for o in np.flatnonzero(t.loss_mask).tolist()]
    assert sorted(seen) == expected


def _starts(pack: Pack) -> list[int]:
    return [0, *np.cumsum([s.tokens for s in pack.segments]).tolist()[:-1]]


def _tokens(batch: list[Trajectory], pack: Pack, name: str) -> np.ndarray[Any, Any]:
    pairs = zip(pack.sample, pack.offset, strict=True)
    return np.array([getattr(batch[i], name)[o] for i, o in pairs])


def _check_predictors(batch: list[Trajectory], pack: Pack) -> None:
    """The predicting position holds the token before, at its place in the sequence."""
    for i, o, r in zip(pack.sample, pack.offset, pack.row, strict=True):
        t, at = batch[i], pack.rows[r]
        sequence = [*t.prompt_ids, *t.response_ids]
        place = len(t.prompt_ids) + o - 1
        assert pack.input_ids[at] == sequence[place]
        assert pack.position_ids[at] == place


def test_a_shared_prompt_is_computed_once() -> None:
    batch = make_batch(0, groups=2, group_size=4, prefix=20)
    (shared,) = make_packs(batch, range(8), 4096, share_prompt=True)
    (plain,) = make_packs(batch, range(8), 4096, share_prompt=False)
    responses = sum(len(t.response_ids) for t in batch)
    prompts = [len(batch[0].prompt_ids), len(batch[4].prompt_ids)]
    assert len(shared.input_ids) == responses + sum(prompts) - 20
    assert len(plain.input_ids) == responses + 4 * sum(prompts)


def test_a_sample_over_the_limit_is_refused() -> None:
    rng = np.random.default_rng(0)
    batch = [make_trajectory(rng, 0, 0, [3] * 10, 22)]
    with pytest.raises(ConfigError, match=r"max_tokens_per_microbatch=31 .* = 32 tokens\)"):
        make_packs(batch, [0], 31, share_prompt=True)


CASES = [
    ("llama", {"tied": True}),
    ("llama", {"tied": False}),
    ("qwen3", {"tied": True}),
    ("qwen3", {"tied": False}),
    ("mistral", {"sliding_window": 7}),
    ("gpt2", {}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": 5.0}),
]


@pytest.mark.parametrize(("kind", "extra"), CASES)
@pytest.mark.parametrize("way", ["block", "split", "fused"])
def test_packed_logprobs_equal_single_sequences(
    kind: str,
    extra: dict[str, Any],
    way: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if way == "split":
        monkeypatch.setattr(attention, "_CALL_COST", 0)
    if way != "block":
        monkeypatch.setattr(attention, "_DENSE_PAIRS", 0)
    folder = save_tiny_model(tmp_path, kind, **extra)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    packed = load_packed(folder)
    batch = make_batch(3, groups=3, group_size=3, prefix=10, temperature=0.7)
    for share in (True, False):
        for limit in (40, 4096):
            for pack in make_packs(batch, range(9), limit, share):
                got, entropy = scores_of(packed, pack)
                want, want_entropy = _reference(plain, batch, pack)
                torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(entropy, want_entropy, atol=1e-5, rtol=1e-5)


def _reference(
    model: Any, batch: list[Trajectory], pack: Pack
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence alone through the model as Hugging Face has it."""
    logprobs, entropy = [], []
    cache: dict[int, torch.Tensor] = {}
    for i, o in zip(pack.sample.tolist(), pack.offset.tolist(), strict=True):
        t = batch[i]
        if i not in cache:
            ids = torch.tensor([[*t.prompt_ids, *t.response_ids]])
            with torch.no_grad():
                cache[i] = torch.log_softmax(model(ids).logits[0] / t.header.temperature, -1)
        row = cache[i][len(t.prompt_ids) + o - 1]
        logprobs.append(row[int(t.response_ids[o])])
        entropy.append(-(row.exp() * row).sum())
    return torch.stack(logprobs), torch.stack(entropy)


def test_a_pack_without_loss_has_a_gradient_of_zero(tmp_path: Path) -> None:
    """What a rank runs while others still have packs: every weight takes part."""
    model = load_packed(save_tiny_model(tmp_path))
    logprobs, entropy = scores_of(model, dummy_pack())
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert not p.grad.any(), name


def test_a_soft_cap_of_the_attention_is_refused(tmp_path: Path) -> None:
    model = load_packed(save_tiny_model(tmp_path, "gemma2"))
    with pytest.raises(ModelError, match="softcap"):
        scores_of(model, dummy_pack())


def test_layers_that_would_mix_packed_sequences_are_refused(tmp_path: Path) -> None:
    chunked = save_tiny_model(tmp_path, "qwen3", layer_types=["chunked_attention"] * 2)
    with pytest.raises(ModelError, match="chunked_attention"):
        load_causal_lm(chunked, trust_remote_code=False)
    with pytest.raises(ModelError, match="cannot load"):
        load_causal_lm(tmp_path / "none", trust_remote_code=False)
