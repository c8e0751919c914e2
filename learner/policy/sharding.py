"""Modules sharded over the learner's ranks by FSDP2, and their tensors made whole again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface

from asyncrl.learner.policy.attention import (
    FLASH_NAME,
    NAME,
    packed_attention,
    packed_flash_attention,
)


class Sharder:
    """Shards every model of a rank over the same ranks, in the same way.

    Args:
        world: ranks of the default process group, which must stand.
        device: where this rank computes.
        dtype: compute type of forward and backward; gradients are reduced in float32.
        cpu_offload: keep weights, gradients and thus moments in host memory between uses.
    """

    def __init__(
        self, world: int, device: torch.device, dtype: torch.dtype, *, cpu_offload: bool = False
    ):
        self.mesh = init_device_mesh(device.type, (world,))
        self.dtype = dtype
        # One rank holds everything anyway: casting again in the backward pass saves nothing.
        self.reshard = world > 1 or cpu_offload
        self.offload = OffloadPolicy()
        if cpu_offload:
            self.offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")

    def shard(
        self,
        root: nn.Module,
        layers: Sequence[nn.Module],
        *,
        in_float32: Sequence[nn.Module] = (),
        frozen: bool = False,
    ) -> None:
        """Shard `layers` one by one, `in_float32` likewise, and with the root what is left.

        A frozen model, which has no backward pass to hurry, gives up its gathered copies at once.
        """
        reshard = self.reshard or frozen
        for layer in layers:
            self._shard(layer, self.dtype, reshard=reshard)
        for module in in_float32:
            self._shard(module, torch.float32, reshard=reshard)
        # The root takes a pack: its temperatures must not be rounded. What it gathers is needed at
        # both ends of the forward pass and at both ends of the backward pass.
        self._shard(root, self.dtype, reshard=frozen, cast_inputs=False)

    def _shard(
        self, module: nn.Module, dtype: torch.dtype, *, reshard: bool, cast_inputs: bool = True
    ) -> None:
        fully_shard(
            module,
            mesh=self.mesh,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=cast_inputs
            ),
            reshard_after_forward=reshard,
            offload_policy=self.offload,
        )


def reshard(module: nn.Module) -> None:
    """Put the shards back in the place of gathered copies, as a backward pass does."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def whole(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """All of a sharded tensor, in `dtype`, on the device of its mesh; a collective.

    It may share memory with the shard.
    """
    value = tensor.detach()
    if dtype is not None:
        value = value.to(dtype)
    if not isinstance(value, DTensor):
        return value
    # Offloaded shards: the ranks of GPUs speak NCCL, which takes no host memory.
    gathered: Tensor = value.to(value.device_mesh.device_type).full_tensor()  # type: ignore[attr-defined]
    return gathered


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """torch.compile the forward of each layer, before they are sharded.

    FSDP's hooks stay around it, attention stays out of it: it is a loop over the segments of a
    pack, which would be compiled anew for every layout.
    """
    for name, attention in ((NAME, packed_attention), (FLASH_NAME, packed_flash_attention)):
        AttentionInterface.register(name, _outside(attention))
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def _outside(attention: Callable[..., Any]) -> Callable[..., Any]:
    outside: Callable[..., Any] = torch.compiler.disable(attention)  # type: ignore[no-untyped-call]
    return outside
