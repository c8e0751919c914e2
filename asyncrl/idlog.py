"""Each role's own list of what it did with which sample, independent of the ledger.

One line per fact, tab separated: what, source, epoch, index, sample, detail. The files let
anybody reconcile a run: what actors dispatched and pushed against what the learner trained.
"""

from __future__ import annotations

from asyncrl.types import SampleId


class IdLog:
    """An append-only file of sample ids, flushed on every `flush` and at the end."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def add(self, what: str, sample: SampleId, detail: object = "") -> None:
        """Record one fact, e.g. `add("trained", id, batch)`."""
        self._file.write(
            f"{what}\t{sample.source}\t{sample.epoch}\t{sample.index}\t{sample.sample}\t{detail}\n"
        )

    def flush(self) -> None:
        """Hand what was added to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
