"""Worker side of the gloo weight transfer; imported by every vLLM worker of asyncrl.

vLLM imports this module in its workers because `WorkerExtension` is their extension class. That
registers the "gloo" engine in time, and ties the engine's processes to the actor's.

    trainer ──broadcast──► staging buffers ──(finish)──► layerwise reload ──► model
                           the model is untouched        all or nothing

A transfer that breaks midway leaves the old weights serving, on every worker of the engine:
the model changes only in `finish_weight_update`, which runs after all workers have staged.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import BroadcastOptions, ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore
from vllm.distributed.utils import create_tcp_store, init_gloo_process_group
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from asyncrl.actors.vllm_setup import HOST_PID_ENV
from asyncrl.roles import end_with
from asyncrl.weights import ARRIVED, GO, TransferPlan, uses_loopback


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

    `checksums` are those of the tensors as they were sent.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    bucket_bytes: int
    timeout_s: float
    checksums: list[int]
    plan: TransferPlan = field(init=False)

    def __post_init__(self) -> None:
        self.plan = TransferPlan.from_info(vars(self))


class GlooWeightTransferEngine(WeightTransferEngine):  # type: ignore[misc]
    """Receives a publication into staging buffers, then loads it in one go."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    supports_draft_weight_update = False
    _staging: dict[str, torch.Tensor] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group: ProcessGroup | None = None
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
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        rank += init_info.rank_offset
        if uses_loopback(init_info.master_address):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        timeout = timedelta(seconds=init_info.timeout_s)
        store = create_tcp_store(
            init_info.master_address, init_info.master_port,
            world_size=init_info.world_size, is_master=False, wait_for_workers=False,
            timeout=timeout,
        )  # fmt: skip
        store.set(ARRIVED.format(rank=rank), "")
        if store.get(GO) != b"yes":
            raise RuntimeError("gloo weight transfer: another member failed to join the group")
        self.group = init_gloo_process_group(
            PrefixStore("gloo", store), rank, init_info.world_size, timeout
        )

    def start_weight_update(self) -> None:
        """Forget what an earlier, abandoned publication staged."""
        self.staged = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Stage one publication (the base class would also synchronise an accelerator)."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receive every bucket of the publication; the model is not touched.

        If a tensor did not arrive as it was sent, nothing is staged, and `damaged` names it.

        Raises:
            RuntimeError: a peer left, or the deadline passed; the group is then of no use.
        """
        if self.group is None:
            raise RuntimeError("gloo weight transfer: not joined, or its group broke earlier")
        plan, deadline = update_info.plan, time.monotonic() + update_info.timeout_s
        flat = self._staging_for(plan)
        try:
            for bucket in plan.buckets(update_info.bucket_bytes):
                options = BroadcastOptions()
                options.rootRank = 0
                options.timeout = timedelta(seconds=max(0.1, deadline - time.monotonic()))
                part = flat[bucket.dtype][bucket.start : bucket.stop]
                self.group.broadcast([part], options).wait()
        except RuntimeError:
            self.shutdown()  # half a bucket may be on the wire
            self._staging = None
            raise
        self.damaged = _damaged(flat, update_info)
        if self.damaged:
            return
        self.staged = [
            (slot.spec.name, flat[slot.spec.dtype][slot.start : slot.stop].view(slot.spec.shape))
            for slot in plan.slots
        ]

    def _staging_for(self, plan: TransferPlan) -> dict[str, torch.Tensor]:
        """The buffers of the last publication, which is loaded and gone: to touch new memory would
        cost as much as to receive into it.
        """
        flat = self._staging
        if flat is None or {d: t.numel() for d, t in flat.items()} != plan.sizes:
            flat = {d: torch.empty(n, dtype=getattr(torch, d)) for d, n in plan.sizes.items()}
        self._staging = flat
        return flat

    def drop_staged(self) -> None:
        """Make the next `finish_weight_update` keep the old weights."""
        self.staged = []

    @torch.no_grad()
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
            reload_model(self.model, self.model_config, staged)

    def shutdown(self) -> None:
        """Leave the group; the engine goes on serving."""
        self.group = None
        self.staged = None


def _damaged(flat: dict[str, torch.Tensor], sent: GlooUpdateInfo) -> list[str]:
    raw = {d: t.view(torch.uint8).numpy().data for d, t in flat.items()}
    got = sent.plan.checksums(raw)
    names = (spec.name for spec in sent.plan.params)
    return [n for n, a, b in zip(names, got, sent.checksums, strict=True) if a != b]


def reload_model(
    model: torch.nn.Module, model_config: Any, weights: list[tuple[str, torch.Tensor]]
) -> None:
    """Load checkpoint-format weights into a serving model.

    vLLM's CPU linear layers keep only a repacked copy of their weight, so a plain
    `load_weights` would fail half-way: the layerwise reload rebuilds each layer and copies
    the result over. A head tied to the embedding has a packed copy of its own, which that
    reload does not know of.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    heads = {n: m for n, m in model.named_modules() if isinstance(m, ParallelLMHead)}
    tied = getattr(model_config.hf_config, "tie_word_embeddings", False)
    initialize_layerwise_reload(model)
    expected = {name for name, _ in model.named_parameters()}
    loaded = model.load_weights(weights)  # type: ignore[operator]
    finalize_layerwise_reload(model, model_config)
    stale_heads = {n: m for n, m in heads.items() if tied and f"{n}.weight" not in (loaded or ())}
    if loaded is not None:
        missing = expected - loaded - {f"{n}.weight" for n in stale_heads}
        if missing:
            raise RuntimeError(
                f"publication lacks {len(missing)} parameters of the engine's model, "
                f"e.g. {min(missing)}"
            )
    for head in stale_heads.values():
        head.quant_method.process_weights_after_loading(head)


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
