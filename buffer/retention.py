"""The rules of committed batches: kept until a checkpoint covers them, served again after a rewind.

    assigned ─ commit ─► kept ─ covered ─► gone
        ▲                 │
        └──── rewind ─────┘

A rewind changes neither which groups a batch has nor their positions: batch k is trained at the
same V again, so what was proved of the bound by version number stays true.
"""

from __future__ import annotations

from asyncrl.buffer import replay
from asyncrl.buffer.books import Books
from asyncrl.buffer.dispatch import Group, State
from asyncrl.buffer.leasing import release
from asyncrl.errors import LedgerError
from asyncrl.types import Version


def covered(b: Books, batch: int) -> None:
    """Let go of the batches up to this one (see `Ledger.covered`)."""
    if batch > b.committed:
        raise LedgerError(
            f"a checkpoint that covers batch {batch}, but the last committed is {b.committed}"
        )
    if batch <= b.covered:
        return
    for k in range(b.covered + 1, batch + 1):
        assignment, groups = b.kept.pop(k)
        replay.let_go(b, assignment)
        b.prior.pop(k, None)
        for group in groups:
            b.drop_payloads(group)
    b.wake_for_bytes()
    b.covered = batch


def trained(group: Group) -> bool:
    """Whether a sample of a committed group was trained."""
    return any(dispatch.state is State.TRAINED for dispatch in group.dispatches())


def rewind(b: Books, batch: int, incarnation: int) -> None:
    """Go back to where `batch` was committed (see `Ledger.rewind`)."""
    if (incarnation, batch) == (b.version.incarnation, b.rewound_to) and batch == b.committed:
        return  # sent again
    if incarnation <= b.version.incarnation:
        raise LedgerError(
            f"rewind to batch {batch} as incarnation {incarnation}: the last one was "
            f"{b.version.incarnation}, and it must rise with every restart of the learner"
        )
    if not b.covered <= batch <= b.committed:
        raise LedgerError(
            f"rewind to batch {batch}: the last committed is {b.committed}, and batches up to "
            f"{b.covered} are not kept any more: restart from a checkpoint of batch {b.covered} "
            f"to {b.committed}"
        )
    release(b, list(b.open_leases))
    for k in range(b.committed, batch, -1):
        assignment, groups = b.assigned[k] = b.kept.pop(k)
        replay.uncommitted(b, assignment, groups)
        b.totals["prior_incarnation"] -= b.prior.pop(k, 0)
        for group in groups:
            b.totals["groups_trained"] -= trained(group)
            b.reopen(group)
    if b.rules.prior_incarnation == "drop":
        for _, live in list(b.order.live_groups()):
            b.take_back(live)
        replay.forget(b, list(b.pool))
        b.wake_for_bytes()
    b.committed = b.rewound_to = batch
    b.last_versions[b.version.incarnation] = b.version.version
    b.version = Version(incarnation, batch // b.rules.batches_per_publication)
