"""Worker side of the weight transfer; imported by every vLLM worker of asyncrl.

vLLM imports this module in its workers because `WorkerExtension` is their extension class. That
registers the "gloo" engine in time, and ties the engine's processes to the actor's.

    trainer ──broadcast──► staging buffers ──────┐
    the machine's relay ──► its memory, mapped ──┴─(finish)──► loading.Loader ──► model
                            the model is untouched             all or nothing

A transfer that breaks midway leaves the old weights serving, on every worker of the engine:
the model changes only in `finish_weight_update`, which runs after all workers have staged.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from asyncrl.actors.gloo_receiver import GlooReceiver, damaged
from asyncrl.actors.loading import Loader
from asyncrl.actors.relay.memory import mapped
from asyncrl.actors.vllm_setup import HOST_PID_ENV
from asyncrl.adapters import Adapters
from asyncrl.roles import end_with
from asyncrl.weights import Bucket, TransferPlan


@dataclass
class GlooInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Where the group meets and which rank this engine's first worker has in it."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """What one publication brings (see `TransferPlan`), in which buckets, by when (seconds).

    `checksums` are those of the tensors as they were sent; `adapters` says what to do with those
    that travel without their base (`Adapters.to_info`). `path` is where the actor holds open what
    its machine's relay has received: there is nothing to receive then.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    bucket_bytes: int
    timeout_s: float
    checksums: list[int]
    adapters: dict[str, Any] | None = None
    path: str | None = None
    plan: TransferPlan = field(init=False)
    merging: Adapters | None = field(init=False)

    def __post_init__(self) -> None:
        self.plan = TransferPlan.from_info(vars(self))
        self.merging = Adapters.from_info(self.adapters) if self.adapters is not None else None


class GlooWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Stages a publication, received or mapped, then loads it in one go."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    supports_draft_weight_update = False
    _merging: Adapters | None = None
    """Of what is staged."""
    _made: Loader | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.receiver, self.buffers = GlooReceiver(), Buffers()
        self.staged: list[tuple[str, torch.Tensor]] | None = None
        self.damaged: list[str] = []
        """Tensors of the last publication that did not arrive as they were sent."""

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the group; a group joined before is left.

        Raises:
            RuntimeError: the sender called it off, since another member failed, or is gone.
        """
        self.shutdown()
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.receiver.join(asdict(init_info), worker)

    def start_weight_update(self) -> None:
        """Forget what an earlier, abandoned publication staged."""
        self.staged = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage one publication (the base class would also synchronise an accelerator)."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive every bucket of the publication, or map it; the model is not touched.

        If a tensor did not arrive as it was sent, nothing is staged, and `damaged` names it. What a
        relay has sealed is as it was sent.

        Raises:
            RuntimeError: a peer left, or the deadline passed; the group is then of no use.
            WeightSyncError: adapters came, and their base is not here; all others got them.
        """
        plan = update_info.plan
        if update_info.path is not None:
            self.damaged = []
            self._stage(update_info, mapped(update_info.path, plan))
            return
        self.buffers.fit(plan)
        try:
            self.receiver.receive(
                plan, self.buffers, bucket_bytes=update_info.bucket_bytes,
                timeout_s=update_info.timeout_s,
            )  # fmt: skip
        except RuntimeError:
            self.buffers = Buffers()  # somebody may still write to these
            raise
        self.damaged = damaged(plan, self.buffers.raw(), update_info.checksums)
        if not self.damaged:
            self._stage(update_info, self.buffers.flat)

    def _stage(self, sent: GlooUpdateInfo, flat: Mapping[str, torch.Tensor]) -> None:
        staged = [
            (slot.spec.name, flat[slot.spec.dtype][slot.start : slot.stop].view(slot.spec.shape))
            for slot in sent.plan.slots
        ]
        if sent.merging is not None:
            self._loader().prepare(sent.merging)
        self.staged, self._merging = staged, sent.merging

    def _loader(self) -> Loader:
        self._made = self._made or Loader(self.model, self.model_config)
        return self._made

    def drop_staged(self) -> None:
        """Make the next `finish_weight_update` keep the old weights."""
        self.staged = []

    def finish_weight_update(self) -> None:
        """Load what was staged; the engine must be paused.

        Raises:
            RuntimeError: nothing was staged, or a parameter of the model did not come; after
                the latter the model is incomplete and the engine must not serve.
        """
        staged, self.staged = self.staged, None
        if staged is None:
            raise RuntimeError("gloo weight transfer: finish without a received publication")
        if staged:
            self._loader().load(staged, self._merging)

    def shutdown(self) -> None:
        """Leave the group; the engine goes on serving."""
        self.receiver.leave()
        self.staged = None


class Buffers:
    """One flat buffer for each type. They are kept: what the last publication left there is loaded
    and gone, and to touch new memory would cost as much as to receive into it."""

    def __init__(self) -> None:
        self.flat: dict[str, torch.Tensor] = {}

    def fit(self, plan: TransferPlan) -> None:
        """Have room for a publication."""
        if {d: t.numel() for d, t in self.flat.items()} != plan.sizes:
            self.flat = {d: torch.empty(n, dtype=getattr(torch, d)) for d, n in plan.sizes.items()}

    def room(self, bucket: Bucket) -> torch.Tensor:
        """The place of a bucket."""
        return self.flat[bucket.dtype][bucket.start : bucket.stop]

    def filled(self, bucket: Bucket, part: torch.Tensor) -> None:
        """It is in its place."""

    def raw(self) -> dict[str, memoryview]:
        """The bytes of each buffer."""
        return {d: t.view(torch.uint8).numpy().data for d, t in self.flat.items()}


class WorkerExtension:
    """Mixed into vLLM's worker: what asyncrl asks of a worker beyond vLLM's own calls."""

    weight_transfer_engine: Any
    finish_weight_update: Any

    def asyncrl_pids(self) -> list[int]:
        """This worker, and the engine core where that is a process of its own."""
        return sorted({os.getpid(), *_engine_core_pid()})

    def asyncrl_damaged(self) -> list[str]:
        """Tensors that did not arrive as they were sent. NCCL's engine does not look."""
        return getattr(self.weight_transfer_engine, "damaged", [])

    def asyncrl_abandon_update(self) -> None:
        """Keep the old weights, whether or not this worker has received the new ones."""
        self.weight_transfer_engine.drop_staged()
        with contextlib.suppress(RuntimeError):  # no update is active after a failed receive
            self.finish_weight_update()


def _engine_core_pid() -> list[int]:
    """The process that spawned this worker, unless that is the actor itself."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or parent.pid == _host_pid():
        return []
    return [parent.pid]


def _host_pid() -> int:
    return int(os.environ.get(HOST_PID_ENV, "0"))


def end_with_host() -> None:
    """End this worker and its engine core when the process that started the engine ends.

    vLLM's engine core does not notice that its client was killed, and would stay with all its
    memory.
    """
    host, core = _host_pid(), _engine_core_pid()
    if host in (0, os.getpid()):
        return

    def end_core() -> None:
        # The parent is still our parent only while it lives: never kill a reused pid.
        if core and os.getppid() == core[0]:
            os.kill(core[0], signal.SIGKILL)

    end_with(host, *core, first=end_core)


if "gloo" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("gloo", GlooWeightTransferEngine)
end_with_host()
