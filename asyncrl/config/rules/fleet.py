"""Devices, places, and how long a role may be silent."""

from __future__ import annotations

import re
from collections.abc import Iterator

from asyncrl.config.places import Role, Wish, wishes
from asyncrl.config.rules.context import Context, Rule
from asyncrl.errors import ConfigError

MAX_MEMBERS = 4096
"""Actors, or learner ranks."""
MIN_SILENT_S = 6.0
"""An actor without work asks for a lease every 5 s: that may be all that it says."""
MIN_LEASE_TIMEOUT_S = 4.0
"""Progress renews a lease every 2 s."""
_ADDRESS = re.compile(r"auto|[^\s:/]+:[0-9]{1,5}|\[[0-9a-fA-F:]+\]:[0-9]{1,5}")


def _devices(c: Context) -> Iterator[str]:
    auto = " (cluster.device=auto)" if c.config.cluster.device == "auto" else ""
    if c.device == "cpu":
        on = f"on device cpu{auto}"
        yield from c.inactive("engine.gpu_memory_utilization", why=on, fix="use a GPU")
        if c.config.engine.tensor_parallel > 1:
            yield f"{c.named('engine.tensor_parallel')} needs GPUs and runs {on}: set it to 1"
        if c.config.weights.backend == "nccl":
            yield (
                f"{c.named('weights.backend')} needs GPUs and runs {on}: set weights.backend=auto"
            )
    weights = c.config.weights
    if weights.strategy == "relay" and weights.backend == "nccl":
        yield (
            f"{c.named('weights.backend')} does not go with weights.strategy=relay, which receives "
            "into host memory: set weights.backend=auto"
        )
    if c.device == "cuda":
        yield from c.inactive(
            "engine.threads", "learner.threads", why=f"on device cuda{auto}",
            fix="set cluster.device=cpu",
        )  # fmt: skip
        if c.config.engine.kv_cache_gib is not None:
            yield from c.inactive(
                "engine.gpu_memory_utilization", why="when engine.kv_cache_gib sets the cache",
                fix="remove engine.kv_cache_gib",
            )  # fmt: skip


def _members(c: Context) -> Iterator[str]:
    for key in ("cluster.actors", "cluster.learners"):
        value = c.flat[key]
        assert isinstance(value, int)
        if value > MAX_MEMBERS:
            yield f"{c.named(key)} is over {MAX_MEMBERS}, more than one buffer serves: lower it"
    address = c.config.cluster.address
    if address is not None and not _ADDRESS.fullmatch(address):
        yield (
            f"{c.named('cluster.address')}: expected HOST:PORT of a running Ray cluster (6379 is "
            "Ray's usual port), or auto for the one on this machine"
        )


def _silence(c: Context) -> Iterator[str]:
    cluster, lease_s = c.config.cluster, c.config.rollout.lease_timeout_s
    if cluster.silent_after_s < MIN_SILENT_S:
        yield (
            f"{c.named('cluster.silent_after_s')} would give up healthy actors: one without work "
            f"speaks every 5 s: raise it to {MIN_SILENT_S:g} or more"
        )
    if lease_s < MIN_LEASE_TIMEOUT_S:
        yield (
            f"{c.named('rollout.lease_timeout_s')} would expire before it can be renewed: progress "
            f"is reported every 2 s: raise it to {MIN_LEASE_TIMEOUT_S:g} or more"
        )
    if cluster.max_restarts == 0:
        yield from c.inactive(
            "cluster.restart_backoff_s", why="with cluster.max_restarts=0",
            fix="raise cluster.max_restarts",
        )  # fmt: skip


def _placement(c: Context) -> Iterator[str]:
    placement = c.config.cluster.placement
    if placement == "spread" and c.config.cluster.address is None:
        yield from c.inactive(
            "cluster.placement", why="without cluster.address (there is one machine)",
            fix="set cluster.address to a Ray cluster",
        )  # fmt: skip
    if placement != "explicit":
        yield from c.inactive(
            "cluster.actor_places", "cluster.learner_places",
            why=f"with cluster.placement={placement}", fix="set cluster.placement=explicit",
        )  # fmt: skip
        return
    users: dict[tuple[str, str], str] = {}
    roles: tuple[tuple[Role, int], ...] = (
        ("actor", c.config.engine.tensor_parallel), ("learner", 1),
    )  # fmt: skip
    for role, gpus in roles:
        try:
            found = wishes(c.config, role)
        except ConfigError as e:
            yield str(e)
            continue
        for rank, wish in enumerate(found):
            yield from _place(c, f"{role}-{rank}", wish, gpus, users)


def _place(
    c: Context, name: str, wish: Wish, gpus: int, users: dict[tuple[str, str], str]
) -> Iterator[str]:
    key = f"cluster.{name.split('-')[0]}_places"
    shown = f"{key}: {wish.node}:{','.join(wish.gpus)} ({name})"
    if wish.gpus and c.device == "cpu":
        yield f"{shown} names GPUs and runs on device cpu: write {wish.node}"
    elif wish.gpus and len(wish.gpus) != gpus:
        why = f"engine.tensor_parallel={gpus}" if key == "cluster.actor_places" else "a rank has 1"
        yield f"{shown} lists {len(wish.gpus)} GPUs and {why}: list {gpus}"
    for gpu in wish.gpus:
        user = users.setdefault((wish.node, gpu), name)
        if user != name or wish.gpus.count(gpu) > 1:
            yield f"{shown}: GPU {gpu} of {wish.node} is listed twice (for {user}): give another"
            return


def _in_flight(c: Context) -> Iterator[str]:
    if c.config.buffer.max_staleness == 0:
        yield from c.inactive(
            "weights.in_flight",
            why="with buffer.max_staleness=0 (nothing is under way at a publication)",
            fix="raise buffer.max_staleness",
        )


RULES: tuple[Rule, ...] = (_devices, _members, _silence, _placement, _in_flight)
