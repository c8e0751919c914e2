"""`asyncrl keys`, and what `asyncrl launch` says about keys and addresses before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.__main__ import main
from asyncrl.security import load_keys

CLUSTER = ["cluster.address=10.0.0.1:6379", "cluster.device=cpu"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_keys_are_made_once_and_said_to_cover_what_they_cover(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "mine"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "keys in mine: launch with security.curve=true security.keys=mine"
    covered, not_covered = out[-2:]
    for part in ("leases", "trajectories", "batches", "metrics", "weights control"):
        assert part in covered
    for part in ("Ray", "NCCL", "gloo"):
        assert part in not_covered
    keys = load_keys(tmp_path / "mine", client_only=False)
    assert main(["keys", "mine"]) == 2
    assert "exists already and is never overwritten" in capsys.readouterr().err
    assert load_keys(tmp_path / "mine", client_only=False) == keys


def test_keys_without_a_folder_do_not_land_in_the_current_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", ""]) == 2
    assert "FOLDER is empty: name a path" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (CLUSTER, "error: cluster.address=10.0.0.1:6379: sockets would bind 10.0.0.1, where"),
        ([*CLUSTER, "security.curve=true", "security.keys=none"],
         "error: security.keys: none/server.key does not exist: make new keys with `asyncrl keys"),
        (["security.curve=true", "security.keys=~nobody-of-that-name"], "write the folder out"),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_starts(
    args: list[str], message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "--config", "tiny", "--run-name", "r", *args]) == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "runs").exists()
