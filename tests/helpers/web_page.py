"""`asyncrl monitor --web` as a process, and its page in a browser, against the run's own files."""

import contextlib
import signal
import subprocess
import sys

import psutil

from tests.helpers.browser import CHROMIUM, Browser
from tests.helpers.eventually import eventually

HIGH = 16_000
"""Pixels: all figures are in view."""
ALL = """[...document.querySelectorAll('.card .plot')].filter(p => p.data).flatMap(
    p => p.data.map(t => [p.closest('.card').dataset.figure, t.meta ?? '', t.x, t.y, t.z]))"""
LEAST = {"reward/mean", "loss/policy", "staleness/head/mean", "staleness/head", "staleness/limit",
         "is/ess_frac", "is/ratio_raw", "sync/total_s", "queue/get_wait_s"}  # fmt: skip
"""Metrics that are drawn of any run."""


class Served:
    """The server; `url` has its token."""

    def __init__(self, *arguments, log):
        self._log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "asyncrl", "monitor", "--web", *arguments],
                stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        eventually(self.lines, "it prints its URL", timeout_s=60)
        self.url = self.lines()[0]

    def lines(self):
        """What it has printed so far."""
        assert self.process.poll() is None, self._log.read_text()
        return self._log.read_text().split("\n")[:-1]

    def cpu_s(self):
        """Processor time so far."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def end(self):
        """Ask it to end, as Ctrl-C in its terminal would; its exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(20)

    def close(self):
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def served(*arguments, log):
    server = Served(*arguments, log=log)
    try:
        yield server
    finally:
        server.close()


def plot(name):
    """A figure's element, in JavaScript."""
    return f"document.querySelector('[data-figure={name}] .plot')"


def drawn(browser, name):
    """[name, x, y, z] of what Plotly shows in a card."""
    browser.wait(plot(name))
    browser.js(f"{plot(name)}.scrollIntoView()")
    browser.wait(f"{plot(name)}.data")
    return browser.js(f"{plot(name)}.data.map(t => [t.name, t.x, t.y, t.z])")


class Page:
    """A page of one run, all of it in view, over steps."""

    def __init__(self, browser, server):
        self.browser, self.server = browser, server

    def check(self, records):
        """Once the run is over: everything that is drawn of learner rank 0 is what it recorded."""
        browser, wanted = self.browser, expected(records)
        browser.wait("document.getElementById('live').textContent === 'ended'")

        def wrong():
            self.look()
            found = drawn_of(browser, wanted)
            assert found.keys() >= LEAST
            return {m: (found[m], wanted[m]) for m in found if found[m] != wanted[m]}

        # What was costly to draw is not drawn again at once.
        eventually(lambda: not wrong(), lambda: str(wrong())[:2000], timeout_s=90)
        browser.wait("document.querySelectorAll('#samples .sample').length > 3")
        browser.wait("document.querySelectorAll('#log div').length > 3")
        assert "batch" in browser.js("document.querySelector('#samples .sample').innerText")
        assert browser.errors == []

    def look(self):
        """Have the page ask for what is new now, and wait until it has it."""
        ticks = "Number(document.documentElement.dataset.ticks ?? 0)"
        before = self.browser.js(ticks)
        self.browser.js("document.dispatchEvent(new Event('visibilitychange'))")
        self.browser.wait(f"{ticks} > {before}")


class Unseen:
    """Where there is no Chromium; tests/monitor/test_web_page.py says so."""

    def check(self, records):
        pass


@contextlib.contextmanager
def watched(run, log):
    """A Page of a run."""
    if CHROMIUM is None:
        yield Unseen()
        return
    with served(str(run.folder), log=log) as server, Browser() as browser:
        browser.shape(1280, HIGH)
        browser.open(server.url)
        browser.wait(f"{plot('reward')}?.data", timeout_s=60)
        yield Page(browser, server)


def expected(records):
    """What of these records is to be seen: by metric, values by step; of histograms, shares.

    Args:
        records: of learner rank 0, one a batch.
    """
    found = {}
    for r in records:
        for metric, value in r["metrics"].items():
            found.setdefault(metric, {})[r["step"]] = value
        for metric, hist in r["hist"].items():
            whole = sum(hist["counts"])
            found.setdefault(metric, {})[r["step"]] = [n / whole for n in hist["counts"] if n]
    return {metric: by_step for metric, by_step in found.items() if not metric.startswith("time/")}


def drawn_of(browser, wanted):
    """The same, as Plotly has it: of these metrics those that are drawn, as the learner's."""
    found = {}
    for figure, metric, x, y, z in browser.js(ALL):
        if metric not in wanted or figure == "pauses":  # the actors' own
            continue
        if z is None:
            found[metric] = dict(zip(x, y, strict=True))
        else:
            found[metric] = {at: [n for n in row if n] for at, row in zip(x, z, strict=True)}
    return found
