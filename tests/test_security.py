"""Keys of the data plane: who is let in, who is refused and counted, and what a folder holds."""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket as sockets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from asyncrl import wire
from asyncrl.actors.announce import Announcer
from asyncrl.actors.weight_service import WeightService
from asyncrl.buffer.server import MAX_FRAME_BYTES, MAX_FRAMES
from asyncrl.errors import ConfigError, WeightSyncError
from asyncrl.hub import Hub, HubClient
from asyncrl.learner.publication.members import Member, Members
from asyncrl.learner.publication.weight_fleet import FleetClient, Limits
from asyncrl.security import (
    CLIENT_SECRET,
    MAX_CONTROL_BYTES,
    SERVER_PUBLIC,
    SERVER_SECRET,
    Gate,
    Keys,
    load_keys,
    new_keys,
    secure_client,
    secure_server,
    write_keys,
)
from asyncrl.types import Version
from tests.buffer.conftest import Running, small_ledger
from tests.helpers.eventually import eventually
from tests.helpers.metric_names import undocumented
from tests.weights.fakes import FakeEngine, subscriber

V0, V1 = Version(0, 0), Version(0, 1)
OURS, OTHERS = new_keys(), new_keys()
STRANGERS: dict[str, Keys | None] = {
    "no keys": None,
    "another client's": replace(OTHERS, server_public=OURS.server_public),
    "another server's": replace(OURS, server_public=OTHERS.server_public),
    "another run's": OTHERS,
}
stranger = pytest.mark.parametrize("keys", STRANGERS.values(), ids=STRANGERS)


class Echo:
    """Answers whatever comes with the same, in a thread, on a context of either kind."""

    def __init__(self, kind: str) -> None:
        self.heard: list[bytes] = []
        self._bound, self._end = threading.Event(), threading.Event()
        serve = {"sync": self._serve, "asyncio": lambda: asyncio.run(self._aserve())}[kind]
        self._thread = threading.Thread(target=serve)
        self._thread.start()
        assert self._bound.wait(60)

    def _bind(self, socket: zmq.Socket[Any]) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        self.gate: Gate = secure_server(socket, OURS)
        self.endpoint = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._bound.set()

    def _serve(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        self._bind(socket)
        while not self._end.is_set():
            if socket.poll(20):
                frames = socket.recv_multipart()
                self.heard.append(frames[1])
                socket.send_multipart(frames)
        socket.close()
        context.term()

    async def _aserve(self) -> None:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        self._bind(socket)
        while not self._end.is_set():
            if await socket.poll(20):
                frames = await socket.recv_multipart()
                self.heard.append(frames[1])
                await socket.send_multipart(frames)
        socket.close()
        context.term()

    def close(self) -> None:
        self._end.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def gates() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "gate"]


@pytest.fixture(autouse=True)
def no_gate_left() -> Iterator[None]:
    yield
    eventually(lambda: not gates(), "a gate outlives its socket's context")


@pytest.fixture(params=["sync", "asyncio"])
def echo(request: pytest.FixtureRequest) -> Iterator[Echo]:
    server = Echo(request.param)
    yield server
    server.close()


@contextmanager
def dealer(
    endpoint: str, keys: Keys | None, prepare: Callable[[Any], None] = lambda _: None
) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    secure_client(socket, keys)
    prepare(socket)
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        socket.close()
        context.term()


def is_served(echo: Echo, what: bytes) -> None:
    with dealer(echo.endpoint, OURS) as socket:
        socket.send(what)
        assert socket.poll(60_000)
        assert socket.recv() == what


# --- the gate --------------------------------------------------------------------------------


@stranger
def test_strangers_get_nothing_and_are_counted(echo: Echo, keys: Keys | None) -> None:
    is_served(echo, b"before")
    refused = echo.gate.refused
    with dealer(echo.endpoint, OURS.client()) as friend, dealer(echo.endpoint, keys) as socket:
        socket.send(b"let me in")
        eventually(lambda: echo.gate.refused > refused, "not counted")
        friend.send(b"meanwhile")
        assert friend.poll(60_000)
        assert not socket.poll(0)
    is_served(echo, b"after")
    assert echo.heard == [b"before", b"meanwhile", b"after"]
    assert echo.gate.metrics() == {"wire/unauthenticated": float(echo.gate.refused)}
    assert undocumented(echo.gate.metrics()) == []


