"""What a running launcher may be asked: one socket, and the client's end of it.

    asyncrl scale ──Scale──► ROUTER, looked at in each turn of the launcher's loop ──► its answer
                  ◄──Scaled or Error──

The endpoint is in status.json (`control`). The client waits for a reply, by its own deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from asyncrl import errors, wire
from asyncrl.errors import AsyncRLError, DeadlineError, WireError
from asyncrl.security import MAX_CONTROL_BYTES, Keys, secure_client, secure_server

log = logging.getLogger(__name__)

MOST_A_TURN = 16
"""Requests answered in one look."""

Answer = Callable[[wire.Message], wire.Message]
"""Does what is asked; an AsyncRLError becomes the reply."""


class Control:
    """The launcher's socket; for one thread.

    Args:
        host: address to bind.
        keys: CURVE keys; None is plain text.
    """

    def __init__(self, host: str, keys: Keys | None = None) -> None:
        self._context: Any = zmq.Context()
        self._socket: Any = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_CONTROL_BYTES)
        self._gate = secure_server(self._socket, keys)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"

    def serve(self, answer: Answer) -> None:
        """Answer what has come; waits for nothing."""
        for _ in range(MOST_A_TURN):
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            reply = wire.encode(_reply(frames, answer))
            try:
                self._socket.send_multipart([peer, *reply], zmq.NOBLOCK)
            except zmq.ZMQError:  # it is gone
                continue

    def close(self) -> None:
        """Safe to call twice."""
        if not self._socket.closed:
            self._socket.close()
            self._context.term()


def _reply(frames: list[bytes], answer: Answer) -> wire.Message:
    req = 0
    try:
        message, _ = wire.decode(frames)
        req = message.req
        reply = answer(message)
    except AsyncRLError as e:
        reply = wire.Error(error=type(e).__name__, message=str(e))
    except Exception as e:  # the run goes on
        log.exception("a request failed")
        reply = wire.Error(error="AsyncRLError", message=f"{type(e).__name__}: {e}")
    return msgspec.structs.replace(reply, req=req)


def ask(
    endpoint: str, request: wire.Message, *, timeout_s: float, keys: Keys | None = None
) -> wire.Message:
    """The launcher's answer to one request.

    Raises:
        DeadlineError: none came; it hangs, has ended, or does not take our keys.
        AsyncRLError: it refused; the class is the one that it named.
    """
    context: Any = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDTIMEO, int(timeout_s * 1000))
        secure_client(socket, keys)
        socket.connect(endpoint)
        try:
            socket.send_multipart(wire.encode(request))
            answered = bool(socket.poll(int(timeout_s * 1000)))
        except zmq.Again:
            answered = False
        if not answered:
            raise DeadlineError(
                f"no answer of the launcher ({endpoint}) within {timeout_s:g} s: it hangs, has "
                "ended, or does not take our keys; see `asyncrl status` and logs/launcher.log"
            )
        reply, _ = wire.decode(socket.recv_multipart())
    finally:
        socket.close()
        context.term()
    if isinstance(reply, wire.Error):
        kind = getattr(errors, reply.error, WireError)
        known = isinstance(kind, type) and issubclass(kind, AsyncRLError)
        raise (kind if known else AsyncRLError)(reply.message)
    return reply
