"""The machines that there are, as Ray or this one tells of them."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_NOT_CUSTOM = ("CPU", "GPU", "memory", "object_store_memory")
"""Resources of Ray's own; the name of any other one may stand for the nodes that have it."""
_HERE = ("local", "localhost", "127.0.0.1")
"""Names of the machine that the launcher runs on."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the Ray cluster.

    >>> Node("f00d", "10.0.0.7", "gpu-a", {"CPU": 64.0, "GPU": 8.0, "rack_a": 1.0}).gpu_ids
    ('0', '1', '2', '3', '4', '5', '6', '7')
    """

    id: str
    address: str
    hostname: str
    resources: Mapping[str, float] = field(default_factory=dict)
    """Ray's names and amounts: CPU, GPU, custom ones."""
    alive: bool = True
    here: bool = False
    """Whether the launcher runs on it."""
    free_gpus: int | None = None
    """GPUs that Ray has not given to others; None: all."""
    visible: tuple[str, ...] | None = None
    """Ids of its GPUs where they are known; None: numbered from 0."""

    @property
    def gpu_ids(self) -> tuple[str, ...]:
        """Ids that may stand in `cluster.*_places`."""
        if self.visible is not None:
            return self.visible
        return tuple(map(str, range(int(self.resources.get("GPU", 0)))))

    @property
    def room(self) -> int:
        """GPUs that may be used."""
        have = len(self.gpu_ids)
        return have if self.free_gpus is None else min(have, self.free_gpus)

    def called(self, name: str) -> bool:
        """Whether `name` stands for this node."""
        if name in (self.address, self.hostname) or (self.here and name in _HERE):
            return True
        return name not in _NOT_CUSTOM and self.resources.get(name, 0) > 0


def gpu_ids_here() -> tuple[str, ...]:
    """NVIDIA GPUs that this process may use, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        ids = (d.strip() for d in visible.split(","))
        # As CUDA reads it: what stands behind an id that is none does not count.
        return tuple(itertools.takewhile(lambda d: d not in ("", "-1"), ids))
    folder = "/proc/driver/nvidia/gpus"
    count = len(os.listdir(folder)) if os.path.isdir(folder) else 0
    return tuple(map(str, range(count)))


def gpus_here() -> int:
    """How many they are."""
    return len(gpu_ids_here())


def this_machine() -> Node:
    """The node of a local Ray."""
    resources = {"CPU": float(len(os.sched_getaffinity(0)))}
    return Node(
        "", "127.0.0.1", socket.gethostname(), resources, here=True, visible=gpu_ids_here()
    )  # fmt: skip


def nodes_of(
    nodes: Iterable[Mapping[str, Any]],
    here: str | None = None,
    free: Mapping[str, Mapping[str, float]] | None = None,
) -> list[Node]:
    """The nodes of `ray.nodes()`, the launcher's own first, in an order that does not change.

    Args:
        nodes: what `ray.nodes()` returns.
        here: id of the node that the launcher runs on; without it, the first one of its host name.
        free: resources that are not taken, by node id; without it, all are free.
    """
    found = sorted(nodes, key=lambda n: (n["NodeManagerAddress"], n["NodeID"]))
    if here is None:
        own = socket.gethostname()
        here = next((n["NodeID"] for n in found if n["NodeManagerHostname"] == own), None)
    result = [
        Node(
            id=n["NodeID"], address=n["NodeManagerAddress"], hostname=n["NodeManagerHostname"],
            resources=dict(n["Resources"]), alive=bool(n["Alive"]), here=n["NodeID"] == here,
            free_gpus=None if free is None else int(free.get(n["NodeID"], {}).get("GPU", 0)),
        )
        for n in found
    ]  # fmt: skip
    return sorted(result, key=lambda n: not n.here)


def launcher_address(cluster: str | None) -> str:
    """Where the launcher binds: loopback, or its address on the network of the cluster."""
    if cluster is None:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connecting a datagram socket only picks the route's own address.
        try:
            probe.connect((cluster.rpartition(":")[0] or socket.gethostname(), 1))
        except OSError:
            return socket.gethostbyname(socket.gethostname())
        return str(probe.getsockname()[0])