def test_other_ways_in_are_closed(echo: Echo) -> None:
    def password(socket: Any) -> None:
        socket.plain_username, socket.plain_password = b"a", b"b"

    with dealer(echo.endpoint, None, password) as socket:
        socket.send(b"let me in")
        eventually(lambda: echo.gate.refused > 0, "not counted")
    address = ("127.0.0.1", int(echo.endpoint.rpartition(":")[2]))
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47)
    for raw in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, bytes(64), greeting,
                greeting + b"\x04\xc8\x05HELLO" + bytes(194)):  # fmt: skip
        with sockets.create_connection(address, 60) as tcp:
            tcp.sendall(raw)
    is_served(echo, b"after")
    assert echo.heard == [b"after"]


def test_nobody_is_refused_without_reason(echo: Echo) -> None:
    for k in range(20):
        is_served(echo, str(k).encode())
    assert echo.gate.refused == 0
    assert echo.gate.metrics() == {}


def test_a_crowd_of_strangers_locks_nobody_out(
    echo: Echo, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "asyncrl.security")
    context = zmq.Context()
    crowd = [context.socket(zmq.DEALER) for _ in range(60)]
    for k, socket in enumerate(crowd):
        socket.setsockopt(zmq.LINGER, 0)
        secure_client(socket, list(STRANGERS.values())[k % len(STRANGERS)])
        socket.connect(echo.endpoint)
        socket.send(b"let us in")
    eventually(lambda: echo.gate.refused >= 60, "not all counted")
    is_served(echo, b"a friend")
    for socket in crowd:
        socket.close()
    context.term()
    assert echo.heard == [b"a friend"]
    said = [r.getMessage() for r in caplog.records]
    assert len(said) <= 3, "the log grows with the crowd"
    assert said[0].startswith("refused a connection, 1 so far: ")


