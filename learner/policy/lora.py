"""LoRA through peft: adapters beside frozen linear layers, merged where whole weights are wanted.

    y = W x + alpha/rank B A x        W [out, in] frozen, A [rank, in] random, B [out, rank] zero

(arXiv 2106.09685.) The adapters live in the Hugging Face model itself, whose modules keep their
names: `base_layer` and `lora_*` are what peft adds below a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from asyncrl.adapters import Merge
from asyncrl.config.learning import LoraConfig
from asyncrl.errors import MissingExtraError, ModelError
from asyncrl.learner.policy.sharding import whole

_ADAPTER = "default"


def add_adapters(model: Any, config: LoraConfig) -> None:
    """Freeze a causal LM and put trainable float32 adapters beside its linear layers, in place.

    All but the head, or those that `targets` names. The random numbers are torch's default ones:
    ranks that seed them alike get the same adapters.

    Raises:
        MissingExtraError: peft is not installed.
        ModelError: a target that the model has not got.
    """
    try:
        import peft
    except ImportError:
        raise MissingExtraError(
            f"learner.lora.rank={config.rank}: peft is not installed; pip install 'asyncrl[lora]'"
        ) from None
    assert config.rank is not None
    linear = _linear_layers(model)
    targets = _matching(linear, config.targets)
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=2 * config.rank if config.alpha is None else config.alpha,
        target_modules=targets,
        lora_dropout=0.0,
        fan_in_fan_out=isinstance(linear[targets[0]], Conv1D),
    )
    peft.get_peft_model(model, settings)
    model.eval()


def _linear_layers(model: Any) -> dict[str, nn.Module]:
    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }


def _matching(linear: dict[str, nn.Module], targets: tuple[str, ...] | None) -> list[str]:
    """Full names of the layers to adapt."""
    if targets is None:
        return list(linear)
    chosen: list[str] = []
    for target in targets:
        found = [name for name in linear if f".{name}".endswith(f".{target}")]
        if not found:
            names = sorted({name.rpartition(".")[2] for name in linear})
            raise ModelError(
                f"learner.lora.targets: the model has no linear layer {target} that can have an "
                f"adapter; it has {', '.join(names)}"
            )
        chosen += [name for name in found if name not in chosen]
    return chosen


def without_adapters(model: nn.Module) -> AbstractContextManager[None]:
    """A context in which the model computes what it did before `add_adapters`, exactly.

    The adapters' share is multiplied by 0. (peft's own switch would set `requires_grad` on
    whatever FSDP has registered at the moment, gathered or not, and lose it there.)
    """
    from peft.helpers import rescale_adapter_scale

    off: AbstractContextManager[None] = rescale_adapter_scale(model, 0)
    return off


def hf_parameters(model: Any) -> Iterator[tuple[str, nn.Parameter, Any]]:
    """Each parameter of a causal LM once, under its Hugging Face name, in a stable order.

    The third item is the layer whose adapter belongs to it, or None. Adapters themselves are left
    out.
    """
    layers = {
        f"{name}.base_layer": module
        for name, module in model.named_modules()
        if hasattr(module, "base_layer") and hasattr(module, "lora_A")
    }
    adapters = {
        id(p)
        for layer in layers.values()
        for part in (layer.lora_A, layer.lora_B)
        for p in part.parameters()
    }
    for name, parameter in model.named_parameters():
        if id(parameter) in adapters:
            continue
        owner, _, leaf = name.rpartition(".")
        if owner in layers:
            layer = layers[owner] if leaf == "weight" else None
            yield f"{owner.removesuffix('.base_layer')}.{leaf}", parameter, layer
        else:
            yield name, parameter, None


def adapter_of(layer: Any) -> tuple[nn.Parameter, nn.Parameter, Merge]:
    """A and B of an adapted layer, and how they are merged with its weight."""
    a, b = (part[_ADAPTER].weight for part in (layer.lora_A, layer.lora_B))
    return a, b, Merge(layer.scaling[_ADAPTER], bool(layer.fan_in_fan_out))


def merged(weight: Tensor, layer: Any, dtype: torch.dtype) -> Tensor:
    """W + alpha/rank B A, whole, computed in float32 as the adapters are; a collective."""
    a, b, merge = adapter_of(layer)
    a_whole, b_whole = whole(a), whole(b)
    total: Tensor = merge(whole(weight), a_whole, b_whole)
    return total.to(dtype)
