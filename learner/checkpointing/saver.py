"""Checkpoints, written beside training.

    train ──► save(step): wait until the last one is written ──► copy own shards ──► train
                                                                    │
    the writing threads of all ranks: DCP, shards ◄─────────────────┘
    that of rank 0, then: the buffer's ledger ─► meta.json, fsync, rename ─► covered ─► prune

Every rank saves at the same steps. Nothing in step is collective; the writing threads have a group
of their own. Waits: `save` and `finish` for the last write (released by its deadline, which grows
with the bytes); the threads for each other (released by the group's timeout) and for the buffer
(by the client's). A checkpoint that fails is told and forgotten, the ones before it stay.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from asyncrl import checkpoints
from asyncrl.checkpoints import Checkpoint, Meta
from asyncrl.config.render import to_yaml
from asyncrl.config.schema import Config
from asyncrl.config.sources import RESOLVED
from asyncrl.errors import AsyncRLError, CheckpointError, DeadlineError
from asyncrl.learner.checkpointing.failure import explain
from asyncrl.learner.checkpointing.score import Score
from asyncrl.learner.checkpointing.shards import write_shards
from asyncrl.learner.checkpointing.staging import Staging, local
from asyncrl.learner.checkpointing.state import expected, state_of
from asyncrl.learner.collectives import host_group
from asyncrl.learner.step import StepResult, Trainer
from asyncrl.roles import RoleSettings
from asyncrl.waits import Waits

log = logging.getLogger(__name__)

BASE_S, BYTES_PER_S = 600.0, 10e6
"""Deadline of a checkpoint: so long, and 1 s for so many bytes of a rank."""
MODEL_PATH = "model_path"
"""In `Meta.state`: the folder of the initial model, from which all that is frozen comes."""
NICE = 10
"""The writing thread gives way to training by so much."""


class Ledger(Protocol):
    """What a checkpoint asks of the buffer (asyncrl.buffer.client)."""

    def save_ledger(self, path: str | os.PathLike[str], batch: int) -> object:
        """Write what the buffer holds into the folder `path`."""

    def covered(self, batch: int) -> None:
        """Batches up to this one need not be kept."""

    def close(self) -> None:
        """End the connection."""


class Saver:
    """This rank's end. Made by all ranks together: it forms the group.

    Args:
        trainer: whose state is saved.
        config, settings: of the run, and of this rank.
        waits: where waits are registered.
        tell: takes an event's fields, from any thread.
        since: what the checkpoint that the run goes on from says; None at its start.

    Raises:
        CheckpointError: the run's folder cannot be written, or is not the same on all machines.
    """

    ledger: Ledger | None = None
    """Rank 0: the buffer; a client of its own, used by the writing thread alone."""

    def __init__(
        self,
        trainer: Trainer,
        config: Config,
        settings: RoleSettings,
        *,
        waits: Waits,
        tell: Callable[..., None],
        since: Meta | None = None,
    ) -> None:
        self._trainer, self._config, self._settings = trainer, config, settings
        self._run, self._waits, self._tell = Path(settings.run_dir), waits, tell
        self._since = since or Meta(step=0, version=0, incarnation=0, world=0, run_id="")
        self._began = time.monotonic()
        self._samples = self._since.samples
        self._score = Score(config.checkpoint.score)
        self._incarnation = settings.resume.incarnation if settings.resume else 0
        self._base = settings.resume.checkpoint if settings.resume else None
        """What the run would go on from once more; until a checkpoint of its own is there."""
        self.step = self._since.step
        """Of the last checkpoint that was begun."""
        self.failure = ""
        """Why the last checkpoint is not on the disk; "" when it is, or is being written."""
        self._begun: tuple[dict[str, Tensor], Meta, dict[str, float]] | None = None
        """What the last one is made of; valid until the next is begun."""
        self._timings: dict[str, float] = {}
        room = expected(trainer)
        nbytes = sum(local(t).nbytes for t in room.values())
        self._limit_s = BASE_S + nbytes / BYTES_PER_S
        self._staging = Staging(pinned=trainer.device.type == "cuda")
        self._group = host_group(settings.host, self._limit_s)
        self._open_folder()
        self._thread = ThreadPoolExecutor(1, "checkpoint", self._give_way)
        self._job: Future[None] | None = self._thread.submit(self._staging.prepare, room)

    def note(self, result: StepResult) -> None:
        """A batch is trained: what the score and the number of samples are made of."""
        self._samples += result.samples
        self._score.add(result.metrics)

    def save(self, step: int, version: int, state: Mapping[str, Any]) -> None:
        """Take a checkpoint after batch `step`; every rank calls it, at the same steps.

        Args:
            step: last batch trained.
            version: v at which the next one is trained.
            state: what else to go on with, of rank 0; it is given back in `Meta.state`.
        """
        began = time.monotonic()
        self._settle()
        waited_s = time.monotonic() - began
        copies = self._staging.copy(state_of(self._trainer))
        s = self._settings
        meta = Meta(
            step=step, version=version, incarnation=self._incarnation, world=s.world,
            run_id=s.run_id, score=self._score.take(), samples=self._samples,
            wall_s=self._since.wall_s + time.monotonic() - self._began, threads=s.threads,
            torch=torch.__version__, state={**state, MODEL_PATH: s.model_path},
        )  # fmt: skip
        self.step = step
        took = {"wait_s": waited_s, "stage_s": time.monotonic() - began - waited_s}
        self._begun = copies, meta, took
        self._job = self._thread.submit(self._write, *self._begun)
        if not self._config.checkpoint.background:
            self._settle()
        self._timings["checkpoint/stall_s"] = time.monotonic() - began

    def failed(self) -> bool:
        """Wait for the last checkpoint; whether this rank knows it not to be on the disk."""
        self._settle()
        return bool(self.failure)

    def again(self) -> None:
        """Write the last one once more, from its copies; every rank calls it, after `failed`."""
        if self._begun is not None:
            self._job = self._thread.submit(self._write, *self._begun)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        begun = self._begun is not None  # until then the thread prepares its buffers
        return begun and self._job is not None and not self._job.done()

    def take_timings(self) -> dict[str, float]:
        """checkpoint/* since the last call; each is handed out once."""
        timings, self._timings = self._timings, {}
        return timings

    def finish(self) -> None:
        """Wait until the last checkpoint is on the disk.

        Raises:
            CheckpointError: it is not.
        """
        self._settle()
        self.check()

    def check(self) -> None:
        """Raise if the last checkpoint has failed; does not wait.

        Raises:
            CheckpointError: it has.
        """
        if self.failure:
            raise CheckpointError(self.failure)

    def close(self) -> None:
        """End the thread; after a failure of training whatever is half written stays so."""
        self._thread.shutdown(wait=self._job is None or self._job.done(), cancel_futures=True)
        if self.ledger is not None:
            self.ledger.close()

    def _settle(self) -> None:
        if self._job is None:
            return
        what = f"the checkpoint of batch {self.step} to be written"
        with self._waits.on(what, "the disk, the buffer and the other ranks", self._limit_s):
            try:
                self._job.result(self._limit_s)
            except TimeoutError:
                raise DeadlineError(
                    f"learner-{self._settings.rank} waited {self._limit_s:.0f} s for {what}: "
                    f"the disk of {self._run} is too slow or stuck; see the logs of all ranks"
                ) from None
        self._job = None

    # --- the writing thread ----------------------------------------------------------------

    @staticmethod
    def _give_way() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        # They take a third of the time, and torch.load does not look at them.
        torch.serialization.set_crc32_options(compute_crc32=False)

    def _write(self, state: dict[str, Tensor], meta: Meta, took: dict[str, float]) -> None:
        folder = checkpoints.partial(self._run, meta.step, meta.incarnation)
        try:
            began = time.monotonic()
            self._make_room(folder)
            checksums = write_shards(state, folder, self._group)
            took["write_s"] = time.monotonic() - began
            if self._settings.rank == 0:
                self._complete(folder, meta, checksums, took)
            self.failure = ""
        except (Exception, CheckpointException) as e:
            self._failed(folder, meta, e)

    def _make_room(self, folder: Path) -> None:
        """Rank 0: an empty folder, and no more than the quota once it is full.

        What fails here fails again when the folder is written to, and then for all ranks.
        """
        if self._settings.rank:
            return
        shutil.rmtree(folder, ignore_errors=True)
        try:
            if (last := checkpoints.latest(self._run)) is not None:
                self._prune(last.meta.nbytes)
        except (OSError, CheckpointError) as e:
            log.warning("no room is made for the next checkpoint: %s", e)

    def _complete(
        self, folder: Path, meta: Meta, checksums: Mapping[str, str], took: dict[str, float]
    ) -> None:
        began = time.monotonic()
        if self.ledger is not None:
            self.ledger.save_ledger(folder / checkpoints.LEDGER, meta.step)
        saved = time.monotonic()
        text = f"{RESOLVED}\n{to_yaml(self._config)}"
        (folder / "config.yaml").write_text(text, encoding="utf-8")
        made = checkpoints.seal(folder, meta, checksums)
        done = time.monotonic()
        self._base = None
        took |= {"ledger_s": saved - began, "sync_s": done - saved}
        self._timings |= {
            "checkpoint/write_s": took["write_s"] + done - began,
            "checkpoint/bytes": float(made.meta.nbytes),
        }
        self._say(made, took)
        try:  # it is there by now, whatever becomes of these
            if self.ledger is not None:
                self.ledger.covered(meta.step)
            self._prune(0)
        except (OSError, AsyncRLError) as e:
            log.warning("after the checkpoint of batch %d: %s", meta.step, e)

    def _prune(self, coming_bytes: int) -> None:
        c = self._config.checkpoint
        quota = None if c.max_gib is None else c.max_gib * 2**30 - coming_bytes
        # One that is being written counts: there are never more than `keep` and that one.
        for path in checkpoints.prune(self._run, c.keep, quota, self._base):
            log.info("removed the checkpoint %s", path)

    def _say(self, made: Checkpoint, took: Mapping[str, float]) -> None:
        log.info("checkpoint of batch %d: %d bytes", made.meta.step, made.meta.nbytes)
        self._tell(
            event="checkpoint", batch=made.meta.step, path=str(made.path.relative_to(self._run)),
            score=made.meta.score, bytes=made.meta.nbytes,
            **{name: round(seconds, 3) for name, seconds in took.items()},
        )  # fmt: skip

    def _failed(self, folder: Path, meta: Meta, error: BaseException) -> None:
        log.warning("the checkpoint of batch %d failed", meta.step, exc_info=error)
        self.failure = explain(error, folder, meta.step)
        if self._settings.rank == 0:
            self._tell(event="checkpoint_failed", batch=meta.step, reason=self.failure)
            shutil.rmtree(folder, ignore_errors=True)

    def _open_folder(self) -> None:
        """Rank 0 makes the folder and removes what a killed process left; all must see it."""
        folder, rank = self._run / checkpoints.FOLDER, self._settings.rank
        if rank == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                checkpoints.clean(self._run)
            except OSError as e:
                raise CheckpointError(explain(e, folder, self.step)) from e
        self._group.barrier().wait()
        if not folder.is_dir():
            raise CheckpointError(
                f"run.dir: {folder} is not there on the machine of learner-{rank}: set run.dir to "
                "a folder that all learners' machines share, or checkpoint.every=null"
            )
