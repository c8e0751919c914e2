"""Messages that are nearly right: mutations of valid ones of every kind, from a seed.

`Fuzzer.message` gives frames; whether they are still a message is for `wire.decode` to say.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from typing import Any

import msgspec

from asyncrl import wire
from tests.helpers.golden import GOLDEN

Frames = list[bytes]

HUGE = [2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31), -(2**63)]
ODD_FLOATS = [math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, -0.0]
TEXTS = ["", "\x00", "é" * 3, "a" * 300, "b" * 70_000, "../../x", "%s%n{0}", "watcher"]
LYING_SIZES = [
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xd9\xff", b"\xc9\x7f\xff\xff\xff\x01",
]  # fmt: skip
"""Heads of arrays, maps, texts and so on that promise more than the message has."""
LONGEST_BYTES = 1 << 20
"""Of a mutation: an allocator keeps a few of the largest blocks it ever had."""
DEPTHS = (20, 600, 3000, 100_000)


class Fuzzer:
    """A source of mutations.

    Args:
        rng: where all choices come from.
        payload: of the samples that are pushed; large, so that one that is kept is seen.
    """

    def __init__(self, rng: random.Random, payload: bytes) -> None:
        self._rng, self._payload = rng, payload
        self._mutations: list[Callable[[Frames], Frames]] = [
            self._flip, self._flip, self._cut, self._insert, self._lie, self._drop_frame,
            self._swap_frames, self._many_frames, self._other_header, self._noise, self._nest,
            self._field, self._field, self._field, self._field, self._remove_key, self._add_key,
            self._schema,
        ]  # fmt: skip

    def message(self, base: Frames) -> Frames:
        """One or two mutations of a message."""
        frames = list(base)
        for _ in range(self._rng.choice((1, 1, 1, 2))):
            frames = self._rng.choice(self._mutations)(frames)
        if sum(map(len, frames)) > LONGEST_BYTES:
            return self.message(base)
        return frames or [b""]

    def any_kind(self, req: int) -> Frames:
        """A valid message of any kind, those of other conversations included."""
        message, _ = self._rng.choice(GOLDEN)
        payloads = {wire.Push: 1, wire.Part: 1}.get(type(message), 0)
        frames = wire.encode(msgspec.structs.replace(message, req=req), [self._payload] * payloads)
        return [bytes(f) for f in frames]

    # --- bytes -------------------------------------------------------------------------------

    def _flip(self, frames: Frames) -> Frames:
        at = self._rng.randrange(len(frames)) if frames else 0
        if not frames or not frames[at]:
            return [b"\xff"]
        changed = bytearray(frames[at])
        for _ in range(self._rng.choice((1, 1, 1, 2, 8))):
            bit = self._rng.randrange(8 * len(changed))
            changed[bit // 8] ^= 1 << bit % 8
        return [*frames[:at], bytes(changed), *frames[at + 1 :]]

    def _cut(self, frames: Frames) -> Frames:
        at = self._rng.randrange(len(frames)) if frames else 0
        keep = self._rng.randrange(len(frames[at]) or 1) if frames else 0
        return [*frames[:at], frames[at][:keep], *frames[at + 1 :]] if frames else []

    def _insert(self, frames: Frames) -> Frames:
        if not frames:
            return [self._rng.randbytes(9)]
        at = self._rng.randrange(len(frames))
        where = self._rng.randrange(len(frames[at]) + 1)
        new = self._rng.randbytes(self._rng.choice((1, 1, 4, 100)))
        return [*frames[:at], frames[at][:where] + new + frames[at][where:], *frames[at + 1 :]]

    def _lie(self, frames: Frames) -> Frames:
        header = frames[0] if frames else b""
        where = self._rng.randrange(len(header) + 1)
        return [header[:where] + self._rng.choice(LYING_SIZES) + header[where:], *frames[1:]]

    def _noise(self, frames: Frames) -> Frames:
        sizes = self._rng.choices((0, 1, 9, 300), k=self._rng.randrange(1, 4))
        return [self._rng.randbytes(size) for size in sizes]

    # --- frames ------------------------------------------------------------------------------

    def _drop_frame(self, frames: Frames) -> Frames:
        at = self._rng.randrange(len(frames)) if frames else 0
        return [*frames[:at], *frames[at + 1 :]]

    def _swap_frames(self, frames: Frames) -> Frames:
        return frames[::-1] if len(frames) > 1 else [self._payload, *frames]

    def _many_frames(self, frames: Frames) -> Frames:
        return [*frames, *[b"x"] * self._rng.choice((1, 1, 6, 7, 8, 9, 300))]

    def _other_header(self, frames: Frames) -> Frames:
        return [self.any_kind(7)[0], *frames[1:]]

    # --- fields --------------------------------------------------------------------------------

    def _nest(self, frames: Frames) -> Frames:
        """A value far deeper than any message has."""
        depth = self._rng.choice(DEPTHS)
        deep = self._rng.choice((b"\x91", b"\x81\xa1k")) * depth + b"\xc0"
        header = frames[0] if frames else b""
        if not header or not 0x80 <= header[0] < 0x8F:
            return [deep, *frames[1:]]
        more = bytes([header[0] + 1])  # a map of one more
        return [more + header[1:] + b"\xa5extra" + deep, *frames[1:]]

    def _field(self, frames: Frames) -> Frames:
        """Another value, anywhere in the tree."""

        def change(where: Any, key: Any) -> None:
            where[key] = self._value(where[key])

        return self._edit(frames, change)

    def _remove_key(self, frames: Frames) -> Frames:
        def change(where: Any, key: Any) -> None:
            del where[key]

        return self._edit(frames, change)

    def _add_key(self, frames: Frames) -> Frames:
        def change(where: Any, key: Any) -> None:
            if isinstance(where, dict):
                where[self._rng.choice((*TEXTS, "req", 7))] = self._value(0)
            else:
                where.insert(key, self._value(0))

        return self._edit(frames, change)

    def _schema(self, frames: Frames) -> Frames:
        header = self._tree(frames)
        if not isinstance(header, dict):
            return frames
        header["schema"] = self._rng.choice((0, 1, 2, 4, 2**64 - 1, "3", None, 3.0, [3]))
        return [msgspec.msgpack.encode(header), *frames[1:]]

    def _edit(self, frames: Frames, change: Callable[[Any, Any], None]) -> Frames:
        header = self._tree(frames)
        places = list(_places(header))
        if not places:
            return [b"\x80", *frames[1:]]
        change(*self._rng.choice(places))
        try:
            return [msgspec.msgpack.encode(header), *frames[1:]]
        except (TypeError, OverflowError, ValueError):  # what msgpack cannot say
            return [b"\xc1", *frames[1:]]

    def _tree(self, frames: Frames) -> Any:
        try:
            return copy.deepcopy(msgspec.msgpack.decode(frames[0]))
        except (msgspec.DecodeError, IndexError, ValueError, RecursionError, TypeError):
            return None

    def _value(self, old: Any) -> Any:
        rng = self._rng
        if isinstance(old, bool) or rng.random() < 0.2:
            return rng.choice((None, True, 0, "", [], {}, b"bytes", [[[]]], {"a": {"b": 1}}, 0.5))
        if isinstance(old, int):
            return rng.choice((*HUGE, old + 1, old - 1, float(old), str(old), 0))
        if isinstance(old, float):
            return rng.choice((*ODD_FLOATS, int(old) if math.isfinite(old) else 0))
        if isinstance(old, str):
            return rng.choice(TEXTS)
        if isinstance(old, list):
            return rng.choice(
                (old * 2, old * 400, old[:-1], [old], old[::-1], dict(enumerate(old)))
            )
        return rng.choice((old, [old], list(old) if isinstance(old, dict) else 0, *HUGE))


def _places(tree: Any) -> Any:
    """(container, key) of every value of a header."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def is_message(frames: Frames) -> wire.Message | None:
    """The message, or None where it is malformed."""
    try:
        return wire.decode(frames)[0]
    except wire.WireError:
        return None
