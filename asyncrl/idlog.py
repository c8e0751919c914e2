"""Each role's own list of what it did with which sample, independent of the ledger.

One line per fact, tab separated: what, source, epoch, index, sample, detail. The files let
anybody reconcile a run: what actors dispatched and pushed against what the learner trained.
"""

from __future__ import annotations

import logging

from asyncrl.disk import LineFile, trouble
from asyncrl.types import SampleId

log = logging.getLogger(__name__)


class IdLog:
    """An append-only file of sample ids, written on every `flush` and at the end.

    A disk that refuses costs lines, which are counted, never the role.
    """

    def __init__(self, path: str) -> None:
        self._file = LineFile(path)
        self._lines: list[str] = []
        self.lost = 0
        """Facts that the disk did not take."""

    def add(self, what: str, sample: SampleId, detail: object = "") -> None:
        """Record one fact, e.g. `add("trained", id, batch)`."""
        self._lines.append(
            f"{what}\t{sample.source}\t{sample.epoch}\t{sample.index}\t{sample.sample}\t{detail}\n"
        )

    def flush(self) -> None:
        """Hand what was added to the operating system."""
        if not self._lines:
            return
        lines, self._lines = self._lines, []
        try:
            self._file.append("".join(lines).encode())
        except OSError as e:
            if not self.lost:
                log.warning("%s; facts about samples are left out", trouble(self._file.path, e))
            self.lost += len(lines)

    def metrics(self) -> dict[str, float]:
        """`ids/lost`, once it is not 0."""
        return {"ids/lost": float(self.lost)} if self.lost else {}

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        self._file.close()
