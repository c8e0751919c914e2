"""Files where the user says: never a run's own; what is there stays until the new one is whole."""

import os
from pathlib import Path

import pytest

from asyncrl.errors import UserError
from asyncrl.monitor.outputs import replacing, target


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    (folder / "trajectories").mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl"):
        (folder / name).write_text("")
    return folder


@pytest.mark.parametrize(
    "name",
    ["metrics.jsonl", "summary.json", "summary.before-1.json", "trajectories/index.jsonl", "logs",
     "logs/x.html", "checkpoints/step-1/meta.json", "trajectories/../events.jsonl",
     "exports/step-1.0/config.json", "buffer.before-resume/data.mdb"],
)  # fmt: skip
def test_a_run_s_own_files_are_refused_also_through_a_link_and_of_runs_nobody_named(
    run, name, tmp_path
):
    (tmp_path / "link").symlink_to(run)
    for place, runs in ((run, [run]), (tmp_path / "link", []), (run, [])):
        with pytest.raises(UserError, match="--output .*keeps its own files there"):
            target(str(place / name), "--output", runs)


def test_a_report_in_the_run_s_folder_or_elsewhere_is_none_of_them(run, tmp_path, monkeypatch):
    for name in ("run.html", "plots/x.html", "samples.jsonl"):
        assert target(str(run / name), "--output", [run]) == run / name
    assert target(str(tmp_path / "metrics.jsonl"), "--output", [run])
    monkeypatch.chdir(run)
    assert str(target("run.html", "--output", [run])) == "run.html"


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    out, link = tmp_path / "r.html", tmp_path / "link"
    out.write_text("old")
    link.symlink_to(out)

    def write(text, error=None):
        with replacing(link) as part:
            part.write_text(text)
            assert out.read_text() == "old"
            if error is not None:
                raise error

    with pytest.raises(OSError, match="full"):
        write("half", OSError("full"))
    assert (out.read_text(), sorted(os.listdir(tmp_path))) == ("old", ["link", "r.html"])
    write("new")
    assert (out.read_text(), sorted(os.listdir(tmp_path))) == ("new", ["link", "r.html"])
    assert link.is_symlink()


def test_a_device_is_written_as_it_is():
    with replacing(Path("/dev/null")) as part:
        assert str(part) == "/dev/null"
