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
import socket
import time
from typing import TYPE_CHECKING

from asyncrl import wire
from asyncrl.buffer.client import BufferClient, patience_s
from asyncrl.config.schema import Config
from asyncrl.errors import AsyncRLError
from asyncrl.hub import HubClient
from asyncrl.idlog import IdLog
from asyncrl.learner.publication.members import Members
from asyncrl.learner.stopping import StopRules
from asyncrl.metrics import IdleMeter, TimeShares
from asyncrl.pulse import Pulse
from asyncrl.roles import RoleSettings
from asyncrl.staleness import version_of_batch
from asyncrl.types import BatchPart, Version
from asyncrl.waits import Waits

if TYPE_CHECKING:
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
        self.waits = Waits(settings.name, warn_s=config.log.wait_warn_s)
        self.version = Version(0, 0)
        self.step = 0
        self._advised: set[str] = set()
        """What the last batch was told about."""

    def bind(self) -> tuple[int, str]:
        """Rank 0: the port of the ranks' rendezvous, the endpoint for actors' announcements."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        s = self.settings
        self.members = Members(host=s.host, keys=s.keys)
        # Left to itself the store would listen on every address of the machine.
        listener = socket.create_server((s.host, 0))
        self._store = TCPStore(
            s.host, listener.getsockname()[1], s.world, is_master=True, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )  # fmt: skip
        return int(self._store.port), self.members.endpoint

    def setup(self, store_host: str, store_port: int) -> None:
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
                timeout=datetime.timedelta(seconds=self.config.cluster.ready_timeout_s),
            )  # fmt: skip
        with self.waits.on("the other ranks to join", "learner-*", COLLECTIVE_TIMEOUT_S):
            dist.init_process_group(
                "nccl" if s.device == "cuda" else "gloo", store=self._store, rank=s.rank,
                world_size=s.world, timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            )  # fmt: skip
        self.trainer = Trainer(
            self.config, s.model_path, rank=s.rank, world=s.world,
            device="cuda:0" if s.device == "cuda" else "cpu",
        )  # fmt: skip
        self.hub = HubClient(s.hub_endpoint, "learner", s.rank, keys=s.keys)
        self.pulse = Pulse(
            self.hub, waits=self.waits,
            metrics=[self.shares.metrics, *([self.members.gate.metrics] if s.rank == 0 else [])],
            position=lambda: (self.step, self.version), children=False,
        )  # fmt: skip
        self.ids = IdLog(s.ids_path)
        self._event("startup", phase="learner", seconds=round(time.monotonic() - began, 2))

    def run(self, buffer: str) -> str:
        """Train until `run.steps` batches are done or the run is stopped.

        Args:
            buffer: the buffer's endpoint.

        Returns:
            Why it ended before `run.steps`; "" when it did not.

        Raises:
            LedgerError: no batch will ever fill; the message says why.
            WeightSyncError: the sending thread is stuck.
        """
        from asyncrl.learner.publication.make import make_publisher

        config, s = self.config, self.settings
        self.client = BufferClient(
            buffer, s.run_id, "learner", s.rank, timeout_s=patience_s(config), keys=s.keys
        )
        self.client.hello()
        self._reported = time.monotonic()
        self._pulled_s = 0.0
        self.stop_rules = StopRules(config)
        with self.shares.state("sync"):
            policy = self.trainer.policy
            self.publisher = make_publisher(
                policy.layout(config.engine.dtype), policy.shards, self.trainer.device, config, s,
                self.members if s.rank == 0 else None,
            )  # fmt: skip
        self.idle = IdleMeter(self.shares)
        n = config.learner.batches_per_publication
        ended = ""
        for batch in range(1, config.run.steps + 1):
            part = self._pull(batch)
            if isinstance(part, str):
                ended = part
                break
            metrics = self._train(part)
            if batch % n == 0 or batch == config.run.steps:
                self._publish()
            reason = self.stop_rules.after_batch(batch, metrics) if s.rank == 0 else None
            if reason is not None and batch < config.run.steps:
                # With which the next pull of every rank is answered.
                self.client.stop(reason, evaluate=True)
        self._finish(ended)
        return ended

    def _pull(self, batch: int) -> BatchPart | str:
        """This rank's part of a batch, or why there is none."""
        began = time.monotonic()
        with self.shares.state("get_wait"), self.waits.on(f"batch {batch}", "buffer-0") as wait:
            while True:
                reply = self.client.pull(batch, wait_s=PULL_WAIT_S)
                if isinstance(reply, BatchPart):
                    self._pulled_s = time.monotonic() - began
                    return reply
                if isinstance(reply, wire.Stopped):
                    log.info("no batch %d: %s", batch, reply.reason)
                    return reply.reason
                wait.owner = f"buffer-0: {reply.waiting_for}"

    def _train(self, part: BatchPart) -> dict[str, float]:
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
            kind = "" if i < part.fresh else "replay-"
            self.ids.add(kind + ("dropped" if sample in dropped else "trained"), sample, part.batch)
        self.ids.flush()
        if self.settings.rank == 0:
            self.client.commit(part.batch, dropped=result.dropped)
        self.step = part.batch
        self._report(result)
        self._advise(result)
        return result.metrics

    def _advise(self, result: StepResult) -> None:
        """Say what is wrong with the data when it begins, not at every batch."""
        for kind, text in result.advice.items():
            if kind not in self._advised and self.settings.rank == 0:
                log.warning("batch %d: %s", self.step, text)
                self._event("advice", text=text)
        self._advised = set(result.advice)

    def _publish(self) -> None:
        self.version = Version(self.version.incarnation, self.version.version + 1)
        with (
            self.shares.state("sync"),
            self.waits.on("the last publication to leave", self.publisher.waiting_for),
        ):
            self.publisher.publish(self.version)
        if self.settings.rank == 0:
            self.client.published(self.version)
            self._event("publication", publication=str(self.version))

    def _finish(self, ended: str) -> None:
        config = self.config
        timeout = config.weights.timeout_s + config.weights.drain_s
        self._behind_last()
        with (
            self.shares.state("sync"),
            self.waits.on("actors to take the last version", self.publisher.waiting_for, timeout),
        ):
            for name in self.publisher.finish(timeout):
                log.warning("%s has not taken the last version %s", name, self.version)
        self._tell_publisher()
        if self.settings.rank == 0:  # before the model is saved: actors evaluate meanwhile
            why = ended or f"finished after {self.step} steps"
            # A stop that somebody else asked for without an evaluation wins over this.
            self.client.stop(why, final=self.version, evaluate=True)
        if config.learner.save_final and self.step > 0:
            with self.shares.state("checkpoint"):
                self.trainer.save_hf(os.path.join(self.settings.run_dir, "checkpoints", "final"))

    def _behind_last(self) -> None:
        """Publish what was trained since the last publication, when the run was stopped."""
        if self.step % self.config.learner.batches_per_publication and (
            self.step < self.config.run.steps
        ):
            self._publish()

    def _tell_publisher(self) -> None:
        """Write what happened to members of the weights plane."""
        if self.settings.rank == 0:
            for event in self.publisher.take_events():
                self._event(publication=event.pop("version"), **event)

    def _report(self, result: StepResult) -> None:
        """One record; rates are per second since the last one, waiting included."""
        values = dict(result.metrics) if self.settings.rank == 0 else {}
        values |= self.shares.metrics()
        values["queue/get_wait_s"] = self._pulled_s
        if self.settings.rank == 0:
            now = time.monotonic()
            seconds, self._reported = now - self._reported, now
            values["throughput/train_tok_s"] = result.tokens / seconds
            values["throughput/samples_s"] = result.samples / seconds
            values |= self.publisher.take_timings()
            self._tell_publisher()
        share = self.idle.read()
        if share is not None:
            values["idle/trainer_frac"] = share
        self.hub.emit(
            values, step=self.step, version=self.version.version,
            incarnation=self.version.incarnation,
            hist=result.hist if self.settings.rank == 0 else {},
        )  # fmt: skip

    def _event(self, event: str, **fields: object) -> None:
        self.hub.emit(
            step=self.step, version=self.version.version, incarnation=self.version.incarnation,
            event={"event": event, **fields},
        )  # fmt: skip

    def close(self) -> None:
        """Leave every group and close every socket; what fails is logged, the rest still closes."""
        import torch.distributed as dist

        names = ("pulse", "publisher", "members", "ids", "client", "hub")
        parts = [getattr(self, name, None) for name in names]
        steps = [part.close for part in parts if part is not None]
        if dist.is_initialized():
            steps.append(dist.destroy_process_group)
        for step in steps:
            try:
                step()
            except Exception:
                log.exception("%s: %s failed", self.settings.name, step.__qualname__)
