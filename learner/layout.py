"""How weights lie on the learner's ranks, and what they become on their way to the engines.

parts: of which each rank holds rows ──────────────────► params: what travels, whole
base, A and B of an adapted layer ──merged on rank 0──►
or its A and B alone ──────────────────────────────────► A and B, merged by the engines
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from asyncrl.adapters import Adapters, Merge
from asyncrl.weights import ParamSpec, TransferPlan


class Part(NamedTuple):
    """A tensor as the ranks hold it, and the dtype in which it leaves them.

    >>> part = Part(ParamSpec("w", "float32", (5, 4)), sharded=True)
    >>> [part.held(rank, 4) for rank in range(4)]
    [(0, 8), (8, 16), (16, 20), (20, 20)]
    """

    spec: ParamSpec
    sharded: bool = False
    """In rows over the ranks, as torch.chunk cuts them; else rank 0 has it whole."""
    frozen: bool = False
    """Never changes: it leaves its rank once."""

    def held(self, rank: int, world: int) -> tuple[int, int]:
        """First and one past the last element, of the flat whole, that `rank` holds."""
        if not self.sharded:
            return (0, self.spec.numel) if rank == 0 else (self.spec.numel, self.spec.numel)
        rows, *others = self.spec.shape
        chunk, width = -(-rows // world), math.prod(others)
        first, last = (min(r * chunk, rows) for r in (rank, rank + 1))
        return first * width, last * width


class Layout(NamedTuple):
    """Everything that a publication must know of the weights before it sees any."""

    params: tuple[ParamSpec, ...]
    """What travels, in order."""
    parts: tuple[Part, ...]
    """What the ranks hold, in the order in which they hand it out."""
    merges: Mapping[str, Merge]
    """By parameter: its parts are NAME:base, NAME:A, NAME:B. All others are their own part."""
    adapters: Adapters | None = None
    """Where A and B travel alone: what the engines make of them."""

    @property
    def load_bytes(self) -> int:
        """Bytes that an engine loads."""
        nbytes = TransferPlan(self.params).nbytes
        return nbytes if self.adapters is None else max(nbytes, self.adapters.load_bytes)

    @classmethod
    def whole(cls, params: Iterable[ParamSpec]) -> Layout:
        """Of tensors that rank 0 has as they travel."""
        specs = tuple(params)
        return cls(specs, tuple(map(Part, specs)), {})
