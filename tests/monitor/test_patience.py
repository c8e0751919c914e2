"""What the page's server stands of those who have no token."""

import socket
import threading

import pytest
import uvicorn

from asyncrl.monitor.web import patience
from tests.helpers.eventually import eventually

MUCH = 64 << 20
"""More than the sockets of both sides hold."""
GET = b"GET / HTTP/1.1\r\nHost: x\r\n"


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


@pytest.fixture
def served():
    """Starts a server with such limits; gives a function that connects."""
    running, sockets = [], []

    def start(**limits):
        protocol = type("Limited", (patience.PatientProtocol,), limits)
        config = uvicorn.Config(
            app, lifespan="off", log_level="critical", ws="none", timeout_graceful_shutdown=1,
            **patience.options() | {"http": protocol, "timeout_keep_alive": 3_600},
        )  # fmt: skip
        server, bound = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        running.append((server, thread, bound))
        eventually(lambda: server.started, "the server does not start")

        def connect():
            sockets.append(socket.create_connection(bound.getsockname()))
            sockets[-1].settimeout(30)
            return sockets[-1]

        return connect

    yield start
    for made in sockets:
        made.close()
    for server, thread, bound in running:
        server.should_exit = True
        thread.join(30)
        bound.close()
        assert not thread.is_alive()


def rest(connection):
    """All that comes until the server closes."""
    found = b""
    try:
        while data := connection.recv(1 << 16):
            found += data
    except ConnectionResetError:
        pass
    return found


def test_a_head_without_end_is_refused(served):
    connection = served()()
    connection.sendall(GET)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        connection.sendall((b"X: " + b"a" * 1_000 + b"\r\n") * (MUCH // 1_000))


def test_a_request_that_does_not_end_is_closed_also_the_second_one(served):
    first = served(request_s=0.05)()
    first.sendall(GET)
    assert rest(first) == b""
    second = served(request_s=property(lambda self: 0.05 if self.cycle else 30.0))()
    second.sendall(GET + b"\r\n" + GET)
    assert rest(second).count(b"HTTP/1.1 200") == 1


def test_beyond_so_many_connections_new_ones_are_closed(served):
    connect = served(most=2)
    held = [connect() for _ in range(2)]
    for connection in held:
        connection.sendall(GET)
    assert rest(connect()) == b""
    held[0].sendall(b"\r\n")
    assert held[0].recv(1 << 16).startswith(b"HTTP/1.1 200")
