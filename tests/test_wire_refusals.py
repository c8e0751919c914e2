"""What the codec refuses: malformed headers, payloads of another length, stray indexes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asyncrl import wire
from asyncrl.errors import WireError
from asyncrl.types import ARRAY_FIELDS, Envelope
from tests.helpers.golden import GOLDEN, GOLDEN_PAYLOAD, HEADER, TRAJECTORY

lengths = st.integers(1, 30)


def changed(message: wire.Message, **changes: Any) -> list[wire.Frame]:
    """The message's map with some keys set, or removed where the value is `...`."""
    plain = msgspec.msgpack.decode(bytes(wire.encode(message)[0])) | changes
    return [msgspec.msgpack.encode({k: v for k, v in plain.items() if v is not ...})]


PULL = wire.Pull(rank=0, batch=1, wait_s=1.0)
PART = wire.Part(batch=1, rank=0, manifest=(HEADER,), fresh=1, mine=(0,))


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
        (changed(PULL, schema=2), "wire schema 2, this side speaks 3"),
        (changed(PULL, schema=2, colour=1), r"schema 2, this side speaks 3"),
        (changed(wire.Fail(actor="a", lease=1, id=HEADER.id, kind="data", reason=""),  # type: ignore[arg-type]
                 kind="bad luck"), "Invalid enum value"),
        ([*wire.encode(PULL), b"x"], "Pull has 1 payloads, expected 0"),
        (wire.encode(PART), "Part has 0 payloads, expected 1"),
        (wire.encode(PART, [b"", b""]), "Part has 2 payloads, expected 1"),
        (changed(PART, fresh=...), "missing required field `fresh`"),
        (wire.encode(wire.Push(header=HEADER)), "Push has 0 payloads, expected 1"),
        (wire.encode(wire.Push(header=HEADER), [GOLDEN_PAYLOAD, b""]), "has 2 payloads"),
        (wire.encode(wire.Push(header=HEADER), [b""]), "has 0 bytes, expected 59"),
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


@settings(deadline=None, max_examples=500)
@given(golden=st.sampled_from(GOLDEN), at=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_changed_byte_is_a_wire_error_or_another_message(
    golden: tuple[wire.Message, bytes], at: int, value: int
) -> None:
    message, header = golden[0], bytearray(golden[1])
    header[at % len(header)] = value
    payloads = [GOLDEN_PAYLOAD] if isinstance(message, wire.Push | wire.Part) else []
    try:
        decoded, _ = wire.decode([bytes(header), *payloads])
    except WireError:
        return
    assert isinstance(decoded, wire.Message)
    again = wire.encode(decoded, payloads)  # compared as bytes: a number may be none by now
    assert wire.encode(*wire.decode(again)) == again


@settings(deadline=None)
@given(golden=st.sampled_from(GOLDEN), cut=st.integers(1, 10_000), more=st.binary(min_size=1))
def test_a_header_cut_short_or_continued_is_a_wire_error(
    golden: tuple[wire.Message, bytes], cut: int, more: bytes
) -> None:
    header = golden[1]
    for wrong in (header[: -(1 + cut % (len(header) - 1))], header + more):
        with pytest.raises(WireError, match="malformed header"):
            wire.decode([wrong, GOLDEN_PAYLOAD])


@settings(deadline=None)
@given(p=lengths, t=lengths, size=st.integers(0, 700))
def test_a_payload_of_another_length_is_refused_wherever_it_comes(
    p: int, t: int, size: int
) -> None:
    assume(size != 4 * p + 17 * t)
    header, payload = replace(HEADER, prompt_tokens=p, response_tokens=t), bytes(size)
    why = (
        rf"payload of sums/0/12/3 has {size} bytes, expected {4 * p + 17 * t} \({p} prompt and {t} "
    )
    with pytest.raises(WireError, match=why):
        wire.decode(wire.encode(wire.Push(header=header), [payload]))
    with pytest.raises(WireError, match=why):
        wire.read_part(msgspec.structs.replace(PART, manifest=(header,)), [payload])
    with pytest.raises(WireError, match=why):
        wire.unpack_trajectory(Envelope(header, payload))


@pytest.mark.parametrize("field", [name for name, _ in ARRAY_FIELDS])
def test_an_array_that_does_not_fit_its_header_is_named(field: str) -> None:
    longer = replace(TRAJECTORY, **{field: np.append(getattr(TRAJECTORY, field), 1)})
    with pytest.raises(WireError, match=rf"{field} of sums/0/12/3 has shape \(\d,\), expected"):
        wire.pack_trajectory(longer)


@pytest.mark.parametrize("tokens", [0, -1, -17])
@pytest.mark.parametrize("field", ["prompt_tokens", "response_tokens"])
def test_samples_without_tokens_are_refused(field: str, tokens: int) -> None:
    header = replace(HEADER, **{field: tokens})
    with pytest.raises(WireError, match="expected at least 1 of each"):
        wire.decode(wire.encode(wire.Push(header=header), [GOLDEN_PAYLOAD]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mine": (1,)}, "part index 1 outside a manifest of 1"),
        ({"mine": (-1,)}, "part index -1 outside a manifest of 1"),
        ({"mine": (0, 0)}, "Part has 1 payloads, expected 2"),
        ({"fresh": 2}, "2 fresh samples in a manifest of 1"),
        ({"fresh": -1}, "-1 fresh samples in a manifest of 1"),
    ],
)
def test_parts_that_contradict_themselves_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    part = msgspec.structs.replace(PART, **changes)
    with pytest.raises(WireError, match=message):
        wire.read_part(part, [GOLDEN_PAYLOAD])
