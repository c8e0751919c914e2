"""The rules of leases: admission, renewal, expiry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from asyncrl import staleness
from asyncrl.buffer import replay
from asyncrl.buffer.books import Books, HeldBack
from asyncrl.buffer.dispatch import State
from asyncrl.errors import LedgerError
from asyncrl.types import Lease, Version


def admission_limit(b: Books, version: Version) -> int:
    """The last position that an actor with this applied version may be leased.

    Versions are compared by number, whatever their incarnation. One beyond what its incarnation
    published counts as the next one: an actor may have applied that before the learner's word of
    it came here, and no other can exist.
    """
    r = b.rules
    known = min(version.version, b.last_versions.get(version.incarnation, b.version.version) + 1)
    return staleness.max_admissible_position(
        r.window, known, r.max_staleness, r.groups_per_batch, r.batches_per_publication
    )


def lease(b: Books, actor: str, applied: Version, capacity: int, now: float) -> list[Lease]:
    """Grant work and note what cut the grant short (see `Ledger.lease`).

    Here alone a limit of bytes decides anything: what came of it is in the journal, so that a
    ledger may be restored under another limit.
    """
    replay.trim(b)
    granted: list[Lease] = []
    current = applied.incarnation >= b.version.incarnation
    limit = admission_limit(b, applied)
    held_back: HeldBack = "" if current else "admission"
    while current and capacity > 0:
        group = b.first_pending()
        if group is None and not b.cursor.has_prompt():
            break
        position = b.order.next_position if group is None else b.order.position(group)
        if position > limit:  # all that come later have higher positions
            held_back = "admission"
            break
        if group is None and not _may_open(b):
            held_back, b.short_of_bytes = "bytes", True
            break
        record = b.grant(actor, applied, group or b.open_group(), capacity, now)
        capacity -= record.leased
        granted.append(
            Lease(
                lease=record.number,
                group=record.group.id,
                samples=tuple(record.dispatches),
                version=applied,
                deadline_s=b.rules.lease_timeout_s,
                prompt=record.group.prompt,
            )
        )
    b.asked[actor] = (applied, held_back)
    return granted


def _may_open(b: Books) -> bool:
    """Whether bytes let one more group be opened.

    The groups of the next batch always may be, once the batches before it are committed: nothing
    else would ever free bytes. So the limit stops no run, and what is held beyond it is never more
    than one batch, and of the batches kept what no checkpoint covers or is being replayed.
    """
    needed = not b.assigned and b.order.live < b.rules.groups_per_batch
    return replay.make_room(b, must=needed)


def grant_again(b: Books, actor: str, applied: Version, samples: int, now: float) -> None:
    """Grant what `lease` once decided to grant, in the same order.

    Raises:
        LedgerError: the prompts end before.
    """
    while samples > 0:
        group = b.first_pending() or b.open_group()
        samples -= b.grant(actor, applied, group, samples, now).leased


def progress(b: Books, actor: str, tokens: Mapping[int, int], now: float) -> None:
    """Renew the actor's leases whose token count grew."""
    for number, count in tokens.items():
        record = b.open_leases.get(number)
        if record is not None and record.actor == actor and count > record.tokens:
            record.tokens = count
            record.deadline_s = now + b.rules.lease_timeout_s


def overdue(b: Books, now: float) -> list[int]:
    """The open leases whose deadline passed."""
    return [number for number, record in b.open_leases.items() if record.deadline_s <= now]


def held_by(b: Books, actor: str) -> list[int]:
    """The actor's open leases."""
    return [number for number, record in b.open_leases.items() if record.actor == actor]


def release(b: Books, leases: Iterable[int]) -> None:
    """End open leases; their unfinished samples are free again."""
    leases = list(leases)
    for number in leases:
        if number not in b.open_leases:
            raise LedgerError(f"lease {number} is not open")
    for number in leases:
        for dispatch in b.open_leases[number].dispatches.values():
            if dispatch.state is State.LEASED:
                b.lose(dispatch)
