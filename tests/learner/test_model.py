"""The policy on tiny models: against plain Hugging Face passes, and what is kept beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from asyncrl.config.learning import CriticConfig, KLConfig, LearnerConfig, OptimConfig
from asyncrl.errors import ModelError
from asyncrl.learner.policy.optim import apply_gradient, make_optimizer
from tests.helpers.ranks import join, two_ranks
from tests.helpers.tiny_model import VOCAB, make_batch, save_tiny_model
from tests.learner.policies import (
    CASES,
    GAE,
    make_policy,
    one_pack,
    plain_scores,
    randomise,
    train_once,
)

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_scores_are_those_of_a_plain_pass(tmp_path: Path, kind: str, tied: bool) -> None:
    folder = save_tiny_model(tmp_path, kind, tied=tied)
    batch = make_batch(2, groups=3, group_size=2, prefix=9, temperature=0.7)
    pack, tensors = one_pack(batch)
    policy = make_policy(folder, advantage=GAE)
    assert policy.module.value_head is not None
    untrained = policy.score(tensors, values=True)
    assert untrained.values is not None
    assert not untrained.values.any()
    randomise(policy.trainable.critic.values(), scale=1.0)
    scores = policy.score(tensors, values=True)
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    logprobs, entropy, hidden = plain_scores(plain, batch, pack)
    torch.testing.assert_close(scores.logprobs, logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.entropy, entropy, rtol=1e-5, atol=1e-5)
    weight, bias = (p.full_tensor() for p in policy.trainable.critic.values())  # type: ignore[attr-defined]
    torch.testing.assert_close(scores.values, hidden @ weight[0] + bias, rtol=1e-5, atol=1e-5)
    assert policy.score(tensors).values is None


def test_the_temperature_is_not_rounded_and_leaves_values_alone(model: Path) -> None:
    """In bfloat16 a temperature of 0.7 would be 0.69921875."""
    policy = make_policy(model, dtype=torch.bfloat16, advantage=GAE)
    randomise(policy.trainable.critic.values(), scale=1.0)
    values, logprobs = [], []
    for temperature in (0.7, 0.69921875, 1.3):
        batch = make_batch(2, groups=2, group_size=2, temperature=temperature)
        scores = policy.score(one_pack(batch)[1], values=True)
        assert scores.values is not None
        assert scores.values.dtype == scores.logprobs.dtype == torch.float32
        values.append(scores.values)
        logprobs.append(scores.logprobs)
    assert torch.equal(values[0], values[2])
    assert not torch.equal(logprobs[0], logprobs[1])


def test_a_detached_trunk_gets_no_gradient(model: Path) -> None:
    policy = make_policy(model, advantage=GAE)
    _, tensors = one_pack(make_batch(2, groups=2, group_size=2))
    randomise(policy.trainable.critic.values(), scale=1.0)
    scores = policy.score(tensors, values=True, detach_trunk=True)
    assert scores.values is not None
    assert not scores.logprobs.requires_grad
    scores.values.square().sum().backward()  # type: ignore[no-untyped-call]
    trainable = policy.trainable
    assert all(p.grad is None for p in trainable.policy.values())
    assert all(p.grad is not None and p.grad.to_local().any() for p in trainable.critic.values())  # type: ignore[attr-defined]
    attached = policy.score(tensors, values=True)
    torch.testing.assert_close(attached.values, scores.values, rtol=0, atol=0)
    assert attached.values is not None
    attached.values.square().sum().backward()  # type: ignore[no-untyped-call]
    moved = [n for n, p in trainable.policy.items() if p.grad is not None]
    assert "model.layers.0.mlp.up_proj.weight" in moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_the_start_and_stays(model: Path, dtype: torch.dtype) -> None:
    policy = make_policy(model, dtype=dtype, kl=KLConfig(coefficient=0.1))
    _, tensors = one_pack(make_batch(2, groups=2, group_size=2))
    start = policy.reference(tensors)
    assert not start.requires_grad
    before = policy.score(tensors).logprobs
    assert torch.equal(start, before)
    optimizer = make_optimizer(policy, LearnerConfig(optim=OptimConfig(lr=1e-2)))
    before.sum().backward()  # type: ignore[no-untyped-call]
    apply_gradient(optimizer, 1.0, None)
    assert not torch.allclose(policy.score(tensors).logprobs, start, atol=1e-3)
    assert torch.equal(policy.reference(tensors), start)
    assert policy._reference is not None
    policy.reshard()
    assert {p.dtype for p in policy._reference.parameters()} == {dtype}
    assert {p.dtype for p in policy.module.parameters()} == {torch.float32}


def test_a_critic_of_its_own(model: Path) -> None:
    policy = make_policy(model, advantage=GAE, critic=CriticConfig(trunk="own", lr=0.1))
    critic = policy.critic
    assert critic is not None
    assert policy.module.value_head is None
    batch = make_batch(2, groups=2, group_size=2)
    pack, tensors = one_pack(batch)
    assert not critic.values(tensors).any()
    assert "critic.value_head.weight" in policy.trainable.critic
    assert not any("lm_head" in name for name in policy.trainable.critic)
    head = [p for n, p in policy.trainable.critic.items() if "value_head" in n]
    randomise(head, scale=1.0)
    plain = AutoModelForCausalLM.from_pretrained(model).eval()
    weight, bias = (p.full_tensor() for p in head)  # type: ignore[attr-defined]
    expected = plain_scores(plain, batch, pack)[2] @ weight[0] + bias
    values = critic.values(tensors)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)
    start = policy.score(tensors).logprobs.detach()
    optimizer = make_optimizer(policy, LearnerConfig(critic=CriticConfig(lr=0.1)))
    (values - 1).square().sum().backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is None for p in policy.trainable.policy.values())
    assert all(p.grad is not None for p in policy.trainable.critic.values())
    apply_gradient(optimizer, 1.0, None)
    assert not torch.allclose(critic.values(tensors), values, atol=1e-2)
    assert torch.equal(policy.score(tensors).logprobs, start)


@pytest.mark.parametrize("trunk", ["shared", "own"])
def test_only_the_policy_is_published(model: Path, trunk: Any) -> None:
    policy = make_policy(model, advantage=GAE, critic=CriticConfig(trunk=trunk))
    plain = AutoModelForCausalLM.from_pretrained(model)
    names = [n for n, _ in plain.named_parameters()]
    policy.score(one_pack(make_batch(2, groups=1, group_size=2))[1])  # leaves gathered copies
    assert [n for n, _ in policy.full_parameters(torch.float32)] == names
    shapes = [(n, tuple(p.shape)) for n, p in plain.named_parameters()]
    assert [(p.name, p.shape) for p in policy.layout("float32").params] == shapes
    state = plain.state_dict()
    for name, value in policy.full_parameters(torch.float32):
        assert torch.equal(value, state[name]), name


def test_offloaded_weights_give_the_same(model: Path) -> None:
    _, tensors = one_pack(make_batch(2, groups=2, group_size=2))
    results = []
    for offload in (False, True):
        policy = make_policy(model, cpu_offload=offload)
        logprobs = policy.score(tensors).logprobs
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
        grads = [p.grad.to_local() for p in policy.trainable.policy.values()]  # type: ignore[union-attr]
        results.append([logprobs.detach(), *grads])
    for plain, offloaded in zip(*results, strict=True):
        assert torch.equal(plain, offloaded)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_give_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the code generator, which takes most of a minute: the traced graphs are run."""
    calls = []

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(graph)
        return graph.forward

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **k: compile_(f, backend=backend, **k))
    policies = [make_policy(model, compile=c) for c in (False, True)]
    graphs = []
    for seed in (2, 3, 4):  # three layouts
        _, tensors = one_pack(make_batch(seed, groups=2, group_size=2, prefix=9))
        results = []
        for policy in policies:
            logprobs = policy.score(tensors).logprobs
            logprobs.sum().backward()  # type: ignore[no-untyped-call]
            grads = {n: p.grad.to_local() for n, p in policy.trainable.policy.items()}  # type: ignore[union-attr]
            results.append((logprobs.detach(), grads))
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)
        graphs.append(len(calls))
    assert graphs[0] > 0
    assert len(set(graphs)) == 1  # no layout is compiled anew


