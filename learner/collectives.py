"""Small gathers and sums over the learner's ranks: tensors only, never objects."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from asyncrl.weights import uses_loopback

T = TypeVar("T", np.int64, np.float64)


def gather_counts(counts: list[int], device: torch.device) -> npt.NDArray[np.int64]:
    """The counts of every rank, [world, len(counts)]."""
    mine = torch.tensor(counts, dtype=torch.int64, device=device)
    out = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(out, mine)
    return np.stack([t.cpu().numpy() for t in out])


def gather_rows(rows: npt.NDArray[np.float32], device: torch.device) -> npt.NDArray[np.float32]:
    """The rows [n, k] of all ranks, in rank order; n may differ between ranks, k may not."""
    sizes = gather_counts([len(rows)], device)[:, 0]
    padded = torch.zeros(int(sizes.max()), rows.shape[1], device=device)
    padded[: len(rows)] = torch.from_numpy(rows)
    out = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(out, padded)
    parts = [t[:n].cpu().numpy() for t, n in zip(out, sizes, strict=True)]
    return np.concatenate(parts)


def sum_over_ranks(values: npt.NDArray[T], device: torch.device) -> npt.NDArray[T]:
    """The sum of every rank's array, of any one shape; float64 or int64."""
    total = torch.from_numpy(values).to(device)
    dist.all_reduce(total)
    return total.cpu().numpy()


def from_rank_0(value: int, device: torch.device) -> int:
    """Rank 0's value, on every rank."""
    told = torch.tensor([value], dtype=torch.int64, device=device)
    dist.broadcast(told, 0)
    return int(told.item())


def host_group(address: str, timeout_s: float) -> Any:
    """A group of all ranks over host memory, apart from that of training; collective.

    Args:
        address: where the ranks meet.
        timeout_s: how long one rank may be behind another.
    """
    if uses_loopback(address):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
