"""`asyncrl report` and `asyncrl compare`, as a user runs them."""

import hashlib
import html.parser
import json
import re
import sys

import pytest

from asyncrl.__main__ import main
from asyncrl.monitor.report.compare import difference, load, settings
from asyncrl.monitor.report.html import render
from tests.monitor.small_run import SmallRun


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    runs = [SmallRun(folder, name="one"), SmallRun(folder, name="<b>two")]
    for run, steps in zip(runs, (12, 5), strict=True):
        run.grow(steps)
    runs[1]._write("events", {"event": "</script><script>alert(1)</script>"}, role="launcher",
                   wall_s=1.0)  # fmt: skip
    config = runs[1].folder / "config.yaml"
    config.write_text(config.read_text().replace("1.0e-05", "2.0e-05"))
    return [run.folder for run in runs]


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs a command line in an empty folder: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = main(arguments)
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def content_of(page):
    """The report's data, as a browser's parser finds it, and the addresses it names."""
    found, links = {}, []

    class Reader(html.parser.HTMLParser):
        inside = None

        def handle_starttag(self, tag, attributes):
            given = dict(attributes)
            self.inside = given.get("id") if tag == "script" else None
            links.extend(v for k, v in attributes if k in ("src", "href") and not v.startswith("#"))

        def handle_data(self, data):
            if self.inside:
                found[self.inside] = found.get(self.inside, "") + data

        def handle_endtag(self, tag):
            self.inside = None

    Reader().feed(page)
    return json.loads(found["data"]), links


def state_of(folder):
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*")) if p.is_file()
    }  # fmt: skip


def test_a_report_is_one_file_with_the_values_and_no_address(command, two, tmp_path):
    before = state_of(two[0])
    code, out, err = command("report", str(two[0]), "-o", "r.html")
    assert (code, err) == (0, "")
    assert out.startswith("r.html: ")
    page = (tmp_path / "r.html").read_text()
    data, links = content_of(page)
    assert links == []
    assert page.count("plotly.js v") == 1
    assert "default-src 'none'" in page
    for axis, first in (("step", 1.0), ("version", 0.0), ("wall_s", 12.0)):
        reward = data["figures"][axis]["reward"]["data"][0]
        assert (reward["x"][0], reward["y"]) == (first, [s / 100 for s in range(1, 13)])
    assert data["states"]["one"]["ledger"]["conserved"] is True
    assert "max_staleness" in data["config"]["one"]
    assert state_of(two[0]) == before, "nothing is written into the run's folder"


def test_names_and_texts_cannot_end_their_element(two):
    data, _ = content_of(render(load([two[1]])))
    events = [e["event"] for e in data["states"]["<b>two"]["events"]]
    assert "</script><script>alert(1)</script>" in events


def test_compare_says_in_what_runs_differ(command, two, tmp_path):
    code, out, err = command("compare", *map(str, two), "--html", "c.html")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["reward,", "last", "10", "0.075", "0.030"] in lines
    assert ["learner.optim.lr", "1e-05", "2e-05"] in lines
    assert not [line for line in lines if line[:1] == ["run.name"]]
    data, _ = content_of((tmp_path / "c.html").read_text())
    assert [len(t["x"]) for t in data["figures"]["step"]["loss"]["data"]] == [12, 5]
    assert data["difference"] == [["learner.optim.lr", "1e-05", "2e-05"]]


def test_compare_says_how_far_a_run_that_was_stopped_has_come(command, tmp_path):
    runs = {name: SmallRun(tmp_path, name=name) for name in ("done", "stopped", "killed", "lives")}
    for run in runs.values():
        run.grow(5)
        config = run.folder / "config.yaml"
        config.write_text(config.read_text().replace("{name: small}", "{name: small, steps: 30}"))
    for name, steps, ended in (("done", 30, "finished"), ("stopped", 12, "stopped")):
        summary = {"steps": steps, "ended": ended}
        (runs[name].folder / "summary.json").write_text(json.dumps(summary))
    runs["killed"].status(state="ended")
    code, out, err = command("compare", *(str(run.folder) for run in runs.values()))
    assert (code, err) == (0, "")
    row = next(line for line in out.splitlines() if line.startswith("run.steps "))
    assert re.split("  +", row) == [
        "run.steps", "30", "12 of 30, stopped", "5 of 30, without a summary", "30"
    ]  # fmt: skip
    for summary in ("[]", '{"steps": "x", "ended": 3}', '{"steps": 30, "ended": "stopped"}'):
        (runs["stopped"].folder / "summary.json").write_text(summary)
        assert difference(load([runs[name].folder for name in ("done", "stopped")])) == []


def test_one_run_is_not_compared_and_a_missing_one_is_named(command, two):
    code, out, err = command("compare", str(two[0]), str(two[0]))
    assert (code, out) == (2, "")
    assert "name two or more" in err
    code, _, err = command("report", "nothing")
    assert code == 2
    assert "no run nothing" in err


def test_folders_where_files_belong_are_named(command, two, tmp_path):
    code, _, err = command("report", str(two[0]), "-o", str(tmp_path))
    assert (code, err) == (
        2, f"error: {tmp_path} cannot be written (is a directory): name another file\n"
    )  # fmt: skip
    for name in ("metrics.jsonl", "events.jsonl"):
        run = SmallRun(tmp_path, name=f"of-{name}")
        (run.folder / name).unlink(missing_ok=True)
        (run.folder / name).mkdir()
        code, _, err = command("report", str(run.folder))
        assert code == 2
        assert err == (
            f"error: {run.folder / name} cannot be read (is a directory): restore it, or name "
            "another run\n"
        )


def test_settings_are_flat_and_those_that_are_missing_count(two, tmp_path):
    assert settings(two[0])["learner.optim.lr"] == "1e-05"
    less = SmallRun(tmp_path, name="less")
    (less.folder / "config.yaml").write_text("buffer: {}\n")
    rows = dict((row[0], row[1:]) for row in difference(load([two[0], less.folder])))
    assert rows["buffer.max_staleness"] == ("2", "-")


def test_without_plotly_one_line_says_which_extra(command, two, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    code, out, err = command("report", str(two[0]))
    assert (code, out) == (2, "")
    assert err == (
        "error: figures need plotly, which is not installed: pip install 'asyncrl[monitor]'\n"
    )
