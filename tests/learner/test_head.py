"""The chunked head equals log_softmax over whole logits, in value, gradient and entropy."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    HyperCLOVAXConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from asyncrl.errors import ModelError
from asyncrl.learner.policy import head
from asyncrl.learner.policy.attention import NAME
from asyncrl.learner.policy.head import head_logprobs
from asyncrl.learner.policy.logprobs import check_head, head_spec, trunk_of

R, H, V, N = 7, 5, 23, 11
"""Rows, hidden size, vocabulary (a prime, so no block size divides it), tokens."""

Inputs = dict[str, Any]

OPTIONS: list[Inputs] = [
    {"softcap": None, "scale": 1.0, "vocab": V},
    {"softcap": None, "scale": 0.25, "vocab": V - 4},
    {"softcap": 1.5, "scale": 1.0, "vocab": V},
    {"softcap": 1.5, "scale": 3.0, "vocab": V - 4},
]


@pytest.fixture(params=["one block, kept", "small blocks, kept", "small blocks", "single tokens"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How the vocabulary is cut, and whether logits are kept for the backward pass."""
    size = {"one block, kept": 1 << 20, "single tokens": 1}.get(request.param, 4 * R)
    monkeypatch.setattr(head, "_BLOCK_ELEMENTS", size)
    monkeypatch.setattr(head, "_KEEP_ELEMENTS", 1 << 20 if "kept" in request.param else 0)


def _inputs(
    rows: int = R, tokens: int = N, vocab: int = V, dtype: torch.dtype = torch.float64
) -> Inputs:
    """Random inputs; some rows predict several tokens, some the same one twice, some none."""
    torch.manual_seed(rows + tokens)
    row = torch.randint(0, max(1, rows - 1), (tokens,))
    target = torch.randint(0, vocab - 4, (tokens,))
    if tokens > 2:
        row[2], target[2] = row[0], target[0]
        row[1] = row[0]
    return {
        "hidden": torch.randn(rows, H, dtype=dtype, requires_grad=True),
        "weight": torch.randn(vocab, H, dtype=dtype, requires_grad=True),
        "bias": torch.randn(vocab, dtype=dtype, requires_grad=True),
        "temperature": torch.rand(rows, dtype=dtype) + 0.5,
        "row": row,
        "target": target,
    }


def _literal(x: Inputs, softcap: float | None, scale: float, vocab: int) -> tuple[Tensor, Tensor]:
    """As the formula has it, on whole logits, in float64."""
    hidden, weight, bias = (x[k].double() for k in ("hidden", "weight", "bias"))
    logits = scale * (hidden @ weight[:vocab].T + bias[:vocab])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    full = torch.log_softmax(logits / x["temperature"].double()[:, None], dim=-1)
    return full[x["row"], x["target"]], -(full.exp() * full).sum(dim=-1)[x["row"]]


