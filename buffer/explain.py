"""Read-only answers about the ledger's state: how much is held, and who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from asyncrl import staleness
from asyncrl.buffer.books import Books
from asyncrl.buffer.dispatch import Group, LeaseRecord, State
from asyncrl.types import FailureKind, Version

_LOOK_AT = {
    FailureKind.DATA: "the prompts and rollout.max_prompt_tokens",
    FailureKind.REWARD: "task.reward, task.reward_timeout_s and what the reward needs",
}


def gauges(b: Books, now: float) -> dict[str, float]:
    """What is held now.

    queue/depth: accepted samples that wait for a batch (of complete groups or not).
    queue/capacity: the most samples that may be alive at once (`Rules.capacity`). queue/bytes:
    payload bytes of all samples held, those of batches and of the replay pool included.
    queue/reserved_bytes: set aside for samples that open groups miss. queue/limit_bytes: what
    these two and SAMPLE_OVERHEAD for each sample held may come to, if there is a limit.
    queue/age_s: of the oldest sample in the queue, absent when there is none. live_groups,
    leased_samples, in_flight/ACTOR. Of an actor whose last request was cut short:
    needs_version/ACTOR, the version from which admission would let it have more, or
    needs_bytes/ACTOR, those of the next group, or needs_prompts/ACTOR, 1. trained_ and
    generated_{tokens,samples}: response tokens and samples of retired groups. samples/len_bias:
    mean trained length over mean generated length, of those, once both exist. prompts/quarantined.
    With replay: replay/pool_groups, and replay/reuse, samples replayed for each one trained, once
    there is one.
    """
    state = b.census.by_state
    values: dict[str, float] = {
        "queue/depth": state[State.QUEUED] + state[State.ASSEMBLING],
        "queue/capacity": b.rules.capacity,
        "queue/bytes": b.room.payload_bytes,
        "queue/reserved_bytes": b.room.reserved_bytes,
        "prompts/quarantined": len(b.cursor.quarantined),
        "live_groups": b.order.live,
        "leased_samples": state[State.LEASED],
    }
    if b.rules.max_bytes is not None:
        values["queue/limit_bytes"] = b.rules.max_bytes
    if b.rules.replay_groups:
        values["replay/pool_groups"] = len(b.pool)
        if trained := state[State.TRAINED]:
            values["replay/reuse"] = b.totals["replayed"] / trained
    accepted = [
        m.accepted_s
        for _, group in b.order.live_groups()
        for m in group.members
        if m.dispatch is not None
    ]
    if accepted:
        values["queue/age_s"] = max(0.0, now - min(accepted))
    values |= {f"in_flight/{actor}": n for actor, n in sorted(b.in_flight.items())}
    needs = _version_needed(b).version
    for actor, (_, why) in sorted(b.asked.items()):
        if why == "admission":
            values[f"needs_version/{actor}"] = needs
        elif why == "bytes":
            values[f"needs_bytes/{actor}"] = b.rules.group_bytes
        elif b.first_pending() is None and not b.cursor.has_prompt():
            values[f"needs_prompts/{actor}"] = 1
    values |= {name: n for name, n in sorted(b.lengths.items())}
    if b.lengths["trained_samples"] and b.lengths["generated_tokens"]:
        of_trained = b.lengths["trained_tokens"] / b.lengths["trained_samples"]
        generated = b.lengths["generated_tokens"] / b.lengths["generated_samples"]
        values["samples/len_bias"] = of_trained / generated
    return values


def metrics(b: Books, counts: Mapping[str, int], now: float) -> dict[str, float]:
    """The buffer's metrics of a record; one without a value is left out."""
    names = "dispatched completed trained dropped_stale filtered failed requeued duplicate held"
    values = {f"samples/{name}": float(counts[name]) for name in names.split()}
    if b.rules.replay_groups:
        values["samples/replayed"] = float(counts["replayed"])
    if b.version.incarnation:
        values["samples/prior_incarnation"] = float(counts["prior_incarnation"])
    if generated := b.lengths["generated_tokens"]:
        used = b.lengths["trained_tokens"]
        values["throughput/used_tokens"] = float(used)
        values["throughput/discarded_tokens"] = float(generated - used)
    shown = ("queue/", "samples/", "replay/", "prompts/")
    return values | {k: float(v) for k, v in gauges(b, now).items() if k.startswith(shown)}


def waiting_for(b: Books, batch: int, now: float) -> str:
    """What batch k lacks: "12 samples of batch 31, held by actor-3 (lease 812, 41 s)"."""
    if batch < b.next_batch:
        return f"batch {batch} is {'assigned' if batch in b.assigned else 'committed'}"
    if batch > b.next_batch:
        return f"batch {batch}: batch {b.next_batch} comes first and nobody asked for it yet"
    first, missing = _next_batch(b)
    leased, holders = _holders(first, now)
    if not missing:
        return f"batch {batch} is complete"
    text = f"{missing} samples of batch {batch}"
    if holders:
        text += f", held by {holders}"
    if missing > leased:
        text += f"; {missing - leased} not leased: {why_not_leased(b)}"
    return text + failures(b)


def waiting_for_next(b: Books, now: float) -> str:
    """What the next batch to be assigned lacks; empty when it is complete."""
    return waiting_for(b, b.next_batch, now) if _next_batch(b)[1] else ""


