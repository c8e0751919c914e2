"""Whether this machine has the memory that the weights' way to the engines takes."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config.schema import CPU_KV_CACHE_GIB, Config
from asyncrl.errors import ConfigError, ModelError
from asyncrl.launch.placement import Placement
from asyncrl.launch.placement.machine import memory_gib
from asyncrl.model_store.tensors import stored_tensors
from asyncrl.weights import DTYPE_BYTES

COPIES = 2
"""Of the weights at a relay: what engines load from, and what arrives meanwhile."""


def check_relay(config: Config, placement: Placement, model_path: Path) -> None:
    """Refuse a relay whose copies do not fit beside the engines' caches; says nothing of a
    cluster's machines.

    Raises:
        ConfigError: with the size that is needed, and the size that is here.
    """
    if placement.weight_strategy != "relay" or config.cluster.address is not None:
        return
    try:
        numel = sum(stored.numel for stored in stored_tensors(model_path).values())
    except ModelError:
        return  # whoever loads it says what is wrong
    each = numel * DTYPE_BYTES[config.engine.dtype] / 2**30
    caches = 0.0
    if placement.device == "cpu":
        caches = config.cluster.actors * (config.engine.kv_cache_gib or CPU_KV_CACHE_GIB)
    need, have = COPIES * each + caches, memory_gib()
    if need > have:
        raise ConfigError(
            f"weights.strategy=relay keeps {COPIES} copies of the weights ({each:.3g} GiB each) in "
            f"shared memory, with the engines' caches ({caches:.3g} GiB) {need:.3g} GiB; this "
            f"machine has {have:.3g}: lower cluster.actors or engine.kv_cache_gib"
        )
