"""Figures say what the records say."""

import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.metrics import STATES
from asyncrl.monitor.figures import heat, kit, learning, staleness, work
from asyncrl.monitor.figures.catalogue import BY_NAME, FIGURES
from asyncrl.monitor.figures.themes import HUES, template
from asyncrl.monitor.reading import totals
from asyncrl.monitor.report.compare import load
from tests.helpers.metric_names import undocumented
from tests.monitor.small_run import SmallRun

AXES = ("step", "version", "wall_s")
FIGURES_FOLDER = Path(kit.__file__).parent


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    run = SmallRun(tmp_path_factory.mktemp("runs"))
    run.grow(10)
    run.metrics({"eval/sums/score": 0.25, "eval/sums/prompts": 8.0}, role="launcher", wall_s=30.5,
                version=10)  # fmt: skip
    run.metrics({"eval/sums/score": 0.125}, role="launcher", wall_s=31, version=0)
    return load([run.folder])


def named(figure):
    return {trace["name"]: trace for trace in figure["data"]}


def test_lines_have_the_values_of_the_records_on_each_axis(small):
    for axis, first in (("step", 1.0), ("version", 0.0), ("wall_s", 12.0)):
        reward = named(learning.reward(small, axis))["reward"]
        assert reward["y"] == [s / 100 for s in range(1, 11)]
        assert reward["x"][0] == first
    scores = named(learning.reward(small, "step"))["held out: sums"]
    assert (scores["x"], scores["y"]) == ([0.0, 10.0], [0.125, 0.25])
    head = named(staleness.head(small, "step"))
    assert {n: t["y"][-1] for n, t in head.items()} == {
        "mean": 1.0, "95 %": 2.0, "max": 2.0, "limit": 2.0
    }  # fmt: skip
    assert [t["y"][0] for t in staleness.ess(small, "step")["data"]] == [0.8, 0.9, 0.8, 0.7]


def test_what_the_page_never_smooths_is_in_the_catalogue():
    page = files("asyncrl.monitor.web").joinpath("static", "page.js").read_text()
    named_there = re.findall(r'"(\w+)"', re.search(r"RAW = new Set\(\[(.+?)\]\)", page)[1])
    assert named_there
    assert set(named_there) <= BY_NAME.keys()


def test_no_engine_seems_ahead_of_training(small):
    for axis in AXES:
        found = named(learning.version(small, axis))
        (name,) = (n for n in found if n.startswith("learner"))
        learner = dict(zip(found[name]["x"], found[name]["y"], strict=True))
        expected = range(10) if axis == "version" else range(1, 11)
        assert list(learner.values()) == list(expected)
        if axis == "wall_s":
            continue
        for actor in ("actor-0", "actor-1"):
            at = dict(zip(found[actor]["x"], found[actor]["y"], strict=True))
            assert all(at[x] <= learner[x] for x in at.keys() & learner.keys())


def test_heat_maps_are_shares_of_each_batch(small):
    drawn = heat.staleness(small, "step")["data"][0]
    assert (drawn["y"], drawn["x"]) == (["0", "1", "2"], [float(s) for s in range(1, 11)])
    assert drawn["z"] == [[0.25, 0.5, 0.25]] * 10
    assert heat.ratio(small, "step")["data"][0]["y"] == ["0.5 to 1", "1 to 2"]
    idle = heat.idle(small, "wall_s")["data"][0]
    assert idle["y"] == ["actor-0", "actor-1"]
    assert idle["z"][0][-2] == pytest.approx(0.3)
    by_actor = named(staleness.by_actor(small, "step"))
    assert by_actor["2 behind"]["x"][1] == pytest.approx(8 / 20)


def test_rates_and_shares_are_those_of_the_totals(small):
    tokens = named(work.tokens(small, "step"))
    assert tokens["generated, responses only"]["y"][2:-1] == pytest.approx([300.0] * 6)
    assert tokens["used"]["y"] == pytest.approx([160.0] * 9)
    samples = named(work.samples(small, "wall_s"))
    middle = [y for x, y in zip(samples["trained"]["x"], samples["trained"]["y"], strict=True)
              if 14 <= x <= 28]  # fmt: skip
    assert middle == pytest.approx([16.0] * len(middle))
    assert len(middle) > 5
    shares = named(work.actors(small, "step"))
    assert shares["generate"]["y"][3] == pytest.approx(0.6)
    columns = zip(*(t["y"] for t in shares.values()), strict=True)
    assert [sum(column) for column in columns] == pytest.approx([1.0] * 9)
    lives = named(work.processes(small, "step"))
    assert dict(zip(lives["train"]["y"], lives["train"]["x"], strict=True))["learner-0"] == (
        pytest.approx(0.9)
    )


