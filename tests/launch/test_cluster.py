"""More and fewer seats while a run goes on; Ray is a table of nodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray._private import state

from asyncrl.config.load import load
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.cluster import Cluster
from asyncrl.launch.placement import machine, place


class Ray:
    """Two nodes with 4 GPUs each, of which some are taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken = {"n0": 0.0, "n1": 0.0}
        monkeypatch.setattr(state, "available_resources_per_node", self.free)

    def free(self) -> dict[str, dict[str, float]]:
        # As Ray does, what is used up is left out.
        return {n: {"GPU": 4 - used} if used < 4 else {} for n, used in self.taken.items()}

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": n, "Alive": True, "NodeManagerAddress": f"127.0.0.{k + 2}",
             "NodeManagerHostname": n, "Resources": {"CPU": 16.0, "GPU": 4.0}}
            for k, n in enumerate(self.taken)
        ]  # fmt: skip

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "n0")


def cluster_of(config: Config, ray: Ray | None = None) -> Any:
    cluster: Any = object.__new__(Cluster)
    cluster._ray = ray or SimpleNamespace(
        nodes=list, get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "")
    )
    cluster._config, cluster._placement, cluster._hosts = config, place(config), []
    cluster._assignment = cluster._assign(config, cluster._placement)
    return cluster


def run(cluster: Any, ray: Ray, *names: str) -> None:
    """Start hosts on their seats."""
    for name in names:
        seat = cluster.seat(name)
        ray.taken[seat.node] += seat.num_gpus
        cluster._hosts.append((name, seat))


def test_what_the_run_uses_it_may_use_and_what_others_use_it_may_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray = Ray(monkeypatch)
    address = ("cluster.address=127.0.0.2:6379", "cluster.device=cuda")
    c = load(None, [*address, "cluster.actors=3", "cluster.learners=1"]).config
    cluster = cluster_of(c, ray)
    run(cluster, ray, "learner-0", "actor-0", "actor-1", "actor-2")
    had = cluster._assignment
    assert ray.taken == {"n0": 4, "n1": 0}
    ray.taken["n1"] += 2  # another run's
    with pytest.raises(ConfigError, match="6 actors . 1 learners need 7 GPUs, 6 of the cluster's"):
        cluster.scale(6)
    assert cluster._assignment is had
    cluster.scale(5)
    assert cluster._assignment.actors[:3] == had.actors
    assert [cluster.seat(f"actor-{r}").node for r in (3, 4)] == ["n1", "n1"]
    run(cluster, ray, "actor-3", "actor-4")
    cluster.scale(2)
    assert len(cluster._assignment.actors) == 2
    # Those that leave have not ended yet: their GPUs are the run's to give.
    cluster.scale(5)
    nodes = [cluster.seat(f"actor-{r}").node for r in range(5)]
    assert (nodes.count("n0"), nodes.count("n1")) == (3, 2)


def test_seats_here_are_as_many_as_memory_and_one_buffer_bear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(machine, "memory_gib", lambda: 4.0)
    c = load("tiny", ["engine.kv_cache_gib=1"]).config
    cluster = cluster_of(c)
    cluster.scale(4)
    four = cluster._assignment
    assert len(four.actors) == 4
    message = r"engine.kv_cache_gib=1 x cluster.actors=5 = 5 GiB is more than this machine's memory"
    with pytest.raises(ConfigError, match=message):
        cluster.scale(5)
    with pytest.raises(ConfigError, match="cluster.actors=4097 is over 4096"):
        cluster.scale(4097)
    assert cluster._assignment is four
