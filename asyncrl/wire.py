"""The one codec of the data plane: a msgpack header, then raw payloads (docs/wire.md).

A message is a ZeroMQ multipart: frame 0 is a msgpack map with the keys `type` (the tag),
`schema` (SCHEMA), `req` (echoed in the reply) and the message's own fields. Each sample adds one
frame, its payload: the arrays of `types.ARRAY_FIELDS` back to back, little-endian, in that order.
Nothing is pickled, and decoding checks every type, so that a malformed message is a WireError and
nothing else.

The messages themselves are in asyncrl.messages; `X as X` below lets callers say `wire.X`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from asyncrl.errors import WireError
from asyncrl.messages import AnyMessage
from asyncrl.messages.base import SCHEMA as SCHEMA
from asyncrl.messages.base import Message as Message
from asyncrl.messages.base import State as State
from asyncrl.messages.data import Ack as Ack
from asyncrl.messages.data import Commit as Commit
from asyncrl.messages.data import Covered as Covered
from asyncrl.messages.data import Error as Error
from asyncrl.messages.data import Fail as Fail
from asyncrl.messages.data import Gone as Gone
from asyncrl.messages.data import Hello as Hello
from asyncrl.messages.data import LeaseRequest as LeaseRequest
from asyncrl.messages.data import Leases as Leases
from asyncrl.messages.data import NotYet as NotYet
from asyncrl.messages.data import Ok as Ok
from asyncrl.messages.data import Part as Part
from asyncrl.messages.data import Progress as Progress
from asyncrl.messages.data import Published as Published
from asyncrl.messages.data import Pull as Pull
from asyncrl.messages.data import Push as Push
from asyncrl.messages.data import Rewind as Rewind
from asyncrl.messages.data import Saved as Saved
from asyncrl.messages.data import SaveLedger as SaveLedger
from asyncrl.messages.data import Scale as Scale
from asyncrl.messages.data import Scaled as Scaled
from asyncrl.messages.data import Stats as Stats
from asyncrl.messages.data import StatsRequest as StatsRequest
from asyncrl.messages.data import Stop as Stop
from asyncrl.messages.data import Stopped as Stopped
from asyncrl.messages.records import OpenWait as OpenWait
from asyncrl.messages.records import Record as Record
from asyncrl.messages.weights import Announce as Announce
from asyncrl.messages.weights import WeightsBegin as WeightsBegin
from asyncrl.messages.weights import WeightsCommit as WeightsCommit
from asyncrl.messages.weights import WeightsInit as WeightsInit
from asyncrl.messages.weights import WeightsReceive as WeightsReceive
from asyncrl.types import (
    ARRAY_FIELDS,
    PROMPT_TOKEN_BYTES,
    RESPONSE_TOKEN_BYTES,
    BatchPart,
    Envelope,
    SampleHeader,
    Trajectory,
)

MAX_HEADER_BYTES = 64 << 20
"""A header longer than this is refused before it is decoded (a batch manifest is the largest)."""

Frame = bytes | memoryview

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message, frames: Sequence[Frame] = ()) -> list[Frame]:
    """The multipart of a message: its header, then `frames` as they are."""
    return [_encoder.encode(message), *frames]


def decode(frames: Sequence[Frame]) -> tuple[Message, tuple[Frame, ...]]:
    """The message of a multipart, and its payloads untouched (a `push` has one).

    Raises:
        WireError: no frame, an unknown type, another schema, a field of the wrong type, a
            number of payloads that the message does not announce, or a `push` whose payload
            has another length than its header says.
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
    payloads = tuple(frames[1:])
    expected = 0
    if isinstance(message, Push):
        expected = 1
    elif isinstance(message, Part):
        expected = len(message.mine)
    if len(payloads) != expected:
        what = type(message).__name__
        raise WireError(f"{what} has {len(payloads)} payloads, expected {expected}")
    if isinstance(message, Push):
        check_payload(message.header, payloads[0])
    return message, payloads


