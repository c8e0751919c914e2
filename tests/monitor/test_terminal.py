"""`asyncrl monitor` in a real pseudo-terminal: screens, keys, runs that come late, go or hang.

The screens are kept in snapshots/; with ASYNCRL_SNAPSHOTS=write they are written anew.
"""

import os
import signal
from pathlib import Path

import pytest

from asyncrl.__main__ import main
from tests.helpers.terminal import terminal
from tests.helpers.web_page import served
from tests.monitor.small_run import SmallRun

pytestmark = pytest.mark.timeout(180)

SNAPSHOTS = Path(__file__).parent / "snapshots"
WRITE = os.environ.get("ASYNCRL_SNAPSHOTS") == "write"
SIZES = ((80, 24), (200, 60))
LINE = "2026-11-30T08:00:04.000Z INFO asyncrl.actors.worker: line {}.\n"
LOG = (
    "2026-11-30T08:00:02.000Z INFO asyncrl.actors.worker: begins\n"
    "2026-11-30T08:00:03.000Z WARNING asyncrl.actors.worker: \x1b[2J\x1b]0;title\x07 is cleaned\n"
)


@pytest.fixture
def small(tmp_path, monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    run = SmallRun(tmp_path / "runs")
    run.grow(12)
    (run.folder / "logs" / "actor-0.log").write_text(LOG)
    return run


def check(screen, name, run):
    """The screen comes to be the one that is kept; `run` stays alive meanwhile."""
    path = SNAPSHOTS / f"{name}.txt"

    def same(text):
        run.status()
        return text + "\n" == path.read_text()

    if WRITE:
        screen.settle(run.status)
        path.write_text(screen.text() + "\n")
    screen.wait(same, f"screen {name}", timeout_s=30)


def test_every_page_on_a_small_and_a_large_screen(small):
    pages = ("overview", "staleness", "pace", "buffer", "weights", "processes", "help")
    with terminal("monitor", "small", "--dir", str(small.folder.parent)) as screen:
        for columns, rows in SIZES:
            screen.resize(columns, rows)
            for key, page in zip("123456?", pages, strict=True):
                screen.press(key)
                check(screen, f"{page}-{columns}x{rows}", small)
            screen.press("?")
            check(screen, f"processes-{columns}x{rows}", small)

        screen.press("7")
        text = screen.wait("is cleaned")
        assert "actor-0    WARNING actors.worker: \\x1b[2J\\x1b]0;title\\x07 is cleaned" in text
        assert b"title\x07" not in screen.raw
        screen.press("l")
        screen.wait(lambda text: "begins" not in text and "level: warnings" in text, "warnings")
        screen.press("8")
        screen.wait("nothing is recorded yet")
        screen.press("o", "o")
        screen.wait("those not trained")

        screen.press("1")
        small.grow(3)
        screen.wait(lambda text: "step 15/100" in text and "reward  0.150" in text, "step 15")
        small.status(ago_s=40)
        screen.wait("no news for 4")
        small.status("ended")
        screen.wait("ended, without a summary")
        screen.press("q")
        assert screen.end() == 0
        assert b"\x1b[?1049l" in screen.raw[-200:], "the terminal is given back"


def test_what_does_not_fit_is_scrolled_to(small):
    with terminal("monitor", str(small.folder), rows=20) as screen:
        screen.wait("training")
        assert "seconds in all" not in screen.text()
        screen.press("end")
        screen.wait("last events")
        screen.press("home")
        screen.wait("reward  0.120")
        screen.press("pagedown")
        screen.wait(lambda text: "reward  0.120" not in text and "figures" in text, "further down")
        screen.press("right")
        screen.wait("samples by head staleness")
        screen.press("left", "left")
        screen.wait("the last samples")
        log = small.folder / "logs" / "actor-0.log"
        log.write_text("".join(LINE.format(k) for k in range(60)))
        screen.press("7")
        screen.wait("line 59.")
        with log.open("a") as file:
            file.write(LINE.format(60))
        screen.wait("line 60.")
        screen.press("home")
        screen.wait("line 0.")
        with log.open("a") as file:
            file.write("".join(LINE.format(k) for k in range(61, 500)))
        screen.wait("line 100.", "the first of those that are kept")
        small.grow(1)
        assert "line 100." in screen.wait("step 13/100"), "one who reads there stays there"
        screen.press("end")
        screen.wait("line 499.")
        os.kill(screen.pid, signal.SIGTERM)
        assert screen.end() == 0
        assert b"\x1b[?1049l" in screen.raw[-200:]


def test_a_run_that_begins_later_is_waited_for_until_a_deadline(small, tmp_path):
    runs = str(tmp_path / "runs")
    with terminal("monitor", "smal", "--dir", runs, "--wait", "100") as screen:
        text = screen.wait("waiting for run smal, for 1:")
        assert "did you mean small?" in text.replace("\n", " ")
        SmallRun(tmp_path / "runs", name="smal")
        screen.wait("step 0/100")
        screen.press("ctrl+c")
        assert screen.end() == 0
    with terminal("monitor", "nobody", "--dir", runs, "--wait", "0.1") as screen:
        assert screen.end() == 2
        assert "no run nobody" in screen.text()


def test_a_run_elsewhere_is_watched_through_its_page(small, tmp_path):
    with served("small", "--dir", str(tmp_path / "runs"), log=tmp_path / "log") as server:
        with terminal("monitor", server.url.replace("token=", "token=x")) as screen:
            assert screen.end() == 2
            assert "refuses the token" in screen.text()
        with terminal("monitor", server.url) as screen:
            for key, page in (("1", "overview"), ("2", "staleness"), ("4", "buffer")):
                screen.press(key)
                check(screen, f"{page}-80x24", small)
            screen.press("7")
            screen.wait("is cleaned")
            screen.press("1")
            small.grow(1)
            screen.wait("reward  0.130")
            server.end()
            screen.wait("cannot be reached")
            assert "reward  0.130" in screen.text(), "what was read stays"
            screen.press("q")
            assert screen.end() == 0


def test_it_needs_a_terminal_and_one_run(small, capsys):
    assert main(["monitor", str(small.folder)]) == 2
    assert "needs a terminal" in capsys.readouterr().err
    assert main(["monitor", "one", "two"]) == 2
    assert "compare them with --web" in capsys.readouterr().err
