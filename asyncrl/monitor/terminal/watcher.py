"""The thread that reads a run and draws what the user looks at; the screen never waits for it.

keys, resizing ──Wanted──► Watcher ──(attach, read, draw; once a second)──► Frame ──► screen
                              │ waits for: a run that is not there yet (until a deadline),
                              └ a disk or a server that does not answer (says for how long)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from rich.text import Text

from asyncrl.errors import UserError
from asyncrl.monitor import words
from asyncrl.monitor.terminal.feed import Feed
from asyncrl.monitor.terminal.pages import BY_NAME
from asyncrl.monitor.terminal.remote import UnreachableError
from asyncrl.monitor.terminal.view import View, Wanted
from asyncrl.monitor.words import clean

EVERY_S = 1.0
SHARE = 0.005
"""Of a core, that it may take in all: beyond it, it draws less often than once a second. What the
user asks for is drawn at once."""
SELDOM_S = 4.0
"""It is never drawn less often than that."""
SILENT_S = 5.0
"""Without news of the launcher, which writes once a second, from here on that is said."""


SHORTEST = 12
"""Columns of a run's name that are shown at least."""


class Frame(NamedTuple):
    """What the screen shows; a body of None is the one before."""

    head: Text
    body: Text | None
    wanted: Wanted
    failed: BaseException | None = None
    """Why there will be no further frame."""


class NotThereError(UserError):
    """The run is not there yet."""


class Watcher(threading.Thread):
    """Reads and draws until `stop`.

    Args:
        attach: finds the run; raises NotThereError while there is none.
        what: that is looked for, in words.
        wait_s: how long for at most.
        show: is given the frames, in this thread.
    """

    def __init__(
        self, attach: Callable[[], Feed], what: str, wait_s: float, show: Callable[[Frame], None]
    ) -> None:
        super().__init__(name="watcher", daemon=True)
        self._attach, self._what, self._wait_s, self._show = attach, what, wait_s, show
        self._wanted = Wanted("overview", 80, 20)
        self._wake, self._ended = threading.Event(), threading.Event()
        self._drawn: tuple[Wanted, int] | None = None
        self._drawn_at = self._read_at = time.monotonic()
        self._spent_s = 0.0
        """Of the process, when it was drawn last."""

    def want(self, wanted: Wanted) -> None:
        """Show something else, at once."""
        self._wanted = wanted
        self._wake.set()

    def stop(self) -> None:
        """End it; it may be in the middle of a reading that never ends."""
        self._ended.set()
        self._wake.set()

    def run(self) -> None:
        """Attach, then look once a second."""
        try:
            feed = self._found()
            while feed is not None and not self._ended.is_set():
                self._wake.clear()
                self._look(feed)
                self._wake.wait(EVERY_S)
        except Exception as e:
            self._show(Frame(Text(str(e)), None, self._wanted, e))

    def _found(self) -> Feed | None:
        deadline = time.monotonic() + self._wait_s
        while not self._ended.is_set():
            try:
                return self._attach()
            except NotThereError as e:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise
                told = f"waiting for {self._what}, for {words.clock(left)} more"
                self._show(Frame(Text(told, "bold"), Text(clean(str(e))), self._wanted))
                self._ended.wait(min(EVERY_S, left))
        return None

    def _look(self, feed: Feed) -> None:
        wanted = self._wanted
        try:
            feed.update()
            state = cleaned(feed.state())
            drawn = self._draw(feed, state, wanted)
        except (UnreachableError, OSError) as e:
            told = f"no news for {words.age(time.monotonic() - self._read_at)}: {clean(str(e))}"
            head = Text.assemble((clean(feed.name), "bold"), "\n", (told, "bold red"))
            self._show(Frame(head, None, wanted))
            return
        self._read_at = time.monotonic()
        self._show(Frame(head_of(feed, state, wanted.width), drawn, wanted))

    def _draw(self, feed: Feed, state: Mapping[str, Any], wanted: Wanted) -> Text | None:
        """The page; None where it may not be drawn again yet, or nothing of it can be new."""
        before = self._drawn
        now, spent_s, page = time.monotonic(), time.process_time(), wanted.page
        asked = before is None or before[0] != wanted
        since_s = now - self._drawn_at
        if not asked and since_s < SELDOM_S and spent_s - self._spent_s > SHARE * since_s:
            return None
        if before == (wanted, feed.revision) and state["over"]:
            return None
        self._drawn_at, self._spent_s = now, spent_s
        view = View(
            feed.history, state, wanted,
            log=feed.log() if page == "log" else (),
            samples=feed.samples(wanted.only) if page == "samples" else (),
            advice=feed.advice() if page == "overview" else (),
        )  # fmt: skip
        self._drawn = (wanted, feed.revision)
        return BY_NAME[page].draw(view)


def cleaned(value: Any) -> Any:
    r"""Plain data with all its text safe in a terminal: events and ends quote what others wrote.

    >>> cleaned({"more": ["a\x1b[2J", 1]})
    {'more': ['a\\x1b[2J', 1]}
    """
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {key: cleaned(item) for key, item in value.items()}
    return [cleaned(item) for item in value] if isinstance(value, list) else value


def shortened(name: str, most: int) -> str:
    """A name of at most `most` characters, its middle left out: runs differ at their ends.

    >>> shortened("tiny-20261130-095122-23798", 14), shortened("tiny", 14)
    ('tiny-20…-23798', 'tiny')
    """
    if len(name) <= most:
        return name
    last = (most - 1) // 2
    return f"{name[: most - 1 - last]}…{name[len(name) - last :]}"


def head_of(feed: Feed, state: Mapping[str, Any], width: int) -> Text:
    """The run in two lines: how far it is, and what it does or why there is no news."""
    steps = "-" if state["step"] is None else f"{state['step']}/{state['steps']}"
    parts = [f"step {steps}"]
    if "version" in state:
        reward = "-" if state["reward"] is None else f"{state['reward']:.3f}"
        parts += [f"version {state['version']}", f"reward {reward}",
                  f"{words.clock(state['elapsed_s'])} gone"]  # fmt: skip
        if state["left_s"] is not None:
            parts.append(f"{words.clock(state['left_s'])} left")
    name, told = clean(feed.name), "   ".join(parts)
    if len(name) + 2 + len(told) > width:
        name = shortened(name, max(width - len(told) - 2, SHORTEST))
    if "version" in state and len(name) + 2 + len(told) > width:
        told = "   ".join(part for part in parts if not part.startswith("version "))
    head = Text.assemble((name, "bold"), f"  {told}", "\n")
    age, stalled = state.get("age_s"), state.get("stalled")
    if state["over"]:
        head.append(state["state"], "bold" if "finished" in state["state"] else "bold red")
    elif age is not None and age > SILENT_S:
        head.append(f"no news for {words.age(age)}: {state['state']}", "bold red")
    elif stalled:
        head.append(f"stalled for {words.age(stalled['for_s'])}: {stalled['why']}", "bold red")
    else:
        head.append(state["state"], "green")
    if state["malformed"]:
        head.append(f"   {state['malformed']} lines cannot be read", "red")
    return head
