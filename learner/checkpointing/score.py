"""What the best checkpoint goes by."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

log = logging.getLogger(__name__)


class Score:
    """The mean of a metric over the batches since the last checkpoint.

    >>> score = Score("reward/mean")
    >>> score.add({"reward/mean": 0.25}), score.add({"reward/mean": 0.75}), score.take()
    (None, None, 0.5)
    >>> score.take() is None
    True
    """

    def __init__(self, metric: str | None) -> None:
        self._metric = metric
        self._values: list[float] = []

    def add(self, metrics: Mapping[str, float]) -> None:
        """Take note of a batch's metrics; one without the metric, or not finite, does not count."""
        value = math.nan if self._metric is None else metrics.get(self._metric, math.nan)
        if math.isfinite(value):
            self._values.append(value)

    def take(self) -> float | None:
        """The mean, and start anew; None if no batch had the metric."""
        values, self._values = self._values, []
        if values:
            return math.fsum(values) / len(values)
        if self._metric is not None:
            log.warning("no batch had checkpoint.score=%s: this one has no score", self._metric)
        return None
