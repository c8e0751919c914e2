"""The pages of `asyncrl monitor` as text: their values, any width, nothing that moves a cursor."""

import doctest
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from asyncrl.monitor import words
from asyncrl.monitor.reading.history import RunHistory
from asyncrl.monitor.terminal import draw, view, watcher
from asyncrl.monitor.terminal.feed import FolderFeed
from asyncrl.monitor.terminal.pages import BY_NAME, HELP, PAGES, work
from asyncrl.monitor.terminal.pages.overview import FIRST
from asyncrl.monitor.terminal.view import View, Wanted, over_time, shares, spent
from asyncrl.monitor.terminal.watcher import head_of
from tests.monitor.small_run import SmallRun

PANELS = [page.name for page in PAGES if page.panels]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    made = SmallRun(tmp_path_factory.mktemp("runs"))
    made.grow(30)
    return made


def viewed(folder, page, width=79, height=20, **more):
    feed = FolderFeed(folder)
    feed.update()
    return View(feed.history, feed.state(), Wanted(page, width, height), **more)


def drawn(folder, page, width=79, height=20, **more):
    return BY_NAME[page].draw(viewed(folder, page, width, height, **more)).plain


def test_the_examples_hold():
    for module in (draw, view, watcher, words):
        found = doctest.testmod(module)
        assert found.attempted
        assert found.failed == 0


@pytest.mark.parametrize("page", PANELS)
@pytest.mark.parametrize("width", [20, 39, 79, 129, 199, 320])
def test_a_page_fits_its_width(small, tmp_path, page, width):
    empty = SmallRun(tmp_path)
    (tmp_path / "nothing").mkdir()
    for folder in (small.folder, empty.folder, tmp_path / "nothing"):
        lines = drawn(folder, page, width, 56).split("\n")
        assert max(map(cell_len, lines)) <= width
        assert len(lines) > 1 or page == "processes"


def test_the_help_fits_the_smallest_screen():
    assert max(map(len, HELP.draw(None).plain.split("\n"))) <= 79
    assert HELP.draw(None).plain.count("\n") < 20


def test_the_time_that_is_left_is_told_beside_a_long_name():
    feed = SimpleNamespace(name="tiny-20261130-095122-23798")
    state = {"step": 28, "steps": 600, "version": 28, "reward": 0.919, "elapsed_s": 58.0,
             "left_s": 249.0, "over": False, "state": "training", "malformed": 0}  # fmt: skip
    small, large = (head_of(feed, state, width).plain.splitlines()[0] for width in (80, 120))
    assert len(small) <= 80
    assert small.endswith("version 28   reward 0.919   0:58 gone   4:09 left")
    assert small.startswith("tiny-20…2-23798  step")
    assert large.startswith(f"{feed.name}  step")


def row(text, name):
    """The words of the line that begins with a name."""
    return next(line.split() for line in text.split("\n") if line.startswith(name))


def test_values_are_the_run_s(small):
    text = drawn(small.folder, "staleness")
    assert row(text, "head")[1:5] == ["1.00", "-", "2", "2"]
    assert row(text, "actor-0")[1:4] == ["320", "0.50", "1"], "16 samples of each of 20 batches"
    assert row(text, "actor-1")[1:4] == ["320", "1.50", "2"]
    assert [row(text, f"      {k} │")[1][1] for k in (0, 1, 2)] == ["▒", "▓", "▒"]
    text = drawn(small.folder, "weights")
    assert row(text, "all")[1:4] == ["6400", "80.0%", "1.0%"]
    assert row(text, "2 behind")[3] == "70.0%"
    text = drawn(small.folder, "buffer")
    assert row(text, "trained")[1:3] == ["960", "96.0%"]
    assert "the law holds" in text
    assert "learner-0: 1.5 s for the next batch on buffer-0" in text
    text = drawn(small.folder, "overview")
    assert row(text, "reward")[1] == "0.300"
    text = drawn(small.folder, "pace")
    assert "tokens/s generated, responses only  300" in text, "100 and 200"


def test_the_smallest_screen_has_what_matters_most(small):
    advice = [{"kind": "actors", "line": "the actors hold the run up: add some"}]
    first = drawn(small.folder, "overview", advice=advice).split("\n")[:20]
    for wanted in ("reward", "loss", *FIRST, "actors: the"):
        assert any(wanted in line for line in first), wanted


@pytest.mark.parametrize("width", [50, 79, 199])
def test_whom_a_process_waits_for_is_shown_whole(small, width):
    made = viewed(small.folder, "processes", width)
    on = "buffer-0: 12 samples held by actor-1 (lease 812, 41 s) and 4 not leased: admission"
    made.state["roles"][0]["waits"] = [f"41 s for batch 13 on {on}", "2.0 s for a push"]
    text = BY_NAME["processes"].draw(made).plain
    assert f"41 s for batch 13 on {on}" in " ".join(text.split())
    assert "2.0 s for a push" in " ".join(text.split())
    assert max(map(cell_len, text.split("\n"))) <= width