def _gradients(results: tuple[Tensor, Tensor], x: Inputs) -> tuple[Tensor, ...]:
    """Of a sum with random weights over log-probabilities and entropies."""
    torch.manual_seed(9)
    total = sum((r * torch.randn(r.shape, dtype=torch.float64)).sum() for r in results)
    assert isinstance(total, Tensor)
    return torch.autograd.grad(total, [x["hidden"], x["weight"], x["bias"]])


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("rows", "tokens"), [(R, N), (1, 1), (1, 3), (R, 0), (0, 0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_whole_logits(rows: int, tokens: int, dtype: torch.dtype, options: Inputs) -> None:
    x = _inputs(rows, tokens, dtype=dtype)
    got, want = head_logprobs(**x, **options), _literal(x, **options)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for g, w in zip(got, want, strict=True):
        assert g.dtype == dtype
        torch.testing.assert_close(g.double(), w, rtol=tolerance, atol=2 * tolerance)
    gradients = _gradients(got, x)
    for g, w in zip(gradients, _gradients(want, x), strict=True):
        torch.testing.assert_close(g.double(), w.double(), rtol=tolerance, atol=10 * tolerance)
    assert not gradients[1][options["vocab"] :].any()


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_equal_finite_differences(
    options: Inputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of log-probability and of entropy, each for itself."""
    monkeypatch.setattr(head, "_BLOCK_ELEMENTS", 10 * R)
    x = _inputs()

    def results(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        inputs = {**x, "hidden": hidden, "weight": weight, "bias": bias}
        return head_logprobs(**inputs, **options)

    assert torch.autograd.gradcheck(results, (x["hidden"], x["weight"], x["bias"]))


def test_a_long_pack_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 tokens, logits up to some tens, in many blocks."""
    monkeypatch.setattr(head, "_KEEP_ELEMENTS", 0)
    monkeypatch.setattr(head, "_BLOCK_ELEMENTS", 4096 * 10)
    x = _inputs(4096, 4096, vocab=151, dtype=torch.float32)
    x["weight"] = (x["weight"].detach() * 4).requires_grad_()
    options: Inputs = {"softcap": None, "scale": 1.0, "vocab": 150}
    got, want = head_logprobs(**x, **options), _literal(x, **options)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-6, atol=1e-5)
    for g, w in zip(_gradients(got, x), _gradients(want, x), strict=True):
        assert (g - w).norm() < 1e-6 * w.norm()  # entries are sums over 4,096 rows and cancel


@pytest.mark.usefixtures("blocks")
def test_bfloat16_is_rounded_only_where_the_model_rounds() -> None:
    """Logits and gradients are in the weight's type; the softmax between them is in float32."""
    x = _inputs(dtype=torch.bfloat16)
    options: Inputs = {"softcap": None, "scale": 1.0, "vocab": V}
    x["temperature"] = x["temperature"].float()
    got = head_logprobs(**x, **options)
    logits = torch.nn.functional.linear(x["hidden"], x["weight"], x["bias"])
    full = torch.log_softmax(logits.double() / x["temperature"].double()[:, None], dim=-1)
    want = full[x["row"], x["target"]], -(full.exp() * full).sum(dim=-1)[x["row"]]
    for g, w in zip(got, want, strict=True):
        assert g.dtype == torch.float32
        torch.testing.assert_close(g.double(), w, rtol=1e-5, atol=1e-5)
    for g, w in zip(_gradients(got, x), _gradients(want, x), strict=True):
        assert g.dtype == torch.bfloat16
        torch.testing.assert_close(g, w, rtol=0.02, atol=0.02 * float(w.abs().max()))


def test_extreme_logits_stay_finite() -> None:
    """A distribution that is certain: entropy 0, log-probabilities 0 and far below."""
    x = _inputs(2, 2, dtype=torch.float32)
    x["hidden"] = torch.tensor([[1e4, 0, 0, 0, 0]] * 2, requires_grad=True)
    x["weight"] = torch.eye(V, H).requires_grad_()
    x["bias"] = torch.zeros(V, requires_grad=True)
    x["row"], x["target"] = torch.tensor([0, 1]), torch.tensor([0, 1])
    x["temperature"] = torch.ones(2)
    logprobs, entropy = head_logprobs(**x, softcap=None, scale=1.0, vocab=V)
    assert logprobs.tolist() == [0, -1e4]
    assert entropy.tolist() == [0, 0]
    assert all(g.isfinite().all() for g in _gradients((logprobs, entropy), x))


def test_a_frozen_head_has_no_gradient() -> None:
    """As under LoRA: only the hidden states are trained."""
    x = _inputs()
    want = _gradients(_literal(x, None, 1.0, V), x)[0]
    x["weight"], x["bias"] = x["weight"].detach(), x["bias"].detach()
    got = head_logprobs(**x, softcap=None, scale=1.0, vocab=V)
    torch.manual_seed(9)
    total = sum((r * torch.randn(r.shape, dtype=torch.float64)).sum() for r in got)
    assert isinstance(total, Tensor)
    total.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(x["hidden"].grad, want)
    with torch.no_grad():
        assert not head_logprobs(**x, softcap=None, scale=1.0, vocab=V)[0].requires_grad


@pytest.mark.parametrize("target", [-1, V - 4, V])
def test_a_token_outside_of_the_vocabulary_is_refused(target: int) -> None:
    x = _inputs()
    x["target"][3] = target
    with pytest.raises(ModelError, match=rf"token id {target}, .* vocabulary is 0 to 18"):
        head_logprobs(**x, softcap=None, scale=1.0, vocab=V - 4)


class _LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the most elements that any operation's result has."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.numel())
        return out


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_memory_does_not_grow_with_rows_times_vocabulary(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor of an operation, forward or backward, is larger than an input or a block."""
    monkeypatch.setattr(head, "_BLOCK_ELEMENTS", 2000)
    monkeypatch.setattr(head, "_KEEP_ELEMENTS", 0)
    for rows, vocab in ((100, 200), (200, 150), (50, 301)):
        x = _inputs(rows, 300, vocab=vocab, dtype=torch.float32)
        with _LargestTensor() as largest:
            _gradients(head_logprobs(**x, softcap=softcap, scale=1.0, vocab=vocab), x)
        assert largest.elements <= max(2000, vocab * H, rows * H) < rows * vocab / 5


@pytest.mark.parametrize("kept", [True, False])
def test_logits_are_kept_only_below_the_limit(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "_KEEP_ELEMENTS", R * V - (not kept))
    x = _inputs()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        head_logprobs(**x, softcap=None, scale=1.0, vocab=V)
    assert (R * V in [t.numel() for t in saved]) == kept


# --- what a Hugging Face model does with its logits --------------------------------------------

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 2,
}
_UNCAPPED = {"attn_logit_softcapping": None}  # its attention is another matter


def _model(config: PreTrainedConfig) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=NAME
    ).eval()


@pytest.mark.parametrize(
    ("config", "softcap", "scale"),
    [
        (LlamaConfig(**_SIZES), None, 1.0),
        (Qwen2Config(**_SIZES, tie_word_embeddings=True), None, 1.0),
        (Gemma2Config(**_SIZES, **_UNCAPPED, final_logit_softcapping=4.0), 4.0, 1.0),
        (Gemma2Config(**_SIZES, **_UNCAPPED, final_logit_softcapping=None), None, 1.0),
        (GraniteConfig(**_SIZES, logits_scaling=8.0), None, 0.125),
        (CohereConfig(**_SIZES, logit_scale=0.3), None, 0.3),
    ],
    ids=lambda p: type(p).__name__ if isinstance(p, PreTrainedConfig) else str(p),
)
def test_the_head_of_known_models(
    config: PreTrainedConfig, softcap: float | None, scale: float
) -> None:
    model = _model(config)
    spec = head_spec(model)
    assert (spec.softcap, spec.scale, spec.vocab) == (softcap, scale, 97)
    check_head(model)


@pytest.mark.parametrize(
    ("config", "overlooked"),
    [
        # It multiplies by what Granite divides by.
        (HyperCLOVAXConfig(**_SIZES, logits_scaling=2.0), {}),
        (Gemma2Config(**_SIZES, **_UNCAPPED), {"softcap": None}),
        (CohereConfig(**_SIZES), {"scale": 1.0}),
    ],
)
def test_an_unknown_scaling_is_refused(
    config: PreTrainedConfig, overlooked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(config)
    spec = replace(head_spec(model), **overlooked)
    monkeypatch.setattr("asyncrl.learner.policy.logprobs.head_spec", lambda _: spec)
    with pytest.raises(ModelError, match=rf"{type(model).__name__} makes its logits in a way"):
        check_head(model)


def test_a_head_that_is_not_finite_is_refused() -> None:
    model = _model(LlamaConfig(**_SIZES))
    with torch.no_grad():
        model.lm_head.weight[3] = math.nan
    with pytest.raises(ModelError, match="off by nan"):
        check_head(model)


def test_padding_rows_of_the_head_are_left_out() -> None:
    """More rows than the model has tokens: no probability is theirs."""
    model = _model(LlamaConfig(**_SIZES))
    model.resize_token_embeddings(128, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[97:] = 1.0  # not what a resize leaves behind
    model.config.vocab_size = 97
    assert head_spec(model).weight.shape == (128, 32)
    assert head_spec(model).vocab == 97
    check_head(model)


def test_an_adapted_head_is_refused() -> None:
    model = _model(LlamaConfig(**_SIZES))
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ModelError, match=r"is a Sequential, .* learner.lora.targets"):
        head_spec(model)


def test_a_model_without_a_trunk_is_refused() -> None:
    class Whole(torch.nn.Module):
        def get_decoder(self) -> Any:
            return self

    with pytest.raises(ModelError, match="Whole has no trunk"):
        trunk_of(Whole())
