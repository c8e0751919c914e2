"""Two learner ranks as processes over gloo, or one in this process.

The test starts them with `two_ranks`; the module that they run enters the group with `rank_of_two`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.helpers.forks import Process, run_module


class Rank:
    """A rank's process, and what it printed."""

    def __init__(self, module: str, out: Path, *arguments: object) -> None:
        self._out = out
        self.process = Process(
            target=run_module, args=(module, [str(a) for a in arguments], out), name=out.name
        )
        self.process.start()

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end; stdout and stderr."""
        self.process.join(timeout)
        out, err = (self._out.with_suffix(s).read_text() for s in (".out", ".err"))
        assert self.returncode is not None, f"still running after {timeout} s:\n{err[-3000:]}"
        return out, err

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()


@contextmanager
def two_ranks(module: str, store: Path, *arguments: object) -> Iterator[list[Rank]]:
    """`main` of the module with RANK STORE ARGUMENTS..., for ranks 0 and 1, gone at the end."""
    with ExitStack() as ranks:
        processes = []
        for rank in range(2):
            out = store.with_name(f"{store.name}-rank-{rank}")
            processes.append(Rank(module, out, rank, store, *arguments))
            ranks.callback(processes[-1].close)
        yield processes


def join(processes: list[Rank], timeout_s: float = 300.0) -> None:
    """Wait for the ranks; each must end well."""
    for p in processes:
        _, err = p.communicate(timeout_s)
        assert p.returncode == 0, err[-3000:]


@contextmanager
def one_rank() -> Iterator[None]:
    """A group of one in this process, as the learner's worker makes it."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


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