def test_a_gate_that_cannot_judge_lets_nobody_in(
    echo: Echo, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(domain: str, key: bytes) -> bool:
        raise RuntimeError("a bug")

    monkeypatch.setattr(echo.gate, "callback", broken)
    with dealer(echo.endpoint, OURS) as socket:
        socket.send(b"let me in")
        eventually(lambda: "could not be judged" in caplog.text, "not said")
        assert not socket.poll(100)
    monkeypatch.undo()
    is_served(echo, b"after")
    assert echo.heard == [b"after"]


def test_without_keys_everything_is_as_before() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        gate = secure_server(server, None)
        port = server.bind_to_random_port("tcp://127.0.0.1")
        with dealer(f"tcp://127.0.0.1:{port}", None) as socket:
            socket.send(b"hello")
            assert server.poll(60_000)
    assert (gate.refused, gate.metrics(), gates()) == (0, {}, [])


def test_a_process_that_ends_without_closing_does_not_hang() -> None:
    code = (
        "import zmq\nfrom asyncrl.security import new_keys, secure_server\n"
        "socket = zmq.Context().socket(zmq.ROUTER)\nsecure_server(socket, new_keys())\n"
        "socket.bind('tcp://127.0.0.1:0')\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


# --- the parts of a run ----------------------------------------------------------------------


@stranger
def test_hub(keys: Keys | None) -> None:
    heard: list[Any] = []
    hub = Hub([], listeners=[heard.append], run_id="r", keys=OURS)
    bad = HubClient(hub.endpoint, "actor", 1, keys=keys)
    bad.emit({"x": 1.0}, step=1, version=0)
    eventually(lambda: "wire/unauthenticated" in hub.metrics(), "not counted")
    good = HubClient(hub.endpoint, "actor", 0, keys=OURS)
    good.emit({"x": 2.0}, step=1, version=0)
    eventually(lambda: heard, "the record of who has the keys")
    good.close()
    bad._socket.close(linger=0)
    bad.close()
    hub.close()
    assert [line["rank"] for line in heard] == [0]


@stranger
def test_announcements_and_weights(keys: Keys | None) -> None:
    async def run() -> None:
        engine = FakeEngine()
        members = Members(keys=OURS)
        service = WeightService(subscriber(engine), keys=OURS)
        service.start()
        announcers = [
            Announcer(members.endpoint, service, name=name, workers=1, applied=lambda: V0, keys=k)
            for name, k in (("stranger", keys), ("friend", OURS))
        ]
        announcing = [asyncio.create_task(a.run()) for a in announcers]
        assert await asyncio.to_thread(members.wait_for, 1, 60.0)
        await asyncio.to_thread(eventually, lambda: members.gate.refused, "not counted")
        (member,) = members.fresh()
        assert member.name == "friend"
        bad, good = (FleetClient([member], Limits(5.0, 5.0, 0.0), k) for k in (keys, OURS))
        with pytest.raises(WeightSyncError, match="its connection closed|did not answer"):
            await asyncio.to_thread(begin, bad)
        assert engine.steps == []
        await asyncio.to_thread(eventually, lambda: service.gate.refused, "not counted")
        await asyncio.to_thread(begin, good)
        assert engine.steps == ["begin"]
        for client in (bad, good):
            client.close()
        for task, announcer in zip(announcing, announcers, strict=True):
            task.cancel()
            announcer.close()
        await asyncio.gather(*announcing, return_exceptions=True)
        await service.close()
        members.close()

    asyncio.run(run())


def begin(client: FleetClient) -> None:
    client.start_round(V1)
    client.start_weight_update()


@stranger
def test_buffer(keys: Keys | None) -> None:
    server = Running(small_ledger(), keys=OURS)
    try:
        frames = [bytes(f) for f in wire.encode(wire.StatsRequest(req=1))]
        with dealer(server.endpoint, keys) as socket:
            socket.send_multipart(frames)
            with dealer(server.endpoint, OURS) as friend:
                hello = wire.Hello(req=1, run_id="r", role="launcher", rank=0, pid=1)
                friend.send_multipart([bytes(f) for f in wire.encode(hello)])
                assert friend.poll(60_000)
                friend.recv_multipart()

                def stats() -> wire.Stats:
                    friend.send_multipart(frames)
                    assert friend.poll(60_000)
                    reply, _ = wire.decode(friend.recv_multipart())
                    assert isinstance(reply, wire.Stats)
                    return reply

                eventually(lambda: "wire/unauthenticated" in stats().gauges, "not counted")
                assert stats().counts["malformed"] == 0
            assert not socket.poll(0)
    finally:
        server.close()
    assert server.error is None


# --- keys --------------------------------------------------------------------------------------


def test_keys_travel_and_show_no_secret() -> None:
    assert pickle.loads(pickle.dumps(OURS)) == OURS
    for shown in (repr(OURS), str(OURS)):
        assert OURS.client_secret.decode() not in shown
        assert str(OURS.server_secret) not in shown
    assert OURS.client().server_secret is None
    assert len({OURS.server_public, OURS.client_public, OTHERS.server_public}) == 3


def test_a_client_s_keys_cannot_bind() -> None:
    with (
        zmq.Context() as context, context.socket(zmq.ROUTER) as socket,
        pytest.raises(ConfigError, match="a client's keys: .* needs server.key_secret"),
    ):  # fmt: skip
        secure_server(socket, OURS.client())


def test_a_folder_of_keys(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "keys"
    keys = write_keys(folder)
    assert load_keys(folder, client_only=False) == keys
    assert load_keys(folder) == keys.client()
    files = {p.name: p.stat().st_mode & 0o777 for p in folder.iterdir()}
    assert files == dict.fromkeys(["server.key", "server.key_secret", "client.key_secret"], 0o600)
    assert folder.stat().st_mode & 0o077 == 0
    assert keys.server_secret is not None
    assert keys.server_secret not in (folder / "server.key").read_bytes()
    before = {p: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(ConfigError, match="server.key exists already and is never overwritten"):
        write_keys(folder)
    (folder / "server.key").unlink()
    with pytest.raises(ConfigError, match="server.key_secret exists already"):
        write_keys(folder)
    assert all(p.read_bytes() == b for p, b in before.items() if p.exists())
    assert not (folder / "server.key").exists(), "half a set of keys"


def test_a_client_needs_two_files(tmp_path: Path) -> None:
    keys = write_keys(tmp_path)
    (tmp_path / "server.key_secret").unlink()
    assert load_keys(tmp_path) == keys.client()
    with pytest.raises(ConfigError, match=r"server.key_secret does not exist: make new keys with"):
        load_keys(tmp_path, client_only=False)


def damage(folder: Path, name: str, how: str) -> None:
    path = folder / name
    match how:
        case "gone":
            path.unlink()
        case "open":
            path.chmod(0o640)
        case "folder":
            path.unlink()
            path.mkdir()
        case "swapped":
            path.write_bytes((folder / "client.key_secret").read_bytes())
        case _:
            path.write_text(how)


CERTIFICATE = 'curve\n    public-key = "{}"\n    secret-key = "{}"\n'


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        ("server.key", "gone", "server.key does not exist"),
        ("client.key_secret", "gone", "client.key_secret does not exist"),
        ("server.key", "", "server.key holds no public key"),
        ("server.key", CERTIFICATE.format("x" * 39, ""), "server.key holds no key"),
        ("server.key", CERTIFICATE.format("~" * 40, ""), "server.key holds no key"),
        ("server.key", "swapped", "server.key and server.key_secret are not of one pair"),
        ("server.key_secret", "open", "server.key_secret can be read or changed by others: chmod"),
        ("client.key_secret", "open", "client.key_secret can be read or changed by others: chmod"),
        ("client.key_secret", "folder", r"client.key_secret cannot be read \(Is a directory\)"),
        ("client.key_secret", 'public-key = "x"', "client.key_secret holds no secret key"),
        ("client.key_secret", CERTIFICATE.format("x" * 40, "y" * 40), "holds no pair of keys"),
        ("client.key_secret", CERTIFICATE.format("x" * 40, "y"), "holds no pair of keys"),
        ("client.key_secret", CERTIFICATE.format(OURS.client_public.decode(),
         OTHERS.client_secret.decode()), "holds no pair of keys"),
    ],
)  # fmt: skip
def test_folders_that_are_refused(tmp_path: Path, name: str, how: str, message: str) -> None:
    write_keys(tmp_path)
    damage(tmp_path, name, how)
    with pytest.raises(ConfigError, match=message):
        load_keys(tmp_path, client_only=False)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/keys: keys cannot be written: Not a directory"):
        write_keys(tmp_path / "file" / "keys")


def test_without_curve_there_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_keys(tmp_path / "made")
    monkeypatch.setattr(zmq, "has", lambda _: False)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        calls: list[Callable[[], object]] = [
            new_keys, lambda: write_keys(tmp_path / "new"), lambda: load_keys(tmp_path / "made"),
            lambda: secure_client(socket, OURS), lambda: secure_server(socket, OURS),
        ]  # fmt: skip
        for call in calls:
            with pytest.raises(ConfigError, match="no CURVE: install pyzmq from a wheel"):
                call()
    assert not (tmp_path / "new").exists()


def test_the_page_says_what_holds() -> None:
    page = (Path(__file__).parents[1] / "docs" / "security.md").read_text()
    for said in (
        f"| frame of {MAX_FRAME_BYTES >> 20} MiB | the buffer |",
        f"| frame of {MAX_CONTROL_BYTES >> 20} MiB | records, announcements, weights requests, "
        "`scale` |",
        f"| {MAX_FRAMES} frames a message | the buffer |",
        *(f"| `{name}` |" for name in (SERVER_PUBLIC, SERVER_SECRET, CLIENT_SECRET)),
    ):
        assert said in page


def test_a_member_of_another_run_is_no_member() -> None:
    """The announcement names an endpoint whose server has other keys."""
    service: list[WeightService] = []

    async def run() -> None:
        engine = FakeEngine()
        service.append(WeightService(subscriber(engine), keys=OTHERS))
        service[0].start()
        client = FleetClient([Member("a", 1, service[0].endpoint, 1)], Limits(5.0, 5.0, 0.0), OURS)
        with pytest.raises(WeightSyncError, match="its connection closed|did not answer"):
            await asyncio.to_thread(begin, client)
        assert engine.steps == []
        client.close()
        await service[0].close()

    asyncio.run(run())
