"""What passes between a reward worker and its child: msgpack behind a 4-byte length."""

from __future__ import annotations

import struct
from typing import BinaryIO

import msgspec

from asyncrl.types import Prompt

LENGTH = struct.Struct("<I")
MAX_BYTES = 256 << 20


class Score(msgspec.Struct, frozen=True, tag="score"):
    """To the child: score this response."""

    prompt: Prompt
    response: str
    finish_reason: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """From the child: the function is imported. With `error`: it cannot be."""

    error: str = ""


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    """From the child: the reward, or with `error` why there is none."""

    reward: float = 0.0
    error: str = ""
    no_number: bool = False
    """With `error`: what the function returned is no finite number."""


_encoder = msgspec.msgpack.Encoder()
request_decoder = msgspec.msgpack.Decoder(Score)
reply_decoder: msgspec.msgpack.Decoder[Ready | Scored] = msgspec.msgpack.Decoder(Ready | Scored)


def pack(message: Score | Ready | Scored) -> bytes:
    """A message with its length in front."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def read(stream: BinaryIO) -> bytes | None:
    """The next message's bytes; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = stream.read(size)
    return body if len(body) == size else None
