"""The files of a checkpoint that torch writes: every rank's shards, and what lies where."""

from __future__ import annotations

import io
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from asyncrl.learner.checkpointing.large_files import LargeFile

_NAME = "__{rank}_0.distcp"
"""By DCP."""


class _PastTheCache(FileSystem):
    """Else the cache's pages take the cores from training."""

    def __init__(self) -> None:
        self.checksums: dict[str, int] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        assert mode == "wb", mode  # a writer does nothing else
        stream = LargeFile(path)
        try:
            with stream:
                yield stream
        except Exception as e:
            if stream.failure is None or e is stream.failure:
                raise
            raise stream.failure from e  # of which torch's own error says nothing
        self.checksums[os.path.basename(path)] = stream.checksum


def write_shards(
    state: dict[str, Tensor], folder: Path, group: ProcessGroup | None
) -> dict[str, str]:
    """All ranks together.

    Returns:
        The checksum of each rank's file, by name.

    Raises:
        CheckpointException: it failed on some rank, for what it says.
    """
    writer = FileSystemWriter(folder, sync_files=False)  # they are synced as they are closed
    writer.fs = files = _PastTheCache()
    save(state, storage_writer=writer, process_group=group)
    own = files.checksums[_NAME.format(rank=dist.get_rank(group))]
    bits = torch.tensor([own], dtype=torch.uint64).view(torch.int64)  # gloo knows none without sign
    told = [torch.empty_like(bits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(told, bits, group=group)
    sums = torch.cat(told).view(torch.uint64).tolist()
    return {_NAME.format(rank=rank): f"{checksum:016x}" for rank, checksum in enumerate(sums)}
