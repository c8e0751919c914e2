"""The timeline: from what processes noted to a file in the trace-event format."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from asyncrl.cli import app
from asyncrl.errors import DataError, UserError
from asyncrl.monitor.trace.events import Timeline
from asyncrl.monitor.trace.lanes import Lanes
from asyncrl.monitor.trace.reading import read_spans
from asyncrl.monitor.trace.write import write_trace
from asyncrl.spans import span_log
from tests.helpers.trace_events import check_trace, named, read_trace

T = 1000.0
"""When the run began, by the monotonic clock of its machine."""


def add_sample(log, k, at, *, became="accepted", index=0):
    """Generated in 1 s, scored in 0.25 s, pushed in 0.05 s."""
    ends = [at + 1.0, at + 1.25, at + 1.3]
    log.add(
        "sample", f"s/0/{index}/{k}", at, ends[-1], id=("s", 0, index, k), lease=index,
        ends=ends, became=became, tokens=7,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """Two actors, two ranks: batch 1 with four samples, batch 2 with two; a failed sample."""
    logs = {
        name: span_log(str(tmp_path), *name, "run-1", 1.0)
        for name in (("actor", 0), ("actor", 1), ("learner", 0), ("learner", 1), ("launcher", 0))
    }
    for k in range(2):
        add_sample(logs[("actor", 0)], k, T + 0.1 * k)
        add_sample(logs[("actor", 1)], k, T + 0.1 * k, index=1)
    add_sample(logs[("actor", 0)], 0, T + 2.0, index=2)
    add_sample(logs[("actor", 1)], 1, T + 2.0, index=2)
    add_sample(logs[("actor", 1)], 2, T + 2.2, became="failed", index=2)
    add_sample(logs[("actor", 1)], 0, T + 0.5, became="duplicate")  # of actor-0's
    logs[("actor", 0)].add("state", "generate", T, T + 1.1)
    logs[("actor", 0)].add("weights", "begin", T + 3.0, T + 3.1, version="0:1")
    for rank in range(2):
        log = logs[("learner", rank)]
        for batch, got in ((1, T + 2.0), (2, T + 4.0)):
            ids = [("s", 0, rank, k) for k in range(2)] if batch == 1 else [("s", 0, 2, rank)]
            for name, at, end in (("prepare", 0, 0.1), ("look", 0.1, 0.3), ("update", 0.3, 1.0)):
                log.add("batch", name, got + at, got + end)
            log.add(
                "batch", f"batch {batch}", got - 1.5, got + 1.1, batch=batch, version="0:0",
                ends=[got, got + 1.0], ids=ids,
            )  # fmt: skip
    publication = logs[("learner", 0)]
    publication.add("publication", "gather", T + 3.05, T + 3.1)
    publication.add("publication", "join", T + 3.1, T + 3.4)
    publication.add("publication", "begin", T + 3.3, T + 3.5)  # of a second round
    publication.add("publication", "version 0:1", T + 3.05, T + 3.6, applied=2)
    logs[("launcher", 0)].add("event", "publication", T + 3.0, T + 3.0, role="learner-0", told={})
    for log in logs.values():
        log.close()
    (tmp_path / "config.yaml").write_text("{}\n")
    return tmp_path


def test_a_timeline_is_valid_and_says_what_happened(folder):
    out = folder / "t.json.gz"
    written = write_trace(folder, out)
    events = read_trace(out)
    check_trace(events)
    assert (written.samples, written.malformed) == (6, 0)
    assert written.events == len(events)
    assert written.seconds == pytest.approx(5.1)
    names = named(events, "process_name")
    assert list(names.values()) == [
        "launcher-0", "buffer-0", "learner-0", "learner-1", "actor-0", "actor-1",
    ]  # fmt: skip
    threads = named(events, "thread_name")

    def slices(process, name):
        return [
            (e["ts"], e["dur"], threads[(e["pid"], e["tid"])]) for e in events
            if e["ph"] == "X" and names[e["pid"]] == process and e["name"] == name
        ]  # fmt: skip

    assert sorted(slices("actor-0", "generate")) == [
        (0, 1_000_000, "sample"), (0, 1_100_000, "state"), (100_000, 1_000_000, "sample 2"),
        (2_000_000, 1_000_000, "sample"),
    ]  # fmt: skip
    assert slices("actor-0", "reward")[0] == (1_000_000, 250_000, "sample")
    assert slices("learner-1", "train") == [
        (2_000_000, 1_000_000, "batch"), (4_000_000, 1_000_000, "batch"),
    ]  # fmt: skip
    assert slices("learner-0", "wait for data")[0] == (500_000, 1_500_000, "batch")
    assert slices("learner-0", "look")[0] == (2_100_000, 200_000, "batch")
    # The second round's begin overlaps the first one's join: another row.
    assert slices("learner-0", "begin") == [(3_300_000, 200_000, "publication 2")]
    assert slices("buffer-0", "batch 1 gathers") == [(1_300_000, 700_000, "batches")]
    assert slices("buffer-0", "batch 2 gathers") == [(3_300_000, 700_000, "batches")]
    (event,) = [e for e in events if e["ph"] == "i"]
    assert (event["name"], event["ts"], event["args"]["role"]) == (
        "publication", 3_000_000, "learner-0",
    )  # fmt: skip


def test_an_arrow_follows_each_trained_sample(folder):
    events = Timeline(read_spans(folder)).events()
    names = named(events, "process_name")
    flows = {}
    for e in events:
        if e["ph"] in "stf":
            flows.setdefault(e["id"], []).append((names[e["pid"]], e["ts"]))
    lives = sorted(tuple(flow) for flow in flows.values())
    assert lives == sorted([
        *[(("actor-0", 100_000 * k), ("buffer-0", 100_000 * k + 1_300_000),
           ("learner-0", 2_000_000)) for k in range(2)],
        *[(("actor-1", 100_000 * k), ("buffer-0", 100_000 * k + 1_300_000),
           ("learner-1", 2_000_000)) for k in range(2)],
        (("actor-0", 2_000_000), ("buffer-0", 3_300_000), ("learner-0", 4_000_000)),
        (("actor-1", 2_000_000), ("buffer-0", 3_300_000), ("learner-1", 4_000_000)),
    ])  # fmt: skip
    depth = [e["args"]["samples"] for e in events if e["ph"] == "C"]
    assert max(depth) == 4
    assert depth[-1] == 0


def test_some_batches_alone(folder):
    events = Timeline(read_spans(folder), steps=(2, 2)).events()
    check_trace(events)
    assert sum(e["ph"] == "s" for e in events) == 2
    assert not [e for e in events if e["name"] == "batch 1 gathers"]


def test_a_machine_that_was_booted_again_has_another_clock(folder):
    path = folder / "trace" / "learner-0.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    # A day later, when its monotonic clock has come to 10 s.
    later = first | {"pid": first["pid"] + 1, "at": 10.0, "wall": first["wall"] + 86_400}
    state = {"track": "state", "name": "train", "at": 11.0, "s": 1.0}
    with path.open("a") as file:
        file.write(f"{json.dumps(later)}\n{json.dumps(state)}\n")
    before, after = (p for p in read_spans(folder).processes if p.name == "learner-0")
    began = (first["wall"] + 86_400 + 1.0) * 1e6
    assert abs(after.spans[0].at - began) <= 2
    assert all(s.at < began for s in before.spans)


def test_two_machines_meet_by_their_clocks_on_the_wall(folder):
    path = folder / "trace" / "actor-1.jsonl"
    first, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    here = json.loads((folder / "trace" / "actor-0.jsonl").read_text().splitlines()[0])
    # Another machine, booted 500 s later; both clocks on the wall go right.
    wall = here["wall"] + first["at"] - here["at"]
    first |= {"host": "other", "at": first["at"] - 500.0, "wall": wall}
    for line in lines:
        line["at"] -= 500.0
        line["ends"] = [e - 500.0 for e in line["ends"]]
    shifted = "\n".join(json.dumps(line) for line in [first, *lines])
    before = Timeline(read_spans(folder)).events()
    path.write_text(f'{shifted}\n{{"track": "sample"}}\nno json\n')
    spans = read_spans(folder)
    assert spans.malformed == 2

    def times(events):
        timed = [e for e in events if "ts" in e]
        return sorted((e["ph"], e["pid"], e["tid"], e["name"], e["ts"]) for e in timed)

    for a, b in zip(times(before), times(Timeline(spans).events()), strict=True):
        assert a[:-1] == b[:-1]
        assert abs(a[-1] - b[-1]) <= 2, "a microsecond or two"


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=40), st.booleans())
def test_slices_of_a_lane_never_cross(spans, nested):
    lanes = Lanes(nested)
    placed = {}
    for at, end in sorted(((a, a + s) for a, s in spans), key=lambda s: (s[0], -s[1])):
        lane = lanes.put(at, end)
        for other_at, other_end in placed.setdefault(lane, []):
            apart = other_end <= at
            inside = nested and other_at <= at and end <= other_end
            assert apart or inside
        placed[lane].append((at, end))
    assert sorted(placed) == list(range(len(placed)))


def test_the_command(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["trace", str(folder), "--steps", "1"])
    assert done.exit_code == 0, done.output
    assert "4 samples from lease to training" in done.output
    check_trace(read_trace(tmp_path / f"{folder.name}.trace.json.gz"))
    with pytest.raises(UserError, match="none of these"):
        write_trace(folder, tmp_path / "x.json", (7, 9))
    with pytest.raises(UserError, match="--steps 3:1"):
        CliRunner().invoke(app, ["trace", str(folder), "--steps", "3:1"], catch_exceptions=False)
    with pytest.raises(UserError, match="--output"):
        write_trace(folder, tmp_path / "no" / "x.json")


def test_a_run_without_spans_is_told_so(tmp_path):
    with pytest.raises(DataError, match=r"trace\.enabled=false"):
        read_spans(tmp_path)


def test_lines_without_what_they_must_have_are_counted_and_left_out(folder):
    whole = write_trace(folder, folder / "all.json")
    odd = [
        {"track": "sample", "ends": [1.0], "became": "accepted"},
        {"track": "sample", "id": [[1], 2], "ends": [1.0], "became": "accepted"},
        {"track": "sample", "id": ["s", 0, 0, 0], "ends": "x", "became": "accepted"},
        {"track": "sample", "id": ["s", 0, 0, 0], "ends": [1.0]},
        {"track": "batch", "batch": "x", "ids": [], "ends": [1.0]},
        {"track": "batch", "batch": 1, "ids": [], "ends": []},
        {"track": "state", "at": 1e308},
        {"track": "process", "role": "actor", "rank": -1, "pid": 1, "host": "h", "run_id": "",
         "wall": 1.0},
    ]  # fmt: skip
    with (folder / "trace" / "actor-0.jsonl").open("a") as file:
        for line in odd:
            file.write(json.dumps({"name": "odd", "at": 1.0, "s": 1.0} | line) + "\n")
    written = write_trace(folder, folder / "odd.json")
    assert written.malformed == whole.malformed + len(odd)
    assert (written.events, written.samples) == (whole.events, whole.samples)
    (folder / "trace" / "actor-9.jsonl").mkdir()
    with pytest.raises(DataError, match=r"actor-9\.jsonl cannot be read: Is a directory"):
        read_spans(folder)
