"""The ledger of a run that goes on: from its own store, or from its checkpoint's copy.

    the run's store ──── there, whole, has the checkpoint's batch? ──► its ledger ─┐
                             └── no, or durability none                            ├─► rewound
    the checkpoint's copy ──► a new store, or memory ──► its ledger ───────────────┘

The store is newer than the checkpoint: what was trained or produced after it is still there. The
ledger is rewound here already, before any actor can ask: leases of the old incarnation are free.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.buffer.copies import read_copy
from asyncrl.buffer.durable import Durability, Keeper, Prompts, open_ledger
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.shelf import payload_key
from asyncrl.buffer.store_file import DATA_FILE, refused, sync_folder
from asyncrl.checkpoints import LEDGER, ResumePoint
from asyncrl.disk import set_aside, sync
from asyncrl.errors import DamagedStoreError, StoreError
from asyncrl.types import Envelope, SampleHeader

_OF_A_STORE = ("memory_bytes", "store_bytes", "recorded")
"""Options that a ledger in memory has not."""

logger = logging.getLogger(__name__)


def resume_ledger(
    folder: Path,
    *,
    resume: ResumePoint,
    make_prompts: Callable[[], Prompts],
    durability: Durability,
    run_id: str,
    goes_on: bool,
    **options: Any,
) -> tuple[Ledger, Keeper]:
    """The ledger of a resumed run, and what keeps it, rewound to the resume point.

    Args:
        folder: of the run's own store, which is set aside where it cannot be used.
        resume: the checkpoint, and the incarnation that goes on from it.
        make_prompts: the prompts, from the first one on.
        goes_on: whether a buffer of this very launch has had the store: it must be used then.
        options: as `open_ledger` has them.

    Raises:
        StoreError, LedgerError, ConfigError: as `open_ledger`; or neither store nor copy has what
            the checkpoint needs.
    """
    copy = None if resume.checkpoint is None else Path(resume.checkpoint, LEDGER)
    if durability == "none":
        ledger, keeper = _in_memory(copy, make_prompts(), run_id, options), Keeper()
    else:
        options |= {"durability": durability, "run_id": run_id}
        opened = _own(folder, resume, make_prompts, goes_on, options)
        if opened is None:
            if copy is not None:
                _install(copy, folder, run_id)
            opened = open_ledger(folder, prompts=make_prompts(), **options)
        ledger, keeper = opened
    if ledger.version.incarnation < resume.incarnation:  # else it was, by a former process
        ledger.rewind(resume.step, resume.incarnation)
        keeper.go_on()
    return ledger, keeper


def _in_memory(copy: Path | None, prompts: Prompts, run_id: str, options: dict[str, Any]) -> Ledger:
    settings = {k: v for k, v in options.items() if k not in _OF_A_STORE}
    if copy is None:
        return Ledger(prompts=prompts, **settings)
    state, payloads = read_copy(copy, run_id)

    def envelope(header: SampleHeader, _: int) -> Envelope:
        return Envelope(header, payloads[payload_key(header)])

    now = time.monotonic()
    ledger = Ledger.restore(state, prompts=prompts, envelope=envelope, now=now, **settings)
    if options["recorded"]:  # of what the rewind takes back, too
        ledger.keep_retired()
    return ledger


def _own(
    folder: Path, resume: ResumePoint, make_prompts: Callable[[], Prompts], goes_on: bool,
    options: dict[str, Any],
) -> tuple[Ledger, Keeper] | None:  # fmt: skip
    """The run's own store, if it can be used; else it is set aside."""
    file = folder / DATA_FILE
    if not goes_on and not (file.exists() and file.stat().st_size):
        return None  # there was none, or its maker was killed before the first write
    try:
        ledger, keeper = open_ledger(folder, prompts=make_prompts(), goes_on=True, **options)
    except DamagedStoreError as e:
        if goes_on or resume.checkpoint is None:
            raise
        _set_aside(folder, str(e))
        return None
    first, committed = ledger.kept_from, ledger.committed
    used = ledger.version.incarnation >= resume.incarnation
    if goes_on or used or first - 1 <= resume.step <= committed:
        return ledger, keeper
    keeper.close()
    if resume.checkpoint is None:
        raise StoreError(
            f"the buffer's store {folder} has batches {first} to {committed}, the run would "
            "go on from the initial model: resume it from a checkpoint, or start a new run"
        )
    what = f"it has batches {first} to {committed}, the checkpoint is of {resume.step}"
    _set_aside(folder, what)
    return None


def _set_aside(folder: Path, why: str) -> None:
    """Keep a store that cannot be used, under another name; one that was kept before goes."""
    try:
        aside = set_aside(folder)
    except OSError as e:
        raise refused(folder, "set aside", e) from e
    logger.warning(
        "the run's own store is not used (%s); it is %s now, the checkpoint's copy is used",
        why, aside,
    )  # fmt: skip


def _install(copy: Path, folder: Path, run_id: str) -> None:
    """A store for the run, made of a checkpoint's copy, whole or not at all."""
    read_copy(copy, run_id)  # each payload is checked
    part = folder.with_name(folder.name + ".part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)  # at most an empty one is left here
        part.mkdir(parents=True)
        shutil.copyfile(copy / DATA_FILE, part / DATA_FILE)
        sync(part / DATA_FILE)
        os.replace(part, folder)
        sync_folder(folder)
    except OSError as e:
        raise refused(folder, "make", e) from e
