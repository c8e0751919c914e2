"""Rank 0's copy of the weights in host memory, laid out as it travels.

fill (training's thread) ──► own shards in place ──► complete (the sending thread):
                             gather the others' ─ merge adapters ─ hash ──► tensors, buckets
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from asyncrl.adapters import BASE, A, B
from asyncrl.learner.layout import Layout
from asyncrl.learner.publication.gather import Gather
from asyncrl.learner.publication.shards import Shards, Source
from asyncrl.types import Version
from asyncrl.weights import BUCKET_BYTES, BYTES_PER_S, TransferPlan


class Snapshot:
    """One flat buffer per wire dtype; filled at each publication, read while training goes on.

    Args:
        layout: what travels, and what it comes from.
        gather: brings the other ranks' shards; None where rank 0 is alone, and its shards are
            the snapshot: there is no second copy of what is not merged.
        hashed: whether to compute checksums.
        pinned: page-locked, for copies from and to a GPU.
        bucket_bytes: of one broadcast, at most.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        gather: Gather | None = None,
        hashed: bool = True,
        pinned: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.plan = TransferPlan(layout.params)
        self.adapters = layout.adapters
        self.load_bytes = layout.load_bytes
        """What an engine loads of it: more than the plan's bytes where adapters travel alone."""
        self.bucket_bytes = bucket_bytes
        self.checksums: list[int] = []
        """Of each parameter's bytes, in the order of the plan, once complete."""
        self._gather, self._hashed = gather, hashed
        self._whole_by = 0.0
        self._flat = _flat_buffers(self.plan, pinned)
        self._places = _places(self.plan, self._flat)
        merged = {name + suffix for name in layout.merges for suffix in (BASE, A, B)}
        raw = TransferPlan(tuple(p.spec for p in layout.parts if p.spec.name in merged))
        self._raw = _places(raw, _flat_buffers(raw, pinned))
        self._raw_specs = {spec.name: spec for spec in raw.params}
        self._merges = layout.merges
        self._views = [(s.name, self._places[s.name].view(s.shape)) for s in self.plan.params]
        self._shards = Shards(
            layout.parts, rank=0, world=gather.world if gather else 1,
            whole=self._places | self._raw,
        )  # fmt: skip

    def fill(self, source: Source) -> None:
        """Copy rank 0's shards of each part to their place; no collective.

        Raises:
            WeightSyncError: a name or shape out of the plan's order, or too few or many.
        """
        self._shards.cut(source)

    @torch.no_grad()
    def complete(self, version: Version) -> dict[str, float]:
        """Make what was filled whole, beside training: the sending thread's part.

        Returns:
            Seconds: sync/gather_s (with merging; where there is something to gather or to merge)
            and sync/hash_s (where it is hashed).

        Raises:
            WeightSyncError: another rank ended, was late, or cut another version.
        """
        took, began = {}, time.monotonic()
        if self._gather is not None:
            self._gather.run(self._shards, version)
        self._shards.settled = True
        self._whole_by = time.monotonic() + self.load_bytes / BYTES_PER_S
        views = dict(self._views)
        for name, merge in self._merges.items():
            base, a, b = (self._raw_view(name + suffix) for suffix in (BASE, A, B))
            views[name].copy_(merge(base, a, b))
        if self._gather is not None or self._merges:
            took["sync/gather_s"] = time.monotonic() - began
        if self._hashed:
            began = time.monotonic()
            raw = {d: t.view(torch.uint8).numpy().data for d, t in self._flat.items()}
            self.checksums = self.plan.checksums(raw)
            took["sync/hash_s"] = time.monotonic() - began
        return took

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter as a view, in the order of the plan."""
        return iter(self._views)

    def buckets(self) -> Iterator[Tensor]:
        """The parts to broadcast, in order, as views."""
        for bucket in self.plan.buckets(self.bucket_bytes):
            yield self._flat[bucket.dtype][bucket.start : bucket.stop]

    @property
    def deadline(self) -> float:
        """When the completion under way, or the last one, ends at the latest (time.monotonic)."""
        gathered_by = self._gather.deadline if self._gather is not None else 0.0
        return max(gathered_by, self._whole_by)

    def waiting_for(self) -> str:
        """Whose shards are missing, and the seconds left; "" when nothing is gathered."""
        return self._gather.waiting_for() if self._gather is not None else ""

    def _raw_view(self, name: str) -> Tensor:
        return self._raw[name].view(self._raw_specs[name].shape)


def _flat_buffers(plan: TransferPlan, pinned: bool) -> dict[str, Tensor]:
    return {
        dtype: torch.empty(n, dtype=getattr(torch, dtype), pin_memory=pinned)
        for dtype, n in plan.sizes.items()
    }


def _places(plan: TransferPlan, flat: dict[str, Tensor]) -> dict[str, Tensor]:
    """The flat place of each parameter."""
    return {s.spec.name: flat[s.spec.dtype][s.start : s.stop] for s in plan.slots}
