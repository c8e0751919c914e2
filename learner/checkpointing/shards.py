"""The files of a checkpoint that torch writes: every rank's shards, and what lies where."""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from asyncrl.large_files import LargeFile


class _PastTheCache(FileSystem):
    """Else the cache's pages take the cores from training for longer than all the rest."""

    def __init__(self) -> None:
        self.checksums: dict[str, str] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        assert mode == "wb", mode  # a writer does nothing else
        with LargeFile(path) as stream:
            yield stream
        self.checksums[os.path.basename(path)] = stream.checksum


def write_shards(
    state: Mapping[str, Tensor], folder: Path, group: ProcessGroup | None
) -> dict[str, str]:
    """All ranks together; nothing is synced.

    Returns:
        Rank 0: the checksums of all ranks' files of shards, by name.

    Raises:
        CheckpointException: it failed on some rank, for what it says.
    """
    writer = FileSystemWriter(folder, sync_files=False)
    writer.fs = files = _PastTheCache()
    save(dict(state), storage_writer=writer, process_group=group)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    of_ranks: list[dict[str, str]] | None = [{}] * world if rank == 0 else None
    dist.gather_object(files.checksums, of_ranks, group=group, group_dst=0)
    return {name: checksum for told in of_ranks or [] for name, checksum in told.items()}
