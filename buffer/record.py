"""What the buffer tells the rest of the run: metrics, events, and the recording of samples."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.trajectories import TrajectoryWriter
from asyncrl.recording import Retired

logger = logging.getLogger(__name__)


class Emit(Protocol):
    """Where the buffer's records go, e.g. `asyncrl.hub.HubClient.emit`."""

    def __call__(
        self,
        metrics: Mapping[str, float] | None = None,
        *,
        step: int,
        version: int,
        incarnation: int,
        event: Mapping[str, Any] | None = None,
    ) -> None:
        """Take one record (fields as in `wire.Record`)."""


class Recorder:
    """Takes retired samples from the ledger to the writer, and emits metrics and events.

    Args:
        ledger: where samples retire.
        writer: where they go; None records nothing.
        emit: where metrics and events go; None drops them.
    """

    def __init__(self, ledger: Ledger, writer: TrajectoryWriter | None, emit: Emit | None) -> None:
        self._ledger = ledger
        self._writer = writer
        self._emit = emit
        self._told_end = False
        if writer is not None:
            ledger.keep_retired()

    def drain(self, *, over: bool = False) -> None:
        """Hand on what retired; with `over`, what the ledger still holds retires too."""
        for source, index, reason in self._ledger.take_quarantined():
            self.event("prompt_quarantined", source=source, index=index, reason=reason)
        if self._writer is None:
            return
        if over:
            self._ledger.tell_held()
        if retired := self._ledger.take_retired():
            self._writer.put(retired)
        if self._writer.ended and not self._told_end:
            self._told_end = True
            self.event("recording_ended", reason=self._writer.ended)

    def put(self, retired: Sequence[Retired]) -> None:
        """Hand on what retired in a former process of the buffer."""
        if self._writer is not None and retired:
            self._writer.put(retired)

    def committed(self, metrics: Mapping[str, float]) -> None:
        """Emit the buffer's metrics of a commit."""
        self._send(metrics=dict(metrics) | self.metrics())

    def event(self, what: str, **fields: object) -> None:
        """Emit a line of events.jsonl."""
        self._send(event={"event": what, **fields})

    def metrics(self) -> dict[str, float]:
        """`record/*`; nothing when nothing is recorded."""
        return {} if self._writer is None else self._writer.metrics()

    @property
    def idle(self) -> bool:
        """Whether nothing that was handed on waits for the disk."""
        return self._writer is None or not self._writer.waiting

    def gauges(self) -> dict[str, float]:
        """The metrics, and the samples that wait for the disk."""
        if self._writer is None:
            return {}
        return self.metrics() | {"record/waiting": self._writer.waiting}

    def close(self) -> None:
        """Record what is held, wait for the disk for a few seconds, end."""
        if self._writer is not None:
            self.drain(over=True)
            self._writer.close()
            self.drain()

    def _send(self, **content: Any) -> None:
        if self._emit is not None:
            incarnation, version = self._ledger.version
            step = self._ledger.committed
            try:
                self._emit(step=step, version=version, incarnation=incarnation, **content)
            except Exception:
                logger.exception("a record of the buffer is lost: %s", content)
