"""Trainer side of the gloo weight transfer: vLLM's trainer engine interface over a snapshot."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import BroadcastOptions, ProcessGroup
from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.distributed.weight_transfer import (
    ParamMeta,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo

from asyncrl.errors import WeightSyncError
from asyncrl.learner.snapshot import Snapshot
from asyncrl.learner.weight_fleet import FleetClient
from asyncrl.weights import uses_loopback


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
            "timeout_s": init_info.timeout_s,
        }
        if uses_loopback(init_info.master_address):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"

        def open_group() -> None:
            engine.group = stateless_init_torch_distributed_process_group(
                init_info.master_address,
                port,
                0,
                init_info.world_size,
                "gloo",
                listen_socket=listener,
                timeout=timedelta(seconds=init_info.timeout_s),
            )

        _both(lambda: client.init_weight_transfer_engine(worker_info), open_group)
        return engine

    def send_weights(self) -> None:
        """One publication: begin, receive beside the broadcast, commit.

        Raises:
            WeightSyncError: an actor failed or the client's deadline passed; the group is gone.
        """
        client = self.client
        info = self.source.snapshot.plan.to_info()
        info["bucket_bytes"] = self.source.snapshot.bucket_bytes
        info["timeout_s"] = max(0.1, client.deadline - time.monotonic())
        client.start_weight_update()
        _both(lambda: client.update_weights(info), self._broadcast)
        client.finish_weight_update(str(client.version))

    def _broadcast(self) -> None:
        if self.group is None:
            raise WeightSyncError("gloo weight transfer: the group broke earlier")
        try:
            for part in self.source.snapshot.buckets():
                options = BroadcastOptions()
                options.rootRank = 0
                left = self.client.deadline - time.monotonic()
                options.timeout = timedelta(seconds=max(0.1, left))
                self.group.broadcast([part], options).wait()
        except RuntimeError:
            self.shutdown()  # closes the connections: healthy actors then fail at once
            raise

    def shutdown(self) -> None:
        """Leave the group."""
        self.group = None


def _both(control: Any, collective: Any) -> None:
    """Run the control call beside the collective; its error, which names actors, comes first."""
    with ThreadPoolExecutor(1, thread_name_prefix="weights-control") as pool:
        answer = pool.submit(control)
        try:
            collective()
        except RuntimeError as e:
            answer.result()
            raise WeightSyncError(f"broadcast failed although all actors answered: {e}") from e
        answer.result()


if "gloo" not in WeightTransferTrainerFactory._registry:
    WeightTransferTrainerFactory.register_engine("gloo", GlooTrainerWeightTransferEngine)
