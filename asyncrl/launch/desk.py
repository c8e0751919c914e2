"""The launcher's desk: where records arrive and what is shown and written of a run.

records ──► Hub ──► metrics.jsonl, events.jsonl, further sinks
             └────► Board ──► ConsoleView, status.json, summary.json
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from asyncrl import wire
from asyncrl.buffer.client import BufferClient
from asyncrl.checkpoints import ResumePoint
from asyncrl.config.paths import expand
from asyncrl.config.schema import Config
from asyncrl.disk import trouble
from asyncrl.hub import Hub, HubClient
from asyncrl.launch.data_plane import keys_of
from asyncrl.launch.folder import RunFolder
from asyncrl.launch.placement import launcher_address
from asyncrl.launch.resume.fields import Change
from asyncrl.launch.resume.lineage import lines_of
from asyncrl.metrics import TimeShares, process_began
from asyncrl.monitor.board import Board
from asyncrl.monitor.console import ConsoleView
from asyncrl.monitor.status_file import StatusFile
from asyncrl.monitor.summary import evaluation_line, last_lines, summary_of
from asyncrl.monitor.watchdog import Watchdog
from asyncrl.protocols import MetricSink
from asyncrl.pulse import Pulse
from asyncrl.sinks import JsonlSink
from asyncrl.spans import span_log
from asyncrl.types import Version
from asyncrl.waits import Waits

log = logging.getLogger(__name__)

RECORDED_S = 10.0
"""How long the recording may take to be on the disk at the end of a run."""
UNWRITTEN = 2
"""Exit code of a run that ended in order, but for its summary.json."""


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
        self, config: Config, folder: RunFolder, run_id: str, view_file: TextIO, began: float,
        *, resume: ResumePoint | None = None, wall_s: float = 0.0,
    ) -> None:  # fmt: skip
        """A desk; `resume` and `wall_s` are where a run goes on, and how long it has lived."""
        self.config, self.folder, self.run_id = config, folder, run_id
        self.board = Board(config, started=began, lived_s=wall_s)
        if resume is not None:
            for path in (folder.events, folder.metrics):
                self.board.remember(lines_of(Path(path)), resume.step, resume.applied)
        self._watchdog = Watchdog(self.board, config.log.stall_warn_s)
        self._troubled: set[str] = set()
        """Sinks whose trouble was told, and checkpoints."""
        self._no_checkpoint = ""
        """Why the last one failed; empty: it did not."""
        self.keys = keys_of(config)
        self._spans = span_log(folder.path, "launcher", 0, run_id, config.trace.kept_mib)
        self.hub = Hub(
            self._sinks(resume), run_id=run_id, host=launcher_address(config.cluster.address),
            keys=self.keys, began_at_s=self.board.elapsed_s(),
            listeners=[self.board.write, self._trace],
        )  # fmt: skip
        self.waits = Waits("launcher", config.log.wait_warn_s)
        self.shares = TimeShares(since=process_began())
        self.shares.enter("serve")
        self._status = StatusFile(
            os.path.join(folder.path, "status.json"), self.board, run_id=run_id, run=folder.name
        )
        self._client = HubClient(self.hub.endpoint, "launcher", keys=self.keys)
        self._pulse = Pulse(
            self._client, waits=self.waits, position=self.board.position,
            metrics=[
                self.hub.metrics, self.board.fleet.metrics, self.shares.metrics, self._spans.flush,
            ],
            children=False,
        )  # fmt: skip
        self.view = ConsoleView(
            self.board, title=f"asyncrl · {folder.name}", mode=config.log.console, file=view_file
        )

    def _sinks(self, resume: ResumePoint | None) -> list[MetricSink]:
        log, folder = self.config.log, self.folder
        sinks: list[MetricSink] = [JsonlSink(folder.metrics, folder.events)]
        if log.wandb != "off":
            from asyncrl.launch.sinks.wandb import WandbSink

            sinks.append(WandbSink(self.config, folder, self.run_id, resumed=resume is not None))
        if log.prometheus is not None:
            from asyncrl.launch.sinks.prometheus import PrometheusSink

            scraped = PrometheusSink(log.prometheus, log.prometheus_host, folder, self.run_id)
            self.board.prometheus = scraped.url
            sinks.append(scraped)
        if log.tensorboard:
            from asyncrl.launch.sinks.tensorboard import TensorBoardSink

            again = None if resume is None else resume.step + 1
            sinks.append(TensorBoardSink(folder, purge_from=again))
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
                    role="launcher", rank=0, version=version,
                    incarnation=self.board.incarnation,
                    step=min(version * n, self.config.run.steps),
                    metrics={
                        f"eval/{task}/score": evaluation.score,
                        f"eval/{task}/prompts": evaluation.prompts,
                    },
                )
            )  # fmt: skip

    def look_for_troubles(self) -> None:
        """Say why nothing moves, when it begins, ever more rarely, and when it is over; and what
        cannot be written."""
        troubles = dict(self.hub.troubles())
        if self._no_checkpoint:
            troubles["checkpoint"] = self._no_checkpoint
        for name in troubles.keys() - self._troubled:
            self.view.say(troubles[name])
        self._troubled = set(troubles)
        if (told := self._watchdog.look()) is None:
            return
        what, fields = told
        self.event(what, **fields)
        if what == "stalled":
            line = f"stalled for {fields['for_s']:.0f} s: {fields['why']}"
        else:
            line = f"it goes on, after {fields['after_s']:.0f} s"
        log.warning(line)
        self.view.say(line)

    def _trace(self, record: Mapping[str, Any]) -> None:
        """Every role's events as they came, for the timeline."""
        if (event := record["event"]) is not None:
            now, role = time.monotonic(), f"{record['role']}-{record['rank']}"
            told = {k: v for k, v in event.items() if k != "event"}
            self._spans.add("event", str(event["event"]), now, now, role=role, told=told)
            if event["event"] in ("checkpoint", "checkpoint_failed"):
                self._no_checkpoint = str(event.get("reason", ""))

    def resumed(self, point: ResumePoint, changes: Sequence[Change]) -> None:
        """Tell that the run goes on, and what differs."""
        self.event(
            "resumed", batch=point.step, checkpoint=point.checkpoint,
            changes=[{"field": c.key, "was": c.was, "is": c.now} for c in changes],
        )  # fmt: skip

    def went_back(self, point: ResumePoint) -> None:
        """The learner begins again, as another incarnation."""
        self.board.went_back(point.step, point.applied)

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
            incarnation=self.board.incarnation, event={"event": what, **fields},
        ))  # fmt: skip

    def summarise(self, stats: wire.Stats | None, ended: str, reason: str, go_on: str = "") -> int:
        """Write summary.json and say the last lines, `go_on` being the last but one; nothing is
        taken in afterwards.

        Returns:
            0, or UNWRITTEN if summary.json cannot be written; then the last line says why.
        """
        code, unwritten = 0, ""
        self.board.stats = stats or self.board.stats
        self._pulse.close()
        self._client.close()
        self.hub.drain()
        self.tell_evals(at_end=True)
        self.event("ended", how=ended, reason=reason)
        self.hub.close()
        self._spans.close()
        try:
            self.folder.write_summary(summary_of(self.board, stats, ended, self.run_id, reason))
        except OSError as e:  # the disk is full, say: what the run has to tell is told all the same
            code, unwritten = UNWRITTEN, trouble(self.folder.summary, e)
        self._status.close()
        self.view.close()
        for line in last_lines(self.board, stats, ended, reason):
            self.view.say(line)
        if go_on:
            self.view.say(go_on)
        self.view.say(f"files: {self.folder.path}")
        if code:
            self.view.say(unwritten)
        return code
