"""Publication by the ranks above 0: own shards copied in step, sent to rank 0 beside training.

train ──► publish(v): wait until v-1 has gone to rank 0 ──► copy own shards ──► train
                                                             └─► a thread: gather.run
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from asyncrl.learner.layout import Layout
from asyncrl.learner.publication.gather import Gather
from asyncrl.learner.publication.shards import Shards, Source
from asyncrl.spans import SpanLog
from asyncrl.types import Version


class ShardPublisher:
    """`WeightPublisher` of a rank that speaks to rank 0 alone.

    Args:
        source: yields (name, this rank's rows) of each part of `layout`, in order.
        layout: the same on every rank.
        gather: this rank's end.
        pinned: page-locked memory, for copies from a GPU.
    """

    def __init__(
        self, *, source: Callable[[], Source], layout: Layout, gather: Gather, pinned: bool
    ) -> None:
        self._source, self._gather = source, gather
        self._shards = Shards(layout.parts, rank=gather.rank, world=gather.world, pinned=pinned)
        self.spans = SpanLog()
        """Gets each gathering."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights-send")
        self._sending: Future[None] | None = None
        self._failed = False

    def publish(self, version: Version) -> None:
        """Copy this rank's shards as `version` and send them beside training.

        Raises:
            WeightSyncError: the last ones did not get to rank 0.
        """
        self.wait()
        self._shards.cut(self._source())
        self._sending = self._thread.submit(self._run, version)

    def _run(self, version: Version) -> None:
        with self.spans.span("publication", f"gather {version}"):
            self._gather.run(self._shards, version)

    def wait(self) -> None:
        """Wait until rank 0 has the last shards, by the gather's deadline.

        Raises:
            WeightSyncError: it does not get them; the publisher is of no use afterwards.
        """
        if self._sending is not None:
            try:
                self._sending.result()
            except BaseException:
                self._failed = True
                raise

    def finish(self, timeout_s: float) -> list[str]:
        """As `wait`; rank 0 tells which actors lack the last version."""
        self.wait()
        return []

    def take_timings(self) -> dict[str, float]:
        """Nothing: rank 0 has the timings."""
        return {}

    def take_events(self) -> list[dict[str, Any]]:
        """Nothing: rank 0 has the events."""
        return []

    def waiting_for(self) -> str:
        """Rank 0 and the seconds left; "" when idle."""
        return self._gather.waiting_for()

    def close(self) -> None:
        """Wait until rank 0 has the last shards.

        Raises:
            WeightSyncError: as `wait`, if it has not said so before.
        """
        try:
            if not self._failed:
                self.wait()
        finally:
            self._thread.shutdown()
