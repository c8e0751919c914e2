"""The staleness arithmetic, in one place (definitions: docs/architecture.md).

Letters: V the learner's version for the batch that consumes a sample, v the version of a token,
S `buffer.max_staleness` in versions, W the window in groups, G groups per batch, n optimizer
batches per publication, p a group's position in the order of consumption (from 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from asyncrl.errors import ConfigError, StalenessError
from asyncrl.types import SampleHeader, Version


def version_of_batch(batch: int, batches_per_publication: int) -> int:
    """V = floor((k - 1) / n): the learner's version while it trains batch k (from 1).

    >>> [version_of_batch(k, 2) for k in (1, 2, 3, 4, 5)]
    [0, 0, 1, 1, 2]
    """
    return (batch - 1) // batches_per_publication


def max_admissible_position(
    window: int,
    applied_version: int,
    max_staleness: int,
    groups_per_batch: int,
    batches_per_publication: int,
) -> int:
    """The last position p that admission grants: p + W <= (v_a + S + 1) * G * n.

    A group there is consumed with at most p + W - 1 groups before it, so by a batch whose V is at
    most v_a + S (proof: asyncrl.buffer.ledger).

    >>> max_admissible_position(1, 0, 0, 4, 1)  # synchronous: the four groups of batch 1
    3
    """
    per_version = groups_per_batch * batches_per_publication
    return (applied_version + max_staleness + 1) * per_version - window


def version_needed(
    position: int,
    window: int,
    max_staleness: int,
    groups_per_batch: int,
    batches_per_publication: int,
) -> int:
    """The lowest version that admission accepts for `position`.

    The inverse of `max_admissible_position`.

    >>> version_needed(4, 1, 0, 4, 1)
    1
    """
    per_version = groups_per_batch * batches_per_publication
    return max(0, -(-(position + window) // per_version) - max_staleness - 1)


def check_window(
    window: int, max_staleness: int, groups_per_batch: int, batches_per_publication: int
) -> None:
    """Refuse a window that can stop the run: W - 1 > S * G * n.

    The last group of a batch has position at most (k - 1) * G + G - 1 and must be admissible for
    an actor that has all that was published; that needs W - 1 <= S * G * n.

    Raises:
        ConfigError: with the numbers and the largest window that works.
    """
    most = max_staleness * groups_per_batch * batches_per_publication + 1
    if not 1 <= window <= most:
        raise ConfigError(
            f"buffer.window={window} is outside 1..{most}: with max_staleness={max_staleness}, "
            f"{groups_per_batch} groups a batch and {batches_per_publication} batches a "
            f"publication a batch could never fill; set it to at most {most} "
            "or raise buffer.max_staleness"
        )


@dataclass(frozen=True, slots=True)
class SampleStaleness:
    """Staleness of one sample, in versions, for the batch that consumes it.

    >>> SampleStaleness(head=2, tail=1, span=1, dispatch=2, in_flight=1, in_queue=1, steps=4,
    ...     prior_incarnation=False).head
    2
    """

    head: int
    """V - min v over policy tokens: the bounded one."""
    tail: int
    """V - max v over policy tokens."""
    span: int
    """max v - min v."""
    dispatch: int
    """V - version applied by the engine when the request was issued."""
    in_flight: int
    """v_finish - v_dispatch."""
    in_queue: int
    """V - v_finish."""
    steps: int
    """`head` in optimizer batches: n per version."""
    prior_incarnation: bool
    """True if it was dispatched in an earlier incarnation than the learner's."""


def sample_staleness(
    header: SampleHeader, current: Version, batches_per_publication: int = 1
) -> SampleStaleness:
    """The staleness of a sample consumed at the learner's `current` version.

    Differences are cut off at 0: after a restart from a checkpoint V can be below the v of a
    sample of an earlier incarnation, whose staleness is max(0, V - v).
    """

    def behind(newer: Version, older: Version) -> int:
        return max(0, newer.version - older.version)

    head = behind(current, header.version_min)
    return SampleStaleness(
        head=head,
        tail=behind(current, header.version_max),
        span=behind(header.version_max, header.version_min),
        dispatch=behind(current, header.version_dispatch),
        in_flight=behind(header.version_finish, header.version_dispatch),
        in_queue=behind(current, header.version_finish),
        steps=head * batches_per_publication,
        # Not that of version_min: its number is the lowest, its incarnation need not be.
        prior_incarnation=header.version_dispatch.incarnation < current.incarnation,
    )


def check_bound(
    manifest: Sequence[SampleHeader],
    current: Version,
    max_staleness: int,
    on_stale: Literal["drop", "raise"] = "drop",
    setting: str = "buffer.max_staleness",
) -> tuple[int, ...]:
    """Indexes into `manifest` of the samples whose head staleness exceeds S, in order.

    The last check, at the consumer: admission makes the answer empty in a healthy run. `setting`
    is what sets S, for the error.

    Raises:
        StalenessError: with `on_stale="raise"`, if there is any; it names the worst.
    """
    heads = [sample_staleness(h, current).head for h in manifest]
    stale = tuple(i for i, head in enumerate(heads) if head > max_staleness)
    if stale and on_stale == "raise":
        worst = max(stale, key=lambda i: heads[i])
        h = manifest[worst]
        raise StalenessError(
            f"{len(stale)} of {len(manifest)} samples exceed {setting}={max_staleness} "
            f"at version {current}; worst: {'/'.join(map(str, h.id))} with head staleness "
            f"{heads[worst]} (tokens {h.version_min} to {h.version_max}, dispatched at "
            f"{h.version_dispatch}, lease {h.lease}, {h.actor})"
        )
    return stale


def token_staleness(
    versions: npt.NDArray[np.integer[Any]], current: Version
) -> npt.NDArray[np.int64]:
    """V - v of each policy token, cut off at 0; same shape as `versions`.

    Tool tokens (NO_VERSION) have no staleness: leave them out.

    >>> token_staleness(np.array([3, 4, 6]), Version(1, 5)).tolist()
    [2, 1, 0]
    """
    return np.maximum(current.version - versions.astype(np.int64), 0)
