"""An engine's end of the relay: looks what its machine's receiver offers, and loads it.

    the offer, looked at every POLL_S ──newer──► opened, checked ──► EngineWeights: begin, receive,
                                                  commit (pause, map, load, stamp, go on)

No engine waits for another, nor for the network: its pause is the load. Whatever came meanwhile is
skipped. What fails before the load leaves the old version generating, and is tried again, later
each time; an engine that is lost is the actor's matter.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from asyncrl.actors.relay.memory import Offer
from asyncrl.errors import AlreadyAppliedError, WeightSyncError
from asyncrl.protocols import WeightSubscriber
from asyncrl.types import Version

log = logging.getLogger(__name__)

POLL_S = 0.05
RETRY_S, RETRY_MAX_S = 1.0, 60.0
"""How long (seconds) to wait after a version that could not be loaded: doubled each time."""


class RelayWatch:
    """Brings an engine to the version on offer while `run` is being awaited.

    Args:
        offer_path: where the receiver writes what it holds.
        weights: the engine's subscriber.
        applied: what the engine runs.
        on_failure: hears which version could not be loaded, and why.
    """

    def __init__(
        self,
        offer_path: str,
        weights: WeightSubscriber,
        *,
        applied: Callable[[], Version],
        on_failure: Callable[[Version, str], None] = lambda version, reason: None,
    ) -> None:
        self._path = Path(offer_path)
        self._weights, self._applied, self._on_failure = weights, applied, on_failure
        self._seen: tuple[int, int] | None = None
        """The offer's file when it was last read."""
        self._offer: Offer | None = None
        self._failures = 0
        self._not_before = 0.0
        self.held = False
        """Set it, and no further version is taken."""

    async def run(self) -> None:
        """Look and load until cancelled.

        Raises:
            EngineError: the engine is lost.
        """
        while True:
            offer = self._look()
            if offer is not None and not self.held and time.monotonic() >= self._not_before:
                await self._take(offer)
            await asyncio.sleep(POLL_S)

    def _look(self) -> Offer | None:
        """What is on offer, if it is newer than what the engine runs."""
        try:
            at = self._path.stat()
        except FileNotFoundError:
            self._seen = self._offer = None
            return None
        if (at.st_ino, at.st_mtime_ns) != self._seen:
            self._offer = Offer.read(self._path)
            self._seen, self._not_before = (at.st_ino, at.st_mtime_ns), 0.0
        offer = self._offer
        return offer if offer is not None and offer.version > self._applied() else None

    async def _take(self, offer: Offer) -> None:
        """Load it.

        Raises:
            EngineError: the engine is lost.
        """
        try:
            fd = offer.open()
            try:
                await self._weights.begin(offer.version)
                path = f"/proc/{os.getpid()}/fd/{fd}"
                await self._weights.receive({**offer.info, "path": path})
                await self._weights.commit(offer.version)
            finally:
                os.close(fd)
        except AlreadyAppliedError:
            pass
        except WeightSyncError as e:
            self._failed(offer, str(e))
        else:
            self._failures = 0

    def _failed(self, offer: Offer, reason: str) -> None:
        wait = min(RETRY_MAX_S, RETRY_S * 2**self._failures)
        self._failures = min(self._failures + 1, 30)
        self._not_before = time.monotonic() + wait
        log.warning("version %s not loaded, again in %.0f s: %s", offer.version, wait, reason)
        self._on_failure(offer.version, reason)
