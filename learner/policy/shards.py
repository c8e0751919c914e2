"""What this rank holds of the policy's parameters; no collective anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.adapters import BASE, A, Adapters, B
from asyncrl.learner.layout import Layout, Part
from asyncrl.learner.policy.lora import adapter_of
from asyncrl.weights import ParamSpec, TransferPlan

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
            parts.append(_part(name + suffix, tensor, _own(tensor)))
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


def adapter_layout(parameters: HeldParameters, dtype: str, base: int) -> Layout:
    """The layout of what trains, where that is adapters: the engines have all else, in a folder
    with the fingerprint `base`.

    Adapters travel unrounded; engines load in `dtype`.
    """
    whole, parts, merges, base_dtype = [], [], {}, dtype
    for name, parameter, layer in parameters:
        whole.append(ParamSpec(name, dtype, tuple(parameter.shape)))
        if layer is not None:
            a, b, merges[name] = adapter_of(layer)
            parts += [_part(name + A, a, _own(a)), _part(name + B, b, _own(b))]
        if parameter.requires_grad:
            parts.append(_part(name, parameter, dtype))
        else:
            base_dtype = _own(parameter)
    load_bytes = TransferPlan(tuple(whole)).nbytes
    adapters = Adapters(merges, base_dtype, dtype, load_bytes, base)
    return Layout(tuple(p.spec for p in parts), tuple(parts), {}, adapters)


def adapter_shards(parameters: HeldParameters) -> Iterator[tuple[str, Tensor]]:
    """As `shards_of`, of an `adapter_layout`."""
    for name, parameter, layer in parameters:
        if layer is not None:
            a, b, _ = adapter_of(layer)
            yield from ((name + A, _local(a)), (name + B, _local(b)))
        if parameter.requires_grad:
            yield name, _local(parameter)


def _own(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _part(name: str, tensor: nn.Parameter, dtype: str) -> Part:
    spec = ParamSpec(name, dtype, tuple(tensor.shape))
    return Part(spec, sharded=isinstance(tensor, DTensor), frozen=not tensor.requires_grad)


def _local(tensor: nn.Parameter) -> Tensor:
    value = tensor.detach()
    return value.to_local() if isinstance(value, DTensor) else value
