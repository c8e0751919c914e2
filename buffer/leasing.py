"""The rules of leases: admission, renewal, expiry."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncrl import staleness
from asyncrl.buffer.books import Books
from asyncrl.buffer.dispatch import LeaseRecord, State
from asyncrl.types import Lease, Version


def admission_limit(b: Books, version: int) -> int:
    """The last position that an actor with this applied version may be leased.

    A version beyond what is published counts as the next one: an actor may have applied that
    before the learner's word of it came here, and no other can exist.
    """
    r, known = b.rules, min(version, b.version.version + 1)
    return staleness.max_admissible_position(
        r.window, known, r.max_staleness, r.groups_per_batch, r.batches_per_publication
    )


def lease(b: Books, actor: str, applied: Version, capacity: int, now: float) -> list[Lease]:
    """Grant work and note whether admission cut the grant short (see `Ledger.lease`)."""
    granted: list[Lease] = []
    current = applied.incarnation >= b.version.incarnation
    limit = admission_limit(b, applied.version)
    held_back = not current
    while current and capacity > 0:
        group = b.first_pending()
        if group is None and not b.has_prompt():
            break
        position = b.order.next_position if group is None else b.order.position(group)
        if position > limit:  # all that come later have higher positions
            held_back = True
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


def progress(b: Books, actor: str, tokens: Mapping[int, int], now: float) -> None:
    """Renew the actor's leases whose token count grew."""
    for number, count in tokens.items():
        record = b.open_leases.get(number)
        if record is not None and record.actor == actor and count > record.tokens:
            record.tokens = count
            record.deadline_s = now + b.rules.lease_timeout_s


def release(b: Books, which: Callable[[LeaseRecord], bool]) -> int:
    """End the open leases that `which` picks; their unfinished samples are free again."""
    records = [record for record in b.open_leases.values() if which(record)]
    for record in records:
        for dispatch in record.dispatches.values():
            if dispatch.state is State.LEASED:
                b.lose(dispatch)
    return len(records)
