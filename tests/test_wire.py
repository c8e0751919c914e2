"""The codec: round trips, golden bytes, refusals, and docs/wire.md against the code."""

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
from asyncrl.errors import WireError
from asyncrl.recording import Entry
from asyncrl.types import (
    ARRAY_FIELDS,
    BatchPart,
    Envelope,
    FinishReason,
    Lease,
    SampleHeader,
    SampleId,
    Trajectory,
    Version,
)

DOC = Path(__file__).parent.parent / "docs" / "wire.md"
MESSAGES: list[type[wire.Message]] = wire.Message.__subclasses__()

HEADER = SampleHeader(
    id=SampleId("sums", 0, 12, 3), lease=812, actor="actor-0", prompt_tokens=2, response_tokens=3,
    policy_tokens=3, version_min=Version(0, 3), version_max=Version(0, 4),
    version_dispatch=Version(0, 3), version_finish=Version(0, 4), reward=1.0,
    finish_reason=FinishReason.STOP, temperature=1.0,
)  # fmt: skip
TRAJECTORY = Trajectory(
    header=HEADER,
    prompt_ids=np.array([1, 258], np.int32),
    response_ids=np.array([3, 4, 2], np.int32),
    behaviour_logprobs=np.array([-0.5, -1.0, 0.0], np.float32),
    versions=np.array([3, 3, 4], np.int32),
    incarnations=np.array([0, 0, 0], np.int32),
    loss_mask=np.array([1, 1, 1], np.uint8),
)
GOLDEN_HEADER = (
    "8e a26964 94 a473756d73 00 0c 03"  # id: ["sums", 0, 12, 3]
    "a56c65617365 cd032c"  # lease: 812
    "a56163746f72 a76163746f722d30"  # actor: "actor-0"
    "ad70726f6d70745f746f6b656e73 02"
    "af726573706f6e73655f746f6b656e73 03"
    "ad706f6c6963795f746f6b656e73 03"
    "ab76657273696f6e5f6d696e 920003"
    "ab76657273696f6e5f6d6178 920004"
    "b076657273696f6e5f6469737061746368 920003"
    "ae76657273696f6e5f66696e697368 920004"
    "a6726577617264 cb3ff0000000000000"
    "ad66696e6973685f726561736f6e a473746f70"
    "ab74656d7065726174757265 cb3ff0000000000000"
    "a86b765f6d69786564 c2"
)
GOLDEN_ARRAYS = [
    "01000000 02010000",  # prompt_ids
    "03000000 04000000 02000000",  # response_ids
    "000000bf 000080bf 00000000",  # behaviour_logprobs
    "03000000 03000000 04000000",  # versions
    "00000000 00000000 00000000",  # incarnations
    "010101",  # loss_mask
]
GOLDEN_PUSH = (
    "84 a474797065 a470757368 a6736368656d61 02 a3726571 07 a6686561646572" + GOLDEN_HEADER
)
GOLDEN_PART = (
    "87 a474797065 a470617274 a6736368656d61 02 a3726571 09"
    "a56261746368 1f a472616e6b 01 a86d616e6966657374 91" + GOLDEN_HEADER + "a46d696e65 9100"
)


def raw(frames: list[wire.Frame]) -> list[bytes]:
    return [bytes(f) for f in frames]


def test_golden_bytes_of_a_push() -> None:
    golden = [bytes.fromhex(h) for h in (GOLDEN_PUSH, *GOLDEN_ARRAYS)]
    packed = wire.pack_trajectory(TRAJECTORY)
    assert raw(wire.encode(wire.Push(req=7, header=packed.header), packed.frames)) == golden
    message, arrays = wire.decode(golden)
    assert message == wire.Push(req=7, header=HEADER)
    got = wire.unpack_trajectory(Envelope(HEADER, arrays))
    for name, dtype in ARRAY_FIELDS:
        assert getattr(got, name).dtype == np.dtype(dtype)
        np.testing.assert_array_equal(getattr(got, name), getattr(TRAJECTORY, name))


def test_golden_bytes_of_a_part() -> None:
    golden = [bytes.fromhex(h) for h in (GOLDEN_PART, *GOLDEN_ARRAYS)]
    part = BatchPart(31, 1, (HEADER,), (0,), (wire.pack_trajectory(TRAJECTORY),))
    assert raw(wire.part_frames(part, req=9)) == golden
    message, arrays = wire.decode(golden)
    assert isinstance(message, wire.Part)
    got = wire.read_part(message, arrays)
    assert (got.batch, got.rank, got.manifest, got.mine) == (31, 1, (HEADER,), (0,))
    assert raw(list(got.envelopes[0].frames)) == golden[1:]


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
        header = replace(message.header, prompt_tokens=1, response_tokens=2)
        message = msgspec.structs.replace(message, header=header)
        frames = [b"1234", *[b"12345678"] * 4, b"12"]
    elif isinstance(message, wire.Part):
        frames = [b"x"] * (len(ARRAY_FIELDS) * len(message.mine))
    decoded, arrays = wire.decode(raw(wire.encode(message, frames)))
    assert decoded == message
    assert type(decoded) is kind
    assert list(arrays) == frames


