"""What survives the buffer's process: changes of the ledger and payloads, settled together.

    ledger call ─► entry ─┐
    push ─► payload ──────┼─► settle(): one transaction ─► then the replies leave
    snapshot, when due ───┘

    start: snapshot ─► ledger ─► entries since ─► ledger as it was; payloads without an owner go

A payload lives as long as somebody holds its envelope: the ledger until its fate is settled, the
recording until it is written.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from asyncrl import wire
from asyncrl.buffer.entries import Stopped
from asyncrl.buffer.journal import Journaled, replay
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.shelf import Shelf, own, payload_key
from asyncrl.buffer.store import Recovered, Store
from asyncrl.recording import Retired
from asyncrl.types import Envelope, GroupId, Prompt, SampleHeader, Version

Durability = Literal["none", "process", "disk"]
Prompts = Iterator[tuple[GroupId, Prompt]]

SNAPSHOT_ENTRIES = 20_000
"""A snapshot is taken after so many entries: what a restart has to read again at most."""
LATE = 4
"""Times SNAPSHOT_ENTRIES after which it is taken although samples wait to be recorded."""
FILE_PER_SAMPLES = 2
"""What the file may take for what its samples count: values fill whole pages (8,192 bytes for one
of 5,000, counted as 7,048), and pages that were left are used again two commits later."""
FILE_BESIDES = 256 << 20
"""What it may take besides: the journal (280 bytes an entry measured) and two snapshots."""

logger = logging.getLogger(__name__)


class Keeper:
    """Keeps nothing: what the process knows ends with it."""

    unrecorded: tuple[Retired, ...] = ()
    """What retired in a former process and was not recorded."""
    stops: tuple[Stopped, ...] = ()
    """Who had asked for the end of the run, in a former process."""

    def envelope(self, header: SampleHeader, payload: wire.Frame) -> Envelope:
        """A sample as it came."""
        return Envelope(header, own(payload))

    def settle(self, *, recorded: bool) -> None:
        """What happened since the last call is stored when this returns.

        Args:
            recorded: whether nothing that retired waits to be recorded.

        Raises:
            StoreError: it cannot be stored; the store is as it was.
        """

    def stopped(self, reason: str, final: Version | None, evaluate: bool) -> None:
        """Somebody asked for the end of the run."""

    def go_on(self) -> None:
        """The run is resumed: who asked for its end before does so no more."""

    def gauges(self) -> dict[str, float]:
        """Sizes for the buffer's statistics."""
        return {}

    def close(self) -> None:
        """Release what is held."""


class Durable(Keeper):
    """Keeps everything in a store; made by `open_ledger`."""

    def __init__(self, ledger: Journaled, store: Store, shelf: Shelf) -> None:
        self._ledger, self._store, self._shelf = ledger, store, shelf

    def envelope(self, header: SampleHeader, payload: wire.Frame) -> Envelope:
        """A sample whose payload goes into the store."""
        return self._shelf.shelve(header, payload)

    def settle(self, *, recorded: bool) -> None:
        """One transaction: entries, payloads, and a snapshot when it is due."""
        store = self._store
        entries = self._ledger.take()
        for entry in entries:
            store.journal(entry)
        due = store.entries + len(entries)
        if due >= SNAPSHOT_ENTRIES and (recorded or due >= LATE * SNAPSHOT_ENTRIES):
            store.snapshot(self._ledger.state())
            for stop in self.stops:  # of which the ledger does not know
                self._ledger.stopped(stop.reason, stop.final, stop.evaluate)
            for entry in self._ledger.take():
                store.journal(entry)
        self._shelf.settle()

    def stopped(self, reason: str, final: Version | None, evaluate: bool) -> None:
        """Write it down, once."""
        stop = Stopped(reason, final, evaluate)
        if stop not in self.stops:
            self.stops += (stop,)
            self._ledger.stopped(reason, final, evaluate)

    def go_on(self) -> None:
        """Write it down; stored when this returns."""
        self.stops = ()
        self._ledger.resumed()
        self.settle(recorded=False)

    def gauges(self) -> dict[str, float]:
        """`store/*`."""
        return {
            "store/bytes": self._store.used_bytes, "store/journal": self._store.entries,
            "store/ram_bytes": self._shelf.ram_bytes, "store/spilled": self._shelf.spilled,
        }  # fmt: skip

    def close(self) -> None:
        """Close the store."""
        self._store.close()


def open_ledger(
    folder: str | os.PathLike[str],
    *,
    durability: Durability,
    run_id: str,
    prompts: Prompts,
    memory_bytes: int,
    store_bytes: int,
    recorded: bool = False,
    goes_on: bool = False,
    clock: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> tuple[Ledger, Keeper]:
    """A ledger and what keeps it: new, or as a former process of the same run left it.

    Args:
        folder: of the store; not touched with durability "none".
        prompts: from the first one on.
        memory_bytes: payloads beyond it are in the store only.
        store_bytes: most bytes of samples, as the ledger's `max_bytes` counts them; the file has
            more room than that, so that it is never full before the ledger leases no more.
        recorded: whether samples that retire are recorded.
        goes_on: whether a former process has served from the store, which must be there then.
        settings: of the ledger.

    Raises:
        StoreError: the store is gone, another run's, damaged, in use, or cannot be written.
        LedgerError: what it holds does not fit together.
        ConfigError: a setting out of range, or one that differs from the former process's.
    """
    if durability == "none":
        return Ledger(prompts=prompts, **settings), Keeper()
    store = Store.open(
        folder, run_id=run_id, sync=durability == "disk", goes_on=goes_on,
        max_bytes=FILE_PER_SAMPLES * store_bytes + FILE_BESIDES,
    )  # fmt: skip
    try:
        shelf = Shelf(store, memory_bytes)
        return _recovered(store, shelf, prompts, recorded, clock(), settings)
    except BaseException:
        store.close()
        raise


def _recovered(
    store: Store, shelf: Shelf, prompts: Prompts, recorded: bool, now: float,
    settings: dict[str, Any],
) -> tuple[Ledger, Durable]:  # fmt: skip
    found: Recovered = store.recover()
    if found.snapshot is None:
        ledger = Journaled(prompts=prompts, **settings)
    else:
        ledger = Journaled.restore(
            found.snapshot, prompts=prompts, envelope=shelf.restore, now=now, **settings
        )
    if recorded:
        ledger.keep_retired()
    stops = replay(ledger, found.entries, envelope=shelf.restore, now=now)
    ledger.take_quarantined()  # told by the former process, before it stored them
    keeper = Durable(ledger, store, shelf)
    keeper.stops = tuple(stops)
    # A payload goes when it is recorded: what is still there is not.
    retired = ledger.take_retired()
    keeper.unrecorded = tuple(r for r in retired if payload_key(r.envelope.header) in found.keys)
    del retired
    surplus = store.keep_only(shelf.keys())
    if found.snapshot is not None or stops or ledger.records():
        logger.info(
            "goes on after batch %d with %d samples; %d payloads had no owner",
            ledger.committed, len(shelf.keys()), surplus,
        )  # fmt: skip
    return ledger, keeper
