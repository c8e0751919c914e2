"""The one codec of the data plane: a msgpack header, then raw array frames (docs/wire.md).

A message is a ZeroMQ multipart: frame 0 is a msgpack map with the keys `type` (the tag),
`schema` (SCHEMA), `req` (echoed in the reply) and the message's own fields; samples add one raw
little-endian frame for each of `types.ARRAY_FIELDS`, in that order. Nothing is pickled, and
decoding checks every type, so that a malformed message is a WireError and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from asyncrl.errors import WireError
from asyncrl.types import (
    ARRAY_FIELDS,
    BatchPart,
    Envelope,
    FailureKind,
    Lease,
    SampleHeader,
    SampleId,
    Trajectory,
    Version,
)

SCHEMA = 1
"""Version of the wire format; a message of another one is refused."""

MAX_HEADER_BYTES = 64 << 20
"""A header longer than this is refused before it is decoded (a batch manifest is the largest)."""

Frame = bytes | memoryview
State = Literal["running", "stopping", "done"]


class Message(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True
):
    """Fields that every message has."""

    schema: int = SCHEMA
    req: int = 0
    """Number of the request; a reply carries the number of what it answers."""


# --- requests to the buffer -------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """First message of a client. Reply: Ok, or Error when the run id is another one."""

    run_id: str
    role: str
    rank: int
    pid: int


class LeaseRequest(Message, frozen=True, kw_only=True, tag="lease_request"):
    """An actor asks for work. Reply: Leases, at the latest after `wait_s` seconds."""

    actor: str
    applied: Version
    """What its engine runs now: admission counts on it."""
    capacity: int
    """Samples it has room for."""
    wait_s: float


class Push(Message, frozen=True, kw_only=True, tag="push"):
    """A finished sample, with its array frames. Reply: Ack."""

    header: SampleHeader


class Progress(Message, frozen=True, kw_only=True, tag="progress"):
    """Tokens produced so far by each lease; a growing number renews the lease. Reply: Ok."""

    actor: str
    tokens: dict[int, int]


class Fail(Message, frozen=True, kw_only=True, tag="fail"):
    """A sample could not be produced. Reply: Ack."""

    actor: str
    lease: int
    id: SampleId
    kind: FailureKind
    reason: str


class Pull(Message, frozen=True, kw_only=True, tag="pull"):
    """A learner rank asks for its part of batch k. Reply: Part, NotYet or Stopped."""

    rank: int
    batch: int
    wait_s: float


class Commit(Message, frozen=True, kw_only=True, tag="commit"):
    """Batch k is trained, less the samples dropped by the staleness check. Reply: Ok."""

    batch: int
    dropped: tuple[SampleId, ...] = ()


class Published(Message, frozen=True, kw_only=True, tag="published"):
    """The learner cut the snapshot of this version. Reply: Ok."""

    version: Version


class Stop(Message, frozen=True, kw_only=True, tag="stop"):
    """End the run: no more leases, no more batches. Reply: Ok."""

    reason: str
    final: Version | None = None
    """The last version, when the learner finished; actors wait for it before a last eval."""


class StatsRequest(Message, frozen=True, kw_only=True, tag="stats_request"):
    """Ask for the ledger's counts. Reply: Stats."""


# --- replies of the buffer ----------------------------------------------------------------


class Ok(Message, frozen=True, kw_only=True, tag="ok"):
    """Done."""


class Error(Message, frozen=True, kw_only=True, tag="error"):
    """Refused. `error` is the class of asyncrl.errors, `message` says why."""

    error: str
    message: str


class Leases(Message, frozen=True, kw_only=True, tag="leases"):
    """Leases granted, possibly none."""

    leases: tuple[Lease, ...] = ()
    state: State = "running"
    final: Version | None = None
    """With state "done": the version to wait for."""
    held_back: bool = False
    """True when admission, not a lack of prompts, is why there are none."""


class Ack(Message, frozen=True, kw_only=True, tag="ack"):
    """What became of a pushed or failed sample."""

    status: Literal["accepted", "duplicate", "unknown"]


class Part(Message, frozen=True, kw_only=True, tag="part"):
    """A rank's part of a batch; the frames of its samples follow, in the order of `mine`."""

    batch: int
    rank: int
    manifest: tuple[SampleHeader, ...]
    mine: tuple[int, ...]


class NotYet(Message, frozen=True, kw_only=True, tag="not_yet"):
    """The batch is not complete; `waiting_for` names what is missing and who holds it."""

    waiting_for: str


class Stopped(Message, frozen=True, kw_only=True, tag="stopped"):
    """The run is ending; there will be no such batch."""

    reason: str


class Stats(Message, frozen=True, kw_only=True, tag="stats"):
    """The ledger's counts and gauges."""

    counts: dict[str, int]
    gauges: dict[str, float]
    conserved: bool
    state: State
    waiting_for: str = ""
    """What the next batch lacks and who holds it; empty when it is complete."""


# --- weights: learner rank 0 to each actor ---------------------------------------------------


class WeightsInit(Message, frozen=True, kw_only=True, tag="weights_init"):
    """Join the transfer group; `info` is the engine's init info. Reply: Ok, Error."""

    info: dict[str, Any]
    rank_offset: int
    """Rank of this actor's first engine worker in the group."""


class WeightsBegin(Message, frozen=True, kw_only=True, tag="weights_begin"):
    """Pause at a token boundary, drop keys and values, get ready to receive. Reply: Ok."""

    version: Version


class WeightsReceive(Message, frozen=True, kw_only=True, tag="weights_receive"):
    """Join the collective and load what it brings. Reply: Ok when loaded."""

    info: dict[str, Any]


class WeightsCommit(Message, frozen=True, kw_only=True, tag="weights_commit"):
    """Finish, stamp the version, go on generating. Reply: Ok."""

    version: Version


# --- metrics: any role to the hub -----------------------------------------------------------


class Record(Message, frozen=True, kw_only=True, tag="record"):
    """One line of metrics.jsonl (DESIGN section 7), or an event for events.jsonl."""

    role: str
    rank: int
    step: int
    version: int
    incarnation: int
    metrics: dict[str, float] = {}
    hist: dict[str, dict[str, list[float]]] = {}
    event: dict[str, Any] | None = None


_Any = (
    Hello | LeaseRequest | Push | Progress | Fail | Pull | Commit | Published | Stop
    | StatsRequest | Ok | Error | Leases | Ack | Part | NotYet | Stopped | Stats
    | WeightsInit | WeightsBegin | WeightsReceive | WeightsCommit | Record
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_Any)
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
