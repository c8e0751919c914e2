"""Publication of weights by a collective: snapshot in step, send beside training.

    train ──► publish(v): wait for v-1 to leave ──► source() into the snapshot ──► train
                                                              │ (rank 0, a thread)
                                   begin ─ broadcast ─ commit ▼
                                           every actor's engine

All ranks call `publish`, since the source gathers; only rank 0 keeps the copy and speaks.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch

from asyncrl.errors import WeightSyncError
from asyncrl.learner.snapshot import Snapshot
from asyncrl.learner.weight_fleet import FleetClient
from asyncrl.types import Version
from asyncrl.weights import BUCKET_BYTES, ParamSpec, TransferPlan, publication_deadline_s

Source = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class BroadcastPublisher:
    """`WeightPublisher` that sends to all actors at once, through vLLM's weight-transfer API.

    `source` yields (name, full tensor) in the order of `metadata` and may be a collective of
    all ranks. Constructing it on rank 0 joins the transfer group, so the actors must be up;
    they hold the initial model already, which is version 0 and is not sent.

    Raises:
        WeightSyncError: an actor did not join by the deadline.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        rank: int,
        world: int,
        source: Source,
        metadata: Sequence[ParamSpec],
        backend: Literal["gloo", "nccl"],
        device: torch.device,
        timeout_s: float,
        workers_per_actor: Sequence[int],
        address: str = "127.0.0.1",
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._rank, self._world = rank, world
        self._source = source
        self._device = device
        self._timeout_s = timeout_s
        self._plan = TransferPlan(tuple(metadata))
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.last_timings: dict[str, float] = {}
        """Of the last publication that left: `sync/total_s` (snapshot cut to committed),
        `sync/pause_s` (the slowest actor's, from all engines at a token boundary on),
        `sync/transfer_s`, `sync/bytes`; and `sync/blocked_s` of the last `publish` call."""
        if rank == 0:
            self._fleet = FleetClient(endpoints, workers_per_actor)
            self._snapshot = Snapshot(
                self._plan, pinned=device.type == "cuda", bucket_bytes=bucket_bytes
            )
            world_size = 1 + sum(workers_per_actor)
            self._sender = self._join(backend, address, world_size)

    def publish(self, version: Version) -> None:
        """Cut a snapshot as `version` and send it beside training; see `WeightPublisher`.

        Raises:
            WeightSyncError: this or the previous publication failed, naming the actor.
        """
        started = time.monotonic()
        self.wait()
        if self._rank != 0:
            for _ in self._source():
                pass
            return
        self._snapshot.fill(self._source())
        self._thread = threading.Thread(
            target=self._send, args=(version, time.monotonic()), name="weights-send", daemon=True
        )
        self._thread.start()
        self.last_timings["sync/blocked_s"] = time.monotonic() - started

    def wait(self) -> None:
        """Wait until the last publication has been applied by all actors.

        Raises:
            WeightSyncError: it failed, now or before; the publisher is of no use afterwards.
        """
        if self._thread is not None:
            self._thread.join()  # ends by the publication's deadline
            self._thread = None
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Wait for the last publication and leave the group."""
        try:
            self.wait()
        finally:
            if self._rank == 0:
                self._sender.shutdown()
                self._fleet.close()

    def _join(self, backend: str, address: str, world_size: int) -> Any:
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        from asyncrl.learner.gloo_sender import GlooTrainerInitInfo, SnapshotSource

        init: Any
        if backend == "gloo":
            init = GlooTrainerInitInfo(address, world_size, self._timeout_s, rank=0)
        else:
            init = _nccl_init_info(address, world_size)
        self._fleet.deadline = time.monotonic() + self._timeout_s
        return WeightTransferTrainerFactory.trainer_init(
            init, client=self._fleet, source=SnapshotSource(self._snapshot, self._device)
        )

    def _send(self, version: Version, cut: float) -> None:
        """Body of the sending thread: one publication by its deadline."""
        fleet = self._fleet
        fleet.version = version
        fleet.deadline = cut + publication_deadline_s(self._timeout_s, self._plan.nbytes)
        fleet.timings.clear()
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
                with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                    self._sender.send_weights()
            else:
                self._sender.send_weights()
        except Exception as e:
            self._sender.shutdown()
            if not isinstance(e, WeightSyncError):
                e = WeightSyncError(f"weights {version}: {type(e).__name__}: {e}")
            self._error = e
            return
        self.last_timings |= {
            "sync/total_s": time.monotonic() - cut,
            "sync/pause_s": fleet.timings["receive"] + fleet.timings["commit"],
            "sync/transfer_s": fleet.timings["receive"],
            "sync/bytes": float(self._plan.nbytes),
        }


def _nccl_init_info(address: str, world_size: int) -> Any:
    """vLLM's own NCCL engine; its rendezvous wants a port number, so a free one is looked up."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    with socket.create_server((address, 0)) as probe:
        port = probe.getsockname()[1]
    return NCCLTrainerInitInfo(
        master_address=address, master_port=port, world_size=world_size, rank=0
    )
