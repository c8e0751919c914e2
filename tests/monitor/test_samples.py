"""`asyncrl samples`: what is chosen, and what is exported."""

import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest
from tokenizers import pre_tokenizers

from asyncrl.__main__ import main
from asyncrl.monitor.samples import export as files
from asyncrl.monitor.samples.search import Search
from asyncrl.monitor.samples.texts import Texts
from asyncrl.monitor.samples.wanted import Condition, Wanted
from asyncrl.recording import read_recording
from asyncrl.types import GroupId
from tests.helpers.recorded import RecordedRun
from tests.helpers.samples_checks import printed, same_rows

COUNT = 240


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    made = RecordedRun(tmp_path_factory.mktemp("run"))
    made.record(*made.some(COUNT))
    return made


@pytest.fixture
def fresh(tmp_path):
    return RecordedRun(tmp_path)


def asked(**texts):
    return {k: Condition.parse(f"--{k}", v) for k, v in texts.items()}


def behind(e):
    if e.version is None:
        return None
    lag = e.version - e.version_min[1]
    return lag if e.version_min[0] == e.incarnation else max(lag, 0)


def said(t):
    """What the bytes of the response are, without our reader."""
    return bytes(BYTES[i] for i in t.response_ids.tolist()).decode()


def _bytes():
    """The byte of each token, by GPT-2's published table."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    odd = [b for b in range(256) if b not in plain]
    sign = {chr(b): b for b in plain} | {chr(256 + k): b for k, b in enumerate(odd)}
    return [sign[c] for c in sorted(pre_tokenizers.ByteLevel.alphabet())]


BYTES = _bytes()
FILTERS = {
    "all": ({}, lambda e, t: True),
    "reward": (asked(reward=">0.25"), lambda e, t: e.reward > 0.25),
    "reward of 1/3": (asked(reward="0.3..0.4"), lambda e, t: 0.3 <= e.reward <= 0.4),
    "negative": (asked(reward="-2"), lambda e, t: e.reward == -2),
    "staleness": (asked(staleness=">=1"), lambda e, t: (behind(e) or 0) >= 1),
    "none behind": (asked(staleness="<=0"), lambda e, t: behind(e) is not None and behind(e) <= 0),
    "batch": (asked(batch="3..5,!=4"), lambda e, t: e.batch in (3, 5)),
    "length": (asked(length="<7"), lambda e, t: len(t.response_ids) < 7),
    "outcome": ({"outcomes": ("held", "failed")}, lambda e, t: e.outcome in ("held", "failed")),
    "actor": ({"actor": "actor-1"}, lambda e, t: e.actor == "actor-1"),
    "finish": ({"finish": "length"}, lambda e, t: t.header.finish_reason == "length"),
    "group": ({"group": GroupId("p:q", 0, 7)}, lambda e, t: e.id[:3] == ("p:q", 0, 7)),
    "prompt": ({"prompt": "gRoup 1"}, lambda e, t: str(e.id[2]).startswith("1")),
    "response": ({"response": "É"}, lambda e, t: "é" in said(t)),
    "several": (
        asked(reward=">0", length=">3") | {"outcomes": ("trained",), "response": "a"},
        lambda e, t: e.reward > 0 and len(t.response_ids) > 3 and e.outcome == "trained"
        and "a" in said(t),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILTERS)
def test_what_is_wanted_is_what_plain_python_chooses(run, name):
    wanted, literally = FILTERS[name]
    recorded = [(r.entry, r.trajectory()) for r in read_recording(run.folder / "trajectories")]
    expected = [e.id for e, t in recorded if literally(e, t)]
    assert 0 < len(expected) < COUNT or name == "all"
    search = Search(run.folder, Wanted(**wanted), Texts(run.folder))
    assert len(search) == len(expected)
    assert [s.entry.id for s in search] == expected
    assert search.counts.samples == COUNT
    assert not list(search.counts.lines())


KEYS = {
    "reward": lambda e, t: e.reward, "staleness": lambda e, t: behind(e),
    "batch": lambda e, t: e.batch, "length": lambda e, t: len(t.response_ids),
}  # fmt: skip


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("key", KEYS)
def test_the_order_is_that_of_a_stable_sort_and_what_has_no_value_comes_last(run, key, descending):
    recorded = [(r.entry, r.trajectory()) for r in read_recording(run.folder / "trajectories")]
    values = [(e.id, KEYS[key](e, t)) for e, t in recorded]
    sign = -1 if descending else 1
    values.sort(key=lambda v: (v[1] is None, 0 if v[1] is None else sign * v[1]))
    search = Search(run.folder, Wanted(), Texts(run.folder), key, descending=descending)
    assert [s.entry.id for s in search] == [sample for sample, _ in values]


def test_the_last_line_of_a_sample_counts_and_what_cannot_be_read_is_told(fresh):
    a, b, c = (fresh.sample(0, k) for k in range(3))
    fresh.trained(a, b, c, version=1, batch=2)
    fresh.trained(a, version=1, batch=2, incarnation=1, resume=True)
    frames = sorted((fresh.folder / "trajectories").glob("*.frames"))
    index = fresh.folder / "trajectories" / "index.jsonl"
    third = json.loads(index.read_text().splitlines()[2])
    with open(frames[0], "r+b") as file:
        file.seek(third["offset"])
        file.write(b"\xff" * 8)
    with open(index, "ab") as file:
        file.write(b'{"no": "entry"}\n\xff\n{"torn')
    before = {p.name: p.read_bytes() for p in (fresh.folder / "trajectories").iterdir()}
    search = Search(fresh.folder, Wanted(), Texts(fresh.folder))
    found = {s.entry.id.sample: s.entry.incarnation for s in search}
    assert found == {0: 1, 1: 0}
    assert list(search.counts.lines()) == [
        "2 lines of the index could not be read",
        "1 samples are left out, their frames could not be read",
        "1 lines are left out, their samples have later ones",
    ]
    out = printed(fresh, "table", "order", None)
    assert "2 of 3 that match, of 3 samples\n2 lines of the index" in out
    assert before == {p.name: p.read_bytes() for p in (fresh.folder / "trajectories").iterdir()}


def test_a_recording_that_grows_is_read_as_far_as_it_is_there(fresh):
    fresh.trained(fresh.sample(0, 0))
    search = Search(fresh.folder, Wanted(), Texts(fresh.folder))
    fresh.trained(fresh.sample(0, 1), resume=True)
    assert [s.entry.id.sample for s in search] == [0]
    assert len(Search(fresh.folder, Wanted(), Texts(fresh.folder))) == 2


def test_exports_read_back_are_what_was_recorded(run, tmp_path, capfd):
    for name in ("all.jsonl", "all.parquet"):
        assert main(["samples", str(run.folder), "--export", str(tmp_path / name)]) == 0
        assert f"{COUNT} of {COUNT} samples\n" in capfd.readouterr().out
        same_rows(run.folder, tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["all.jsonl", "all.parquet"]
    rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert sum("é" in row["response"] for row in rows) > 9
    assert [list(row) for row in rows] == [list(files.FIELDS)] * COUNT
    kept = ["--reward", ">0.9", "--sort", "-length", "-n", "3"]
    target = str(tmp_path / "few.parquet")
    assert main(["samples", str(run.folder), "--export", target, *kept]) == 0
    few = pyarrow.parquet.read_table(target).to_pylist()
    lengths = sorted((r["response_tokens"] for r in rows if r["reward"] > 0.9), reverse=True)
    assert [r["response_tokens"] for r in few] == lengths[:3]


def test_every_field_is_documented():
    page = (Path(__file__).parents[2] / "docs/monitoring.md").read_text()
    assert [f for f in files.FIELDS if f"`{f}`" not in page] == []


def test_an_export_holds_one_row_group_in_memory_whatever_the_recording(fresh, monkeypatch):
    """Forty samples of 340 kB; less than a fifth of them is ever there."""
    long = fresh.sample(0, 0, response="ab" * 10_000)
    ids = (long.header.id._replace(sample=k) for k in range(40))
    fresh.trained(*(replace(long, header=replace(long.header, id=i)) for i in ids))
    monkeypatch.setattr(files, "TOKENS", 50_000)
    whole = (fresh.folder / "trajectories" / "000001.frames").stat().st_size
    assert whole > 13e6
    texts = Texts(fresh.folder)
    for name in ("x.jsonl", "x.parquet"):
        tracemalloc.start()
        try:
            files.export(Search(fresh.folder, Wanted(), texts), fresh.folder / name, texts)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < whole / 5
    assert pyarrow.parquet.ParquetFile(fresh.folder / "x.parquet").num_row_groups == 14


def test_without_the_tokenizer_tokens_are_numbers_and_nothing_searches_them(fresh, capfd):
    sample = fresh.sample(0, 0, response="ab")
    fresh.trained(sample)
    (fresh.folder / "config.yaml").write_text("model: {name: ./nowhere}\n")
    numbers = " ".join(map(str, sample.response_ids.tolist()))
    run = str(fresh.folder)
    assert main(["samples", run]) == 0
    assert numbers in capfd.readouterr().out
    out = fresh.folder / "x.jsonl"
    assert main(["samples", run, "--export", str(out)]) == 0
    assert "without text" in capfd.readouterr().out
    assert json.loads(out.read_text())["response"] is None
    assert main(["samples", run, "--response", "a"]) == 2
    assert "--response searches text, and the run's tokenizer is not" in capfd.readouterr().err
    elsewhere = ["--tokenizer", str(fresh.folder / "model")]
    assert main(["samples", run, "--response", "AB", *elsewhere]) == 0
    assert "1 of 1 that match" in capfd.readouterr().out


BAD = [
    (["--reward", "high"], "error: --reward high: a number is asked for, or a condition on one, "),
    (["--batch", ">1..2"], "error: --batch >1..2: a number"),
    (["--outcome", "traned"], "error: --outcome traned: one or more of trained, dropped_stale, "),
    (["--sort", "size"], "error: --sort size: one of order, reward, staleness, batch, length is"),
    (["--show", "5"], "error: --show 5: an id is SOURCE:EPOCH:INDEX:SAMPLE"),
    (["--show", "p:q:0:0:9"], "error: --show p:q:0:0:9: no such sample is recorded"),
    (["--group", "p"], "error: --group p: a group is SOURCE:EPOCH:INDEX"),
    (["--group", "p:0:0"], "error: --group p:0:0: none of its samples match"),
    (["--show", "p:q:0:0:0", "--group", "p:q:0:0"], "error: --group has no effect here, --show "),
    (["--group", "p:q:0:0", "--limit", "3"], "error: --limit has no effect here, --group shows"),
    (["--tokens"], "error: --tokens has no effect here, it goes with --show: leave it out"),
    (["--export", "x.csv"], "error: --export x.csv: its name must end in .jsonl or .parquet"),
    (["--export", "no/x.jsonl"], "error: --export no/x.jsonl: cannot be written: No such file"),
    (["--export", "x.jsonl", "--reward", ">9"], "error: --export x.jsonl: no sample matches"),
    (["--tokenizer", "nowhere"], "error: --tokenizer nowhere: there is no tokenizer.json"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "message"), BAD)
def test_mistakes_end_with_one_message_and_leave_no_file(
    run, args, message, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    assert main(["samples", str(run.folder), *args]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(message)
    assert len(err.splitlines()) == 1
    assert os.listdir(tmp_path) == []


def test_a_run_without_a_recording_and_a_parquet_without_pyarrow_say_so(fresh, monkeypatch, capfd):
    assert main(["samples", str(fresh.folder)]) == 2
    assert "the run has record.trajectories=false, or the fate of" in capfd.readouterr().err
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    assert main(["samples", str(fresh.folder), "--export", "x.parquet"]) == 2
    assert "pip install 'asyncrl[parquet]', or write .jsonl" in capfd.readouterr().err


def test_the_newest_come_first_and_as_many_as_are_asked_for(run, capfd):
    assert main(["samples", str(run.folder), "--step", ">=0", "-n", "4"]) == 0
    used = [r.entry.id for r in read_recording(run.folder / "trajectories") if r.entry.batch]
    *rows, _, told = capfd.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[1:]] == [
        ":".join(map(str, sample)) for sample in used[:-5:-1]
    ]
    assert told == f"4 of {len(used)} that match, of {COUNT} samples"
