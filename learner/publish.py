"""Publication of weights by a collective: snapshot in step, send beside training.

    train ──► publish(v): wait for v-1 to leave ──► source() into the snapshot ──► train
                                                              │ (rank 0, a thread)
                                   begin ─ broadcast ─ commit ▼
                                           every actor's engine

All ranks call `publish`, since the source gathers; only rank 0 keeps the copy and speaks. Waits for
the sending thread (released by the publication's deadline, and given up STUCK_MARGIN_S later).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch

from asyncrl.errors import WeightSyncError
from asyncrl.learner.snapshot import Snapshot
from asyncrl.learner.weight_fleet import FleetClient, Receiver
from asyncrl.types import Version
from asyncrl.weights import BUCKET_BYTES, ParamSpec, TransferPlan, publication_deadline_s

STUCK_MARGIN_S = 10.0
"""Seconds beyond its deadline after which a publication's thread counts as stuck: NCCL's
collectives have no deadline of their own."""

Source = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class BroadcastPublisher:
    """`WeightPublisher` that sends to all actors at once, through vLLM's weight-transfer API.

    `source` yields (name, full tensor) in the order of `metadata` and may be a collective of
    all ranks. Constructing it on rank 0 joins the transfer group, so the `receivers` must be up;
    they hold the initial model already, which is version 0 and is not sent.

    Raises:
        WeightSyncError: an actor did not join by the deadline.
    """

    def __init__(
        self,
        receivers: Sequence[Receiver],
        *,
        rank: int,
        world: int,
        source: Source,
        metadata: Sequence[ParamSpec],
        backend: Literal["gloo", "nccl"],
        device: torch.device,
        timeout_s: float,
        address: str = "127.0.0.1",
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._rank, self._world = rank, world
        self._source = source
        self._device = device
        self._timeout_s = timeout_s
        self._plan = TransferPlan(tuple(metadata))
        self._thread: threading.Thread | None = None
        self._error: WeightSyncError | None = None
        self._stuck = False
        self._timings: deque[dict[str, float]] = deque()  # filled by the sending thread
        if rank == 0:
            self._fleet = FleetClient(receivers)
            self._snapshot = Snapshot(
                self._plan, pinned=device.type == "cuda", bucket_bytes=bucket_bytes
            )
            world_size = 1 + sum(r.workers for r in receivers)
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
        cut = time.monotonic()
        fleet = self._fleet
        fleet.version = version
        fleet.deadline = cut + publication_deadline_s(self._timeout_s, self._plan.nbytes)
        self._thread = threading.Thread(
            target=self._send, args=(cut, cut - started), name="weights-send", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last publication has been applied by all actors.

        Raises:
            WeightSyncError: it failed or is stuck, now or before; the publisher is of no use
                afterwards.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            give_up = self._fleet.deadline + STUCK_MARGIN_S
            thread.join(max(0.0, give_up - time.monotonic()))
            if thread.is_alive():
                self._stuck = True
                self._error = WeightSyncError(
                    f"weights {self._fleet.version}: the sending thread is stuck, "
                    f"{STUCK_MARGIN_S:.0f} s past its deadline: an engine or the link to it is "
                    "gone in the middle of the collective; see the actors' logs"
                )
        if self._error is not None:
            raise self._error

    def take_timings(self) -> dict[str, float]:
        """What the publication that left since the last call took; each is handed out once.

        sync/blocked_s: the `publish` call (training stood still). sync/total_s: snapshot cut to
        committed by all. sync/pause_s: first request to pause to last commit, as seen from here;
        each engine's own pause lies within. sync/transfer_s: the receive phase. sync/bytes.
        """
        timings: dict[str, float] = {}
        while self._timings:
            timings |= self._timings.popleft()
        return timings

    def close(self) -> None:
        """Wait for the last publication and leave the group; at once if `wait` has failed.

        Raises:
            WeightSyncError: the last publication failed and no `wait` has said so.
        """
        try:
            if self._thread is not None:
                self.wait()
        finally:
            if self._rank == 0:
                if not self._stuck:  # to shut the group down would wait for its collective
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

    def _send(self, cut: float, blocked_s: float) -> None:
        """Body of the sending thread: one publication by its deadline."""
        fleet = self._fleet
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
                with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
                    self._sender.send_weights()
            else:
                self._sender.send_weights()
        except Exception as e:
            if not isinstance(e, WeightSyncError):
                e = WeightSyncError(f"weights {fleet.version}: {type(e).__name__}: {e}")
            self._error = e
            with contextlib.suppress(Exception):  # the group is broken already
                self._sender.shutdown()
            return
        begin, receive, commit = (fleet.timings[p] for p in ("begin", "receive", "commit"))
        self._timings.append(
            {
                "sync/blocked_s": blocked_s,
                "sync/total_s": time.monotonic() - cut,
                "sync/pause_s": commit[1] - begin[0],
                "sync/transfer_s": receive[1] - receive[0],
                "sync/bytes": float(self._plan.nbytes),
            }
        )


def _nccl_init_info(address: str, world_size: int) -> Any:
    """vLLM's own NCCL engine; its rendezvous wants a port number, so a free one is looked up.

    Between the probe and vLLM's bind another process could take the port (a small race, since
    vLLM takes no bound socket); its bind then fails, and with it the run.
    """
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    with socket.create_server((address, 0)) as probe:
        port = probe.getsockname()[1]
    return NCCLTrainerInitInfo(
        master_address=address, master_port=port, world_size=world_size, rank=0
    )
