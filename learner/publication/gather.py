"""Shards on their way to rank 0, in the sending threads, on a process group of their own.

    rank 1 ──pieces of its shards──► rank 0: straight to their place in the snapshot
    rank 2 ──(after rank 1)────────►

Gloo over host memory, also where training speaks NCCL: it shares nothing with training's group, so
that the order of the two does not matter. A send waits for rank 0 (which may still deliver the last
version), a receive for the other rank (which may still be training): both are released by their
deadline, or at once when the other process ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.errors import WeightSyncError
from asyncrl.learner.publication.shards import Shards
from asyncrl.types import Version
from asyncrl.weights import BUCKET_BYTES, uses_loopback


class Gather:
    """This rank's end. Made by all ranks together: it forms the group.

    Args:
        rank, world: of the default process group, which must stand.
        timeout_s: how long one gather may take at rank 0; elsewhere `patience_s` more, which is
            what rank 0 may need before it begins.
        address: where the ranks meet.
        bucket_bytes: at most so much is under way at a time.
    """

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        timeout_s: float,
        patience_s: float,
        address: str = "127.0.0.1",
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.rank, self.world = rank, world
        self._seconds = timeout_s + (patience_s if rank else 0.0)
        self._bucket_bytes = bucket_bytes
        self.deadline = 0.0
        """Of the gather under way or of the last one (time.monotonic)."""
        self._waiting = ""
        if uses_loopback(address):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        limit = timedelta(seconds=self._seconds)
        self._group: Any = dist.new_group(backend="gloo", timeout=limit)

    def run(self, shards: Shards, version: Version) -> None:
        """Send this rank's shards; on rank 0 receive those of the others.

        Raises:
            WeightSyncError: another rank ended, was late, or cut another version. The group is
                then of no more use.
        """
        self.deadline = time.monotonic() + self._seconds
        others = range(1, self.world) if self.rank == 0 else (0,)
        verb = "receive the shards of" if self.rank == 0 else "send its shards to"
        for other in others:
            self._waiting = f"weights {version}: learner-{self.rank} to {verb} learner-{other}"
            try:
                self._exchange(shards, version, other)
            except RuntimeError as e:
                raise WeightSyncError(
                    f"{self._waiting}: failed after {self._seconds_gone():.1f} s (limit "
                    f"{self._seconds:.0f} s), that rank has ended or is stuck; see its log: {e}"
                ) from e
        self._waiting = ""
        shards.settled = True

    def waiting_for(self) -> str:
        """Which rank, and the seconds left; "" when idle."""
        left = max(0.0, self.deadline - time.monotonic())
        return f"{self._waiting} ({left:.0f} s left)" if self._waiting else ""

    def _exchange(self, shards: Shards, version: Version, other: int) -> None:
        move = self._group.recv if self.rank == 0 else self._group.send
        head = torch.tensor(version)
        self._wait([move([head], other, 0)])
        if tuple(head.tolist()) != version:
            got = Version(*head.tolist())
            raise RuntimeError(f"it cut version {got}, this rank {version}")
        sender = max(self.rank, other)
        for bucket in self._buckets(shards.pieces(sender, self._bucket_bytes)):
            self._wait([move([piece], other, 0) for piece in bucket])

    def _wait(self, works: list[Any]) -> None:
        for work in works:
            left = max(0.001, self.deadline - time.monotonic())
            work.wait(timedelta(seconds=left))

    def _buckets(self, pieces: list[Tensor]) -> Iterator[list[Tensor]]:
        bucket: list[Tensor] = []
        size = 0
        for piece in pieces:
            if bucket and size + piece.nbytes > self._bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(piece)
            size += piece.nbytes
        if bucket:
            yield bucket

    def _seconds_gone(self) -> float:
        return self._seconds - (self.deadline - time.monotonic())
