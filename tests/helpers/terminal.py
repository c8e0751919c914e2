"""A program in a real pseudo-terminal, and its screen as text."""

import contextlib
import fcntl
import os
import pty
import select
import struct
import sys
import termios
import time

import psutil
import pyte

KEYS = {"up": "\x1b[A", "down": "\x1b[B", "right": "\x1b[C", "left": "\x1b[D", "end": "\x1b[F",
        "home": "\x1b[H", "pagedown": "\x1b[6~", "pageup": "\x1b[5~", "ctrl+c": "\x03"}  # fmt: skip


class _Screen(pyte.Screen):
    """Answers nothing: what a program asks a terminal about itself is left open."""

    def report_device_status(self, *args, **kwargs):
        pass

    def report_device_attributes(self, *args, **kwargs):
        pass


class Terminal:
    """`asyncrl ...` with a terminal of its own; `close` ends it."""

    def __init__(self, *arguments, columns=80, rows=24, env=None):
        self._screen = _Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = bytearray()
        """All that was written."""
        self.status = None
        """The exit code, once it is over."""
        # These would win over the terminal's real size.
        kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            os.execve(
                sys.executable, [sys.executable, "-m", "asyncrl", *arguments],
                kept | {"TERM": "xterm", "COLORTERM": ""} | (env or {}),
            )  # fmt: skip

    def resize(self, columns, rows):
        """As when somebody drags the window's corner."""
        self._screen.resize(rows, columns)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, *keys):
        """Type keys, by name or as they are."""
        for key in keys:
            os.write(self._fd, KEYS.get(key, key).encode())

    def text(self):
        """The screen now."""
        self._read(0)
        return "\n".join(line.rstrip() for line in self._screen.display)

    def wait(self, condition, what="", timeout_s=60.0):
        """Read on until `condition(text)`, or until it holds a text; the screen then."""
        holds = (lambda text: condition in text) if isinstance(condition, str) else condition
        deadline = time.monotonic() + timeout_s
        while not holds(text := self.text()):
            assert self.status is None, f"it ended ({self.status}):\n{self.raw[-3000:].decode()}"
            assert time.monotonic() < deadline, f"no {what or condition!r}:\n{text}"
            self._read(0.05)
        return text

    def settle(self, meanwhile, for_s=3.0):
        """Read on for a while, with `meanwhile()`; for what is looked at by people."""
        until = time.monotonic() + for_s
        while time.monotonic() < until:
            meanwhile()
            self._read(0.2)

    def end(self, timeout_s=30.0):
        """Its exit code, once it has ended."""
        deadline = time.monotonic() + timeout_s
        while self.status is None:
            assert time.monotonic() < deadline, f"still there:\n{self.text()}"
            self._read(0.05)
        return self.status

    def cpu_s(self):
        """Processor time so far."""
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system

    def _read(self, timeout_s):
        if self.status is not None:
            return
        while select.select([self._fd], [], [], timeout_s)[0]:
            try:
                data = os.read(self._fd, 1 << 16)
            except OSError:  # the other end is closed
                self._reap(0)
                return
            if not data:
                self._reap(0)
                return
            self.raw += data
            self._stream.feed(data)
            timeout_s = 0
        self._reap(os.WNOHANG)

    def _reap(self, how):
        pid, status = os.waitpid(self.pid, how)
        if pid:
            self.status = os.waitstatus_to_exitcode(status)

    def close(self):
        if self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
            self.status = -9
        os.close(self._fd)


@contextlib.contextmanager
def terminal(*arguments, **options):
    made = Terminal(*arguments, **options)
    try:
        yield made
    finally:
        made.close()


PAGES = {
    "1": "samples/s trained", "2": "by actor", "3": "where the time goes",
    "4": "ledger: each dispatch",
    "5": "importance weights by staleness", "6": "heard", "7": "level: all", "8": "prompt",
}  # fmt: skip
"""What each page of `asyncrl monitor` has, by its key."""


def walk(screen):
    """Look at all pages of a run that trains, on a small screen and on a large one."""
    for columns, rows in ((80, 24), (200, 60)):
        screen.resize(columns, rows)
        for key, seen in PAGES.items():
            screen.press(key)

            def drawn(text, seen=seen):
                return seen in text and "? help  q quit" in text.split("\n")[-1]

            text = screen.wait(drawn, f"page {key} with {seen!r} and the keys below")
            assert len(text.split("\n")) == rows
            assert "no lines" not in text


def check_ended(screen, records):
    """The screen of a run that has ended shows what learner rank 0 recorded."""
    last, steps = records[-1]["metrics"], len(records)
    screen.press("1")
    screen.wait("ended: finished")
    screen.wait(f"reward  {last['reward/mean']:.3f}")
    assert f"step {steps}/{steps}" in screen.text()
    screen.press("2")
    text = screen.wait("by actor")
    head = next(line for line in text.split("\n") if " head " in f" {line}" and "bounded" in line)
    shown = head[head.index("head") :].split()
    assert shown[1:2] == [f"{last['staleness/head/mean']:.2f}"]
    assert shown[4:5] == [f"{last['staleness/head/max']:.0f}"]
    screen.press("5")
    screen.wait(f"effective sample size  {last['is/ess_frac']:.3f}")
    screen.press("q")
    assert screen.end() == 0
