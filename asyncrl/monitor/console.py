"""The live console: one panel, redrawn; or one line a step where there is no terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.monitor import words
from asyncrl.monitor.board import Board
from asyncrl.monitor.summary import scored
from asyncrl.monitor.words import clock, share

_BARS = "▁▂▃▄▅▆▇█"
LOADING_ROWS = 5
"""Phases of starting roles shown at once."""
LOADING_EVERY_S = 10.0
"""How often plain lines tell what is being loaded."""


def sparkline(values: Iterable[float], width: int = 40) -> str:
    """The values as one line of bars, the last `width` buckets of them.

    >>> sparkline([0, 1, 2, 3], width=4)
    '▁▃▆█'
    """
    data = [v for v in values if math.isfinite(v)]
    if len(data) > width:
        step = len(data) / width
        buckets = [data[int(i * step) : max(int((i + 1) * step), int(i * step) + 1)]
                   for i in range(width)]  # fmt: skip
        data = [sum(b) / len(b) for b in buckets]
    if not data:
        return ""
    low, high = min(data), max(data)
    if high == low or not math.isfinite(high - low):
        return _BARS[3] * len(data)
    return "".join(_BARS[round((v - low) / (high - low) * (len(_BARS) - 1))] for v in data)


class ConsoleView:
    """Shows a Board until `close`."""

    def __init__(self, board: Board, *, title: str, mode: str, file: TextIO) -> None:
        self.board = board
        self.title = title
        self.file = file
        self.console = Console(file=file, highlight=False)
        if mode == "auto":
            mode = "live" if self.console.is_terminal else "plain"
        self.mode = mode
        self._told = board.began_at
        self._told_loading = time.monotonic()
        self._quiet_since: float | None = None
        self._quiet_told = 0.0
        self._live: Live | None = None
        if mode == "live":
            self._live = Live(
                self._panel(),
                console=self.console,
                refresh_per_second=4,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start(refresh=True)  # else a first line could cross the first panel

    def say(self, text: str) -> None:
        """A line that stays, above the panel."""
        if self.mode != "off":
            with suppress(OSError):  # the terminal is gone, or the disk behind it is full
                self.console.print(Text(text), soft_wrap=True)
                self.file.flush()

    def refresh(self) -> None:
        """Show the board as it is now."""
        self._told = min(self._told, self.board.step)  # the learner may have gone back
        if self._live is not None:
            self._live.update(self._panel())
        elif self.mode == "plain" and self.board.step > self._told:
            self._told = self.board.step
            self.say(self._line())
            self._quiet_since, self._quiet_told = time.monotonic(), 0.0
        elif self.mode == "plain" and self.board.training_began is not None:
            self._tell_stall()
        elif self.mode == "plain":
            now = time.monotonic()
            if now - self._told_loading >= LOADING_EVERY_S and (rows := self._loading_rows()):
                self._told_loading = now
                self.say("  " + "; ".join(rows))

    def _tell_stall(self) -> None:
        """Where nobody sees the panel: whom a run without steps waits for; ever more rarely."""
        now, limit = time.monotonic(), self.board.config.log.wait_warn_s
        if self._quiet_since is None:
            self._quiet_since = now
        quiet = now - self._quiet_since
        if quiet < max(limit, 2 * self._quiet_told):
            return
        self._quiet_told = quiet
        longest = self.board.fleet.longest_waits(now)[:2]
        waits = [f"{w.role} {words.wait(w.what, w.on, w.age_s)}" for w in longest]
        self.say(f"  no step for {quiet:.0f} s: {'; '.join(waits) or self.board.phase}")

    def close(self) -> None:
        """Leave the last state on the screen."""
        if self._live is not None:
            self._live.update(self._panel())
            self._live.stop()
            self._live = None

    def _line(self) -> str:
        b, m = self.board, self.board.learner
        return (
            f"step {b.step}/{b.config.run.steps}  version {b.version}"
            f"  reward {m.get('reward/mean', float('nan')):.3f}"
            f"  staleness {m.get('staleness/head/mean', 0):.2f}"
            f" max {m.get('staleness/head/max', 0):.0f}"
            f"  generate {b.gen_tok_s():.0f} tok/s"
            f"  train {m.get('throughput/train_tok_s', 0):.0f} tok/s with prompts"
            f"  ess {m.get('is/ess_frac', float('nan')):.2f}"
            f"  left {clock(b.seconds_left())}"
        )

    def _panel(self) -> Panel:
        b, m, c = self.board, self.board.learner, self.board.config
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold cyan", justify="right", no_wrap=True, min_width=9)
        table.add_column()

        def row(label: str, text: str) -> None:
            table.add_row(label, Text(text, no_wrap=True, overflow="ellipsis"))

        row(
            "step", f"{b.step}/{c.run.steps}   version {b.version}   left {clock(b.seconds_left())}"
        )
        table.add_row("", ProgressBar(total=c.run.steps, completed=b.step, width=60))
        row("reward", f"{b.rewards[-1]:.3f}  {sparkline(b.rewards)}" if b.rewards else "-")
        row(
            "staleness",
            f"mean {m.get('staleness/head/mean', 0):.2f}   max {m.get('staleness/head/max', 0):.0f}"
            f"   limit {c.buffer.max_staleness}",
        )
        restarts = b.fleet.restarts()
        row(
            "generate",
            f"{b.gen_tok_s():.0f} tok/s   actors {b.fleet.alive()}/{b.fleet.actors} alive"
            + (f", {leaving} leave" if (leaving := b.fleet.count("leaving")) else "")
            + f"   waiting {share(b.actors_idle())}"
            + (f"   restarts {restarts}" if restarts else ""),
        )
        row(
            "train",
            f"{m.get('throughput/train_tok_s', 0):.0f} tok/s with prompts"
            f"   ranks {c.cluster.learners}   waiting {share(m.get('idle/trainer_frac'))}",
        )
        for label, text in self._buffer_rows():
            row(label, text)
        for label, text in self._wait_rows():
            # Not markup (it may quote errors), and whole: its end says who is waited for.
            table.add_row(label, Text(text, overflow="fold"))
        for version, evaluation in sorted(b.evals.items()):
            row(f"eval v{version}", scored(evaluation, c.eval.samples))
        return Panel(table, title=Text(self.title), subtitle="Ctrl-C stops in order", expand=True)

    def _buffer_rows(self) -> list[tuple[str, str]]:
        stats = self.board.stats
        if stats is None:
            return []
        gauges, counts = stats.gauges, stats.counts
        return [
            (
                "buffer",
                f"{counts.get('held', 0)} of {gauges.get('queue/capacity', 0):.0f} samples alive"
                f"   {gauges.get('queue/depth', 0):.0f} waiting   {counts.get('leased', 0)} leased",
            ),
        ]

    def _wait_rows(self) -> list[tuple[str, str]]:
        """Who waits for whom and since when; what is still loading; or what the run is doing."""
        b = self.board
        rows = [] if b.phase == "training" else [("now", b.phase)]
        rows += [("starting", row) for row in self._loading_rows()]
        if b.phase == "training":
            waits = [
                ("waits", f"{w.role} {words.wait(w.what, w.on, w.age_s)}")
                for w in b.fleet.longest_waits(time.monotonic())
            ]
            told = b.stats.waiting_for if b.stats is not None else ""
            rows += waits or [("waits", told or "nobody")]
        return rows

    def _loading_rows(self) -> list[str]:
        rows = [
            f"{words.names(roles)} {phase} {age:.0f} s"
            for phase, roles, age in self.board.fleet.loading(time.monotonic())
        ]
        more = len(rows) - LOADING_ROWS
        return rows if more <= 0 else [*rows[:LOADING_ROWS], f"and {more} more"]