def over(b: Books) -> str:
    """Why the run has to end in order, from what is known now; empty while it may go on.

    The prompts have ended with too few groups for a batch, or a long row of groups was left out.
    """
    r = b.rules
    if b.cursor.ended and not b.cursor.all_quarantined and b.order.live < r.groups_per_batch:
        return exhausted_reason(b)
    if b.filtered_in_a_row < r.max_filtered_in_a_row:
        return ""
    return (
        f"buffer.max_filtered_in_a_row={r.max_filtered_in_a_row}: so many groups in a row had all "
        "rewards equal and were left out by buffer.filter_zero_variance: turn that off, or choose "
        "prompts that the model sometimes, not always, answers right"
    )


def exhausted_reason(b: Books) -> str:
    """Why no further batch can be filled."""
    why = f"{b.rules.prompts_end}: " if b.rules.prompts_end else ""
    unused = ": not trained, their samples stay held" if b.order.live else ""
    return (
        f"{why}prompts exhausted, {b.order.live} groups left, "
        f"batch {b.next_batch} needs {b.rules.groups_per_batch}{unused}{failures(b)}"
    )


def hopeless(b: Books) -> str:
    """Why batches stopped filling although prompts go on; empty while there is hope.

    That is: a long row of groups failed and none completed, or all prompts are in quarantine.
    """
    r = b.rules
    if b.cursor.all_quarantined and b.order.live < r.groups_per_batch:
        return f"no prompt is left{_quarantine(b)}{failures(b)}"
    if b.last_failure is not None:
        kind, reason = b.last_failure
        # A bad prompt fails at once, while all the good ones that may be alive are still produced.
        groups = r.max_live_groups if kind is FailureKind.DATA else r.groups_per_batch
        if b.failed_in_a_row > max(16, 4 * groups):
            return (
                f"{b.failed_in_a_row} groups in a row failed and none completed, the last for its "
                f"{kind} ({reason}): check {_LOOK_AT[kind]}"
            )
        attempts = max(32, 2 * r.group_size * r.max_attempts)
        if kind is FailureKind.REWARD and b.attempts_in_vain > attempts:
            return (
                f"{b.attempts_in_vain} attempts in a row failed and no sample came in between, the "
                f"last for its {kind} ({reason}): check {_LOOK_AT[kind]}"
            )
    return ""


def why_not_leased(b: Books) -> str:
    """Why samples that the next batch needs are not being produced."""
    pending = b.first_pending()
    if pending is None and not b.cursor.has_prompt():
        return f"prompts exhausted, {b.order.live} groups left"
    if not b.asked:
        return "no actor has asked for work"
    needs = _version_needed(b)
    held = [(applied, actor) for actor, (applied, why) in b.asked.items() if why == "admission"]
    if pending is None and any(why == "bytes" for _, why in b.asked.values()):
        return f"bytes: {_bytes(b)}"
    if not held:
        return f"no room at {', '.join(sorted(b.asked)[:3])}"
    applied, actor = max(held)  # the least behind: the first that could go on
    return f"admission: {actor} runs version {_short(applied)}, needs {_short(needs)}"


def _version_needed(b: Books) -> Version:
    """The lowest version that admission gives the next lease to."""
    r, pending = b.rules, b.first_pending()
    position = b.order.next_position if pending is None else b.order.position(pending)
    needed = staleness.version_needed(
        position, r.window, r.max_staleness, r.groups_per_batch, r.batches_per_publication
    )
    return Version(b.version.incarnation, needed)


def _bytes(b: Books) -> str:
    """What fills the limit, in GiB, and the setting that sets it."""
    r, gib = b.rules, 2.0**30
    assert r.max_bytes is not None
    limit = r.bytes_setting or f"max_bytes={r.max_bytes}"
    return (
        f"{(b.room.used_bytes - b.room.reserved_bytes) / gib:.3g} GiB held and "
        f"{b.room.reserved_bytes / gib:.3g} set aside leave no room for a group of up to "
        f"{r.group_bytes / gib:.3g} within {limit}"
    )


def _quarantine(b: Books) -> str:
    """A note on prompts left out, if any are."""
    if not b.cursor.quarantined:
        return ""
    after = b.rules.quarantine_after
    return f", {len(b.cursor.quarantined)} prompts in quarantine (rollout.quarantine_after={after})"


def failures(b: Books) -> str:
    """A note on groups that failed, if any did."""
    if b.last_failure is None or not b.totals["groups_failed"]:
        return ""
    kind, reason = b.last_failure
    return f" ({b.totals['groups_failed']} groups failed; last failure: {kind}: {reason})"


def _next_batch(b: Books) -> tuple[list[Group], int]:
    """The groups that come next, and how many samples they and groups not yet opened lack."""
    wanted = b.rules.groups_per_batch
    first = [group for _, group in islice(b.order.live_groups(), wanted)]
    missing = sum(g.unresolved for g in first) + (wanted - len(first)) * b.rules.group_size
    return first, missing


def _short(version: Version) -> str:
    """A version without its incarnation while that is 0."""
    return str(version.version) if version.incarnation == 0 else str(version)


def _holders(groups: list[Group], now: float) -> tuple[int, str]:
    """How many wanted samples of these groups are leased, and by whom, oldest lease first."""
    leased = 0
    holders: list[LeaseRecord] = []
    for record in sorted((r for g in groups for r in g.leases if r.leased), key=lambda r: r.number):
        wanted = sum(
            d.state is State.LEASED and record.group.wants(k) for k, d in record.dispatches.items()
        )
        leased += wanted
        if wanted:
            holders.append(record)
    names = [f"{r.actor} (lease {r.number}, {now - r.granted_s:.0f} s)" for r in holders[:3]]
    more = f" and {len(holders) - 3} more" if len(holders) > 3 else ""
    return leased, ", ".join(names) + more
