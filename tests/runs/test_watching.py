"""What watching a run costs it: next to nothing, whatever becomes of who watches."""

import itertools
import os
import signal

import pytest

from tests.helpers.browser import Browser, needs_chromium
from tests.helpers.run_checks import batches, check_law, reconcile
from tests.helpers.terminal import terminal, walk
from tests.helpers.web_page import plot, served

pytestmark = [pytest.mark.run, pytest.mark.soak, pytest.mark.timeout(1800)]

STEPS = 120


def spent_s(run, since):
    """Processor seconds of all roles after a moment, by their own records."""
    total = 0.0
    lines = [r for role in ("launcher", "buffer", "learner", "actor") for r in run.metrics(role)]
    lines = [r for r in lines if "host/cpu_frac" in r["metrics"] and r["wall_s"] >= since]
    for _, of in itertools.groupby(
        sorted(lines, key=lambda r: (r["role"], r["rank"], r["wall_s"])),
        key=lambda r: (r["role"], r["rank"]),
    ):
        for before, after in itertools.pairwise(of):
            total += after["metrics"]["host/cpu_frac"] * (after["wall_s"] - before["wall_s"])
    return total


@needs_chromium
def test_a_page_costs_less_than_a_hundredth_and_may_hang_or_be_killed(start, tmp_path):
    run = start("--actors", "6", "--learners", "2", f"run.steps={STEPS}")
    run.wait_for_step(3)
    with served(str(run.folder), log=tmp_path / "log") as server, Browser() as browser:
        browser.shape(1280, 900)
        browser.open(server.url)
        browser.wait(f"{plot('reward')}?.data")
        cpu_s, since = server.cpu_s(), run.metrics("launcher")[-1]["wall_s"]
        run.wait_for_step(STEPS // 2)
        share = (server.cpu_s() - cpu_s) / spent_s(run, since)
        server.process.send_signal(signal.SIGSTOP)
        run.wait_for_step(3 * STEPS // 4)
        server.process.kill()
        assert run.wait(900) == 0, run.output
    print(f"the page's server took {share:.2%} of the run's processor time")
    assert share < 0.01
    summary = run.summary()
    assert summary["steps"] == STEPS
    check_law(summary)
    reconcile(run, STEPS, 32)
    assert len(batches(run)) == STEPS
    run.nothing_left()


def test_a_terminal_costs_less_than_a_hundredth_and_may_hang_or_be_killed(start):
    run = start("--actors", "6", "--learners", "2", f"run.steps={STEPS}")
    run.wait_for_step(3)
    with terminal("monitor", str(run.folder)) as screen:
        walk(screen)
        screen.resize(80, 24)
        screen.press("1")
        cpu_s, since = screen.cpu_s(), run.metrics("launcher")[-1]["wall_s"]
        while not any(r["step"] >= STEPS // 2 for r in run.metrics("learner")):
            screen.settle(lambda: None)
        share = (screen.cpu_s() - cpu_s) / spent_s(run, since)
        os.kill(screen.pid, signal.SIGSTOP)
        run.wait_for_step(3 * STEPS // 4)
        os.kill(screen.pid, signal.SIGKILL)
        assert run.wait(900) == 0, run.output
    print(f"the terminal took {share:.2%} of the run's processor time")
    assert share < 0.01
    check_law(run.summary())
    reconcile(run, STEPS, 32)
    run.nothing_left()
