"""A rank's state copied in step, into host memory that is kept from one checkpoint to the next."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Staging:
    """Memory of its own for each tensor. Fresh pages cost more than the copy: they are touched
    ahead, by `prepare`.

    Args:
        pinned: page-locked, for copies from a GPU.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._own: dict[str, Tensor] = {}

    def prepare(self, state: Mapping[str, Tensor]) -> None:
        """Make room for tensors like these, in any thread."""
        for name, tensor in state.items():
            self._room_for(name, local(tensor))

    @torch.no_grad()
    def copy(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same tensors, sharded likewise, in the own memory; valid until the next call."""
        copies: dict[str, Tensor] = {}
        on_gpu = False
        for name, tensor in state.items():
            held = local(tensor)
            on_gpu |= held.is_cuda
            own = self._room_for(name, held)
            own.copy_(held, non_blocking=held.is_cuda)
            copies[name] = own if not isinstance(tensor, DTensor) else _like(own, tensor)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies

    def _room_for(self, name: str, tensor: Tensor) -> Tensor:
        own = self._own.get(name)
        if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
            own = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pinned)
            if own.numel():  # by numpy: torch would start threads of its own for it
                own.view(-1).view(torch.uint8).numpy().fill(0)
            self._own[name] = own
        return own


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(own: Tensor, tensor: DTensor) -> DTensor:
    """`own` as the shard of a tensor that is sharded as this one is; from_local would move it to
    the device of the mesh."""
    like: DTensor = DTensor(own, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return like
