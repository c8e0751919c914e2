"""How much a server waits for, and keeps, of whom it does not know yet: the token is in a head.

A connection ends when its next request is not whole in time, also after an answer; its head may
have HEAD_BYTES (uvicorn answers 400 and closes); beyond MOST connections new ones are closed.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_BYTES = 32 << 10
REQUEST_S = 20.0
"""From a connection, or from the last answer on it, to the end of the next request."""
MOST = 256


class PatientProtocol(H11Protocol):
    """HTTP/1.1 as uvicorn has it, with a deadline for each request."""

    most = MOST
    request_s = REQUEST_S
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, unless there are too many."""
        if len(self.connections) >= self.most:
            transport.abort()
            return
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self.transport is not None:  # one that was taken
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        if self.transport is not None:
            super().data_received(data)
            self._watch()

    def on_response_complete(self) -> None:
        """A request was answered; the next one may begin."""
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        """Set the deadline while a request is awaited; an answer may take its time."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        elif not answering and self._deadline is None:
            self._deadline = self.loop.call_later(self.request_s, self._late)

    def _late(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


def options() -> dict[str, Any]:
    """Of uvicorn.Config."""
    return {
        "http": PatientProtocol, "h11_max_incomplete_event_size": HEAD_BYTES,
        "timeout_keep_alive": REQUEST_S,
    }  # fmt: skip
