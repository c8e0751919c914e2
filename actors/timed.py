"""How long an engine is held up by publications, for its time shares."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from asyncrl.metrics import TimeShares
from asyncrl.protocols import WeightSubscriber
from asyncrl.types import Version


class TimedSubscriber:
    """A subscriber whose time from begin to commit, or to what failed, counts as `sync`."""

    def __init__(self, subscriber: WeightSubscriber, shares: TimeShares) -> None:
        self._subscriber, self._shares = subscriber, shares
        self._timing = False

    async def join(self, info: Mapping[str, Any]) -> None:
        """Join the transfer group."""
        with self._shares.state("sync"):
            await self._subscriber.join(info)

    async def begin(self, version: Version) -> None:
        """Pause; the time that counts begins here."""
        if not self._timing:
            self._timing = True
            self._shares.enter("sync")
        with self._ended_by_failure():
            await self._subscriber.begin(version)

    async def receive(self, info: Mapping[str, Any]) -> None:
        """Receive the weights."""
        with self._ended_by_failure():
            await self._subscriber.receive(info)

    async def commit(self, version: Version) -> None:
        """Load, stamp, go on; the time that counts ends here, however it went."""
        try:
            await self._subscriber.commit(version)
        finally:
            self._end()

    @contextlib.contextmanager
    def _ended_by_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        if self._timing:
            self._timing = False
            self._shares.leave("sync")
