"""TensorBoard's event files in the run's folder: scalars and histograms, by step and wall time.

Written with TensorBoard's own record writer and protocol buffers; neither torch nor tensorflow
is loaded.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.errors import MissingExtraError
from asyncrl.launch.folder import RunFolder
from asyncrl.sinks import tag


class TensorBoardSink:
    """One event a record; names as in `sinks.tag`."""

    def __init__(self, folder: RunFolder, purge_from: int | None = None) -> None:
        """A new file; of those before it, TensorBoard forgets the steps from `purge_from` on."""
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            raise MissingExtraError(
                "log.tensorboard=true: tensorboard is not installed; "
                "pip install 'asyncrl[tensorboard]'"
            ) from None
        self._event, self._summary, self._histogram = Event, Summary, HistogramProto
        path = os.path.join(folder.path, "tensorboard")
        os.makedirs(path, exist_ok=True)
        name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.0"
        # Without a buffer: what was written can be looked at at once.
        self._writer = RecordWriter(open(os.path.join(path, name), "ab", buffering=0))  # noqa: SIM115
        self._put(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_from is not None:
            start = SessionLog(status=SessionLog.START)
            self._put(Event(wall_time=time.time(), step=purge_from, session_log=start))
        self._began: float | None = None

    def _put(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the record's metrics and histograms."""
        values = [
            self._summary.Value(tag=tag(record, name), simple_value=value)
            for name, value in record["metrics"].items()
        ]
        values += [
            self._summary.Value(tag=tag(record, name), histo=self._histo(h["edges"], h["counts"]))
            for name, h in record["hist"].items()
        ]
        if not values:
            return
        if self._began is None:
            self._began = time.time() - record["wall_s"]
        self._put(
            self._event(
                wall_time=self._began + record["wall_s"], step=record["step"],
                summary=self._summary(value=values),
            )
        )  # fmt: skip

    def _histo(self, edges: Sequence[float], counts: Sequence[float]) -> Any:
        """Their protocol buffer; sums as if each value lay in the middle of its bin."""
        middles = [(a + b) / 2 for a, b in zip(edges[:-1], edges[1:], strict=True)]
        return self._histogram(
            min=edges[0], max=edges[-1], num=sum(counts),
            sum=sum(m * n for m, n in zip(middles, counts, strict=True)),
            sum_squares=sum(m * m * n for m, n in zip(middles, counts, strict=True)),
            bucket_limit=edges[1:], bucket=counts,
        )  # fmt: skip

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