def _schema_hint(header: Frame) -> str:
    """A note on the schema of a header that did not decode, when it is another one."""
    try:
        schema = msgspec.msgpack.decode(header).get("schema")
    except (msgspec.DecodeError, ValueError, AttributeError, RecursionError):
        return ""
    return "" if schema == SCHEMA else f" (schema {schema}, this side speaks {SCHEMA})"


def check_payload(header: SampleHeader, payload: Frame) -> None:
    """Check a sample's numbers, and its payload's length against the header's token counts.

    Raises:
        WireError: naming the sample, the size and the size expected.
    """
    if not (0 <= header.lease < 1 << 63 and 0 <= header.id.sample < 1 << 31):
        raise WireError(f"sample {_name(header)} of lease {header.lease}: no such numbers")
    p, t = header.prompt_tokens, header.response_tokens
    if p < 1 or t < 1:
        raise WireError(
            f"sample {_name(header)} has {p} prompt and {t} response tokens, "
            "expected at least 1 of each"
        )
    expected = PROMPT_TOKEN_BYTES * p + RESPONSE_TOKEN_BYTES * t
    if len(payload) != expected:
        raise WireError(
            f"payload of {_name(header)} has {len(payload)} bytes, expected {expected} "
            f"({p} prompt and {t} response tokens)"
        )


def _name(header: SampleHeader) -> str:
    return "/".join(map(str, header.id))


def _length(header: SampleHeader, array: str) -> int:
    return header.prompt_tokens if array == "prompt_ids" else header.response_tokens


def pack_trajectory(trajectory: Trajectory) -> Envelope:
    """A trajectory's header and its arrays in one payload.

    Raises:
        WireError: the arrays are not as long as the header says.
    """
    header, arrays = trajectory.header, []
    for name, dtype in ARRAY_FIELDS:
        array = np.asarray(getattr(trajectory, name), dtype=dtype)
        if array.shape != (_length(header, name),):
            raise WireError(
                f"{name} of {_name(header)} has shape {array.shape}, "
                f"expected ({_length(header, name)},)"
            )
        arrays.append(array.tobytes())
    payload = b"".join(arrays)
    check_payload(header, payload)
    return Envelope(header, payload)


def unpack_trajectory(envelope: Envelope) -> Trajectory:
    """The arrays of an envelope as read-only views of its payload (shapes as in `Trajectory`).

    Raises:
        WireError: the payload does not fit the header.
    """
    header, payload = envelope.header, envelope.payload
    check_payload(header, payload)
    view = memoryview(payload).toreadonly()
    arrays, at = {}, 0
    for name, dtype in ARRAY_FIELDS:
        arrays[name] = np.frombuffer(view, dtype, _length(header, name), at)
        at += arrays[name].nbytes
    return Trajectory(header=header, **arrays)


def part_frames(part: BatchPart, req: int = 0) -> list[Frame]:
    """The multipart of a rank's part of a batch."""
    message = Part(
        req=req, batch=part.batch, rank=part.rank, manifest=part.manifest, fresh=part.fresh,
        mine=part.mine,
    )  # fmt: skip
    return encode(message, [e.payload for e in part.envelopes])


def read_part(message: Part, payloads: Sequence[Frame]) -> BatchPart:
    """The batch part of a decoded Part message.

    Raises:
        WireError: an index outside the manifest, or a payload that does not fit its header.
    """
    manifest = message.manifest
    if not 0 <= message.fresh <= len(manifest):
        raise WireError(f"{message.fresh} fresh samples in a manifest of {len(manifest)}")
    if len(payloads) != len(message.mine):
        raise WireError(f"Part has {len(payloads)} payloads, expected {len(message.mine)}")
    envelopes = []
    for index, payload in zip(message.mine, payloads, strict=True):
        if not 0 <= index < len(manifest):
            raise WireError(f"part index {index} outside a manifest of {len(manifest)}")
        check_payload(manifest[index], payload)
        envelopes.append(Envelope(manifest[index], payload))
    return BatchPart(
        message.batch, message.rank, manifest, message.mine, tuple(envelopes), message.fresh
    )
