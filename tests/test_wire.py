"""The codec: golden bytes, round trips, and docs/wire.md against the code."""

from __future__ import annotations

import ast
import inspect
import re
import types
import typing
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl import wire
from asyncrl.recording import Entry
from asyncrl.types import (
    ARRAY_FIELDS,
    PROMPT_TOKEN_BYTES,
    RESPONSE_TOKEN_BYTES,
    BatchPart,
    Envelope,
    Lease,
    SampleHeader,
    Trajectory,
)
from tests.helpers.golden import (
    GOLDEN,
    GOLDEN_OF,
    GOLDEN_PAYLOAD,
    GOLDEN_PUSH,
    HEADER,
    TRAJECTORY,
)

DOC = Path(__file__).parent.parent / "docs" / "wire.md"
MESSAGES: list[type[wire.Message]] = wire.Message.__subclasses__()


def raw(frames: list[wire.Frame]) -> list[bytes]:
    return [bytes(f) for f in frames]


@pytest.mark.parametrize(
    ("message", "header"), GOLDEN, ids=[type(message).__name__ for message, _ in GOLDEN]
)
def test_golden_bytes_of_every_message(message: wire.Message, header: bytes) -> None:
    payloads = [GOLDEN_PAYLOAD] if isinstance(message, wire.Push | wire.Part) else []
    assert raw(wire.encode(message, payloads)) == [header, *payloads]
    assert wire.decode([header, *payloads]) == (message, tuple(payloads))


def test_every_message_has_golden_bytes() -> None:
    assert set(GOLDEN_OF) == set(MESSAGES)


def test_golden_bytes_of_a_payload() -> None:
    packed = wire.pack_trajectory(TRAJECTORY)
    assert (packed.header, packed.payload) == (HEADER, GOLDEN_PAYLOAD)
    got = wire.unpack_trajectory(Envelope(HEADER, GOLDEN_PAYLOAD))
    for name, dtype in ARRAY_FIELDS:
        assert getattr(got, name).dtype == np.dtype(dtype)
        np.testing.assert_array_equal(getattr(got, name), getattr(TRAJECTORY, name))


def test_golden_bytes_of_a_part() -> None:
    golden = [GOLDEN_OF[wire.Part], GOLDEN_PAYLOAD]
    part = BatchPart(31, 1, (HEADER,), (0,), (wire.pack_trajectory(TRAJECTORY),), fresh=1)
    assert raw(wire.part_frames(part, req=9)) == golden
    message, payloads = wire.decode(golden)
    assert isinstance(message, wire.Part)
    assert wire.read_part(message, payloads) == part


def test_a_payload_is_four_bytes_a_prompt_token_and_seventeen_a_response_token() -> None:
    sizes = [np.dtype(dtype).itemsize for _, dtype in ARRAY_FIELDS]
    assert [PROMPT_TOKEN_BYTES, RESPONSE_TOKEN_BYTES] == [sizes[0], sum(sizes[1:])] == [4, 17]
    assert sorted(sizes, reverse=True) == sizes  # back to back, every array is aligned


# --- round trips -------------------------------------------------------------------------

