"""How the learner's ranks find each other."""

from __future__ import annotations

import datetime
import socket
from typing import Any

from asyncrl.roles import RoleSettings
from asyncrl.waits import Waits

COLLECTIVE_TIMEOUT_S = 1800.0
"""Longest time one rank may be behind another before the collective gives up."""


def open_store(settings: RoleSettings) -> Any:
    """Rank 0: the store that the ranks meet in."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # Left to itself the store would listen on every address of the machine.
    listener = socket.create_server((settings.host, 0))
    return TCPStore(
        settings.host, listener.getsockname()[1], settings.world, is_master=True,
        wait_for_workers=False, master_listen_fd=listener.detach(),
    )  # fmt: skip


def find_store(settings: RoleSettings, host: str, port: int, timeout_s: float) -> Any:
    """The other ranks: rank 0's store."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = datetime.timedelta(seconds=timeout_s)
    return TCPStore(host, port, settings.world, is_master=False, timeout=timeout)


def join(settings: RoleSettings, store: Any, waits: Waits) -> None:
    """Make the default process group; waits for all ranks."""
    import torch.distributed as dist

    with waits.on("the other ranks to join", "learner-*", COLLECTIVE_TIMEOUT_S):
        dist.init_process_group(
            "nccl" if settings.device == "cuda" else "gloo", store=store, rank=settings.rank,
            world_size=settings.world, timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )  # fmt: skip
