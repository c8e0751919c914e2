"""When a learner rank takes checkpoints: now and then, when the buffer asks, at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from asyncrl.checkpoints import Meta
from asyncrl.config.schema import Config
from asyncrl.learner.checkpointing.resume import go_on
from asyncrl.learner.checkpointing.saver import Ledger, Saver
from asyncrl.learner.collectives import from_rank_0
from asyncrl.learner.step import StepResult, Trainer
from asyncrl.metrics import TimeShares
from asyncrl.roles import RoleSettings
from asyncrl.staleness import version_of_batch
from asyncrl.waits import Waits


class Keeper:
    """Loads the checkpoint that the run goes on from, and takes new ones. Made by all ranks.

    With `checkpoint.every` null it takes none.

    Args:
        trainer: whose state it is.
        config, settings: of the run, and of this rank.
        waits, shares: where waits and time are registered.
        tell: takes an event's fields, from any thread.
        rest: what rank 0 goes on with beside the trainer's state; see `remembered`.

    Raises:
        CheckpointError: the checkpoint cannot be used, or none can be written.
    """

    def __init__(
        self,
        trainer: Trainer,
        config: Config,
        settings: RoleSettings,
        *,
        waits: Waits,
        shares: TimeShares,
        tell: Callable[..., None],
        rest: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._trainer, self._config, self._settings = trainer, config, settings
        self._shares, self._rest = shares, rest
        self._asked = False
        """Rank 0: the buffer has no room for more batches without a checkpoint."""
        self._since: Meta | None = go_on(trainer, settings, waits)
        self._saver: Saver | None = None
        if config.checkpoint.every is not None:
            self._saver = Saver(
                trainer, config, settings, waits=waits, tell=tell, since=self._since
            )

    @property
    def remembered(self) -> Mapping[str, Any]:
        """What `rest` gave when the checkpoint was taken; empty at the start of a run."""
        return {} if self._since is None else self._since.state

    def connect(self, connect: Callable[[], Ledger]) -> None:
        """Rank 0: the buffer's part of a checkpoint, through a client of its own."""
        if self._saver is not None:
            self._saver.ledger = connect()

    def trained(self, result: StepResult, *, asked: bool) -> None:
        """A batch is trained and committed; `asked`: the buffer wants a checkpoint (rank 0)."""
        self._asked = asked
        if self._saver is not None:
            self._saver.note(result)

    def after_batch(self, step: int) -> None:
        """Take a checkpoint if one is due. Every rank decides alike."""
        saver, every = self._saver, self._config.checkpoint.every
        if saver is None or every is None:
            return
        asked = self._asked and not saver.busy  # one that is being written makes room as well
        if self._settings.world > 1:
            asked = bool(from_rank_0(int(asked), self._trainer.device))
        if asked or step % every == 0:
            self._save(saver, step)

    def check(self) -> None:
        """While a batch does not come: whether it waits for room that no checkpoint will make.

        Raises:
            CheckpointError: the buffer asked for one, and it could not be written.
        """
        if self._asked and self._saver is not None:
            self._saver.check()

    def last(self, step: int) -> None:
        """The run ends after batch `step`: begin a last checkpoint."""
        saver = self._saver
        if saver is not None and self._config.checkpoint.at_end and step > saver.step:
            self._save(saver, step)

    def finish(self, *, in_step: bool = True) -> None:
        """Wait until the last checkpoint is on the disk; nothing is trained any more.

        Args:
            in_step: every rank gets here, so that one that failed can be tried once more.

        Raises:
            CheckpointError: it is not.
        """
        if (saver := self._saver) is None:
            return
        with self._shares.state("checkpoint"):
            if in_step:
                failed = saver.failed()
                if self._settings.world > 1:  # rank 0 alone seals it
                    failed = bool(from_rank_0(int(failed), self._trainer.device))
                if failed:
                    saver.again()
            saver.finish()

    def take_timings(self) -> dict[str, float]:
        """checkpoint/* since the last call; each is handed out once."""
        return {} if self._saver is None else self._saver.take_timings()

    def close(self) -> None:
        """End the writing thread and its connection."""
        if self._saver is not None:
            self._saver.close()

    def _save(self, saver: Saver, step: int) -> None:
        n = self._config.learner.batches_per_publication
        with self._shares.state("checkpoint"):
            saver.save(step, version_of_batch(step + 1, n), self._rest())
