"""Below the messages: frames beyond the limit, bytes that are no ZeroMQ, clients without a key."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq

from asyncrl import wire
from asyncrl.buffer.client import BufferClient
from asyncrl.buffer.server import MAX_FRAME_BYTES
from asyncrl.security import new_keys, write_keys
from tests.buffer.peers import learner, raw
from tests.helpers.buffer_process import BufferProcess, BufferSpec
from tests.helpers.eventually import eventually

LEDGER = {"group_size": 2, "groups_per_batch": 2, "max_staleness": 3}
KEPT_BYTES = 16 << 20
"""Less than what any one of these tests sends or announces."""

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\x00") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"


@pytest.fixture
def buffer() -> Iterator[BufferProcess]:
    process = BufferProcess(BufferSpec(ledger=LEDGER))
    yield process
    process.close()


@contextmanager
def bare(buffer: BufferProcess) -> Iterator[socket.socket]:
    """A TCP connection."""
    with socket.create_connection(("127.0.0.1", buffer.port), timeout=30) as s:
        yield s


@contextmanager
def zmtp(buffer: BufferProcess) -> Iterator[socket.socket]:
    """A connection after ZeroMQ's own handshake, made by hand."""
    with bare(buffer) as s:
        s.sendall(GREETING + bytes([4, len(READY)]) + READY)
        received(s, len(GREETING))
        assert received(s, 1) == b"\x04"
        received(s, received(s, 1)[0])
        yield s


def received(s: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = s.recv(size - len(data))
        assert more, "closed"
        data += more
    return data


def closed(s: socket.socket) -> bool:
    """Whether the other side ends the connection; what it still sends is read."""
    try:
        while s.recv(65536):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def serves(buffer: BufferProcess) -> None:
    """Somebody honest is answered."""
    with learner(buffer) as client:  # type: ignore[arg-type]
        assert client.stats().conserved


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES + 1, 1 << 40, (1 << 64) - 1])
def test_a_frame_beyond_the_limit_ends_its_connection(buffer: BufferProcess, size: int) -> None:
    hello = bytes(wire.encode(wire.Hello(run_id="r", role="watcher", rank=0, pid=1))[0])
    with zmtp(buffer) as s:
        s.sendall(bytes([0, len(hello)]) + hello)
        flags, length = received(s, 2)
        assert flags == 0
        assert isinstance(wire.decode([received(s, length)])[0], wire.Ok)
        s.sendall(b"\x02" + struct.pack(">Q", size) + bytes(1000))
        assert closed(s)
    serves(buffer)


def test_frames_that_are_announced_and_never_come_cost_nothing(buffer: BufferProcess) -> None:
    serves(buffer)
    before = buffer.rss_bytes
    with ExitStack() as stack:
        for _ in range(100):  # 25 GiB together
            s = stack.enter_context(zmtp(buffer))
            s.sendall(b"\x02" + struct.pack(">Q", MAX_FRAME_BYTES - 1) + bytes(1000))
        serves(buffer)
        assert buffer.rss_bytes - before < KEPT_BYTES
    serves(buffer)


def test_a_message_of_thousands_of_frames_is_one_refusal(buffer: BufferProcess) -> None:
    header = bytes(wire.encode(wire.StatsRequest(req=7))[0])
    with raw(buffer, role="watcher") as exchange:  # type: ignore[arg-type]
        exchange([header, *[bytes(1000)] * 5000])
        before = buffer.rss_bytes
        for _ in range(20):  # 100 MB together
            refused = exchange([header, *[bytes(1000)] * 5000])
            assert isinstance(refused, wire.Error)
            assert refused.req == 7
        stats = exchange([header])
    assert isinstance(stats, wire.Stats)
    assert stats.counts["malformed"] == 21
    assert buffer.rss_bytes - before < KEPT_BYTES


def test_bytes_that_are_no_zeromq_disturb_nobody(buffer: BufferProcess) -> None:
    rng = random.Random(3)
    starts = [
        b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        GREETING[:10], GREETING[:11] + b"\x00", GREETING[:30], GREETING + b"\x04\x00",
        GREETING + b"\x06" + b"\xff" * 8, GREETING + bytes([4, len(READY)]) + READY[:9],
        GREETING.replace(b"NULL", b"EVIL"), GREETING.replace(b"NULL\x00", b"CURVE"),
    ]  # fmt: skip
    serves(buffer)
    before = buffer.rss_bytes
    with ExitStack() as stack:
        for round_ in range(20):
            for start in starts:
                s = bare(buffer)
                # Every second one stays there and says nothing more.
                with s if round_ % 2 else _kept(stack, s) as connection:
                    connection.sendall(start + rng.randbytes(rng.choice((0, 0, 1, 64, 4000))))
        with learner(buffer) as client:  # type: ignore[arg-type]
            assert client.stats().conserved
            assert buffer.rss_bytes - before < KEPT_BYTES
    serves(buffer)


@contextmanager
def _kept(stack: ExitStack, connection: object) -> Iterator[socket.socket]:
    yield stack.enter_context(connection)  # type: ignore[arg-type]


def test_without_the_key_nobody_gets_in(tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys")
    buffer = BufferProcess(BufferSpec(ledger=LEDGER, keys=str(tmp_path / "keys")))
    context = zmq.Context()
    try:
        other = new_keys()
        wrong = [
            None,
            (keys.server_public, other.client_public, other.client_secret),
            (other.server_public, keys.client_public, keys.client_secret),
        ]
        sockets = []
        for attempt in wrong:
            s = context.socket(zmq.DEALER)
            s.linger = 0
            if attempt is not None:
                s.curve_serverkey, s.curve_publickey, s.curve_secretkey = attempt
            s.connect(buffer.endpoint)
            s.send_multipart(wire.encode(wire.Hello(run_id="r", role="actor", rank=0, pid=1)))
            sockets.append(s)
        client = BufferClient(buffer.endpoint, "r", "learner", 0, keys=keys.client())
        try:
            client.hello()
            eventually(
                lambda: client.stats().gauges.get("wire/unauthenticated", 0) >= len(wrong),
                lambda: f"not refused: {client.stats()}",
            )
            assert client.stats().counts["malformed"] == 0
        finally:
            client.close()
        assert not any(s.poll(0) for s in sockets)
        for s in sockets:
            s.close()
    finally:
        context.destroy(linger=0)
        buffer.close()
