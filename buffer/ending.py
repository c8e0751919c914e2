"""How the run ends, as the buffer knows it: running ─► stopping ─► done."""

from __future__ import annotations

import logging

from asyncrl import wire
from asyncrl.buffer.durable import Keeper
from asyncrl.types import Version

logger = logging.getLogger(__name__)


class Ending:
    """Who asked for the end, and what actors and learners are told of it."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self.state: wire.State = "running"
        self.reason = ""
        """The first one."""
        self.final: Version | None = None
        """The last version, once it is known."""
        self._evaluate = True

    @property
    def running(self) -> bool:
        """Whether nobody has asked for the end."""
        return self.state == "running"

    @property
    def evaluated(self) -> bool:
        """Whether the final version is to be evaluated: unless any stop was against it."""
        return self.state == "done" and self._evaluate

    def stop(self, reason: str, final: Version | None, evaluate: bool) -> None:
        """No more leases, no more batches; a later stop may add the final version."""
        self.reason = self.reason or reason
        self._evaluate = self._evaluate and evaluate
        self._keeper.stopped(reason, final, evaluate)
        if final is not None:
            self.state, self.final = "done", final
        elif self.running:
            self.state = "stopping"

    def in_order(self, reason: str) -> None:
        """The buffer itself ends the run."""
        logger.info("the run ends: %s", reason)
        self.stop(reason, final=None, evaluate=True)

    def resume(self) -> None:
        """Stop as in a former process of this buffer."""
        for stop in self._keeper.stops:
            self.stop(stop.reason, stop.final, stop.evaluate)
