"""An actor's word to learner rank 0: who it is, what it runs, whether it takes weights now.

    each second, and at once when `applied` or `ready` changes ──Announce──► members.py

The actor waits for nobody here: what cannot be sent is dropped, the next one says the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

import zmq

from asyncrl import wire
from asyncrl.actors.weight_service import WeightService
from asyncrl.security import Keys, secure_client
from asyncrl.types import Version

ANNOUNCE_S = 1.0
"""Seconds between two announcements."""


class Announcer:
    """Announces a weight service to `fleet_endpoint` while `run` is being awaited.

    `applied` tells what the engine runs. Whatever the service has served may have changed it, so
    the announcer looks each time the service is idle again. An engine with 0 `workers` in the
    transfer group, since it loads from its machine's relay, is told of but never sent anything.
    """

    def __init__(
        self,
        fleet_endpoint: str,
        service: WeightService,
        *,
        name: str,
        workers: int,
        applied: Callable[[], Version],
        keys: Keys | None = None,
    ) -> None:
        self._service = service
        self._name, self._workers = name, workers
        self._applied = applied
        self._said: tuple[Version, bool] | None = None
        self._leaving = False
        self._changed = asyncio.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.LINGER, 100)
        self._socket.setsockopt(zmq.SNDHWM, 2)  # old ones are of no use to anybody
        secure_client(self._socket, keys)
        self._socket.connect(fleet_endpoint)
        service.on_idle = self.look

    async def run(self) -> None:
        """Announce until cancelled."""
        while True:
            self._announce()
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANNOUNCE_S):
                    await self._changed.wait()

    def look(self) -> None:
        """Announce at once, from `run`, if there is news."""
        if self._said != (self._applied(), self._ready):
            self._changed.set()

    def leave(self) -> None:
        """Say at once that this actor takes no more weights, and nothing else from now on."""
        self._leaving = True
        self._announce()

    @property
    def _ready(self) -> bool:
        return self._service.ready and not self._leaving

    def close(self) -> None:
        """Say no more; safe to call twice."""
        self._service.on_idle = None
        self._socket.close()
        self._context.term()

    def _announce(self) -> None:
        applied, ready = self._applied(), self._ready
        message = wire.Announce(
            name=self._name,
            pid=os.getpid(),
            endpoint=self._service.endpoint,
            workers=self._workers,
            applied=applied,
            ready=ready,
        )
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(wire.encode(message), zmq.NOBLOCK)
            self._said = (applied, ready)
