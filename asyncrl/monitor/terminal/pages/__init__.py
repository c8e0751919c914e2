"""The pages, in the order of their keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.text import Text

from asyncrl.monitor.terminal.draw import Panel, arrange
from asyncrl.monitor.terminal.pages import learning, overview, texts, work
from asyncrl.monitor.terminal.view import View


class Page(NamedTuple):
    """One page: panels that are arranged, or a text that is wrapped."""

    name: str
    title: str
    panels: Callable[[View], Sequence[Panel]] | None = None
    text: Callable[[View], Text] | None = None
    follows: bool = False
    """Whether its end is what one looks at."""

    def draw(self, view: View) -> Text:
        """The page at the width that is wanted."""
        if self.text is not None:
            return self.text(view)
        assert self.panels is not None
        return arrange(self.panels(view), view.wanted.width)


PAGES = (
    Page("overview", "Overview", overview.overview),
    Page("staleness", "Staleness", learning.staleness),
    Page("pace", "Pace", work.pace),
    Page("buffer", "Buffer", work.buffer),
    Page("weights", "Weights", learning.weights),
    Page("processes", "Processes", work.processes),
    Page("log", "Log", text=texts.log, follows=True),
    Page("samples", "Samples", text=texts.samples),
)
HELP = Page("help", "Help", text=texts.help_)
BY_NAME = {page.name: page for page in (*PAGES, HELP)}
