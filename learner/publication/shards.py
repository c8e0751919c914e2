"""A rank's shards of one snapshot in host memory, each where it will be sent from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.learner.layout import Part

Source = Iterable[tuple[str, Tensor]]
"""Name and this rank's rows of each part, in order."""


class Shards:
    """Filled in training's thread, without a collective; read by the sending thread.

    Args:
        parts: all that the ranks hold, in order.
        rank, world: whose rows these are, and of how many ranks.
        whole: rank 0 only: the flat tensor of each part, in which all ranks' rows find their
            place. The other ranks keep their own rows alone.
        pinned: page-locked, for copies from a GPU.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        rank: int,
        world: int,
        whole: Mapping[str, Tensor] | None = None,
        pinned: bool = False,
    ) -> None:
        self.parts, self.rank, self.world = tuple(parts), rank, world
        self.settled = False
        """What is frozen has left already: neither cut nor gathered again."""
        self._whole = whole
        if whole is None:
            self._own = _back_to_back(self.parts, rank, world, pinned)
        else:
            self._own = [self._rows_of(part, 0) for part in self.parts]

    @torch.no_grad()
    def cut(self, source: Source) -> None:
        """Copy, and cast, this rank's rows of each part to their place.

        Raises:
            WeightSyncError: a name or shape out of the plan's order, or too few or many.
        """
        devices = set()
        rest = iter(source)
        for part, place in zip(self.parts, self._own, strict=True):
            name, rows = next(rest, ("", None))
            if rows is None:
                raise WeightSyncError(f"snapshot: {part.spec.name} and what follows it are missing")
            if not part.sharded and self.rank:
                continue
            shape = self._shape_of(part, place)
            if name != part.spec.name or tuple(rows.shape) != shape:
                raise WeightSyncError(
                    f"snapshot: got {name} {tuple(rows.shape)}, the plan says {part.spec.name} "
                    f"{shape}"
                )
            if not (part.frozen and self.settled):
                place.view(shape).copy_(rows, non_blocking=True)
                devices.add(rows.device)
        if (extra := next(rest, None)) is not None:
            raise WeightSyncError(f"snapshot: got {extra[0]}, the plan says no further parameter")
        for device in devices:
            if device.type == "cuda":  # before the next step writes to the parameters
                torch.cuda.current_stream(device).synchronize()

    def pieces(self, rank: int, limit_bytes: int) -> list[Tensor]:
        """Rows of `rank` that travel to rank 0, as flat views of at most `limit_bytes`, in order.

        The same on `rank` and on rank 0, but for where they lie.
        """
        pieces: list[Tensor] = []
        for part, own in zip(self.parts, self._own, strict=True):
            if not (part.frozen and self.settled):
                rows = own if rank == self.rank else self._rows_of(part, rank)
                step = max(1, limit_bytes // rows.element_size())
                pieces += torch.split(rows, step)
        return [piece for piece in pieces if piece.numel()]

    def _rows_of(self, part: Part, rank: int) -> Tensor:
        assert self._whole is not None, "only rank 0 knows the others' rows"
        start, stop = part.held(rank, self.world)
        return self._whole[part.spec.name][start:stop]

    def _shape_of(self, part: Part, place: Tensor) -> tuple[int, ...]:
        if not part.sharded:
            return part.spec.shape
        _, *others = part.spec.shape
        width = math.prod(others)
        return (place.numel() // width if width else 0, *others)


def _back_to_back(parts: Sequence[Part], rank: int, world: int, pinned: bool) -> list[Tensor]:
    """A rank's place for its rows of each part: one buffer per dtype."""
    filled: dict[str, int] = {}
    ranges = []
    for part in parts:
        start, stop = part.held(rank, world)
        at = filled.get(part.spec.dtype, 0)
        filled[part.spec.dtype] = at + stop - start
        ranges.append((part.spec.dtype, at, filled[part.spec.dtype]))
    flat = {
        d: torch.empty(n, dtype=getattr(torch, d), pin_memory=pinned) for d, n in filled.items()
    }
    return [flat[dtype][start:stop] for dtype, start, stop in ranges]
