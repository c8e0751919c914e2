"""A copy of the weights in host memory, laid out as it travels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from asyncrl.errors import WeightSyncError
from asyncrl.weights import BUCKET_BYTES, TransferPlan


class Snapshot:
    """One flat buffer per wire dtype; filled at each publication, read while training goes on."""

    def __init__(
        self, plan: TransferPlan, *, pinned: bool = False, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self.plan = plan
        self.bucket_bytes = bucket_bytes
        self._flat = {
            dtype: torch.empty(n, dtype=getattr(torch, dtype), pin_memory=pinned)
            for dtype, n in plan.sizes.items()
        }
        self._views = [
            (s.spec.name, self._flat[s.spec.dtype][s.start : s.stop].view(s.spec.shape))
            for s in plan.slots
        ]

    @torch.no_grad()
    def fill(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy (and cast) each tensor to its place.

        Raises:
            WeightSyncError: a name or shape out of the plan's order, or too few or many.
        """
        views = iter(self._views)
        for name, tensor in weights:
            expected, view = next(views, ("no further parameter", torch.empty(0)))
            if name != expected or tensor.shape != view.shape:
                raise WeightSyncError(
                    f"snapshot: got {name} {tuple(tensor.shape)}, the plan says {expected} "
                    f"{tuple(view.shape)}"
                )
            view.copy_(tensor)
        if (rest := next(views, None)) is not None:
            raise WeightSyncError(f"snapshot: {rest[0]} and what follows it are missing")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter as a view, in the order of the plan."""
        return iter(self._views)

    def buckets(self) -> Iterator[torch.Tensor]:
        """The parts to broadcast, in order, as views."""
        for bucket in self.plan.buckets(self.bucket_bytes):
            yield self._flat[bucket.dtype][bucket.start : bucket.stop]
