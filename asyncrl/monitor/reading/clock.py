"""The clocks of a run: how long it has lived and trained, over all its launches.

    command of a launch       the next one    elapsed_s: from each launch's command to its last
    |------------------|      |------------|  record. The time between launches, when nobody runs,
          |xxxxxxxxx|              |xxxx|     is in none of the clocks.
          first   last batch                  training_s: the x

Everything that says seconds, or something per second, of a whole run takes them from here: the
console, summary.json, status.json, the tiles, compare and the figures. What is trained a second
time, after the learner went back, counts each time: it was work.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

LARGEST = 1e300
"""Of a number in a record: what is beyond it was never measured, and sums of it would be none."""


class Span(NamedTuple):
    """A stretch of `wall_s`."""

    began: float
    ended: float


@dataclass(slots=True)
class _Trained:
    """What one incarnation of the learner has trained."""

    first_batch_at: float | None = None
    """When learner rank 0 had its first batch and began to train it; an older run does not say."""
    first: float | None = None
    """When its first batch was trained."""
    last: float = 0.0
    first_took_s: float = 0.0
    samples: float = 0.0
    tokens: float = 0.0


class RunClock:
    """Reads the clocks out of records, in any order of the two files.

    >>> clock = RunClock()
    >>> def learner(wall_s, **of):
    ...     clock.write({"role": "learner", "rank": 0, "incarnation": 0, "wall_s": wall_s} | of)
    >>> learner(12.0, event={"event": "startup", "phase": "first_batch"})
    >>> rates = {"throughput/samples_s": 16.0, "throughput/train_tok_s": 800.0}
    >>> for wall_s in (14.0, 16.0):
    ...     learner(wall_s, metrics=rates | {"loss/tokens": 9.0, "throughput/batch_s": 2.0})
    >>> clock.first_step_s, clock.training_s, clock.samples_s, clock.elapsed_s
    (14.0, 4.0, 16.0, 16.0)
    """

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        """Of all launches, to the newest record."""
        self._launches: list[float] = []
        self._trained: dict[int, _Trained] = {}

    def write(self, line: Mapping[str, Any]) -> None:
        """Take a line of either file, or a record as the hub's listeners see it."""
        at, event = _number(line.get("wall_s")), line.get("event")
        self.elapsed_s = max(self.elapsed_s, at)
        source = (line.get("role"), line.get("rank"))
        told = event if isinstance(event, Mapping) else line  # in the file an event is flat
        kind = told.get("event")
        if kind == "launch":
            self._launches.append(_number(told.get("began_s", at)))
        if source != ("learner", 0):
            return
        metrics = line.get("metrics") or {}
        if kind == "startup" and told.get("phase") == "first_batch":
            self._of(line).first_batch_at = at
        elif "loss/tokens" in metrics:
            self._batch(self._of(line), at, metrics)

    def _of(self, line: Mapping[str, Any]) -> _Trained:
        return self._trained.setdefault(int(_number(line.get("incarnation"))), _Trained())

    def _batch(self, mine: _Trained, at: float, metrics: Mapping[str, float]) -> None:
        took_s = metrics.get("throughput/batch_s")
        if mine.first is None:
            mine.first, mine.first_took_s = at, took_s or 0.0
        elif took_s is None:  # an older run
            took_s = at - mine.last
        mine.last = at
        mine.samples += metrics.get("throughput/samples_s", 0.0) * (took_s or 0.0)
        mine.tokens += metrics.get("throughput/train_tok_s", 0.0) * (took_s or 0.0)

    # --- what they say ---------------------------------------------------------------------------

    def launches(self) -> list[float]:
        """`wall_s` at which each launch began, [n]."""
        return sorted(self._launches) or [0.0]

    def training(self) -> list[Span]:
        """Of each launch that trained: from when its first batch began to be trained to the end of
        its last one; restarts of the learner meanwhile are in it."""
        found: dict[int, Span] = {}
        launches = self.launches()
        for mine in self._trained.values():
            if mine.first is None:
                continue
            began = mine.first_batch_at
            began = mine.first - mine.first_took_s if began is None else began
            launch = bisect_right(launches, mine.first)
            known = found.get(launch, Span(began, mine.last))
            found[launch] = Span(min(known.began, began), max(known.ended, mine.last))
        return [found[launch] for launch in sorted(found)]

    @property
    def training_s(self) -> float | None:
        """Seconds of training; None before the first batch is trained."""
        spans = self.training()
        return sum(s.ended - s.began for s in spans) if spans else None

    @property
    def samples_s(self) -> float | None:
        """Fresh samples trained per second of training."""
        return self._per_second(sum(t.samples for t in self._trained.values()))

    @property
    def train_tok_s(self) -> float | None:
        """Tokens trained, prompts and replayed samples included, per second of training."""
        return self._per_second(sum(t.tokens for t in self._trained.values()))

    def _per_second(self, work: float) -> float | None:
        seconds = self.training_s
        return work / seconds if seconds else None

    @property
    def first_step_s(self) -> float | None:
        """From the command of the newest launch to the end of its first step."""
        began = self.launches()[-1]
        ends = [t.first for t in self._trained.values() if t.first is not None]
        return min((end - began for end in ends if end >= began), default=None)


def _number(value: object) -> float:
    """A number of a file that anybody may have written into."""
    known = isinstance(value, int | float) and abs(value) <= LARGEST
    return float(value) if known else 0.0  # type: ignore[arg-type]
