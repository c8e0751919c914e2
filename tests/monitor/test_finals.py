"""Figures of a whole run, and the clocks that they divide by."""

from __future__ import annotations

import doctest
import json
import random
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.monitor.board import Board
from asyncrl.monitor.figures import work
from asyncrl.monitor.reading import clock, totals
from asyncrl.monitor.reading.clock import RunClock
from asyncrl.monitor.reading.finals import finals
from asyncrl.monitor.reading.history import RunHistory
from asyncrl.monitor.report.compare import load
from asyncrl.monitor.summary import summary_of
from asyncrl.types import Version
from tests.monitor.small_run import SmallRun

SAMPLES, TOKENS = 32, 640


class TwoLaunches(SmallRun):
    """A run that is stopped at second 20 and resumed: the second launch's clock begins there.

    32 samples and 640 tokens a batch, of which the first took 2 s, the second 6, each later one 3.
    One actor makes 100 tokens/s from second 4 of each launch on.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, name="two", actors=1)
        (self.folder / "events.jsonl").write_text("")
        self.launch(0.0, began=10.0, took=[2.0, 6.0])
        self.incarnation = 1
        self.launch(20.0, began=31.0, took=[3.0, 3.0])

    def launch(self, at: float, *, began: float, took: list[float]) -> None:
        self._write("events", {"event": "launch", "began_s": at}, role="launcher", wall_s=at + 3)
        self._write("events", {"event": "startup", "phase": "first_batch", "seconds": 1.0},
                    role="learner", wall_s=began)  # fmt: skip
        for second in range(4, 20):
            spent = {"time/generate_s": 0.75 * second, "time/get_wait_s": 0.25 * second}
            self.metrics({"actor/generated_tokens": 100.0 * (second - 4)} | spent,
                         role="actor", wall_s=at + second)  # fmt: skip
        for seconds in took:
            self.step, began = self.step + 1, began + seconds
            # The first rate of a launch counts from when it was ready, 5 s earlier.
            seconds += 5.0 if seconds == took[0] and self.step % 2 else 0.0
            self.metrics(
                {"loss/tokens": 300.0 * self.step, "is/ess_frac": 1.0 / self.step,
                 "throughput/batch_s": seconds, "throughput/samples_s": SAMPLES / seconds,
                 "throughput/train_tok_s": TOKENS / seconds, "queue/get_wait_s": 0.5},
                role="learner", wall_s=began,
            )  # fmt: skip
        self.metrics({"host/rss_bytes": 1.0}, role="launcher", wall_s=at + 20)


def told(folder: Path) -> dict[str, float | None]:
    history = RunHistory(folder)
    history.update()
    return {f.label: f.value for f in finals(history)}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for name in ("metrics.jsonl", "events.jsonl")
        for line in (folder / name).read_text().splitlines()
    ]


def test_rates_are_work_over_the_time_in_which_launches_trained(tmp_path: Path) -> None:
    found = told(TwoLaunches(tmp_path).folder)
    assert found["samples/s trained"] == pytest.approx(4 * SAMPLES / 14), "8 s and 6 s"
    assert found["tokens/s trained (+ prompts)"] == pytest.approx(4 * TOKENS / 14)
    assert found["tokens/s generated"] == pytest.approx(100.0), "neither gap nor start is in it"
    assert found["actors wait"] == pytest.approx(0.25)
    assert found["first step after, s"] == 14.0, "from the second launch's command"
    assert found["seconds in all"] == 40.0
    assert found["effective samples"] == pytest.approx(4 / 10), "each batch by its tokens"


def test_every_display_of_a_run_has_the_same_clocks(tmp_path: Path) -> None:
    run = TwoLaunches(tmp_path)
    found = told(run.folder)
    before = [
        line for line in lines(run.folder) if line["wall_s"] <= 20 and not line["incarnation"]
    ]
    board = Board(Config(), lived_s=20.0)
    board.remember(before, step=2, version=Version(1, 2))
    for line in lines(run.folder):
        if line not in before:
            event = {k: line[k] for k in ("event", "began_s", "phase", "seconds") if k in line}
            live = {"metrics": line.get("metrics", {}), "event": event or None, "waits": None}
            board.write({k: line[k] for k in ("role", "rank", "step", "version", "incarnation",
                                              "wall_s")} | live)  # fmt: skip
    summary = summary_of(board, None, "finished", "two-1", "")
    assert summary["samples_s"] == found["samples/s trained"]
    assert summary["first_step_s"] == found["first step after, s"]
    assert summary["training_s"] == 14.0
    assert summary["total_s"] >= 20.0, "former launches included"
    board.write({"role": "launcher", "rank": 0, "step": 4, "version": 4, "incarnation": 1,
                 "wall_s": 40.0, "metrics": {}, "event": {"event": "ended"}})  # fmt: skip
    assert board.elapsed_s() == found["seconds in all"], "it stands still"


def test_the_order_of_the_two_files_does_not_matter(tmp_path: Path) -> None:
    told = lines(TwoLaunches(tmp_path).folder)
    found = set()
    for seed in range(5):
        read = RunClock()
        events = [line for line in told if "event" in line]
        random.Random(seed).shuffle(events)
        metrics = [line for line in told if "event" not in line]
        for line in (*metrics, *events) if seed % 2 else (*events, *metrics):
            read.write(line)
        found.add((read.training_s, read.samples_s, read.first_step_s, read.elapsed_s))
    assert len(found) == 1


def test_a_piece_between_two_launches_is_as_long_as_its_training(tmp_path: Path) -> None:
    runs = load([TwoLaunches(tmp_path).folder])
    (generated,) = (
        t for t in work.tokens(runs, "step")["data"] if t["name"].startswith("generated")
    )
    assert generated["y"] == pytest.approx([100.0, 100.0, 100.0])
    over_time = work.tokens(runs, "wall_s")["data"][0]
    assert 0.0 in over_time["y"], "on the axis of time the start of a launch is a start"


def test_readings_told_in_the_other_order_are_no_restart(tmp_path: Path) -> None:
    run = SmallRun(tmp_path)
    for second, spent in enumerate((90.0, 90.5, 90.4, 91.0, 2.0, 3.0)):
        run.metrics({"time/train_s": spent}, role="learner", wall_s=float(second))
    history = RunHistory(run.folder)
    history.update()
    _, lived = totals.total(history, "time/train_s", ("learner", 0))
    assert lived.tolist() == pytest.approx([90.0, 90.5, 90.5, 91.1, 93.1, 94.1])


def test_the_examples_hold() -> None:
    for module in (clock, totals):
        found = doctest.testmod(module)
        assert (bool(found.attempted), found.failed) == (True, 0)


def test_an_older_run_says_its_pace_from_its_second_batch_on(tmp_path: Path) -> None:
    run = SmallRun(tmp_path)
    run.grow(5)
    found = told(run.folder)
    assert found["tokens/s trained (+ prompts)"] == 300.0
    assert found["first step after, s"] == 12.0


@pytest.mark.parametrize("damaged", [{"wall_s": "soon"}, {"wall_s": None}, {"began_s": []}])
def test_a_damaged_line_harms_no_clock(damaged: dict[str, Any]) -> None:
    read = RunClock()
    read.write({"role": "launcher", "rank": 0, "event": "launch", "wall_s": 1.0} | damaged)
    assert read.launches()[0] in (0.0, 1.0)
    assert read.training_s is None


def glossary() -> set[str]:
    """First columns of docs/monitoring.md, words and fields one by one."""
    text = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
    rows = re.findall(r"^\| (.+?) \|", text[text.index("## Words") : text.index("## Advice")], re.M)
    return {*rows, *(name for row in rows for name in re.findall(r"`(\w+)`", row))}


def test_every_headline_is_in_the_glossary(tmp_path: Path) -> None:
    page = files("asyncrl.monitor.web").joinpath("static", "panels.js").read_text()
    tiles = set(re.findall(r'tile\("([^"]+)"', page)) | {"time", "time gone"}
    assert '? "time" : "time gone"' in page
    headlines = {f.label for f in finals(RunHistory(tmp_path))}
    fields = set(summary_of(Board(Config()), None, "", "", ""))
    known = glossary()
    assert (headlines | tiles | fields) - known == set()
    assert {"requeued", "behind", "waiting", "left"} <= known


def test_actors_that_came_and_went_count_by_what_they_made(tmp_path: Path) -> None:
    # One after the other, 100 tokens a second each: together that is no more.
    run = SmallRun(tmp_path)
    for second in range(40):
        made = {"actor/generated_tokens": 100.0 * (second % 20)}
        run.metrics(made, role="actor", rank=second // 20, wall_s=float(second))
    for step in (1, 2):
        run.step += 1
        run.batch(39.0 * (step - 1))
    assert told(run.folder)["tokens/s generated"] == (1900 + 1900) / 39
