"""LoRA's adapters on their way: both ends must merge them with the same base, in the same way.

learner: A, B of each adapted weight ──► engine: W from its model folder + scaling B A ──► load

What is frozen never leaves the learner. No torch here: tensors are only multiplied and added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncrl.errors import WeightSyncError
from asyncrl.weights import TransferPlan

BASE, A, B = ":base", ":A", ":B"
"""Behind the name of an adapted parameter: the parts that it is merged from."""


class Merge(NamedTuple):
    """How an adapted parameter is made: W + scaling B A, the product transposed for Conv1D."""

    scaling: float
    transposed: bool

    def __call__(self, base: Any, a: Any, b: Any) -> Any:
        """Base [out, in] ([in, out] if transposed), A [rank, in], B [out, rank].

        A and B are float32, and so is the sum: it is rounded once, by whoever asked for it.
        """
        delta = b @ a * self.scaling
        return base + (delta.T if self.transposed else delta)


@dataclass(frozen=True)
class Adapters:
    """What an engine must know to merge adapters that travel without their base."""

    merges: Mapping[str, Merge]
    """By parameter; NAME:A and NAME:B travel in float32."""
    base_dtype: str
    """In which the learner keeps what is frozen: merging starts from those numbers."""
    dtype: str
    """In which merged and frozen weights are loaded, as whole ones would travel."""
    load_bytes: int
    """Of all weights in that type: what loading takes grows with them."""
    base: int
    """Fingerprint of the learner's model folder (model_store/tensors.py)."""

    def changes(self, came: Iterable[str]) -> set[str]:
        """The parameters that change, of the names of what travelled.

        >>> merges = {"q.weight": Merge(2.0, False)}
        >>> names = ("q.weight:A", "q.weight:B", "norm.weight")
        >>> sorted(Adapters(merges, "bfloat16", "bfloat16", 0, 0).changes(names))
        ['norm.weight', 'q.weight']
        """
        parts = {name + suffix for name in self.merges for suffix in (A, B)}
        return self.merges.keys() | (set(came) - parts)

    def to_info(self) -> dict[str, Any]:
        """Plain values, for the update info."""
        return {
            "merges": {name: list(merge) for name, merge in self.merges.items()},
            "base_dtype": self.base_dtype,
            "dtype": self.dtype,
            "load_bytes": self.load_bytes,
            "base": self.base,
        }

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> Adapters:
        """What `to_info` wrote.

        Raises:
            WeightSyncError: something is missing or of another kind.
        """
        try:
            merges = {n: Merge(float(s), bool(t)) for n, (s, t) in info["merges"].items()}
            return cls(
                merges, str(info["base_dtype"]), str(info["dtype"]), int(info["load_bytes"]),
                int(info["base"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise WeightSyncError(f"update info: malformed adapters: {e!r}") from e


def bytes_to_load(info: Mapping[str, Any]) -> int:
    """Bytes that an engine loads for a publication, of its update info: deadlines grow with them.

    Raises:
        WeightSyncError: malformed.
    """
    nbytes = TransferPlan.from_info(info).nbytes
    adapters = info.get("adapters")
    return nbytes if adapters is None else max(nbytes, Adapters.from_info(adapters).load_bytes)
