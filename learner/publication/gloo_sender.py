"""Trainer side of the gloo weight transfer: vLLM's trainer engine interface over a snapshot.

    every worker: "I am here" ──► store ──► all here: go ──► gloo's own rendezvous ──► group
                                        └─► one failed or is late: no ──► the others stop waiting

gloo's rendezvous waits for all ranks and cannot be called off, hence the question before it. Waits
for the workers (released by the joining deadline, or by a member's failure) and for the collective
(released by its own deadline).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import BroadcastOptions, ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore
from vllm.distributed.utils import create_tcp_store, init_gloo_process_group
from vllm.distributed.weight_transfer import (
    ParamMeta,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo

from asyncrl.errors import WeightSyncError
from asyncrl.learner.publication.snapshot import Snapshot
from asyncrl.learner.publication.weight_fleet import FleetClient
from asyncrl.weights import ARRIVED, GO, uses_loopback

_POLL_S = 0.005


class SnapshotSource(WeightSource):  # type: ignore[misc]
    """vLLM's view of a snapshot: (name, tensor on `device`) in the order of its plan."""

    def __init__(self, snapshot: Snapshot, device: torch.device) -> None:
        self.snapshot = snapshot
        self._device = device

    def metadata(self) -> list[ParamMeta]:
        """Name, wire dtype and full shape of each parameter."""
        params = self.snapshot.plan.params
        return [ParamMeta(p.name, getattr(torch, p.dtype), p.shape) for p in params]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.snapshot.tensors():
            yield name, tensor.to(self._device, non_blocking=True)


@dataclass
class GlooTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc]
    """Where the sender listens, the group's size (sender + workers) and the joining deadline."""

    backend: ClassVar[str] = "gloo"

    master_address: str
    world_size: int
    timeout_s: float


class GlooTrainerWeightTransferEngine(TrainerWeightTransferEngine):  # type: ignore[misc]
    """Sends a snapshot's flat buffers in bounded buckets from rank 0 of a gloo group."""

    init_info_cls = GlooTrainerInitInfo
    client: FleetClient
    source: SnapshotSource
    group: ProcessGroup | None = None
    _called_off: Any = None

    @classmethod
    def trainer_init(
        cls, init_info: GlooTrainerInitInfo, *, client: Any, source: Any = None
    ) -> GlooTrainerWeightTransferEngine:
        """Open the group on a free port and have the workers join it."""
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        listener = socket.create_server((init_info.master_address, 0))
        port = listener.getsockname()[1]
        worker_info = {
            "master_address": init_info.master_address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": init_info.world_size,
            # Longer than the sender waits: it then tells them, rather than let them find out.
            "timeout_s": init_info.timeout_s + client.limits.margin_s,
        }
        if uses_loopback(init_info.master_address):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        _both(lambda: client.init_weight_transfer_engine(worker_info), client,
              lambda: engine._open_group(init_info, listener))  # fmt: skip
        return engine

    def _open_group(self, init_info: GlooTrainerInitInfo, listener: socket.socket) -> None:
        timeout = timedelta(seconds=init_info.timeout_s)
        store = create_tcp_store(
            init_info.master_address, listener.getsockname()[1], listen_socket=listener,
            world_size=init_info.world_size, is_master=True, wait_for_workers=False,
            timeout=timeout,
        )  # fmt: skip
        keys = [ARRIVED.format(rank=rank) for rank in range(1, init_info.world_size)]
        deadline = time.monotonic() + init_info.timeout_s
        while not store.check(keys):
            if self.client.failures or time.monotonic() > deadline:
                store.set(GO, "no")
                self._called_off = store  # until the workers have read it
                raise RuntimeError("not all workers came to join the transfer group")
            time.sleep(_POLL_S)
        store.set(GO, "yes")
        self.group = init_gloo_process_group(
            PrefixStore("gloo", store), 0, init_info.world_size, timeout
        )

    def send_weights(self) -> None:
        """One publication: begin, receive beside the broadcast, commit.

        Raises:
            WeightSyncError: a member failed, or the broadcast did; the group is of no more use.
        """
        client = self.client
        info = self.source.snapshot.plan.to_info()
        info["bucket_bytes"] = self.source.snapshot.bucket_bytes
        info["timeout_s"] = client.limits.transfer_s
        info["checksums"] = self.source.snapshot.checksums
        if (adapters := self.source.snapshot.adapters) is not None:
            info["adapters"] = adapters.to_info()
        client.start_weight_update()
        _both(lambda: client.update_weights(info), client, self._broadcast)
        client.finish_weight_update(str(client.version))

    def _broadcast(self) -> None:
        if self.group is None:
            raise WeightSyncError("gloo weight transfer: the group broke earlier")
        deadline = time.monotonic() + self.client.limits.transfer_s
        try:
            for part in self.source.snapshot.buckets():
                options = BroadcastOptions()
                options.rootRank = 0
                options.timeout = timedelta(seconds=max(0.1, deadline - time.monotonic()))
                self.group.broadcast([part], options).wait()
        except RuntimeError:
            self.shutdown()  # closes the connections: healthy actors then fail at once
            raise

    def shutdown(self) -> None:
        """Leave the group."""
        self.group = None


def _both(control: Callable[[], None], client: FleetClient, collective: Callable[[], None]) -> None:
    """Run the control call beside the collective; its error, which names members, comes first."""
    with ThreadPoolExecutor(1, thread_name_prefix="weights-control") as pool:
        answer = pool.submit(control)
        try:
            collective()
        except RuntimeError as e:
            client.hurry()
            answer.result()
            raise WeightSyncError(f"the collective failed although all answered: {e}") from e
        answer.result()


if "gloo" not in WeightTransferTrainerFactory._registry:
    WeightTransferTrainerFactory.register_engine("gloo", GlooTrainerWeightTransferEngine)
