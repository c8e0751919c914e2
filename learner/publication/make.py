"""Which publisher a rank has: rank 0 speaks to the actors, the others to rank 0."""

from __future__ import annotations

from collections.abc import Callable

import torch

from asyncrl.config.schema import Config
from asyncrl.learner.layout import Layout
from asyncrl.learner.publication.gather import Gather
from asyncrl.learner.publication.members import Members
from asyncrl.learner.publication.publish import STUCK_MARGIN_S, BroadcastPublisher
from asyncrl.learner.publication.shard_publisher import ShardPublisher
from asyncrl.learner.publication.shards import Source
from asyncrl.learner.publication.weight_fleet import Limits
from asyncrl.roles import RoleSettings
from asyncrl.weights import publication_deadline_s


def make_publisher(
    layout: Layout,
    source: Callable[[], Source],
    device: torch.device,
    config: Config,
    settings: RoleSettings,
    members: Members | None,
) -> BroadcastPublisher | ShardPublisher:
    """The publisher of this rank; a collective of all ranks, which form a group.

    `source` yields this rank's rows of each part of `layout`, in order; `device` is where it
    computes, `members` is rank 0's.
    """
    weights = config.weights
    relayed = weights.strategy == "relay"
    drain_s = 0.0 if relayed else weights.drain_s  # relays have no requests to wait for
    gather = None
    if settings.world > 1:
        nbytes = layout.load_bytes
        limit = publication_deadline_s(weights.timeout_s, nbytes)
        # Before it receives, rank 0 may have to end a delivery: its rounds begin by the limit.
        delivery = limit + drain_s + Limits.of(weights.timeout_s, nbytes, drain_s).round_s
        gather = Gather(
            rank=settings.rank, world=settings.world, timeout_s=limit,
            patience_s=delivery + STUCK_MARGIN_S, address=settings.host,
        )  # fmt: skip
    if members is None:
        assert gather is not None, "rank 0 has members"
        return ShardPublisher(
            source=source, layout=layout, gather=gather, pinned=device.type == "cuda"
        )  # fmt: skip
    return BroadcastPublisher(
        members, source=source, layout=layout, gather=gather,
        backend=settings.weight_backend, address=settings.host, device=device,
        timeout_s=weights.timeout_s, drain_s=drain_s, keys=settings.keys, relayed=relayed,
    )  # fmt: skip
