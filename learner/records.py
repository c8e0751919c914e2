"""What a learner rank tells the hub: a record of each batch, and events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from asyncrl.hub import HubClient
from asyncrl.metrics import IdleMeter, TimeShares
from asyncrl.types import Version

if TYPE_CHECKING:
    from asyncrl.learner.step import StepResult


class Records:
    """Of one rank; what is of the whole batch comes from rank 0 alone.

    Args:
        hub: where they go.
        rank: this one.
        shares: where its time goes.
        position: the last batch trained, and the version.
    """

    def __init__(
        self, hub: HubClient, rank: int, shares: TimeShares,
        position: Callable[[], tuple[int, Version]],
    ) -> None:  # fmt: skip
        self._hub, self._rank, self._shares, self._position = hub, rank, shares, position
        self.training()

    def training(self) -> None:
        """From now on it trains: rates and shares of the first batch count from here."""
        self._told = time.monotonic()
        self._idle = IdleMeter(self._shares)

    def batch(self, result: StepResult, more: Mapping[str, float]) -> None:
        """One record; rates are per second since the last one, waiting included."""
        first = self._rank == 0
        values = dict(result.metrics) if first else {}
        values |= self._shares.metrics() | dict(more)
        if first:
            now = time.monotonic()
            seconds, self._told = now - self._told, now
            values["throughput/batch_s"] = seconds
            values["throughput/train_tok_s"] = result.tokens / seconds
            values["throughput/samples_s"] = result.samples / seconds
        share = self._idle.read()
        if share is not None:
            values["idle/trainer_frac"] = share
        step, version = self._position()
        self._hub.emit(
            values, step=step, version=version.version, incarnation=version.incarnation,
            hist=result.hist if first else {},
        )  # fmt: skip

    def event(self, event: str, **fields: object) -> None:
        """From any thread."""
        step, version = self._position()
        self._hub.emit(
            step=step, version=version.version, incarnation=version.incarnation,
            event={"event": event, **fields},
        )  # fmt: skip
