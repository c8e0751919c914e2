"""The launcher's desk: where records arrive and what is shown and written of a run.

records ──► Hub ──► metrics.jsonl, events.jsonl, further sinks
             └────► Board ──► ConsoleView, status.json, summary.json
"""

from __future__ import annotations

import os
import time
from typing import TextIO

from asyncrl import wire
from asyncrl.buffer.client import BufferClient
from asyncrl.config.paths import expand
from asyncrl.config.schema import Config
from asyncrl.hub import Hub, HubClient
from asyncrl.launch.data_plane import keys_of
from asyncrl.launch.folder import RunFolder
from asyncrl.launch.placement import launcher_address
from asyncrl.monitor.board import Board
from asyncrl.monitor.console import ConsoleView
from asyncrl.monitor.status_file import StatusFile
from asyncrl.monitor.summary import evaluation_line, last_lines, summary_of
from asyncrl.protocols import MetricSink
from asyncrl.pulse import Pulse
from asyncrl.sinks import JsonlSink
from asyncrl.types import Version
from asyncrl.waits import Waits

RECORDED_S = 10.0
"""How long the recording may take to be on the disk at the end of a run."""


def last_stats(client: BufferClient, version: Version, waits: Waits) -> wire.Stats:
    """The ledger's last counts, once everything is recorded or RECORDED_S is over.

    Raises:
        AsyncRLError: the buffer is gone.
    """
    stats = client.stats()
    if stats.state != "done":  # a run that broke: no learner has said so
        client.stop("the run failed or was ended", final=version)
        stats = client.stats()
    deadline = time.monotonic() + RECORDED_S
    with waits.on("the recording to be on the disk", "buffer-0", RECORDED_S) as wait:
        while (left := stats.gauges.get("record/waiting")) and time.monotonic() < deadline:
            wait.owner = f"buffer-0: {left:.0f} samples left"
            time.sleep(0.05)
            stats = client.stats()
    return stats


class Desk:
    """Owns the hub, the board and the console of a run."""

    def __init__(
        self, config: Config, folder: RunFolder, run_id: str, view_file: TextIO, began: float
    ) -> None:
        self.config, self.folder, self.run_id = config, folder, run_id
        self.board = Board(config, started=began)
        self.keys = keys_of(config)
        self.hub = Hub(
            self._sinks(), run_id=run_id, host=launcher_address(config.cluster.address),
            keys=self.keys, listeners=[self.board.write],
        )  # fmt: skip
        self.waits = Waits("launcher", config.log.wait_warn_s)
        self._status = StatusFile(
            os.path.join(folder.path, "status.json"), self.board, run_id=run_id, run=folder.name
        )
        self._client = HubClient(self.hub.endpoint, "launcher", keys=self.keys)
        self._pulse = Pulse(
            self._client, waits=self.waits, position=self.board.position,
            metrics=[self.hub.metrics, self.board.fleet.metrics], children=False,
        )  # fmt: skip
        self.view = ConsoleView(
            self.board, title=f"asyncrl · {folder.name}", mode=config.log.console, file=view_file
        )

    def _sinks(self) -> list[MetricSink]:
        log, folder = self.config.log, self.folder
        sinks: list[MetricSink] = [JsonlSink(folder.metrics, folder.events)]
        if log.wandb != "off":
            from asyncrl.launch.sinks.wandb import WandbSink

            sinks.append(WandbSink(self.config, folder))
        if log.tensorboard:
            from asyncrl.launch.sinks.tensorboard import TensorBoardSink

            sinks.append(TensorBoardSink(folder))
        return sinks

    def serves(self, endpoint: str) -> None:
        """Tell in status.json where the launcher can be asked."""
        security = self.config.security
        lasting = None if security.keys is None else expand(security.keys, "security.keys")
        self.board.control = {
            "endpoint": endpoint, "curve": security.curve,
            "keys": None if lasting is None else os.path.abspath(lasting),
        }  # fmt: skip

    def tell_evals(self, at_end: bool = False) -> None:
        """Write `eval/<task>/score` once all actors' shares of a version are in."""
        task, n = self.config.task.kind, self.config.learner.batches_per_publication
        for version, evaluation in self.board.finished_evals(at_end):
            evaluation.told = True
            self.view.say(evaluation_line(version, evaluation, self.config.eval.samples))
            self.hub.write(
                wire.Record(
                    role="launcher", rank=0, version=version, incarnation=0,
                    step=min(version * n, self.config.run.steps),
                    metrics={
                        f"eval/{task}/score": evaluation.score,
                        f"eval/{task}/prompts": evaluation.prompts,
                    },
                )
            )  # fmt: skip

    def phase(self, text: str) -> None:
        """What the run is doing now, for the console."""
        if text != self.board.phase:
            self.board.phase = text
            if self.view.mode == "plain":
                self.view.say(text)
        self.view.refresh()

    def training(self) -> None:
        """All learner ranks are set up: time shares and the time left count from here."""
        self.board.training_began = time.monotonic()
        self.phase("training")
        self.event("training", learners=self.config.cluster.learners)

    def startup(self, phase: str, began: float) -> None:
        """An event for the breakdown of the start."""
        self.event("startup", phase=phase, seconds=round(time.monotonic() - began, 2))

    def event(self, what: str, **fields: object) -> None:
        """A line of events.jsonl."""
        self.hub.write(wire.Record(
            role="launcher", rank=0, step=self.board.step, version=self.board.version,
            incarnation=0, event={"event": what, **fields},
        ))  # fmt: skip

    def summarise(self, stats: wire.Stats | None, ended: str, reason: str) -> None:
        """Write summary.json and say the last lines; nothing is taken in afterwards."""
        self.board.stats = stats or self.board.stats
        self._pulse.close()
        self._client.close()
        self.hub.drain()
        self.tell_evals(at_end=True)
        self.hub.close()
        try:
            self.folder.write_summary(summary_of(self.board, stats, ended, self.run_id, reason))
        except OSError as e:  # the disk is full, say: what the run has to tell is told all the same
            self.view.say(f"summary.json cannot be written: {e.strerror or e}")
        self._status.close()
        self.view.close()
        for line in last_lines(self.board, stats, ended, reason):
            self.view.say(line)
        self.view.say(f"files: {self.folder.path}")