def test_a_restarted_process_loses_no_work(tmp_path):
    run = SmallRun(tmp_path, actors=1)
    for second, tokens in enumerate((100.0, 200.0, 50.0, 150.0)):
        run.metrics({"actor/generated_tokens": tokens}, role="actor", wall_s=second)
    t, c = totals.total(load([run.folder])[0].history, "actor/generated_tokens", ("actor", 0))
    assert (t.tolist(), c.tolist()) == ([0, 1, 2, 3], [100, 200, 250, 350])


def test_what_a_process_did_before_its_first_record_counts(tmp_path):
    run = SmallRun(tmp_path, actors=1)
    for second, tokens in ((3.0, 300.0), (4.0, 400.0)):
        run.metrics({"actor/generated_tokens": tokens}, role="actor", wall_s=second)
    history = load([run.folder])[0].history
    times = np.array([0.0, 3.0, 4.0])
    grown = totals.gained(history, ["actor/generated_tokens"], [("actor", 0)], times)
    assert grown.tolist() == [300, 100]


def test_several_runs_are_told_apart(small, tmp_path):
    other = SmallRun(tmp_path, name="other")
    other.grow(3)
    both = [*small, *load([other.folder])]
    reward = named(learning.reward(both, "step"))
    assert reward["small: reward"]["line"]["color"] != reward["other: reward"]["line"]["color"]
    assert len(reward["other: reward"]["x"]) == 3


def test_more_runs_than_colours_are_drawn(small):
    many = small * (len(HUES) + 1)
    assert all(entry.draw(many, "step") for entry in FIGURES if entry.draw(small, "step"))


@pytest.mark.parametrize("axis", AXES)
def test_every_figure_is_one_to_plotly_and_speaks_of_documented_metrics(small, axis):
    import plotly.graph_objects as go

    drawn = {entry.name: entry.draw(small, axis) for entry in FIGURES}
    assert {name for name, figure in drawn.items() if figure is None} == {
        "device_memory", "devices", "length", "masked", "pauses", "quantiles", "replay"
    }  # fmt: skip
    for figure in drawn.values():
        if figure is not None:
            go.Figure(figure)  # refuses unknown attributes and values
    go.Figure(layout={"template": template("dark")})


def test_no_figure_asks_for_a_metric_that_nobody_writes():
    text = "".join(path.read_text() for path in FIGURES_FOLDER.glob("*.py"))
    areas = "staleness|is|kl|loss|sync|queue|samples|reward|rollout|throughput|replay|actor|host"
    names = set(re.findall(rf'"((?:{areas})/[a-z0-9_/]+)"', text))
    assert len(names) > 50
    histograms, unit = {"staleness/head", "staleness/token", "is/ratio_raw"}, {"samples/s"}
    beginning = {"is/by_staleness/"}
    assert undocumented(names - histograms - unit - beginning) == []


def test_a_run_without_records_has_no_figures(tmp_path):
    run = load([SmallRun(tmp_path).folder])
    assert [e.name for e in FIGURES for axis in AXES if e.draw(run, axis) is not None] == []


@given(st.lists(st.floats(-1e6, 1e6), max_size=300), st.integers(4, 40))
def test_thinning_keeps_peaks_and_order_and_what_was_drawn(values, most):
    xs = [float(k) for k in range(len(values))]
    kept, ys = kit.thin(xs, values, most)
    assert len(kept) <= max(most, 2)
    assert kept == sorted(set(kept))
    assert ys == [values[int(x)] for x in kept]
    if values:
        assert (min(ys), max(ys)) == (min(values), max(values))


def test_each_second_has_one_colour():
    from asyncrl.monitor.figures.themes import STATE_HUES

    assert set(STATE_HUES) == set(STATES)
