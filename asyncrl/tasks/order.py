"""A shuffle of 0 .. n - 1 that needs no list, the same on every machine and Python.

A Feistel network permutes the smallest even-bit domain that holds n; values outside are
walked on until they fall inside (Black and Rogaway 2002, "Ciphers with arbitrary finite
domains").
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

_ROUNDS = 4


def shuffled(n: int, seed: int, epoch: int, purpose: str = "train") -> Iterator[int]:
    """Every number below n once, in an order that (seed, epoch, purpose) alone decides.

    >>> sorted(shuffled(5, seed=1, epoch=0))
    [0, 1, 2, 3, 4]
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    key = blake2b(f"{purpose}:{seed}:{epoch}".encode(), digest_size=32).digest()
    for start in range(n):
        value = start
        while True:
            left, right = value >> half, value & mask
            for r in range(_ROUNDS):
                left, right = right, left ^ (_mix(key, r, right) & mask)
            value = left << half | right
            if value < n:
                break
        yield value


def _mix(key: bytes, r: int, value: int) -> int:
    data = r.to_bytes(1, "little") + value.to_bytes(16, "little")
    return int.from_bytes(blake2b(data, key=key, digest_size=16).digest(), "little")
