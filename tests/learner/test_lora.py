"""LoRA: what trains, what is published, and the base as the reference."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.config.learning import KLConfig, LearnerConfig, LoraConfig, OptimConfig
from asyncrl.errors import MissingExtraError, ModelError
from asyncrl.learner.policy.model import Policy
from asyncrl.learner.policy.optim import apply_gradient, make_optimizer
from tests.helpers.tiny_model import make_batch, save_tiny_model
from tests.learner.policies import LORA, make_policy, one_pack, plain_scores, randomise

pytestmark = pytest.mark.usefixtures("one_rank")

KL = KLConfig(coefficient=0.1)
LINEAR = {
    "llama": {f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down")},
    "gpt2": {"c_attn", "c_fc", "c_proj"},
}
"""The linear layers of a kind, but for the head."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


def trained(model: Path, **learner: Any) -> Policy:
    """A policy whose adapters are no longer at their start."""
    policy = make_policy(model, **({"lora": LORA} | learner))
    randomise(policy.trainable.policy.values(), scale=0.2)
    return policy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
def test_fresh_adapters_are_the_reference_and_alone_in_training(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    folder = save_tiny_model(tmp_path, kind)
    policy = make_policy(folder, dtype=dtype, lora=LORA, kl=KL)
    assert policy._reference is None
    _, tensors = one_pack(make_batch(2, groups=2, group_size=2))
    start = policy.reference(tensors)
    first = policy.score(tensors).logprobs  # after the reference: its context is left behind
    assert torch.equal(first, start)
    first.sum().backward()  # type: ignore[no-untyped-call]
    base = {n: p for n, p in policy.module.model.named_parameters() if "lora_" not in n}
    assert {p.dtype for p in base.values()} == {dtype}
    assert all(p.grad is None for p in base.values())
    trainable = policy.trainable.policy
    assert all("lora_" in n and p.dtype == torch.float32 for n, p in trainable.items())
    assert any(p.grad.to_local().any() for n, p in trainable.items() if "lora_B" in n)  # type: ignore[union-attr]
    optimizer = make_optimizer(policy, LearnerConfig(optim=OptimConfig(lr=0.05)))
    apply_gradient(optimizer, 1.0, None)
    assert not torch.allclose(policy.score(tensors).logprobs, start, atol=1e-2)
    assert torch.equal(policy.reference(tensors), start)


@pytest.mark.parametrize(
    ("kind", "tied", "lora"),
    [
        ("llama", True, LORA),
        ("qwen3", False, LoraConfig(rank=3, alpha=5.0, targets=("q_proj", "mlp.down_proj"))),
        ("gpt2", True, LORA),  # its layers are transposed
    ],
)
def test_merged_parameters_are_those_of_peft(
    tmp_path: Path, kind: str, tied: bool, lora: LoraConfig
) -> None:
    import peft

    folder = save_tiny_model(tmp_path, kind, tied=tied)
    policy = trained(folder, lora=lora)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    names = [n for n, _ in plain.named_parameters()]
    before = {n: p.clone() for n, p in plain.named_parameters()}
    layers = {n.split(".lora_")[0] for n in policy.trainable.policy}
    theirs = peft.get_peft_model(
        plain,
        peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.rank or 0,
            lora_alpha=lora.alpha or 2 * (lora.rank or 0),  # type: ignore[arg-type]
            target_modules=sorted(layers),
            fan_in_fan_out=kind == "gpt2",
        ),
    )
    parameters = dict(theirs.base_model.model.named_parameters())
    with torch.no_grad():
        for name, p in policy.trainable.policy.items():
            parameters[name].copy_(p.full_tensor())  # type: ignore[attr-defined]
    merged = dict(theirs.merge_and_unload().named_parameters())
    got = dict(policy.full_parameters(torch.float32))
    assert list(got) == [p.name for p in policy.layout("float32").params] == names
    for name, value in got.items():
        torch.testing.assert_close(value, merged[name], rtol=1e-6, atol=1e-7)
        changed = name.removesuffix(".weight") in layers
        assert torch.equal(value, before[name]) != changed, name
    chosen = {name.rpartition(".")[2] for name in layers}
    assert chosen == ({"q_proj", "down_proj"} if lora.targets else LINEAR[kind])


@pytest.mark.parametrize("tied", [True, False])
def test_the_saved_model_computes_what_the_policy_does(tmp_path: Path, tied: bool) -> None:
    policy = trained(save_tiny_model(tmp_path / "in", "qwen3", tied=tied))
    policy.save_hf(tmp_path / "out")
    batch = make_batch(2, groups=2, group_size=2)
    pack, tensors = one_pack(batch)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert (saved.lm_head.weight is saved.model.embed_tokens.weight) == tied
    want = plain_scores(saved, batch, pack)[0]
    torch.testing.assert_close(policy.score(tensors).logprobs, want, rtol=1e-5, atol=1e-5)


def test_merging_is_done_in_float32(model: Path) -> None:
    """B A in bfloat16, or added to a rounded W, would lose what training has moved."""
    policy = trained(model, dtype=torch.bfloat16)
    exact = dict(policy.full_parameters(torch.float32))
    parameters = {n: p.full_tensor() for n, p in policy.module.model.named_parameters()}
    layer = "model.layers.0.mlp.up_proj"
    a, b = (parameters[f"{layer}.lora_{x}.default.weight"] for x in "AB")
    want = parameters[f"{layer}.base_layer.weight"].float() + 2 * (b @ a)
    torch.testing.assert_close(exact[f"{layer}.weight"], want, rtol=0, atol=1e-7)
    for name, value in policy.full_parameters(torch.bfloat16):
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, exact[name].bfloat16()), name


def test_checkpointed_adapters_have_the_same_gradient(model: Path) -> None:
    _, tensors = one_pack(make_batch(2, groups=2, group_size=2))
    results = []
    for checkpointing in (False, True):
        policy = trained(model, gradient_checkpointing=checkpointing)
        policy.score(tensors).logprobs.sum().backward()  # type: ignore[no-untyped-call]
        grads = {n: p.grad.to_local() for n, p in policy.trainable.policy.items()}  # type: ignore[union-attr]
        results.append(grads)
    assert len(results[0]) > 8
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("target", ["proj", "lm_head", "embed_tokens", "q_projection"])
def test_a_target_that_matches_nothing_is_refused(model: Path, target: str) -> None:
    expected = (
        f"no linear layer {target} that can have an adapter; it has "
        "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    )
    with pytest.raises(ModelError, match=expected):
        make_policy(model, lora=LoraConfig(rank=2, targets=("q_proj", target)))


def test_without_peft_the_extra_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingExtraError, match=r"learner\.lora\.rank=4: .*'asyncrl\[lora\]'"):
        make_policy(model, lora=LORA)