def test_processes_of_a_launcher_that_is_gone_are_not_told_as_alive(small):
    made = viewed(small.folder, "processes")
    made.state["roles"][0] |= {"state": "unknown", "heard_s": 300.2}
    made.state.update(unknown_s=300.0, go_on="asyncrl launch --resume small")
    lines = BY_NAME["processes"].draw(made).plain.split("\n")
    assert lines[0] == "as it was 5:00 ago, when the launcher was last heard of"
    assert lines[1] == "it goes on with: asyncrl launch --resume small"
    assert row("\n".join(lines), "learner-0")[1:5] == ["unknown", "30", "0", "5:00"]
    assert "waited then 1.5 s for the next batch on buffer-0" in lines[4]


@pytest.mark.parametrize(
    ("only", "told"),
    [("", "nothing is recorded yet"), ("trained", "was trained"), ("other", "failed or held")],
)
def test_why_no_sample_is_shown_is_said_of_the_kind_asked_for(only, told):
    empty = View(RunHistory(Path("nowhere")), {}, Wanted("samples", 79, 20, only=only))
    assert told in BY_NAME["samples"].draw(empty).plain


def test_a_law_that_does_not_hold_is_said(small):
    made = viewed(small.folder, "buffer")
    made.state["ledger"]["conserved"] = False
    assert "THE LAW IS BROKEN" in BY_NAME["buffer"].draw(made).plain


def test_the_bar_of_a_process_is_its_time(small):
    lines = work.times(viewed(small.folder, "pace"), 12 + 2 + 2 * 100)
    bars = row("\n".join(line.plain for line in lines), "actor-0")[1:3]
    assert bars == ["S" * 10 + "G" * 60 + "w" * 20 + "." * 10] * 2


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=10), st.integers(1, 200))
def test_a_bar_of_shares_is_full(seconds, width):
    of = dict(zip(draw.LETTERS, seconds, strict=False))
    if shares(of):
        assert len(draw.stacked(shares(of), width)) == width


class Told(RunHistory):
    """A history of pulses (rank, second, metrics) of actors."""

    def __init__(self, folder, pulses):
        run = SmallRun(folder, name="told")
        for rank, wall_s, metrics in pulses:
            run.metrics(metrics, role="actor", rank=rank, wall_s=wall_s)
        super().__init__(run.folder)
        self.update()


def test_time_of_late_is_the_difference_unless_the_process_is_another_one(tmp_path):
    before = {"time/sync_s": 5.0, "time/generate_s": 50.0, "time/eval_s": 3.0}
    later = {"time/sync_s": 6.0, "time/generate_s": 80.0, "time/eval_s": 3.0}
    anew = {"time/sync_s": 2.0, "time/generate_s": 7.0}
    made = Told(tmp_path, [(0, 60, before), (0, 120, later), (1, 60, before), (1, 120, anew)])
    assert spent(made, ("actor", 0)) == {"sync": 6.0, "generate": 80.0, "eval": 3.0}
    assert spent(made, ("actor", 0), 60.0) == {"sync": 1.0, "generate": 30.0, "eval": 0.0}
    for since in (None, 60.0):
        assert spent(made, ("actor", 1), since) == {"sync": 2.0, "generate": 7.0}
    assert spent(made, ("learner", 0)) == {}


def test_rates_are_summed_over_processes_and_not_over_their_records(tmp_path):
    pulses = [(rank, float(s), {"throughput/gen_tok_s": 10.0 * (rank + 1)})
              for rank in range(3) for s in range(20) if rank < 2 or s >= 10]  # fmt: skip
    made = Told(tmp_path, pulses)
    xs, sums = over_time(made, "throughput/gen_tok_s", "actor", 40)
    assert len(xs) == 9
    assert sums == [30.0] * 5 + [60.0] * 4


@settings(max_examples=40)
@given(st.text(max_size=60), st.sampled_from(["prompt", "response", "head"]))
def test_what_others_wrote_moves_no_cursor(text, where):
    sample = {"prompt": "p", "response": "r", "head": "h"} | {where: text}
    entry = {"at": "", "role": "actor-0", "level": "INFO", "logger": "x", "text": text}
    empty = View(RunHistory(Path("nowhere")), {}, Wanted("log", 79, 20), [entry], [sample])
    for page in ("log", "samples"):
        shown = BY_NAME[page].draw(empty).plain
        assert shown.replace("\n", "").isprintable()
    if text.isprintable():
        assert text in BY_NAME["samples"].draw(empty).plain


def test_events_move_no_cursor_either(tmp_path):
    run, frames = SmallRun(tmp_path), []
    run._write("events", {"event": "failed", "why": "a\x1b[2J\nb"}, role="actor", wall_s=1.0)

    def show(frame):
        frames.append(frame)
        watching.stop()

    watching = watcher.Watcher(lambda: FolderFeed(run.folder), "it", 0.0, show)
    watching.run()
    (frame,) = frames
    assert "why a\\x1b[2J\\nb" in frame.body.plain
    assert frame.body.plain.replace("\n", "").isprintable()


def test_a_chart_of_what_is_no_number_draws_the_rest():
    lines = draw.chart("x", [1, 2, 3], [1.0, float("nan"), 3.0], 12, 2)
    assert [line.plain[9:] for line in lines[1:]] == ["  █", "▁ █"]
