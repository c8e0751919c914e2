"""Reading a run's files while they grow: torn lines, incarnations, thinning, what is broken."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.monitor.reading import history as history_of
from asyncrl.monitor.reading.finals import finals
from asyncrl.monitor.reading.history import Point, RunHistory, Series
from asyncrl.monitor.reading.tail import Decoder, Tail
from tests.monitor.small_run import SmallRun

objects = st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=6), max_size=3)
broken = st.sampled_from(
    [b"[1]", b"7", b"{torn", b'"text"', b"\xff\xfe", b'{"a": "\xff"}', b"null"]
)
blank = st.sampled_from([b"", b"  "])


def encoded(line):
    return line if isinstance(line, bytes) else json.dumps(line).encode()


@given(st.lists(objects | broken | blank, max_size=12), st.data())
def test_each_whole_line_comes_once_however_the_bytes_are_cut(lines, data):
    whole = b"".join(encoded(line) + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    decoder, found = Decoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        found += decoder.feed(whole[start:end])
    assert found == [line for line in lines if isinstance(line, dict)]
    assert decoder.malformed == sum(
        isinstance(line, bytes) and bool(line.strip()) for line in lines
    )


@settings(max_examples=25)
@given(st.lists(st.lists(objects, max_size=3), min_size=1, max_size=4), st.integers(1, 8))
def test_a_file_is_read_on_from_where_it_was_and_a_torn_line_waits(pieces, torn):
    with tempfile.TemporaryDirectory() as folder:
        tail, found, written = Tail(Path(folder, "x.jsonl")), [], b""
        assert list(tail.lines()) == [], "not there yet"
        for lines in pieces:
            more = b"".join(encoded(line) + b"\n" for line in lines)
            cut = max(0, len(more) - torn)
            for part in (more[:cut], more[cut:]):
                written += part
                tail.path.write_bytes(written)
                found += tail.lines()
                assert len(found) == written.count(b"\n"), "no more than the whole ones"
        assert found == [line for lines in pieces for line in lines]
        tail.path.write_bytes(b'{"another": 1}\n')
        again = list(tail.lines())
    if len(written) > 15:
        assert (again, tail.restarted) == ([{"another": 1}], 1)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=5))
def test_a_later_incarnation_replaces_what_was_read_from_its_first_step_on(lives):
    """Each life trains some steps, beginning at most one past the last; late lines are ignored."""
    series, expected, last = Series(by_step=True), {}, 0
    for incarnation, (first, count) in enumerate(lives):
        first = min(first, last + 1)
        expected = {step: v for step, v in expected.items() if step < first}
        for step in range(first, first + count):
            value = 100.0 * incarnation + step
            series.add(Point(step, step - 1, incarnation, 0.0), value)
            expected[step] = value
        last = first + count - 1
        series.add(Point(first, 0, incarnation - 1, 0.0), -1.0)  # of a learner that is no more
    assert {p.step: v for p, v in zip(series.points, series.values, strict=True)} == expected
    assert [p.step for p in series.points] == sorted(expected)


@given(st.integers(1, 500), st.integers(8, 64))
def test_thinning_keeps_the_ends_and_the_order_and_the_newest_half_whole(count, most):
    series = Series(by_step=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history_of, "MAX_POINTS", most)
        for k in range(count):
            series.add(Point(0, 0, 0, float(k)), k)
    assert len(series.values) <= most
    assert series.values == sorted(series.values)
    assert (series.values[0], series.values[-1]) == (0, count - 1)
    newest = min(count, most // 2)
    assert series.values[-newest:] == list(range(count - newest, count))
    assert [p.wall_s for p in series.points] == series.values


@pytest.fixture
def small(tmp_path):
    made = SmallRun(tmp_path)
    made.grow(4)
    return made


GOOD = {"role": "learner", "rank": 0, "step": 9, "version": 8, "wall_s": 1.0, "metrics": {}}
HIST = {"edges": [0, 1, 2], "counts": [1, 2]}


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": "9"}, {"rank": None}, {"metrics": []}, {"metrics": {"a": "b"}}, {"wall_s": "x"},
        {"hist": {"h": {"edges": [0, 1]}}}, {"hist": {"h": HIST | {"counts": [1]}}},
        {"hist": {"h": HIST | {"edges": [0, "1", 2]}}},
    ],
)  # fmt: skip
def test_a_record_that_is_none_is_counted_and_changes_nothing(small, wrong):
    path = small.folder / "metrics.jsonl"
    with path.open("a") as file:
        file.write(json.dumps(GOOD | wrong) + "\n" + json.dumps(GOOD | {"hist": {"h": HIST}}))
    history = RunHistory(small.folder)
    assert history.update()
    assert history.malformed == 1
    assert history.last_at().step == 4
    with path.open("a") as file:
        file.write("\n")
    history.update()
    assert (history.malformed, history.last_at().step) == (1, 9)
    assert history.hists("h")[0].counts == (1, 2)


def test_a_run_that_goes_on_after_a_checkpoint_has_each_step_once(small):
    history = RunHistory(small.folder)
    history.update()
    small.incarnation, small.step = 1, 2
    small.grow(1)
    history.update()
    assert history.series("reward/mean") == ([1.0, 2.0, 3.0], [0.01, 0.02, 0.03])
    assert [h.at.incarnation for h in history.hists("staleness/head")] == [0, 0, 1]
    assert len(history.hists("staleness/head", last=2)) == 2
    assert not history.update(), "nothing new"


def test_the_value_at_a_moment_and_the_newest(small):
    history = RunHistory(small.folder)
    history.update()
    actor = ("actor", 1)
    times, values = history.series("actor/generated_tokens", actor, "wall_s")
    assert history.value_at("actor/generated_tokens", actor, times[3] + 0.5) == values[3]
    assert history.value_at("actor/generated_tokens", actor, times[0] - 0.5) is None
    at, newest = history.newest("actor/generated_tokens", actor)
    assert (at.wall_s, newest) == (times[-1], values[-1])
    assert history.newest("nothing", actor) is None


def test_of_a_version_the_newest_score_counts_and_none_of_what_was_given_up(small):
    told = [(0, 0, 0.5), (20, 0, 0.9), (10, 0, 0.6), (15, 1, 0.3), (15, 1, 0.2)]
    for k, (version, small.incarnation, score) in enumerate(told):
        small.metrics({"eval/sums/score": score}, role="launcher", wall_s=30.0 + k, version=version)
    history = RunHistory(small.folder)
    history.update()
    (scores,) = history.scores().values()
    assert [(at.version, score) for at, score in scores] == [(0, 0.5), (10, 0.6), (15, 0.2)]
    assert {f.label: f.value for f in finals(history)}["held out, last"] == 0.2
