"""Replay: trained groups are kept for a while and trained again, on top of fresh ones.

    commit ─► pool ─► batch k draws R groups ─► trained again, checked against its own bound
               │
               └─► forgotten: older than `replay_max_staleness`, or bytes are short (oldest first)

Fresh samples keep their place in the law of conservation; replayed ones are counted apart.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

from asyncrl.buffer.books import Books
from asyncrl.buffer.dispatch import BatchAssignment, Group, State, Trained
from asyncrl.buffer.rules import ReplayBy
from asyncrl.staleness import version_of_batch
from asyncrl.types import GroupId, SampleId

SPREAD_FLOOR = 1e-3
"""Added to the spread of a group's rewards, so that none is beyond reach with by="advantage"."""


def draw(
    pool: Iterable[Trained], count: int, by: ReplayBy, version: int, seed: int, batch: int
) -> list[Trained]:
    """`count` groups without replacement (all, if there are fewer), in the order of the pool.

    Weighted sampling with one key a group, u^(1/w) (Efraimidis and Spirakis 2006). A pure function
    of its arguments: the numbers come from a generator of this seed and batch.
    """
    rng = random.Random(f"{seed}/{batch}")
    groups = list(pool)
    # log(u) / w has the order of u^(1/w) and does not underflow; 1 - random() is never 0.
    keys = [math.log(1 - rng.random()) / _weight(g, by, version) for g in groups]
    chosen = sorted(range(len(groups)), key=lambda i: -keys[i])[:count]
    return [groups[i] for i in sorted(chosen)]


def _weight(group: Trained, by: ReplayBy, version: int) -> float:
    """How likely the group is to be drawn at the learner's `version`."""
    if by == "advantage":
        return group.spread + SPREAD_FLOOR
    return 0.5 ** (version - group.version) if by == "fresh" else 1.0


def choose(b: Books, batch: int) -> list[Trained]:
    """The groups that batch k replays; the batch holds them until `let_go`."""
    r = b.rules
    if not r.replay_groups:
        return []
    version = version_of_batch(batch, r.batches_per_publication)
    forget(b, [g.id for g in b.pool.values() if version - g.version > r.replay_max_staleness])
    chosen = draw(b.pool.values(), r.replay_groups, r.replay_by, version, r.seed, batch)
    for envelope in (e for g in chosen for e in g.envelopes):
        b.room.hold(envelope)
    return chosen


def committed(
    b: Books, assignment: BatchAssignment, groups: Iterable[Group], dropped: set[SampleId]
) -> None:
    """A batch is trained: count what it replayed, and keep its own groups for later ones."""
    stale = sum(e.header.id in dropped for e in assignment.replayed)
    b.replayed[assignment.batch] = len(assignment.replayed) - stale
    b.totals["replayed"] += len(assignment.replayed) - stale
    b.totals["replay_dropped_stale"] += stale
    if not b.rules.replay_groups:
        return
    for group in groups:
        trained = tuple(
            m.envelope for _, m in group.accepted()
            if m.envelope and m.dispatch and m.dispatch.state is State.TRAINED
        )  # fmt: skip
        if trained:
            b.pool[group.id] = Trained(group.id, trained)
            for envelope in trained:
                b.room.hold(envelope)


def let_go(b: Books, assignment: BatchAssignment) -> None:
    """Nobody will ask for the batch again: it holds what it replayed no longer."""
    b.replayed.pop(assignment.batch, None)
    for envelope in assignment.replayed:
        b.room.release(envelope)


def uncommitted(b: Books, assignment: BatchAssignment, groups: Iterable[Group]) -> None:
    """The batch will be trained once more: undo `committed`."""
    b.totals["replayed"] -= b.replayed.pop(assignment.batch)
    forget(b, [g.id for g in groups])


def forget(b: Books, groups: Iterable[GroupId]) -> None:
    """Take groups out of the pool, those of them that are there."""
    for group_id in groups:
        if (gone := b.pool.pop(group_id, None)) is not None:
            for envelope in gone.envelopes:
                b.room.release(envelope)


def make_room(b: Books, *, must: bool) -> bool:
    """Whether another group may be opened: it fits, or it `must`.

    For that the oldest of the pool are forgotten, as few as it takes, but none in vain.
    """
    if not b.room.fits_group():
        idle = _idle(b)
        if not must and not b.room.fits_group(without=[e for g in idle for e in g.envelopes]):
            return False
        _forget_until(b, idle, b.room.fits_group)
    return True


def trim(b: Books) -> None:
    """The pool alone takes no bytes beyond the limit."""
    if not b.room.within_limit():
        _forget_until(b, _idle(b), b.room.within_limit)


def _idle(b: Books) -> list[Trained]:
    """The groups of the pool that no batch holds: to forget another would free nothing."""
    return [g for g in b.pool.values() if not b.room.shared(g.envelopes[0])]


def _forget_until(b: Books, groups: Iterable[Trained], enough: Callable[[], bool]) -> None:
    for group in groups:
        if enough():
            return
        forget(b, [group.id])
