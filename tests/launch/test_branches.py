"""A run that went back to an older checkpoint: what it left behind is never taken for its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.launch.resume.branches import Base, Branches
from asyncrl.launch.resume.lineage import LINEAGE_FILE, Lineage, branches_of
from asyncrl.launch.resume.weights import weights_of
from tests.helpers.former import Former

TWICE = Branches(3, {1: Base(0, 10), 2: Base(1, 15), 3: Base(0, 8)})
"""Incarnation 3 went back to batch 8 of the first one."""


def test_each_batch_of_the_line_has_one_incarnation() -> None:
    once = Branches(2, {1: Base(0, 10), 2: Base(1, 15)})
    assert [once.incarnation_at(k) for k in (1, 10, 11, 15, 16, 99)] == [0, 0, 1, 1, 2, 2]
    assert [TWICE.incarnation_at(k) for k in (8, 9, 99)] == [0, 3, 3]
    again = Branches(1, {1: Base(None, 0)})
    assert [again.incarnation_at(k) for k in (1, 99)] == [1, 1]
    assert Branches(0, {}).incarnation_at(5) == 0


@pytest.mark.parametrize(
    ("incarnation", "batch", "left"),
    [(0, 8, None), (3, 40, None), (0, 9, 8), (0, 20, 8), (1, 12, 8), (2, 20, 8)],
)
def test_where_a_branch_was_left(incarnation: int, batch: int, left: int | None) -> None:
    assert TWICE.left_at(incarnation, batch) == left


def test_what_is_not_known_is_not_said() -> None:
    old = Branches.told(4, [[3, None, 0, 0], [4, 3, 30], "x", [4, 9, 1], None])
    assert [old.incarnation_at(k) for k in (31, 30)] == [4, None]
    assert [old.left_at(*one) for one in ((3, 31), (3, 30), (2, 99), (5, 1))] == [30] + [None] * 3


def test_a_checkpoint_of_a_branch_that_was_left_is_said_and_its_copy_used(tmp_path: Path) -> None:
    former = Former(tmp_path, 10, 20)
    assert former.resume(f"{former.folder}@10").point().incarnation == 1
    former.checkpoint(15, 1)
    store = former.folder / "buffer"
    store.mkdir()
    of_its_line = former.resume()
    assert of_its_line.lines() == ["goes on from batch 15 (step-000015)"]
    left = former.resume(f"{former.folder}@20")
    assert left.lines()[1] == (
        "it is of a branch that the run left at batch 10: what was trained instead is left now, "
        "and the buffer goes on from the checkpoint's copy"
    )
    assert store.exists(), "nothing has changed yet"
    assert left.point().step == 20
    assert not store.exists(), "its batches have the same numbers and other samples"
    assert (former.folder / "buffer.before-resume").exists()
    assert branches_of(former.folder).left_at(1, 15) == 10
    assert former.resume(f"{former.folder}@20").left_at is None


def test_a_store_of_the_line_stays(tmp_path: Path) -> None:
    former = Former(tmp_path, 10, 20)
    (former.folder / "buffer").mkdir()
    former.resume(f"{former.folder}@10").point()
    assert (former.folder / "buffer").exists()


def test_a_store_that_cannot_be_set_aside_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = Former(tmp_path, 10, 20)
    former.resume(f"{former.folder}@10").point()
    (former.folder / "buffer").mkdir()

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    left = former.resume(f"{former.folder}@20")
    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(ConfigError, match=r"buffer cannot be written \(permission denied\): let"):
        left.point()


def test_learners_that_are_restarted_in_place_stay_on_the_line(tmp_path: Path) -> None:
    former = Former(tmp_path, 10)
    lineage = Lineage.take_up(former.folder)
    newest = lineage.newest(former.checkpoints)
    assert lineage.goes_on(newest).applied == (1, 10)
    former.checkpoint(20, 1)
    assert lineage.goes_on(lineage.newest(former.checkpoints)).applied == (2, 20)
    lineage.close()
    assert [branches_of(former.folder).incarnation_at(k) for k in (10, 20, 21)] == [0, 1, 2]
    (former.folder / LINEAGE_FILE).write_text('{"incarnation": "x", "bases": 3}')
    assert branches_of(former.folder).incarnation_at(5) == 0


def test_weights_of_a_branch_that_was_left_are_said(tmp_path: Path) -> None:
    former = Former(tmp_path, 10, 20)
    former.resume(f"{former.folder}@10").point()
    for step in (10, 20):
        exported = former.folder / "exports" / f"step-0000{step}.0"
        exported.mkdir(parents=True)
        (exported / "config.json").write_text("{}")
    said: list[str] = []
    weights_of("r@10", tmp_path, said.append)
    assert said == []
    weights_of("r@20", tmp_path, said.append)
    path = former.folder / "checkpoints" / "step-000020"
    assert said == [f"{path} is of a branch that r left at batch 10"]
