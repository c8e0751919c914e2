"""The one codec of the data plane: a msgpack header, then raw array frames (docs/wire.md).

A message is a ZeroMQ multipart: frame 0 is a msgpack map with the keys `type` (the tag),
`schema` (SCHEMA), `req` (echoed in the reply) and the message's own fields; samples add one raw
little-endian frame for each of `types.ARRAY_FIELDS`, in that order. Nothing is pickled, and
decoding checks every type, so that a malformed message is a WireError and nothing else.

The messages themselves are in asyncrl.messages; `X as X` below lets callers say `wire.X`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from asyncrl.errors import WireError
from asyncrl.messages import SCHEMA as SCHEMA
from asyncrl.messages import Ack as Ack
from asyncrl.messages import Announce as Announce
from asyncrl.messages import AnyMessage
from asyncrl.messages import Commit as Commit
from asyncrl.messages import Error as Error
from asyncrl.messages import Fail as Fail
from asyncrl.messages import Gone as Gone
from asyncrl.messages import Hello as Hello
from asyncrl.messages import LeaseRequest as LeaseRequest
from asyncrl.messages import Leases as Leases
from asyncrl.messages import Message as Message
from asyncrl.messages import NotYet as NotYet
from asyncrl.messages import Ok as Ok
from asyncrl.messages import OpenWait as OpenWait
from asyncrl.messages import Part as Part
from asyncrl.messages import Progress as Progress
from asyncrl.messages import Published as Published
from asyncrl.messages import Pull as Pull
from asyncrl.messages import Push as Push
from asyncrl.messages import Record as Record
from asyncrl.messages import State as State
from asyncrl.messages import Stats as Stats
from asyncrl.messages import StatsRequest as StatsRequest
from asyncrl.messages import Stop as Stop
from asyncrl.messages import Stopped as Stopped
from asyncrl.messages import WeightsBegin as WeightsBegin
from asyncrl.messages import WeightsCommit as WeightsCommit
from asyncrl.messages import WeightsInit as WeightsInit
from asyncrl.messages import WeightsReceive as WeightsReceive
from asyncrl.types import ARRAY_FIELDS, BatchPart, Envelope, SampleHeader, Trajectory

MAX_HEADER_BYTES = 64 << 20
"""A header longer than this is refused before it is decoded (a batch manifest is the largest)."""

Frame = bytes | memoryview

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_N_ARRAYS = len(ARRAY_FIELDS)


def encode(message: Message, frames: Sequence[Frame] = ()) -> list[Frame]:
    """The multipart of a message: its header, then `frames` as they are."""
    return [_encoder.encode(message), *frames]


def decode(frames: Sequence[Frame]) -> tuple[Message, tuple[Frame, ...]]:
    """The message of a multipart, and its array frames untouched.

    Raises:
        WireError: no frame, an unknown type, another schema, a field of the wrong type, or
            a number of frames that the message does not announce.
    """
    if not frames:
        raise WireError("empty message: expected a msgpack header in frame 0")
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise WireError(f"header of {len(frames[0])} bytes is over {MAX_HEADER_BYTES}")
    try:
        message: Message = _decoder.decode(frames[0])
    except (msgspec.DecodeError, ValueError, RecursionError) as e:
        raise WireError(f"malformed header: {e}{_schema_hint(frames[0])}") from e
    if message.schema != SCHEMA:
        raise WireError(
            f"wire schema {message.schema}, this side speaks {SCHEMA}: "
            "run the same asyncrl version on both sides"
        )
    arrays = tuple(frames[1:])
    expected = 0
    if isinstance(message, Push):
        expected = _N_ARRAYS
        check_frames(message.header, arrays)
    elif isinstance(message, Part):
        expected = _N_ARRAYS * len(message.mine)
    if len(arrays) != expected:
        raise WireError(
            f"{type(message).__name__} has {len(arrays)} array frames, expected {expected}"
        )
    return message, arrays


def _schema_hint(header: Frame) -> str:
    """A note on the schema of a header that did not decode, when it is another one."""
    try:
        schema = msgspec.msgpack.decode(header).get("schema")
    except (msgspec.DecodeError, ValueError, AttributeError, RecursionError):
        return ""
    return "" if schema == SCHEMA else f" (schema {schema}, this side speaks {SCHEMA})"


def check_frames(header: SampleHeader, frames: Sequence[Frame]) -> None:
    """Check the byte length of each array frame against the header's token counts.

    Raises:
        WireError: naming the array, its size and the size expected.
    """
    if len(frames) != _N_ARRAYS:
        raise WireError(f"sample has {len(frames)} array frames, expected {_N_ARRAYS}")
    if header.response_tokens < 1 or header.prompt_tokens < 1:
        raise WireError(
            f"sample {header.id} has {header.prompt_tokens} prompt and "
            f"{header.response_tokens} response tokens, expected at least 1 of each"
        )
    for (name, dtype), frame in zip(ARRAY_FIELDS, frames, strict=True):
        n = header.prompt_tokens if name == "prompt_ids" else header.response_tokens
        want = n * np.dtype(dtype).itemsize
        if len(frame) != want:
            raise WireError(f"{name} of {header.id} has {len(frame)} bytes, expected {want}")


def pack_trajectory(trajectory: Trajectory) -> Envelope:
    """A trajectory's header and raw array frames (zero-copy where layout allows)."""
    frames = tuple(
        memoryview(np.ascontiguousarray(getattr(trajectory, name), dtype=dtype).data).cast("B")
        for name, dtype in ARRAY_FIELDS
    )
    check_frames(trajectory.header, frames)
    return Envelope(trajectory.header, frames)


def unpack_trajectory(envelope: Envelope) -> Trajectory:
    """The arrays of an envelope as read-only numpy views (shapes as in `Trajectory`)."""
    check_frames(envelope.header, envelope.frames)
    arrays = {
        name: np.frombuffer(frame, dtype=dtype)
        for (name, dtype), frame in zip(ARRAY_FIELDS, envelope.frames, strict=True)
    }
    return Trajectory(header=envelope.header, **arrays)


def part_frames(part: BatchPart, req: int = 0) -> list[Frame]:
    """The multipart of a rank's part of a batch."""
    message = Part(
        req=req, batch=part.batch, rank=part.rank, manifest=part.manifest, mine=part.mine
    )
    return encode(message, [f for e in part.envelopes for f in e.frames])


def read_part(message: Part, arrays: Sequence[Frame]) -> BatchPart:
    """The batch part of a decoded Part message.

    Raises:
        WireError: an index outside the manifest, or frames that do not fit their headers.
    """
    envelopes = []
    for j, index in enumerate(message.mine):
        if not 0 <= index < len(message.manifest):
            raise WireError(f"part index {index} outside a manifest of {len(message.manifest)}")
        frames = tuple(arrays[j * _N_ARRAYS : (j + 1) * _N_ARRAYS])
        check_frames(message.manifest[index], frames)
        envelopes.append(Envelope(message.manifest[index], frames))
    return BatchPart(message.batch, message.rank, message.manifest, message.mine, tuple(envelopes))
