"""Two learner ranks as processes over gloo.

The test starts them with `two_ranks`; the module that they run enters the group with `rank_of_two`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


@contextmanager
def two_ranks(
    module: str, store: Path, *arguments: object
) -> Iterator[list[subprocess.Popen[str]]]:
    """`python -m module RANK STORE ARGUMENTS...` for ranks 0 and 1, gone at the end."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, *(str(a) for a in (rank, store, *arguments))],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        yield processes
    finally:
        for p in processes:
            p.kill()
            p.wait()
            for stream in (p.stdout, p.stderr):
                assert stream is not None
                stream.close()


def join(processes: list[subprocess.Popen[str]], timeout_s: float = 300.0) -> None:
    """Wait for the ranks; each must end well."""
    for p in processes:
        _, err = p.communicate(timeout=timeout_s)
        assert p.returncode == 0, err[-3000:]


@contextmanager
def rank_of_two() -> Iterator[tuple[int, list[str]]]:
    """Within the process group: this process's rank, and the arguments behind it and the store."""
    rank, store, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=int(rank), world_size=2,
        timeout=timedelta(seconds=120),
    )  # fmt: skip
    try:
        yield int(rank), arguments
    finally:
        dist.destroy_process_group()