ints = st.integers(-(2**63), 2**63 - 1)
scalars: dict[Any, st.SearchStrategy[Any]] = {
    int: ints,
    str: st.text(max_size=20),
    bool: st.booleans(),
    float: st.floats(allow_nan=False),
    type(None): st.none(),
    Any: st.recursive(
        st.none() | st.booleans() | ints | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=5,
    ),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, as the codec returns them."""
    if kind in scalars:
        return scalars[kind]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, args))
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is list:
        return st.lists(values(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if is_dataclass(kind) or issubclass(kind, tuple | msgspec.Struct):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{name: values(hint) for name, hint in hints.items()})
    return st.sampled_from(list(kind))  # an enumeration


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_message_survives_the_trip(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(MESSAGES))
    hints = typing.get_type_hints(kind)
    names = [f.name for f in msgspec.structs.fields(kind) if f.name != "schema"]
    message = kind(**{name: data.draw(values(hints[name]), name) for name in names})
    frames: list[wire.Frame] = []
    if isinstance(message, wire.Push):
        p, t = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
        header = replace(
            message.header, prompt_tokens=p, response_tokens=t,
            lease=data.draw(st.integers(0, 2**63 - 1)),
            id=message.header.id._replace(sample=data.draw(st.integers(0, 2**31 - 1))),
        )  # fmt: skip
        message = msgspec.structs.replace(message, header=header)
        size = 4 * p + 17 * t
        frames = [data.draw(st.binary(min_size=size, max_size=size))]
    elif isinstance(message, wire.Part):
        frames = [data.draw(st.binary(max_size=9)) for _ in message.mine]
    decoded, payloads = wire.decode(raw(wire.encode(message, frames)))
    assert decoded == message
    assert type(decoded) is kind
    assert list(payloads) == frames


lengths = st.integers(1, 30)


def noise(p: int, t: int, seed: int) -> Trajectory:
    """A sample whose arrays are any bits."""
    rng = np.random.default_rng(seed)
    arrays = {
        name: rng.integers(0, 256, (p if name == "prompt_ids" else t) * np.dtype(dtype).itemsize)
        .astype(np.uint8)
        .view(dtype)
        for name, dtype in ARRAY_FIELDS
    }
    return Trajectory(replace(HEADER, prompt_tokens=p, response_tokens=t), **arrays)


@settings(deadline=None)
@given(p=lengths, t=lengths, seed=st.integers(0, 2**32))
def test_arrays_survive_bit_for_bit(p: int, t: int, seed: int) -> None:
    sent = noise(p, t, seed)
    packed = wire.pack_trajectory(sent)
    assert packed.nbytes == len(packed.payload) == 4 * p + 17 * t
    push, payloads = wire.decode(wire.encode(wire.Push(header=sent.header), [packed.payload]))
    assert isinstance(push, wire.Push)
    got = wire.unpack_trajectory(Envelope(push.header, payloads[0]))
    for name, _ in ARRAY_FIELDS:
        assert getattr(got, name).tobytes() == getattr(sent, name).tobytes()


@settings(deadline=None)
@given(data=st.data(), manifest=st.integers(1, 5))
def test_a_part_survives_the_trip(data: st.DataObject, manifest: int) -> None:
    samples = [noise(data.draw(lengths), data.draw(lengths), seed) for seed in range(manifest)]
    mine = sorted(data.draw(st.sets(st.integers(0, manifest - 1))))
    part = BatchPart(
        batch=3, rank=1, manifest=tuple(s.header for s in samples), mine=tuple(mine),
        envelopes=tuple(wire.pack_trajectory(samples[i]) for i in mine),
        fresh=data.draw(st.integers(0, manifest)),
    )  # fmt: skip
    message, payloads = wire.decode(raw(wire.part_frames(part, req=5)))
    assert isinstance(message, wire.Part)
    assert (message.req, wire.read_part(message, payloads)) == (5, part)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_unpacking_copies_nothing_and_nobody_can_write_to_it(kind: Any) -> None:
    payload = kind(GOLDEN_PAYLOAD)
    got = wire.unpack_trajectory(Envelope(HEADER, payload))
    for name, _ in ARRAY_FIELDS:
        array = getattr(got, name)
        assert np.shares_memory(np.frombuffer(payload, np.uint8), array)
        assert array.flags.aligned
        assert not array.flags.writeable


def test_packing_takes_arrays_in_any_layout() -> None:
    scattered = replace(
        TRAJECTORY,
        response_ids=np.array([3, 0, 4, 0, 2, 0], np.int64)[::2],
        loss_mask=np.array([True, True, True]),
    )
    assert wire.pack_trajectory(scattered).payload == GOLDEN_PAYLOAD


def test_an_envelope_may_have_its_payload_elsewhere() -> None:
    class Stored(Envelope):
        __slots__ = ("loads",)

        @property
        def payload(self) -> bytes:
            self.loads = getattr(self, "loads", 0) + 1
            return GOLDEN_PAYLOAD

        @property
        def nbytes(self) -> int:
            return 59

    stored = Stored(HEADER, b"")
    assert stored == Envelope(HEADER, memoryview(GOLDEN_PAYLOAD))
    assert stored != Envelope(HEADER, GOLDEN_PAYLOAD[:-1] + b"\0")
    assert (stored.nbytes, stored.loads) == (len(GOLDEN_PAYLOAD), 2)
    part = BatchPart(31, 1, (HEADER,), (0,), (stored,), fresh=1)
    assert wire.part_frames(part)[1] == GOLDEN_PAYLOAD
    assert wire.unpack_trajectory(stored).response_ids.tolist() == [3, 4, 2]


# --- docs/wire.md ------------------------------------------------------------------------------


def test_the_document_has_every_message_and_field() -> None:
    text = DOC.read_text()
    for kind in MESSAGES:
        tag = kind.__struct_config__.tag
        section = re.search(rf"^### `{tag}`$(.*?)(?=^##|\Z)", text, re.M | re.S)
        assert section, f"docs/wire.md has no section for {tag}"
        for f in msgspec.structs.fields(kind):
            if f.name not in ("schema", "req"):
                assert f"| `{f.name}` |" in section[1], f"{tag}.{f.name} is not in docs/wire.md"
    for record in (SampleHeader, Lease, wire.OpenWait, Entry):
        title = "The index" if record is Entry else record.__name__
        section = re.search(rf"^### {title}$(.*?)(?=^##|\Z)", text, re.M | re.S)
        assert section, f"docs/wire.md has no section {title}"
        for name in typing.get_type_hints(record):
            assert f"| `{name}` |" in section[1], f"{title}: {name} is not in docs/wire.md"
    assert f"schema version {wire.SCHEMA}" in text


def test_the_documents_example_is_the_golden_push() -> None:
    blocks = re.findall(r"```hex\n(.*?)```", DOC.read_text(), re.S)
    frames = [bytes.fromhex(re.sub(r"#.*", "", block)) for block in blocks]
    assert frames == [GOLDEN_PUSH, GOLDEN_PAYLOAD, GOLDEN_OF[wire.Ack]]


def test_nothing_is_pickled() -> None:
    imported = {
        name
        for node in ast.walk(ast.parse(inspect.getsource(wire)))
        for name in (
            [a.name for a in node.names] if isinstance(node, ast.Import)
            else [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        )
    }  # fmt: skip
    assert "pickle" not in imported
