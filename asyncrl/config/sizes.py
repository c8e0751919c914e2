"""What the buffer's settings come to, in bytes."""

from __future__ import annotations

from typing import NamedTuple

from asyncrl.config.schema import Config


class Limit(NamedTuple):
    """The most bytes that the buffer holds."""

    key: str
    """The setting behind it."""
    gib: float
    bytes: int

    @property
    def setting(self) -> str:
        """`key=value`."""
        return f"{self.key}={self.gib:g}"


def buffer_limit(config: Config) -> Limit:
    """The limit of `buffer.durability`: memory without a store, else the store."""
    b = config.buffer
    key, gib = (
        ("buffer.memory_gib", b.memory_gib) if b.durability == "none"
        else ("buffer.store_gib", b.store_gib)
    )  # fmt: skip
    return Limit(key, gib, int(gib * 2**30))


def sample_bytes(config: Config) -> int:
    """The most that one sample takes in the buffer, its records included."""
    # Here, since numpy comes with it and the command line must start fast.
    from asyncrl.types import PROMPT_TOKEN_BYTES, RESPONSE_TOKEN_BYTES, SAMPLE_OVERHEAD

    r = config.rollout
    arrays = PROMPT_TOKEN_BYTES * r.max_prompt_tokens + RESPONSE_TOKEN_BYTES * r.max_new_tokens
    return arrays + SAMPLE_OVERHEAD
