"""One learner rank: pull a batch, train it, commit it, publish weights.

    buffer ──part of batch k──► train at V = floor((k - 1) / n) ──► commit
                                   │ every n batches
                                   └──► snapshot = version V + 1 ──► sent beside training

Waits for: its part of batch k (released by the buffer, which names who is missing), the other
ranks (collectives, released by their timeout), the previous publication (only if it has not left
when the next is due). Every rank pulls the same batches: a batch of which one rank has got its
part is served to all.
"""

from __future__ import annotations

import datetime
import logging
import os
import time
from typing import TYPE_CHECKING, Any

import psutil

from asyncrl import wire
from asyncrl.buffer.client import BufferClient
from asyncrl.config.schema import Config
from asyncrl.errors import AsyncRLError
from asyncrl.idlog import IdLog
from asyncrl.metrics import HubClient, IdleMeter, TimeShares
from asyncrl.roles import RoleSettings
from asyncrl.staleness import version_of_batch
from asyncrl.types import BatchPart, Version
from asyncrl.weights import ParamSpec

if TYPE_CHECKING:
    from asyncrl.learner.publish import BroadcastPublisher
    from asyncrl.learner.step import StepResult

log = logging.getLogger(__name__)

PULL_WAIT_S = 5.0
"""How long the buffer may park a pull before it says whom the batch waits for."""
COLLECTIVE_TIMEOUT_S = 1800.0
"""Longest time one rank may be behind another before the collective gives up."""