@settings(deadline=None)
@given(p=st.integers(1, 30), t=st.integers(1, 30), seed=st.integers(0, 2**32))
def test_arrays_survive_bit_for_bit(p: int, t: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    noise = {
        name: rng.integers(0, 256, (p if name == "prompt_ids" else t) * np.dtype(dtype).itemsize)
        .astype(np.uint8)
        .view(dtype)
        for name, dtype in ARRAY_FIELDS
    }
    sent = Trajectory(replace(HEADER, prompt_tokens=p, response_tokens=t), **noise)
    packed = wire.pack_trajectory(sent)
    assert packed.nbytes == 4 * p + 17 * t
    _, arrays = wire.decode(wire.encode(wire.Push(header=sent.header), packed.frames))
    got = wire.unpack_trajectory(Envelope(sent.header, arrays))
    for name, _ in ARRAY_FIELDS:
        assert getattr(got, name).tobytes() == noise[name].tobytes()


def test_packing_copies_nothing_that_is_laid_out_already() -> None:
    packed = wire.pack_trajectory(TRAJECTORY)
    for frame, (name, _) in zip(packed.frames, ARRAY_FIELDS, strict=True):
        assert np.shares_memory(np.frombuffer(frame, np.uint8), getattr(TRAJECTORY, name))


# --- refusals ------------------------------------------------------------------------------


def changed(message: wire.Message, **changes: Any) -> list[wire.Frame]:
    """The message's map with some keys set, or removed where the value is `...`."""
    plain = msgspec.msgpack.decode(bytes(wire.encode(message)[0])) | changes
    return [msgspec.msgpack.encode({k: v for k, v in plain.items() if v is not ...})]


PULL = wire.Pull(rank=0, batch=1, wait_s=1.0)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([], "empty message"),
        ([b""], "malformed header"),
        ([b"\xc1"], "malformed header"),
        ([b"\x80"], "malformed header"),
        ([b"\x91" * 5000], "malformed header"),
        (changed(PULL, type="pulll"), "malformed header"),
        (changed(PULL, type=...), "malformed header"),
        (changed(PULL, batch="1"), r"Expected `int`, got `str` - at `\$.batch`"),
        (changed(PULL, batch=1.5), "Expected `int`"),
        (changed(PULL, batch=...), "missing required field `batch`"),
        (changed(PULL, colour=1), "unknown field `colour`"),
        (changed(PULL, schema=1), "wire schema 1, this side speaks 2"),
        (changed(PULL, schema=1, colour=1), r"schema 1, this side speaks 2"),
        (changed(wire.Fail(actor="a", lease=1, id=HEADER.id, kind="data", reason=""),  # type: ignore[arg-type]
                 kind="bad luck"), "Invalid enum value"),
        ([*wire.encode(PULL), b"x"], "Pull has 1 array frames, expected 0"),
        ([*wire.encode(wire.Part(batch=1, rank=0, manifest=(HEADER,), mine=(0,))), b"x"],
         "Part has 1 array frames, expected 6"),
        (wire.encode(wire.Push(header=HEADER)), "sample has 0 array frames, expected 6"),
    ],
)  # fmt: skip
def test_malformed_messages_are_wire_errors(frames: list[wire.Frame], message: str) -> None:
    with pytest.raises(WireError, match=message):
        wire.decode(frames)


def test_a_header_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(WireError, match="is over"):
        wire.decode([memoryview(bytearray(wire.MAX_HEADER_BYTES + 1))])


@settings(deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=3))
def test_noise_is_a_wire_error_and_nothing_else(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        wire.decode(frames)


@settings(deadline=None)
@given(at=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_flipped_byte_is_a_wire_error_or_another_message(at: int, value: int) -> None:
    golden = [bytearray.fromhex(h) for h in (GOLDEN_PUSH, *GOLDEN_ARRAYS)]
    golden[0][at % len(golden[0])] = value
    try:
        message, _ = wire.decode([bytes(f) for f in golden])
    except WireError:
        return
    assert isinstance(message, wire.Push)


@pytest.mark.parametrize("field", [name for name, _ in ARRAY_FIELDS])
def test_a_frame_of_the_wrong_length_is_named(field: str) -> None:
    frames = list(wire.pack_trajectory(TRAJECTORY).frames)
    at = [name for name, _ in ARRAY_FIELDS].index(field)
    frames[at] = bytes(frames[at]) + b"\0"
    with pytest.raises(WireError, match=f"{field} of .* has .* bytes, expected"):
        wire.decode(wire.encode(wire.Push(header=HEADER), frames))


def test_samples_without_tokens_and_stray_part_indexes_are_refused() -> None:
    with pytest.raises(WireError, match="0 response tokens, expected at least 1"):
        wire.check_frames(replace(HEADER, response_tokens=0), [b""] * 6)
    frames = wire.pack_trajectory(TRAJECTORY).frames
    for index in (1, -1):
        part = wire.Part(batch=1, rank=0, manifest=(HEADER,), mine=(index,))
        with pytest.raises(WireError, match=f"part index {index} outside a manifest of 1"):
            wire.read_part(part, frames)


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
    assert frames == [bytes.fromhex(h) for h in (GOLDEN_PUSH, *GOLDEN_ARRAYS)]


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
