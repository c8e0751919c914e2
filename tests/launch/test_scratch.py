"""A replay's temporary folder outlives nobody for long."""

from __future__ import annotations

import subprocess
import sys
import tempfile

import pytest

from asyncrl.launch.scratch import OWNER, Scratch, remove_orphans

OWNED = """
import sys
from asyncrl.launch.scratch import Scratch
with Scratch() as folder:
    (folder / "model.safetensors").write_bytes(b"x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder for temporary files, of this process and those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_folder_goes_when_its_owner_was_killed_and_not_before(place):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        folder = owner.stdout.readline().strip()
        remove_orphans()
        assert [str(p) for p in place.iterdir()] == [folder], "its owner lives"
        owner.kill()
        owner.wait()
        assert [str(p) for p in place.iterdir()] == [folder], "nobody was there to remove it"
        remove_orphans()
        assert list(place.iterdir()) == []
    finally:
        owner.kill()
        owner.communicate()


def test_a_folder_goes_with_its_command_and_others_are_left_alone(place):
    for name in ("asyncrl-replay-", "asyncrl-0", "other"):
        (place / name).mkdir()
    (place / "asyncrl-0" / OWNER).touch()
    (place / "asyncrl-replay-link").symlink_to("other")
    (place / "other" / OWNER).touch()
    before = set(place.iterdir())
    with Scratch() as folder:
        remove_orphans()
        assert set(place.iterdir()) == before | {folder}
    remove_orphans()
    assert set(place.iterdir()) == before
