"""Which role runs where: decided from the settings and the nodes that there are, before any starts.

place(config) ─► Placement        device, backend, threads, GPUs per role; no Ray
nodes_of(ray.nodes()) ─► nodes ─► assign(config, placement, nodes) ─► a Seat per role member
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal

from asyncrl.config.places import Role, Wish, wishes
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.placement.assign import assign
from asyncrl.launch.placement.nodes import Node, gpus_here, launcher_address, nodes_of
from asyncrl.launch.placement.seats import Assignment, Placement, Seat

__all__ = [
    "Assignment", "Node", "Placement", "Seat", "assign", "gpus_here", "launcher_address",
    "nodes_of", "place", "rows", "weights_text",
]  # fmt: skip


def place(config: Config) -> Placement:
    """Resolve device and threads; without a cluster, check that every role has its GPUs here.

    Raises:
        ConfigError: too few GPUs here, or `cluster.*_places` name what is not here.
    """
    c = config.cluster
    have = gpus_here()
    device = c.device
    if device == "auto" and c.address is not None and not have:
        raise ConfigError(
            "cluster.device=auto: this machine has no GPU and says nothing about the cluster at "
            "cluster.address: set cluster.device=cpu or cuda"
        )
    if device == "auto":
        device = "cuda" if have else "cpu"
    if device == "cuda" and not have and c.address is None:
        raise ConfigError(
            "cluster.device=cuda: there is no NVIDIA GPU on this machine; "
            "set cluster.device=cpu or cluster.address"
        )
    cores = len(os.sched_getaffinity(0))
    share = max(1, cores // (c.actors + c.learners))
    backend = config.weights.backend
    cuda = device == "cuda"
    strategy = _strategy(config, cuda)
    fastest: Literal["gloo", "nccl"] = "nccl" if cuda and strategy == "broadcast" else "gloo"
    placement = Placement(
        device=device,
        weight_backend=fastest if backend == "auto" else backend,
        actor_threads=config.engine.threads or share,
        learner_threads=config.learner.threads or share,
        actor_gpus=config.engine.tensor_parallel if cuda else 0,
        learner_gpus=1 if cuda else 0,
        weight_strategy=strategy,
    )
    if c.address is None:
        assign(config, placement, ())
    return placement


def _strategy(config: Config, cuda: bool) -> Literal["broadcast", "relay"]:
    chosen, c = config.weights.strategy, config.cluster
    if chosen != "auto":
        return chosen
    # With one engine a machine there is nobody whom a relay would spare.
    return "relay" if not cuda and c.address is None and c.actors > 1 else "broadcast"


def weights_text(config: Config, placement: Placement) -> str:
    """How weights get to the engines, for people.

    >>> from asyncrl.config.schema import ClusterConfig
    >>> config = Config(cluster=ClusterConfig(actors=6))
    >>> weights_text(config, Placement("cpu", "gloo", 1, 1, weight_strategy="relay"))
    'relay over gloo, 1 receiver for 6 actors'
    >>> weights_text(config, Placement("cuda", "nccl", 1, 1))
    'broadcast over nccl to 6 actors'
    """
    c, how = config.cluster, f"{placement.weight_strategy} over {placement.weight_backend}"
    actors = f"{c.actors} actor{'s' if c.actors > 1 else ''}"
    if placement.weight_strategy == "broadcast":
        return f"{how} to {actors}"
    receivers = "1 receiver" if c.address is None else "1 receiver on each machine"
    return f"{how}, {receivers} for {actors}"


def rows(config: Config, placement: Placement) -> Iterator[tuple[str, str, str, str]]:
    """(role, node, device, threads) of every role member, as far as it is known before Ray."""
    c, p, on_cpu = config.cluster, placement, placement.device == "cpu"
    roles: tuple[tuple[Role, int, int, int, bool], ...] = (
        ("actor", c.actors, p.actor_gpus, p.actor_threads, config.engine.threads is not None),
        (
            "learner", c.learners, p.learner_gpus, p.learner_threads,
            config.learner.threads is not None,
        ),
    )  # fmt: skip
    anywhere = Wish("this machine" if c.address is None else "?", ())
    yield "buffer-0", _wishes(config, "learner", 1, anywhere)[0].node, "cpu", "1"
    for role, count, gpus, threads, given in roles:
        # A node of a cluster divides its own cores.
        told = "-" if not on_cpu else str(threads) if given or c.address is None else "?"
        for rank, wish in enumerate(_wishes(config, role, count, anywhere)):
            device = "cpu" if on_cpu else f"gpu {','.join(wish.gpus)}" if wish.gpus else None
            yield f"{role}-{rank}", wish.node, device or f"{gpus} gpu", told


def _wishes(config: Config, role: Role, count: int, anywhere: Wish) -> tuple[Wish, ...]:
    return wishes(config, role) if config.cluster.placement == "explicit" else (anywhere,) * count