class LearnerWorker:
    """Owns a rank's model, optimizer, publisher and clients."""

    def __init__(self, config: Config, settings: RoleSettings) -> None:
        self.config = config
        self.settings = settings
        self.shares = TimeShares()
        self.version = Version(0, 0)
        self.step = 0

    def bind_store(self) -> int:
        """Rank 0: open the rendezvous of the ranks; the port it got."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._store = TCPStore(
            self.settings.host, 0, self.settings.world, is_master=True, wait_for_workers=False
        )
        return int(self._store.port)

    def setup(self, store_host: str, store_port: int) -> dict[str, object]:
        """Join the other ranks and load the model; collective."""
        import torch
        import torch.distributed as dist
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from asyncrl.learner.step import Trainer

        s, began = self.settings, time.monotonic()
        if s.device == "cpu":
            torch.set_num_threads(s.threads)
        else:
            torch.cuda.set_device(0)  # Ray shows each rank its own device
        torch.manual_seed(self.config.run.seed)
        if s.rank > 0:
            self._store = TCPStore(
                store_host, store_port, s.world, is_master=False,
                timeout=datetime.timedelta(seconds=120),
            )  # fmt: skip
        dist.init_process_group(
            "nccl" if s.device == "cuda" else "gloo", store=self._store, rank=s.rank,
            world_size=s.world, timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )  # fmt: skip
        self.trainer = Trainer(
            self.config, s.model_path, rank=s.rank, world=s.world,
            device="cuda:0" if s.device == "cuda" else "cpu",
        )  # fmt: skip
        self.client = BufferClient(s.buffer_endpoint, s.run_id, "learner", s.rank)
        self.client.hello()
        self.hub = HubClient(s.hub_endpoint, "learner", s.rank)
        self.ids = IdLog(s.ids_path)
        self._event("learner_ready", seconds=round(time.monotonic() - began, 2))
        return {"pid": os.getpid()}

    def run(self, actors: list[dict[str, Any]]) -> str:
        """Train until `run.steps` batches are done or the buffer says stop; which of the two.

        Args:
            actors: what each ready actor announced (`name`, `endpoint`, `workers`).

        Raises:
            LedgerError: no batch will ever fill; the message says why.
            WeightSyncError: an actor did not take a publication.
        """
        config = self.config
        self._reported = time.monotonic()
        with self.shares.state("sync"):
            self.publisher = self._make_publisher(actors)
        self.idle = IdleMeter(self.shares)
        n = config.learner.batches_per_publication
        ended = "finished"
        for batch in range(1, config.run.steps + 1):
            part = self._pull(batch)
            if part is None:
                ended = "stopped"
                break
            self._train(part)
            if batch % n == 0 or batch == config.run.steps:
                self._publish()
        self._finish(ended)
        return ended

    def _make_publisher(self, actors: list[dict[str, Any]]) -> BroadcastPublisher:
        import torch

        from asyncrl.learner.publish import BroadcastPublisher
        from asyncrl.learner.weight_fleet import Receiver

        s, dtype = self.settings, self.config.engine.dtype
        shapes = self.trainer.policy.parameter_shapes()
        return BroadcastPublisher(
            [Receiver(a["name"], a["endpoint"], a["workers"]) for a in actors],
            rank=s.rank, world=s.world, backend=s.weight_backend, address=s.host,
            source=lambda: self.trainer.full_parameters(getattr(torch, dtype)),
            metadata=[ParamSpec(name, dtype, shape) for name, shape in shapes.items()],
            device=self.trainer.device, timeout_s=self.config.weights.timeout_s,
        )  # fmt: skip

    def _pull(self, batch: int) -> BatchPart | None:
        with self.shares.state("get_wait"):
            while True:
                reply = self.client.pull(batch, wait_s=PULL_WAIT_S)
                if isinstance(reply, BatchPart):
                    return reply
                if isinstance(reply, wire.Stopped):
                    log.info("no batch %d: %s", batch, reply.reason)
                    return None
                log.info("%s waits for %s", self.settings.name, reply.waiting_for)

    def _train(self, part: BatchPart) -> None:
        planned = version_of_batch(part.batch, self.config.learner.batches_per_publication)
        if self.version.version != planned:
            raise AsyncRLError(
                f"{self.settings.name} would train batch {part.batch} at version {self.version}, "
                f"by definition it is trained at version {planned}: publications were miscounted"
            )
        with self.shares.state("train"):
            result = self.trainer.train(part, self.version)
        dropped = set(result.dropped)
        for i in part.mine:
            sample = part.manifest[i].id
            self.ids.add("dropped" if sample in dropped else "trained", sample, part.batch)
        self.ids.flush()
        if self.settings.rank == 0:
            self.client.commit(part.batch, dropped=result.dropped)
        self.step = part.batch
        self._report(result)

    def _publish(self) -> None:
        self.version = Version(self.version.incarnation, self.version.version + 1)
        with self.shares.state("sync"):
            self.publisher.publish(self.version)
        if self.settings.rank == 0:
            self.client.published(self.version)
            self._event("publication", publication=str(self.version))

    def _finish(self, ended: str) -> None:
        with self.shares.state("sync"):
            self.publisher.wait()
        if self.config.learner.save_final and self.step > 0:
            with self.shares.state("checkpoint"):
                self.trainer.save_hf(os.path.join(self.settings.run_dir, "checkpoints", "final"))
        if self.settings.rank == 0:
            self.client.stop(f"{ended} after {self.step} steps", final=self.version)

    def _report(self, result: StepResult) -> None:
        """One record; rates are per second since the last one, waiting included."""
        values = dict(result.metrics) if self.settings.rank == 0 else {}
        values |= self.shares.metrics()
        values["host/rss_bytes"] = psutil.Process().memory_info().rss
        if self.settings.rank == 0:
            now = time.monotonic()
            seconds, self._reported = now - self._reported, now
            values["throughput/train_tok_s"] = result.tokens / seconds
            values["throughput/samples_s"] = result.samples / seconds
            values |= self.publisher.take_timings()
        share = self.idle.read()
        if share is not None:
            values["idle/trainer_frac"] = share
        self.hub.emit(
            values, step=self.step, version=self.version.version,
            incarnation=self.version.incarnation,
            hist=result.hist if self.settings.rank == 0 else {},
        )  # fmt: skip

    def _event(self, what: str, **fields: object) -> None:
        self.hub.emit(
            step=self.step, version=self.version.version, incarnation=self.version.incarnation,
            event={"event": what, **fields},
        )  # fmt: skip

    def close(self) -> None:
        """Leave every group and close every socket; what fails is logged, the rest still closes."""
        import torch.distributed as dist

        parts = [getattr(self, p, None) for p in ("publisher", "ids", "client", "hub")]
        steps = [part.close for part in parts if part is not None]
        if dist.is_initialized():
            steps.append(dist.destroy_process_group)
        for step in steps:
            try:
                step()
            except Exception:
                log.exception("%s: %s failed", self.settings.name, step.__qualname__)
