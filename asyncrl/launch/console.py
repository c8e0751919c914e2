"""The live console: one panel, redrawn; or one line a step where there is no terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl.launch.board import Board

_BARS = "▁▂▃▄▅▆▇█"


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


def clock(seconds: float | None) -> str:
    """m:ss, or a dash.

    >>> clock(65.2), clock(None)
    ('1:05', '-')
    """
    if seconds is None:
        return "-"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def share(value: float | None) -> str:
    """A fraction as a percentage, or a dash."""
    return "-" if value is None else f"{value * 100:.0f} %"


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
        self._told = 0
        self._live: Live | None = None
        if mode == "live":
            self._live = Live(
                self._panel(),
                console=self.console,
                refresh_per_second=4,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()

    def say(self, text: str) -> None:
        """A line that stays, above the panel."""
        if self.mode != "off":
            self.console.print(Text(text), soft_wrap=True)
            self.file.flush()

    def refresh(self) -> None:
        """Show the board as it is now."""
        if self._live is not None:
            self._live.update(self._panel())
        elif self.mode == "plain" and self.board.step > self._told:
            self._told = self.board.step
            self.say(self._line())

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
            f"  train {m.get('throughput/train_tok_s', 0):.0f} tok/s"
            f"  ess {m.get('is/ess_frac', float('nan')):.2f}"
            f"  left {clock(b.seconds_left())}"
        )

    def _panel(self) -> Panel:
        b, m, c = self.board, self.board.learner, self.board.config
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold cyan", justify="right", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis")
        table.add_row(
            "step", f"{b.step}/{c.run.steps}   version {b.version}   left {clock(b.seconds_left())}"
        )
        table.add_row("", ProgressBar(total=c.run.steps, completed=b.step, width=60))
        table.add_row(
            "reward",
            f"{b.rewards[-1]:.3f}  {sparkline(b.rewards)}" if b.rewards else "-",
        )
        table.add_row(
            "staleness",
            f"mean {m.get('staleness/head/mean', 0):.2f}   max {m.get('staleness/head/max', 0):.0f}"
            f"   limit {c.buffer.max_staleness}",
        )
        table.add_row(
            "generate",
            f"{b.gen_tok_s():.0f} tok/s   actors {len(b.actors)}/{c.cluster.actors}"
            f"   waiting {share(b.actors_idle())}",
        )
        table.add_row(
            "train",
            f"{m.get('throughput/train_tok_s', 0):.0f} tok/s   ranks {c.cluster.learners}"
            f"   waiting {share(m.get('idle/trainer_frac'))}",
        )
        for label, text in self._buffer_rows():
            table.add_row(label, Text(text))  # quotes users' errors, which are no markup
        for version, evaluation in sorted(b.evals.items()):
            table.add_row(
                f"eval v{version}", f"{evaluation.score:.3f} on {evaluation.prompts} held out"
            )
        return Panel(table, title=Text(self.title), subtitle="Ctrl-C stops in order", expand=True)

    def _buffer_rows(self) -> list[tuple[str, str]]:
        stats = self.board.stats
        if stats is None:
            return [("waits", self.board.phase)]
        gauges, counts = stats.gauges, stats.counts
        waits = stats.waiting_for or "nobody"
        return [
            (
                "buffer",
                f"{gauges.get('queue/depth', 0):.0f} of {gauges.get('queue/capacity', 0):.0f}"
                f" samples queued   {counts.get('leased', 0)} leased",
            ),
            ("waits", waits if self.board.phase == "training" else self.board.phase),
        ]
