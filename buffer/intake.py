"""The rules of results and failures, up to the completion of a group."""

from __future__ import annotations

import math
from typing import Literal

from asyncrl.buffer.books import Books
from asyncrl.buffer.dispatch import Dispatch, Group, Phase, State
from asyncrl.buffer.leasing import admission_limit
from asyncrl.types import Envelope, FailureKind, SampleHeader, SampleId

MAX_REWARD = 1e30
"""A reward beyond this, either way, is refused: its square must be finite in float64."""

Status = Literal["accepted", "duplicate", "unknown"]


def accept(b: Books, envelope: Envelope, now: float) -> Status:
    """Take a result, or say why not (see `Ledger.accept`)."""
    h = envelope.header
    dispatch = _find(b, h.lease, h.actor, h.id)
    if not isinstance(dispatch, Dispatch):
        return dispatch
    group, leased = dispatch.lease.group, dispatch.state is State.LEASED
    late = dispatch.state is State.REQUEUED
    gone = b.rules.prior_incarnation == "drop" and (
        dispatch.lease.version.incarnation < b.version.incarnation
    )
    if not group.wants(h.id.sample) or not (leased or late) or gone:
        if leased:
            b.lose(dispatch)
        else:
            b.refused["repeated_results"] += 1
        return "duplicate"
    if not (_trainable(b, h, dispatch) and b.room.takes(envelope)):
        b.refused["protocol_errors"] += 1
        if leased:
            b.lose(dispatch)
        return "unknown"
    take(b, dispatch, envelope, now)
    return "accepted"


def take(b: Books, dispatch: Dispatch, envelope: Envelope, now: float) -> None:
    """The dispatch brought a result that counts."""
    group = dispatch.lease.group
    if dispatch.state is State.LEASED:
        dispatch.lease.deadline_s = now + b.rules.lease_timeout_s
    else:
        b.unfree(group, dispatch.sample)
    b.settle(dispatch, State.ASSEMBLING)
    member = group.members[dispatch.sample]
    member.dispatch, member.envelope, member.accepted_s = dispatch, envelope, now
    b.room.hold(envelope)
    b.totals["completed"] += 1
    b.attempts_in_vain = 0
    b.resolve(group)
    if not group.unresolved:
        _complete(b, group)


def fail(
    b: Books,
    actor: str,
    lease: int,
    sample: SampleId,
    kind: FailureKind,
    reason: str,
    now: float,
) -> Status:
    """Take note that a leased sample brings no result (see `Ledger.fail`)."""
    dispatch = _find(b, lease, actor, sample)
    if not isinstance(dispatch, Dispatch):
        return dispatch
    group = dispatch.lease.group
    if dispatch.state is not State.LEASED:
        return "duplicate"
    if not group.wants(sample.sample):
        b.lose(dispatch)
        return "duplicate"
    if kind is FailureKind.INFRASTRUCTURE:
        b.lose(dispatch)
        return "accepted"
    b.last_failure = (kind, reason)
    b.attempts_in_vain += 1
    dispatch.lease.deadline_s = now + b.rules.lease_timeout_s
    b.settle(dispatch, State.FAILED)
    member = group.members[sample.sample]
    member.failures += 1
    if member.failures < b.rules.max_attempts:
        b.free(group, sample.sample)
    else:
        member.given_up = True
        b.resolve(group)
        _give_up(b, group)
    return "accepted"


def _find(b: Books, lease: int, actor: str, sample: SampleId) -> Dispatch | Status:
    """The dispatch that a message names, or the answer when there is none.

    Nothing in a header is trusted: lease, actor and sample must name one dispatch together.
    """
    record = b.leases.get(lease)
    if record is None and b.was_granted(lease):
        b.refused["repeated_results"] += 1  # its group is retired: a resend, or far too late
        return "duplicate"
    if record is not None and record.actor == actor and record.group.id == sample.group:
        dispatch = record.dispatches.get(sample.sample)
        if dispatch is not None:
            return dispatch
    b.refused["unknown_results"] += 1
    return "unknown"


def _trainable(b: Books, h: SampleHeader, dispatch: Dispatch) -> bool:
    """Whether the sample keeps the bound wherever its group is consumed, by its own stamp."""
    position = b.order.position(dispatch.lease.group)
    return (
        h.version_max.version >= h.version_min.version
        and h.version_min >= dispatch.lease.version  # every token is, in the order of publication
        and position <= admission_limit(b, h.version_min)
        and abs(h.reward) <= MAX_REWARD  # false for not-a-number
        and 0 <= h.policy_tokens <= h.response_tokens
        and 0.0 < h.temperature < math.inf
    )


def _give_up(b: Books, group: Group) -> None:
    """A member was given up: go on with the others, or remove the group."""
    remaining = sum(not m.given_up for m in group.members)
    if remaining < 2 or b.rules.failed_member == "drop":
        b.totals["groups_failed"] += 1
        b.failed_in_a_row += 1
        if b.last_failure is not None:
            b.cursor.count_failure(group.id, "{}: {}".format(*b.last_failure))
        b.remove(group, Phase.FAILED, State.FAILED)
    elif not group.unresolved:
        _complete(b, group)


def _complete(b: Books, group: Group) -> None:
    """All members are in or given up: the group waits for a batch, or is filtered out."""
    b.failed_in_a_row = 0
    rewards = {m.envelope.header.reward for m in group.members if m.envelope is not None}
    if b.rules.filter_zero_variance and len(rewards) == 1:
        b.totals["groups_filtered"] += 1
        b.filtered_in_a_row += 1
        b.remove(group, Phase.FILTERED, State.FILTERED)
    else:
        b.filtered_in_a_row = 0
        b.finish(group)
