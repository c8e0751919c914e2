"""Whether this machine has the cores and the memory that the settings ask for."""

from __future__ import annotations

import os
from pathlib import Path

from asyncrl.config.schema import CPU_KV_CACHE_GIB, Config
from asyncrl.errors import ConfigError
from asyncrl.launch.placement.seats import Placement

THREADS_PER_CORE = 4
"""More threads than this a core in one role spend their time waiting for each other."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_machine(config: Config, placement: Placement) -> None:
    """Refuse what would thrash or be killed; says nothing of a cluster's machines or of GPUs.

    Raises:
        ConfigError: too many threads, or caches larger than the memory.
    """
    if placement.device != "cpu" or config.cluster.address is not None:
        return
    cores = len(os.sched_getaffinity(0))
    for key, threads in (
        ("engine.threads", config.engine.threads), ("learner.threads", config.learner.threads),
    ):  # fmt: skip
        if threads is not None and threads > THREADS_PER_CORE * cores:
            raise ConfigError(
                f"{key}={threads} is more than {THREADS_PER_CORE} times this machine's {cores} "
                f"cores: lower it to {cores} or less, or remove it"
            )
    actors, each = config.cluster.actors, config.engine.kv_cache_gib or CPU_KV_CACHE_GIB
    have = memory_gib()
    if actors * each > have:
        raise ConfigError(
            f"engine.kv_cache_gib={each:g} x cluster.actors={actors} = {actors * each:.4g} GiB is "
            f"more than this machine's memory ({have:.1f} GiB): lower engine.kv_cache_gib or "
            "cluster.actors"
        )


def memory_gib() -> float:
    """Memory of this machine, or of the container where that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = int(_CGROUP_LIMIT.read_text())
    except (OSError, ValueError):  # none, or "max"
        limit = total
    return min(total, limit) / 2**30
