"""What both ends of a weight transfer must agree on: order, layout, buckets, deadlines.

The learner's snapshot and the engine's staging buffer have the same layout: the parameters of one
dtype lie back to back in one flat buffer, in the order of the plan, and travel in buckets
that ignore parameter boundaries. Both ends compute that from the names, dtypes and shapes that
travel ahead. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import xxhash

from asyncrl.errors import DamagedWeightsError, WeightSyncError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Wire dtypes, by the names torch gives them, with their sizes in bytes."""

BUCKET_BYTES = 64 << 20
"""One broadcast carries at most this much: no buffer beyond the layout's own is needed."""

BYTES_PER_S = 100e6
"""A link slower than this misses the deadline of a publication."""

ARRIVED, GO = "arrived/{rank}", "go"
"""Keys of a gloo group's store: a worker says that it is there and waits for "yes" or "no"."""


class ParamSpec(NamedTuple):
    """One parameter as it travels: its Hugging Face name, wire dtype and full shape.

    >>> ParamSpec("lm_head.weight", "bfloat16", (32000, 64)).numel
    2048000
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


class Slot(NamedTuple):
    """Where a parameter lies in the flat buffer of its dtype, in elements."""

    spec: ParamSpec
    start: int

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + self.spec.numel


class Bucket(NamedTuple):
    """One broadcast: elements [start, stop) of the flat buffer of `dtype`."""

    dtype: str
    start: int
    stop: int


@dataclass(frozen=True)
class TransferPlan:
    """The layout of one publication.

    >>> plan = TransferPlan((ParamSpec("a", "float32", (2, 3)), ParamSpec("b", "float32", ())))
    >>> plan.sizes, plan.nbytes, [s.start for s in plan.slots]
    ({'float32': 7}, 28, [0, 6])
    >>> [(b.start, b.stop) for b in plan.buckets(16)]
    [(0, 4), (4, 7)]
    """

    params: tuple[ParamSpec, ...]

    def __post_init__(self) -> None:
        for spec in self.params:
            if spec.dtype not in DTYPE_BYTES:
                raise WeightSyncError(
                    f"parameter {spec.name} has dtype {spec.dtype}: "
                    f"weights travel as one of {', '.join(DTYPE_BYTES)}"
                )

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> TransferPlan:
        """The plan of an update info (names, dtype_names, shapes; vLLM's NCCL fields).

        Raises:
            WeightSyncError: lists of different lengths, or a dtype that cannot travel.
        """
        names, dtypes, shapes = info["names"], info["dtype_names"], info["shapes"]
        if not len(names) == len(dtypes) == len(shapes):
            raise WeightSyncError(
                f"update info has {len(names)} names, {len(dtypes)} dtypes, {len(shapes)} shapes"
            )
        return cls(tuple(map(_spec, names, dtypes, shapes)))

    def to_info(self) -> dict[str, Any]:
        """The update info that `from_info` reads."""
        return {
            "names": [p.name for p in self.params],
            "dtype_names": [p.dtype for p in self.params],
            "shapes": [list(p.shape) for p in self.params],
        }

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """Each parameter's place, in the order of the plan."""
        filled: dict[str, int] = {}
        slots = []
        for spec in self.params:
            start = filled.get(spec.dtype, 0)
            slots.append(Slot(spec, start))
            filled[spec.dtype] = start + spec.numel
        return tuple(slots)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Elements of each dtype's flat buffer, in order of first appearance."""
        sizes: dict[str, int] = {}
        for spec in self.params:
            sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.numel
        return sizes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole publication."""
        return sum(n * DTYPE_BYTES[dtype] for dtype, n in self.sizes.items())

    def buckets(self, limit_bytes: int = BUCKET_BYTES) -> Iterator[Bucket]:
        """The broadcasts in order, each of at most `limit_bytes`."""
        for dtype, numel in self.sizes.items():
            step = max(1, limit_bytes // DTYPE_BYTES[dtype])
            for start in range(0, numel, step):
                yield Bucket(dtype, start, min(start + step, numel))

    def checksums(self, flat: Mapping[str, memoryview]) -> list[int]:
        """`checksum` of each parameter's bytes, in the order of the plan.

        `flat` has the bytes of each dtype's buffer.

        >>> plan = TransferPlan((ParamSpec("a", "float16", (2,)), ParamSpec("b", "float16", ())))
        >>> [hex(c) for c in plan.checksums({"float16": memoryview(b"abcdef")})]
        ['0x6497a96f53a89890', '0x4076b5e9db38bf9f']
        """
        return [
            checksum(flat[slot.spec.dtype][slot.start * size : slot.stop * size])
            for slot in self.slots
            for size in (DTYPE_BYTES[slot.spec.dtype],)
        ]


def checksum(data: memoryview) -> int:
    """xxh3_64 of a parameter's bytes.

    >>> hex(checksum(memoryview(b"abcd")))
    '0x6497a96f53a89890'
    """
    return xxhash.xxh3_64_intdigest(data)


def _spec(name: str, dtype: str, shape: Sequence[int]) -> ParamSpec:
    return ParamSpec(name, dtype, tuple(shape))


def refuse_damaged(reports: Iterable[Sequence[str]]) -> None:
    """Raise DamagedWeightsError if a worker reports names of tensors that arrived wrong.

    >>> refuse_damaged([[], []])
    """
    names = sorted({name for report in reports for name in report})
    if names:
        some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        raise DamagedWeightsError(
            f"{len(names)} tensors did not arrive as they were sent (checksums differ): {some}"
        )


def publication_deadline_s(timeout_s: float, nbytes: int) -> float:
    """Seconds that one publication may take: `weights.timeout_s` plus 1 s per 100 MB.

    >>> publication_deadline_s(60.0, 300_000_000)
    63.0
    """
    return timeout_s + nbytes / BYTES_PER_S


def uses_loopback(address: str) -> bool:
    """Whether a group that meets at `address` is on this machine alone.

    >>> uses_loopback("127.0.0.1"), uses_loopback("10.0.0.1")
    (True, False)
    """
    return address == "localhost" or address.startswith("127.")
