"""What this rank holds of the policy's parameters; no collective anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.learner.layout import BASE, A, B, Layout, Part
from asyncrl.learner.policy.lora import adapter_of
from asyncrl.weights import ParamSpec

HeldParameters = Iterable[tuple[str, nn.Parameter, Any]]
"""Name, sharded parameter, and the layer whose adapter belongs to it (lora.hf_parameters)."""


def layout_of(parameters: HeldParameters, dtype: str) -> Layout:
    """The layout of what travels in `dtype`; what is merged leaves its rank unrounded."""
    params, parts, merges = [], [], {}
    for name, parameter, layer in parameters:
        params.append(ParamSpec(name, dtype, tuple(parameter.shape)))
        if layer is None:
            parts.append(_part(name, parameter, dtype))
            continue
        a, b, merges[name] = adapter_of(layer)
        for suffix, tensor in ((BASE, parameter), (A, a), (B, b)):
            own = str(tensor.dtype).removeprefix("torch.")
            parts.append(_part(name + suffix, tensor, own))
    return Layout(tuple(params), tuple(parts), merges)


def shards_of(parameters: HeldParameters) -> Iterator[tuple[str, Tensor]]:
    """Name and this rank's rows of each part, in the order of the layout.

    They share memory with the parameters: copy what must outlive the next step.
    """
    for name, parameter, layer in parameters:
        if layer is None:
            yield name, _local(parameter)
            continue
        a, b, _ = adapter_of(layer)
        yield from ((name + BASE, _local(parameter)), (name + A, _local(a)), (name + B, _local(b)))


def _part(name: str, tensor: nn.Parameter, dtype: str) -> Part:
    spec = ParamSpec(name, dtype, tuple(tensor.shape))
    return Part(spec, sharded=isinstance(tensor, DTensor), frozen=not tensor.requires_grad)


def _local(tensor: nn.Parameter) -> Tensor:
    value = tensor.detach()
    return value.to_local() if isinstance(value, DTensor) else value
