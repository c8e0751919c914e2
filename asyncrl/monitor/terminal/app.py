"""The screen of `asyncrl monitor`: two lines of the run, the pages, one of them, the keys."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.events import Resize
from textual.message import Message
from textual.widgets import Static

from asyncrl.monitor import words
from asyncrl.monitor.terminal.feed import Feed
from asyncrl.monitor.terminal.pages import BY_NAME, PAGES
from asyncrl.monitor.terminal.view import Wanted
from asyncrl.monitor.terminal.watcher import EVERY_S, Frame, Watcher

LEVELS = {"DEBUG": "all", "WARNING": "warnings", "ERROR": "errors"}
KINDS = {"": "all", "trained": "trained", "other": "not trained"}
LATE_S = 5.0
"""Without a frame for this long, what is read does not answer: said on the screen."""
AROUND = 4
"""Rows that are not the page's."""


class Arrived(Message):
    """A frame, from the watcher's thread."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self.frame = frame


class MonitorApp(App[None]):
    """Shows what a Watcher draws.

    Args:
        attach: finds the run; raises NotThereError while there is none.
        what: that is looked for, in words.
        wait_s: how long for at most.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head { height: 2; text-wrap: nowrap; text-overflow: ellipsis; }
    #tabs, #keys { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
    #scroll { height: 1fr; scrollbar-size-vertical: 1; scrollbar-gutter: stable; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(k), f"page('{p.name}')") for k, p in enumerate(PAGES, start=1)),
        Binding("question_mark", "help"),
        Binding("escape", "page('overview')"),
        Binding("right,tab", "turn(1)", priority=True),
        Binding("left,shift+tab", "turn(-1)", priority=True),
        Binding("l", "level"),
        Binding("o", "only"),
        Binding("q,ctrl+c", "quit", priority=True),
    ]

    def __init__(self, attach: Callable[[], Feed], what: str, wait_s: float) -> None:
        super().__init__()
        self.theme = "ansi-dark"  # the terminal's own colours, whichever these are
        self.animation_level = "none"
        self.failed: BaseException | None = None
        """Why it ended, unless the user ended it."""
        self._watcher = Watcher(attach, what, wait_s, self._arrived)
        self._wanted = Wanted(PAGES[0].name, 80, 20)
        self._back = PAGES[0].name
        self._shown: tuple[str, Text] = ("", Text())
        self._head = Text()
        self._arrived_at = time.monotonic()

    def compose(self) -> ComposeResult:
        """From above to below."""
        yield Static(id="head")
        yield Static(id="tabs")
        with VerticalScroll(id="scroll"):
            yield Static(id="body")
        yield Static(id="keys")

    def on_mount(self) -> None:
        """Begin to watch."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)
        self.query_one("#scroll").focus()
        self._want(width=self.size.width - 1, height=self.size.height - AROUND)
        self.set_interval(EVERY_S, self._tick)
        self._watcher.start()

    def on_unmount(self) -> None:
        """End watching."""
        self._watcher.stop()

    def on_resize(self, event: Resize) -> None:
        """Draw for the new size."""
        self._want(width=event.size.width - 1, height=event.size.height - AROUND)

    # --- what comes --------------------------------------------------------------------------

    def _arrived(self, frame: Frame) -> None:
        """From the watcher's thread."""
        self.post_message(Arrived(frame))

    def on_arrived(self, message: Arrived) -> None:
        """Show a frame; its body, if it is of what is looked at now."""
        frame = message.frame
        if frame.failed is not None:
            self.failed = frame.failed
            self.exit()
            return
        self._arrived_at = time.monotonic()
        self._set_head(frame.head)
        if frame.body is not None and frame.wanted == self._wanted:
            self._show(frame.wanted.page, frame.body)

    def _show(self, page: str, body: Text) -> None:
        before, text = self._shown
        if before == page and text == body:
            return
        scroll = self.query_one("#scroll", VerticalScroll)
        at_end = scroll.scroll_offset.y >= scroll.max_scroll_y
        # Finding out how high it is costs most; lines of a page with panels are never wrapped.
        same = before == page and BY_NAME[page].panels is not None
        grown = not same or body.plain.count("\n") != text.plain.count("\n")
        self.query_one("#body", Static).update(body, layout=grown)
        self._shown = (page, body)
        if BY_NAME[page].follows and (at_end or before != page):
            scroll.scroll_end(animate=False)
        elif before != page:
            scroll.scroll_home(animate=False)

    def _set_head(self, head: Text) -> None:
        if head != self._head:
            self._head = head
            self.query_one("#head", Static).update(head, layout=False)

    def _tick(self) -> None:
        late = time.monotonic() - self._arrived_at
        if late > LATE_S:
            first = self._head.plain.partition("\n")[0]
            told = f"no news for {words.age(late)}: what is read does not answer"
            self._set_head(Text.assemble(first, "\n", (told, "bold red")))

    # --- keys --------------------------------------------------------------------------------

    def action_page(self, name: str) -> None:
        """Show a page."""
        self._want(page=name)

    def action_help(self) -> None:
        """Show the keys, or go back."""
        if self._wanted.page == "help":
            self._want(page=self._back)
        else:
            self._back = self._wanted.page
            self._want(page="help")

    def action_turn(self, by: int) -> None:
        """Show the next page, or the one before."""
        names = [p.name for p in PAGES]
        at = names.index(self._wanted.page) if self._wanted.page in names else -max(by, 0)
        self._want(page=names[(at + by) % len(names)])

    def action_level(self) -> None:
        """Show graver log lines only, or all again."""
        if self._wanted.page == "log":
            self._want(level=_next(LEVELS, self._wanted.level))

    def action_only(self) -> None:
        """Show samples of another kind."""
        if self._wanted.page == "samples":
            self._want(only=_next(KINDS, self._wanted.only))

    def _want(self, **changed: object) -> None:
        wanted = self._wanted._replace(**changed)  # type: ignore[arg-type]
        self._wanted = wanted
        self.query_one("#tabs", Static).update(tabs(wanted.page, wanted.width + 1), layout=False)
        self.query_one("#keys", Static).update(keys(wanted), layout=False)
        self._watcher.want(wanted)


def tabs(page: str, width: int) -> Text:
    """The pages with their keys, the one that is shown in reverse."""
    space = "  " if width >= 100 else " "
    made = Text()
    for k, p in enumerate(PAGES, start=1):
        made.append(f"{k}{space[1:]}{p.title}", "reverse" if p.name == page else "")
        made.append(space)
    made.rstrip()
    return made


def keys(wanted: Wanted) -> Text:
    """The keys that do something here."""
    found = [("?", "help"), ("q", "quit"), ("1-8 ←→", "pages"), ("↑↓ PgUp PgDn", "scroll")]
    if wanted.page == "log":
        found.append(("l", f"level: {LEVELS[wanted.level]}"))
    if wanted.page == "samples":
        found.append(("o", f"shown: {KINDS[wanted.only]}"))
    return Text("  ").join(Text.assemble((key, "bold"), f" {does}") for key, does in found)


def _next(of: dict[str, str], now: str) -> str:
    names = list(of)
    return names[(names.index(now) + 1) % len(names)]


def show(attach: Callable[[], Feed], what: str, wait_s: float) -> None:
    """Show a run until the user quits.

    Raises:
        UserError: the run did not come, or cannot be read.
    """
    app = MonitorApp(attach, what, wait_s)
    with contextlib.suppress(KeyboardInterrupt):
        app.run(mouse=False)
    if app.failed is not None:
        raise app.failed
