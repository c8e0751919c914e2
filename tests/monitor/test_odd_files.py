"""What a run's files hold that nobody expects is told, counted or left out; the rest goes on."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from starlette.testclient import TestClient

from asyncrl.__main__ import main
from asyncrl.errors import UserError
from asyncrl.monitor import words
from asyncrl.monitor.figures import heat, staleness
from asyncrl.monitor.reading import panels
from asyncrl.monitor.reading.open_run import OpenRun
from asyncrl.monitor.reading.settings import read_settings
from asyncrl.monitor.report.compare import load
from asyncrl.monitor.status_reader import read
from asyncrl.monitor.terminal import attach
from asyncrl.monitor.terminal.draw import wrapped
from asyncrl.monitor.web.app import make_app
from asyncrl.monitor.web.shelf import Shelf
from asyncrl.monitor.window import of_history
from tests.monitor.small_run import SmallRun

TOKEN = "a-token-of-a-test"


@pytest.fixture
def run(tmp_path):
    made = SmallRun(tmp_path / "runs")
    made.grow(5)
    return made


def edit(folder, role=None, **changes):
    path = folder / "status.json"
    content = json.loads(path.read_text()) | changes
    if role is not None:
        content["roles"][0] |= role
    path.write_text(json.dumps(content))


def append(run, name, *lines):
    with (run.folder / name).open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def opened(run):
    made = OpenRun(run.name, run.folder)
    made.read()
    return made


# --- status.json ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"updated_at": None}, {"updated_at": "x"}, {"updated_at": float("nan")}, {"pid": -1},
        {"pid": 1 << 31}, {"step": "a"}, {"roles": [1]}, {"ledger": []}, {"host": 3},
        {"role": {"waits": [{"what": 1}]}}, {"role": {"phase": "load", "phase_s": None}},
    ],
    ids=str,
)  # fmt: skip
def test_a_status_with_an_odd_field_names_it(run, changes):
    edit(run.folder, **changes)
    with pytest.raises(UserError, match=r"is not a run's status: ValidationError: .*\$\."):
        read(run.folder)
    assert "is not a run's status" in panels.brief(run.folder)["state"]
    assert main(["status", str(run.folder)]) == 2


def test_a_later_asyncrl_may_say_more_of_a_run_a_role_and_a_wait(run, capfd):
    waits = [{"what": "a", "on": "b", "age_s": 1.0, "deadline_s": None, "later": 2}]
    edit(run.folder, {"waits": waits, "later": 1}, later=1)
    history = opened(run)
    found = panels.state(run.folder, history.history, history.finals())
    assert found["roles"][0]["waits"] == ["1.0 s for a on b"]
    assert main(["status", str(run.folder)]) == 0
    assert "1.0 s for a on b" in capfd.readouterr().out


def test_a_time_that_is_none_and_half_a_character_are_shown(run, capfd):
    edit(run.folder, left_s=float("inf"), host="\ud800", phase="a\ud800b")
    assert main(["status", str(run.folder)]) == 0
    told = capfd.readouterr().out
    assert "state     a\\ud800b" in told
    assert ", - left" in told
    (run.folder / "summary.json").write_text("[" * 50_000)
    assert panels.brief(run.folder)["step"] == 5


# --- the page ------------------------------------------------------------------------------------


@pytest.fixture
def page(run):
    app = make_app(Shelf(run.folder.parent), ["small"], TOKEN)
    with TestClient(app, headers={"authorization": f"Bearer {TOKEN}"}) as made:
        yield made


def test_one_odd_run_leaves_all_others_on_the_page(page, run):
    runs = run.folder.parent
    for name in ("null", os.fsdecode(b"caf\xe9")):
        shutil.copytree(run.folder, runs / name)
    edit(runs / "null", updated_at=None)
    told = {r["name"]: r for r in page.get("/api/runs").json()["runs"]}
    assert told.keys() == {"small", "null", "caf\\udce9"}
    assert "$.updated_at" in told["null"]["state"]
    assert told["small"]["step"] == told["caf\\udce9"]["step"] == 5
    assert page.get("/api/runs/caf%5Cudce9/state").json()["step"] == 5


def test_a_run_that_nobody_foresaw_is_listed_with_the_reason_and_logged_once(
    page, monkeypatch, caplog
):
    def fails(folder):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(panels, "brief", fails)
    for _ in range(2):
        (told,) = page.get("/api/runs").json()["runs"]
        assert told["state"] == "cannot be read: RuntimeError: no such thing"
    (logged,) = (r for r in caplog.records if r.levelname == "ERROR")
    assert logged.exc_info
    assert panels.unread("no \ud800 such thing")["state"] == "no \\ud800 such thing"


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "trajectories/index.jsonl"])
def test_a_folder_in_the_place_of_a_file_is_told_in_one_line(page, run, name):
    (run.folder / name).unlink()
    (run.folder / name).mkdir()
    answer = page.get("/api/runs/small/state")
    assert answer.status_code == 503
    assert answer.text.startswith(f"{name.rpartition('/')[2]} cannot be read: Is a directory")


# --- lines ---------------------------------------------------------------------------------------


def test_lines_that_are_none_are_counted_and_hold_up_nothing(run):
    before = of_history(opened(run).history)
    append(run, "events.jsonl", '{"event": "training"}', '{"event": "training", "wall_s": "x"}',
           '{"event": {"a": 1}, "wall_s": 1}', "[" * 50_000)  # fmt: skip
    append(run, "metrics.jsonl", "[" * 50_000, json.dumps({
        "role": "learner", "rank": 0, "step": 6, "version": 5, "wall_s": 30,
        "metrics": {"queue/get_wait_s": 0.1, "reward/mean": 1e308},
    }))  # fmt: skip
    made = opened(run)
    assert made.history.malformed == 6
    assert of_history(made.history) == before
    assert made.finals()


def test_a_staleness_that_is_no_number_is_left_out(run):
    run.metrics({"queue/get_wait_s": 0.1, "is/by_staleness/\u00b2/ess_frac": 0.5}, role="learner",
                wall_s=40, step=6, version=5)  # fmt: skip
    assert staleness.ages_of(opened(run).history.names()) == [0, 1, 2]


def test_a_histogram_of_one_line_cannot_take_the_memory(run):
    wide = {"staleness/head": {"edges": [-1e8, 0, 1], "counts": [3, 1]},
            "is/ratio_raw": {"edges": list(range(5_001)), "counts": [1] * 5_000}}  # fmt: skip
    run.metrics({"queue/get_wait_s": 0.1}, wide, role="learner", wall_s=40, step=6, version=5)
    for figure in (heat.staleness, heat.ratio):
        (trace,) = figure(load([run.folder]), "step")["data"]
        assert len(trace["y"]) < 400
        assert [sum(n for (n,) in column) for column in trace["customdata"]][-1] in (4, 5_000)


# --- config.yaml ---------------------------------------------------------------------------------

CONFIGS = {
    "latin": (b"a: \xe9\n", "UnicodeDecodeError"),
    "itself": (b"a: &x\n  b: *x\n", r"alias \(\*name\)"),
    "list": (b"- 1\n", "no sections"),
    "torn": (b"a: [1\n", "ParserError"),
    "deep": (b"a: " + b"[" * 20_000, "RecursionError"),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_is_no_configuration_is_told_by_compare_and_survived_by_report(run, kind, tmp_path):
    content, why = CONFIGS[kind]
    (run.folder / "config.yaml").write_bytes(content)
    with pytest.raises(UserError, match=f"is not a run's configuration: .*{why}"):
        read_settings(run.folder)
    assert main(["report", str(run.folder), "-o", str(tmp_path / "r.html")]) == 0
    assert panels.samples(run.folder) == []


def test_dates_are_what_they_look_like_and_an_empty_file_has_no_settings(run, capfd):
    (run.folder / "config.yaml").write_text("a: {day: 2020-01-01, 1: .inf}\n")
    assert read_settings(run.folder) == {"a": {"day": "2020-01-01", "1": float("inf")}}
    other = SmallRun(run.folder.parent, name="other")
    (other.folder / "config.yaml").write_text("")
    assert main(["compare", str(run.folder), str(other.folder)]) == 0
    assert "2020-01-01" in capfd.readouterr().out


# --- what is printed -----------------------------------------------------------------------------


def test_names_and_settings_cannot_steer_the_terminal(run, capfd, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    evil = run.folder.parent / "another-run\x1b[2J"
    shutil.copytree(run.folder, evil)
    (evil / "config.yaml").write_text('a: "x\\e[31m"\n')
    assert main(["compare", str(run.folder), str(evil)]) == 0
    assert main(["report", str(evil)]) == 0
    assert main(["status", "another-run", "--dir", str(run.folder.parent)]) == 2
    out, err = capfd.readouterr()
    assert "\x1b" not in out + err
    assert out.count("another-run\\x1b[2J") >= 2
    assert "x\\x1b[31m" in out
    assert "did you mean another-run\\x1b[2J" in err


def test_a_locale_without_the_characters_is_no_reason_to_end(run):
    edit(run.folder, phase="gr\u00fc\u00df")
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", "status", str(run.folder)], capture_output=True,
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    )  # fmt: skip
    assert done.returncode == 0
    assert b"gr\\xfc\\xdf" in done.stdout


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["monitor", "x", "--wait", "inf"], "--wait inf: "),
        (["status", "~nobody-of-this-name"], "RUN=~nobody-of-this-name: "),
        (["report", "RUN", "-o", "~nobody-of-this-name/x"], "--output=~nobody-of-this-name/x: "),
        (["report", "RUN", "-o", "RUN/metrics.jsonl"], "--output "),
        (["compare", "RUN", "RUN2", "--html", "RUN2/events.jsonl"], "--html "),
        (["trace", "RUN", "-o", "RUN/trace/actor-0.jsonl"], "--output "),
        (["samples", "RUN", "--export", "RUN/trajectories/index.jsonl"], "--export "),
        (["samples", "RUN", "--finish", "foo"], "--finish foo: one of stop, length, abort is"),
        (["samples", "RUN", "--group", f"a:{'9' * 5_000}:1"], "--group a:9"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_told_in_one_line(run, args, told, capfd):
    other = SmallRun(run.folder.parent, name="other")
    kept = (run.folder / "metrics.jsonl").read_bytes()
    given = [a.replace("RUN2", str(other.folder)).replace("RUN", str(run.folder)) for a in args]
    assert main(given) == 2
    err = capfd.readouterr().err
    assert err.startswith(f"error: {told}")
    assert len(err.splitlines()) == 1
    assert (run.folder / "metrics.jsonl").read_bytes() == kept


def test_a_token_is_not_on_the_screen_and_one_column_is_enough(tmp_path, monkeypatch):
    from asyncrl.monitor.terminal import app

    shown = []
    monkeypatch.setattr(app, "show", lambda attach, what, wait_s: shown.append(what))
    for stream in (attach.sys.stdin, attach.sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    attach.watch("http://host:1/?token=secret", tmp_path, 1.0)
    assert shown == ["run http://host:1/"]
    assert [line.plain for line in wrapped("ab", 0)] == ["a", "b"]


def test_ranks_are_plain_numbers():
    assert words.by_number("actor-²") == ("actor-²", 0)
    assert words.numbered(f"actor-{'9' * 5_000}")[1] is None
    assert words.numbered("launcher") == ("launcher", None)
    assert words.clock(float("inf")) == "-"
