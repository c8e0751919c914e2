"""One learner rank: pull a batch, train it, commit it, publish weights.

    buffer ──part of batch k──► train at V = floor((k - 1) / n) ──► commit
                                   │ every n batches
                                   ├──► snapshot = version V + 1 ──► sent beside training
                                   └──► checkpoint, now and then ──► written beside training

Waits for: its part of batch k (released by the buffer, which names who is missing), the other
ranks (collectives, released by their timeout), the previous publication and the previous
checkpoint (only if it has not left, or is not written, when the next is due). Every rank pulls the
same batches: a batch of which one rank has got its part is served to all.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from asyncrl import wire
from asyncrl.buffer.client import BufferClient, patience_s
from asyncrl.config.schema import Config
from asyncrl.errors import AsyncRLError
from asyncrl.gpu import gpu_meter
from asyncrl.hub import HubClient
from asyncrl.idlog import IdLog
from asyncrl.learner import ranks
from asyncrl.learner.publication.members import Members
from asyncrl.learner.records import Records
from asyncrl.learner.stopping import StopRules
from asyncrl.learner.undisturbed import train_undisturbed
from asyncrl.metrics import TimeShares, process_began
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


class LearnerWorker:
    """Owns a rank's model, optimizer, publisher and clients."""

    def __init__(self, config: Config, settings: RoleSettings) -> None:
        self.config = config
        self.settings = settings
        spans = settings.span_log(config.trace.kept_mib)
        self.shares = TimeShares(since=process_began(), spans=spans)
        self.waits = Waits(settings.name, warn_s=config.log.wait_warn_s)
        resume = settings.resume
        self.version = Version(0, 0) if resume is None else resume.applied
        self.step = 0 if resume is None else resume.step
        self.stop_rules = StopRules(config)
        self._advised: set[str] = set()
        """What the last batch was told about."""

    def bind(self, port: int = 0) -> tuple[int, str]:
        """Rank 0: the port of the ranks' rendezvous, the endpoint for actors' announcements.

        `port`: of that endpoint, where actors know a learner that is restarted; 0 is any.
        """
        s = self.settings
        self.members = Members(host=s.host, port=port, keys=s.keys)
        self._store = ranks.open_store(s)
        return int(self._store.port), self.members.endpoint

    def setup(self, store_host: str, store_port: int) -> None:
        """Join the other ranks and load the model; collective."""
        import torch

        from asyncrl.learner.checkpointing.keeper import Keeper
        from asyncrl.learner.step import Trainer

        s, began = self.settings, time.monotonic()
        if s.device == "cpu":
            torch.set_num_threads(s.threads)
        else:
            torch.cuda.set_device(0)  # Ray shows each rank its own device
        torch.manual_seed(self.config.run.seed)
        if s.rank > 0:
            limit = self.config.cluster.ready_timeout_s
            self._store = ranks.find_store(s, store_host, store_port, limit)
        ranks.join(s, self._store, self.waits)
        self.trainer = Trainer(
            self.config, s.model_path, rank=s.rank, world=s.world,
            device="cuda:0" if s.device == "cuda" else "cpu",
        )  # fmt: skip
        self.trainer.spans = self.shares.spans
        self.hub = HubClient(s.hub_endpoint, "learner", s.rank, keys=s.keys)
        self.records = Records(self.hub, s.rank, self.shares, lambda: (self.step, self.version))
        self.pulse = Pulse(
            self.hub, waits=self.waits,
            metrics=[
                self.shares.metrics, self.shares.spans.flush,
                *([self.members.gate.metrics] if s.rank == 0 else []),
                *([gpu_meter()] if s.device == "cuda" else []),
            ],
            position=lambda: (self.step, self.version), children=False,
        )  # fmt: skip
        self.ids = IdLog(s.ids_path)
        self.keeper = Keeper(
            self.trainer, self.config, s, waits=self.waits, shares=self.shares,
            tell=self.records.event, rest=self._rest,
        )  # fmt: skip
        if rest := self.keeper.remembered:
            self.stop_rules.restore(rest["stop_rules"])
            self._advised = set(rest["advised"])
        train_undisturbed()
        self.records.event("startup", phase="learner", seconds=round(time.monotonic() - began, 2))

    def run(self, buffer: str) -> str:
        """Train until `run.steps` batches are done or the run is stopped.

        Args:
            buffer: the buffer's endpoint.

        Returns:
            Why it ended before `run.steps`; "" when it did not.

        Raises:
            LedgerError: no batch will ever fill; the message says why.
            WeightSyncError: the sending thread is stuck.
            CheckpointError: the last checkpoint could not be written, or one without which the
                buffer has no room.
        """
        from asyncrl.learner.publication.make import make_publisher

        config, s = self.config, self.settings
        self.client = self._connect(buffer)
        if s.rank == 0:
            if s.resume is not None:  # no rank pulls before: the publisher is made by all together
                self.client.rewind(s.resume.step, s.resume.incarnation)
            self.keeper.connect(lambda: self._connect(buffer))
        self.records.training()
        self._pulled_s = 0.0
        with self.shares.state("sync"):
            policy = self.trainer.policy
            # vLLM's NCCL engine loads what it receives, and could not merge it with anything.
            alone = s.weight_backend != "nccl" and policy.base_is_elsewhere()
            self.publisher = make_publisher(
                policy.layout(config.engine.dtype, adapters=alone),
                lambda: policy.shards(adapters=alone), self.trainer.device, config, s,
                self.members if s.rank == 0 else None,
            )  # fmt: skip
        self.publisher.spans = self.shares.spans
        n = config.learner.batches_per_publication
        if s.resume is not None:  # actors get no lease before they run it
            self._publish(self.version)
        ended = ""
        first = self.step + 1
        for batch in range(first, config.run.steps + 1):
            part = self._pull(batch)
            if isinstance(part, str):
                ended = part
                break
            if batch == first:
                self.records.event("startup", phase="first_batch", seconds=round(self._pulled_s, 2))
            metrics = self._train(part)
            if batch % n == 0 or batch == config.run.steps:
                self._publish()
            reason = self.stop_rules.after_batch(batch, metrics) if s.rank == 0 else None
            self.keeper.after_batch(batch)
            if reason is not None and batch < config.run.steps:
                # With which the next pull of every rank is answered.
                self.client.stop(reason, evaluate=True)
        self._finish(ended)
        return ended

    def _connect(self, buffer: str) -> BufferClient:
        s = self.settings
        client = BufferClient(
            buffer, s.run_id, "learner", s.rank, timeout_s=patience_s(self.config), keys=s.keys
        )
        client.hello()
        return client

    def _rest(self) -> dict[str, object]:
        """What a checkpoint needs beside the trainer's state."""
        return {"stop_rules": self.stop_rules.state(), "advised": sorted(self._advised)}

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
                self.keeper.check()
                wait.owner = f"buffer-0: {reply.waiting_for}"

    def _train(self, part: BatchPart) -> dict[str, float]:
        planned = version_of_batch(part.batch, self.config.learner.batches_per_publication)
        if self.version.version != planned:
            raise AsyncRLError(
                f"{self.settings.name} would train batch {part.batch} at version {self.version}, "
                f"by definition it is trained at version {planned}: publications were miscounted"
            )
        got = time.monotonic()
        with self.shares.state("train"):
            result = self.trainer.train(part, self.version)
        trained = time.monotonic()
        dropped = set(result.dropped)
        for i in part.mine:
            sample = part.manifest[i].id
            kind = "" if i < part.fresh else "replay-"
            self.ids.add(kind + ("dropped" if sample in dropped else "trained"), sample, part.batch)
        self.ids.flush()
        asked = False
        if self.settings.rank == 0:
            asked = self.client.commit(part.batch, result.dropped, self.version.incarnation)
        self.shares.spans.add(
            "batch", f"batch {part.batch}", got - self._pulled_s, time.monotonic(),
            batch=part.batch, version=str(self.version), ends=[got, trained],
            ids=[part.manifest[i].id for i in part.mine if i < part.fresh],
        )  # fmt: skip
        self.step = part.batch
        self.keeper.trained(result, asked=asked)
        self._report(result)
        self._advise(result)
        return result.metrics

    def _advise(self, result: StepResult) -> None:
        """Say what is wrong with the data when it begins, not at every batch."""
        for kind, text in result.advice.items():
            if kind not in self._advised and self.settings.rank == 0:
                log.warning("batch %d: %s", self.step, text)
                self.records.event("advice", text=text)
        self._advised = set(result.advice)

    def _publish(self, version: Version | None = None) -> None:
        """As the next version, or as the one that the learner goes on with."""
        self.version = version or Version(self.version.incarnation, self.version.version + 1)
        with (
            self.shares.state("sync"),
            self.waits.on("the last publication to leave", self.publisher.waiting_for),
        ):
            self.publisher.publish(self.version)
        if self.settings.rank == 0:
            self.client.published(self.version)
            self.records.event("publication", publication=str(self.version))

    def _finish(self, ended: str) -> None:
        config = self.config
        timeout = config.weights.timeout_s + config.weights.drain_s
        self.keeper.last(self.step)
        self._behind_last()
        with (
            self.shares.state("sync"),
            self.waits.on("actors to take the last version", self.publisher.waiting_for, timeout),
        ):
            for name in self.publisher.finish(timeout):
                log.warning("%s has not taken the last version %s", name, self.version)
        self._tell_publisher()
        in_step = False
        try:
            self._say_and_save(ended)
            in_step = True
        finally:
            self.keeper.finish(in_step=in_step)

    def _say_and_save(self, ended: str) -> None:
        config = self.config
        if self.settings.rank == 0:  # before the model is saved: actors evaluate meanwhile
            why = ended or f"finished after {self.step} steps"
            # A stop that somebody else asked for without an evaluation wins over this.
            self.client.stop(why, final=self.version, evaluate=True)
        if config.learner.save_final and self.step > 0:
            final = os.path.join(self.settings.run_dir, "checkpoints", "final")
            with self.shares.state("checkpoint"):
                self.trainer.save_hf(final, replace=True)  # that of the run before it went on

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
                self.records.event(publication=event.pop("version"), **event)

    def _report(self, result: StepResult) -> None:
        more = {"queue/get_wait_s": self._pulled_s, **self.ids.metrics()}
        if self.settings.rank == 0:
            more |= self.publisher.take_timings() | self.keeper.take_timings()
            self._tell_publisher()
        self.records.batch(result, more)

    def close(self) -> None:
        """Leave every group and close every socket; what fails is logged, the rest still closes."""
        import torch.distributed as dist

        names = ("pulse", "publisher", "keeper", "members", "ids", "client", "hub")
        parts = [getattr(self, name, None) for name in names]
        steps = [part.close for part in parts if part is not None]
        if dist.is_initialized():
            steps.append(dist.destroy_process_group)
        for step in steps:
            try:
                step()
            except Exception:
                log.exception("%s: %s failed", self.settings.name, step.__qualname__)