# --- refusals ------------------------------------------------------------------------------


def test_a_padded_embedding_is_refused_by_name(tmp_path: Path) -> None:
    """transformers cannot load it and vLLM will not: rows and `vocab_size` must agree."""
    folder = save_tiny_model(tmp_path, tied=True, vocab_size=VOCAB + 7)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB}))
    expected = rf"embed_tokens.weight is \({VOCAB + 7}, 32\) in the weights and \({VOCAB}, 32\)"
    with pytest.raises(ModelError, match=expected):
        make_policy(folder)


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks the weights model\.layers\.1\.mlp\.up_proj"):
        make_policy(folder)


def test_flash_attention_needs_a_gpu(model: Path) -> None:
    with pytest.raises(ModelError, match="learner.attention=flash"):
        make_policy(model, attention="flash", dtype=torch.bfloat16)


# --- two ranks -------------------------------------------------------------------------------


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    """Uneven work, shards without elements (the value head's bias), adapters, offloading."""
    folder = save_tiny_model(tmp_path / "model", "qwen3", tied=True)
    out = tmp_path / "out"
    with two_ranks("tests.learner.policies", tmp_path / "store", folder, out) as processes:
        wanted = {case: train_once(folder, case, 0, 1) for case in CASES}
        join(processes)
    for number, (case, want) in enumerate(wanted.items()):
        with (
            np.load(f"{out}.{number}.0.npz") as first,
            np.load(f"{out}.{number}.1.npz") as second,
        ):
            got = dict(first)
            for name in second:
                if name in got:
                    np.testing.assert_array_equal(second[name], got[name])
                else:
                    got[name] = second[name]
        assert got.keys() == want.keys()
        _compare(case, got, want)


def _compare(case: str, got: dict[str, Any], want: dict[str, Any]) -> None:
    scale = max(float(np.abs(v).max()) for k, v in want.items() if k.startswith("grad/"))
    for name, value in want.items():
        gradient = name.startswith("grad/")
        tolerance = 1e-5 * (scale if gradient else 1)
        np.testing.assert_allclose(
            got[name], value, rtol=1e-5, atol=tolerance, err_msg=f"{case}: {name}"
        )
