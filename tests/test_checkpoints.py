"""A run's checkpoints as folders: whole or not there, the latest and the best kept."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl import checkpoints
from asyncrl.checkpoints import META, Checkpoint, Meta, ResumePoint, reading, writing
from asyncrl.errors import CheckpointError


def write(
    run: Path, step: int, *, incarnation: int = 0, score: float | None = None, size: int = 10
) -> Checkpoint:
    folder = checkpoints.partial(run, step, incarnation)
    (folder / "ledger").mkdir(parents=True)
    (folder / "0.distcp").write_bytes(b"x" * size)
    (folder / "ledger" / "data.mdb").write_bytes(b"y" * 3)
    meta = Meta(
        step=step, version=step, incarnation=incarnation, world=1, run_id="r", score=score
    )  # fmt: skip
    return checkpoints.seal(folder, meta)


def steps(run: Path) -> list[int]:
    return [c.meta.step for c in checkpoints.list_checkpoints(run)]


def test_a_sealed_checkpoint_is_found_by_its_names(tmp_path: Path) -> None:
    assert checkpoints.latest(tmp_path) is None
    first = write(tmp_path, 10, score=0.5)
    second = write(tmp_path, 20, score=0.25)
    folder = tmp_path / "checkpoints"
    assert (first.path, first.meta.nbytes) == (folder / "step-000010", 13)
    assert checkpoints.latest(tmp_path) == second
    assert checkpoints.best(tmp_path) == first
    assert [checkpoints.find(tmp_path, w) for w in ("latest", "best", "10")] == [
        second, first, first,
    ]  # fmt: skip
    for name, target in (("latest", "step-000020"), ("best", "step-000010")):
        assert (folder / name).readlink() == Path(target)
    assert checkpoints.read(folder / "latest") == second
    assert ResumePoint.at(second, 3) == ResumePoint(str(second.path), 3, 20, 20)
    with pytest.raises(CheckpointError, match=r"no checkpoint 15, it has those of steps 10, 20"):
        checkpoints.find(tmp_path, "15")


def test_the_newest_is_of_the_highest_incarnation(tmp_path: Path) -> None:
    """A run that went back to step 10 has left step 30 behind."""
    for step in (10, 20, 30):
        write(tmp_path, step)
    resumed = write(tmp_path, 20, incarnation=1, size=99)  # takes the place of the other
    latest = checkpoints.latest(tmp_path)
    assert latest == resumed
    assert steps(tmp_path) == [10, 30, 20]
    folder = tmp_path / "checkpoints"
    base = str(folder / "step-000010")  # where the run went back to
    assert checkpoints.prune(tmp_path, keep=1, spare=base) == [folder / "step-000030"]
    assert checkpoints.prune(tmp_path, keep=1) == [Path(base)]


def _truncated(folder: Path) -> str:
    (folder / "0.distcp").write_bytes(b"x" * 9)
    return r"0\.distcp: the checkpoint is damaged \(it has 9 bytes, 10 were written\)"


def _lost(folder: Path) -> str:
    (folder / "ledger" / "data.mdb").unlink()
    return r"ledger/data\.mdb: the checkpoint is damaged \(No such file"


def _torn(folder: Path) -> str:
    (folder / "meta.json").write_text((folder / "meta.json").read_text()[:50])
    return r"meta\.json: the checkpoint is damaged \("


def _foreign(folder: Path) -> str:
    (folder / "meta.json").write_text(json.dumps({"step": 20}))
    return r"meta\.json: the checkpoint is damaged \(.*missing"


def _empty(folder: Path) -> str:
    (folder / "meta.json").unlink()
    return r"step-000020 is no checkpoint, it has no meta\.json"


@pytest.mark.parametrize("damage", [_truncated, _lost, _torn, _foreign, _empty])
def test_a_damaged_one_is_named_and_never_passed_over(tmp_path: Path, damage: object) -> None:
    write(tmp_path, 10)
    damaged = write(tmp_path, 20).path
    assert callable(damage)
    with pytest.raises(CheckpointError, match=damage(damaged)):
        checkpoints.latest(tmp_path)
    write(tmp_path, 30)  # a run that goes on is not disturbed by it, nor does it remove it
    checkpoints.prune(tmp_path, keep=1)
    assert damaged.exists()
    assert not (tmp_path / "checkpoints" / "step-000010").exists()


@pytest.mark.parametrize("name", ["0.distcp", "meta.json"])
def test_a_bit_that_flipped_is_noticed(tmp_path: Path, name: str) -> None:
    made = write(tmp_path, 10, size=1 << 21)

    def verify() -> None:
        for rank in range(2):  # each looks at its share
            checkpoints.verify(checkpoints.read(made.path), rank, 2)

    verify()
    content = bytearray((made.path / name).read_bytes())
    content[content.index(b"0") if name == META else -1] ^= 1  # a digit: it is JSON all the same
    (made.path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name}: the checkpoint is damaged .its checksum"):
        verify()


def test_one_that_a_learner_removes_meanwhile_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, gone = write(tmp_path, 20), tmp_path / "checkpoints" / "step-000010"
    monkeypatch.setattr(reading, "_folders", lambda _: [gone, kept.path])
    assert checkpoints.list_checkpoints(tmp_path) == [kept]


def test_what_is_half_written_is_never_seen_and_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 10)
    half = checkpoints.partial(tmp_path, 20, 0)
    half.mkdir()
    remove = shutil.rmtree

    def removed(path: Path, **more: bool) -> None:
        if (path / "meta.json").exists():  # a buffer that still writes finds no folder
            assert not half.exists()
        remove(path, **more)

    monkeypatch.setattr(shutil, "rmtree", removed)
    (half / "meta.json").write_text("{}")
    removed_by_half = half.with_name(f"{half.name}.removed.tmp")
    removed_by_half.mkdir()
    link = half.with_name(".latest.link")
    link.symlink_to("step-000020")
    assert steps(tmp_path) == [10]
    assert set(checkpoints.clean(tmp_path)) == {removed_by_half, half, link}
    assert sorted(p.name for p in half.parent.iterdir()) == ["latest", "step-000010"]


@dataclass
class Written:
    step: int
    score: float | None
    nbytes: int


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([None, 0.0, 1.0, 2.0]), st.integers(0, 90)), max_size=8),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(0, 200)),
)
def test_pruning_keeps_the_latest_and_the_best_and_no_more_than_it_must(
    tmp_path_factory: pytest.TempPathFactory,
    made: list[tuple[float | None, int]],
    keep: int,
    quota: int | None,
) -> None:
    run = tmp_path_factory.mktemp("run")
    held: list[Written] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "sync", lambda _: None)  # most of the time, of no matter here
        for step, (score, size) in enumerate(made, start=1):
            held.append(Written(step, score, write(run, step, score=score, size=size).meta.nbytes))
            checkpoints.prune(run, keep, quota)
            best = _drop_the_oldest(held, keep, quota)
            assert steps(run) == [w.step for w in held]
            top = checkpoints.best(run)
            assert (top.meta.step if top else None) == (best.step if best else None)


def _drop_the_oldest(held: list[Written], keep: int, quota: int | None) -> Written | None:
    """As it is said: until there are few enough, but for the latest and the best."""
    scored = [w for w in held if w.score is not None]
    best = max(scored, key=lambda w: (w.score, w.step), default=None)
    for w in list(held):
        few = len(held) <= keep and (quota is None or sum(h.nbytes for h in held) <= quota)
        if not few and w is not held[-1] and w is not best:
            held.remove(w)
    return best


def test_a_kill_at_any_moment_leaves_whole_checkpoints(tmp_path: Path) -> None:
    last = 0
    for kill in range(4):
        with subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.checkpoint_loop", str(tmp_path), str(last + 1)],
            stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            for _ in range(3 + 2 * kill):
                last = int(process.stdout.readline())
            process.kill()
            said = process.stdout.read().split()
        last = int(said[-1]) if said else last
        found = checkpoints.list_checkpoints(tmp_path)
        assert found[-1].meta.step in (last, last + 1), "what was told is there"
        for c in found:
            for number in range(4):
                data = (c.path / f"{number}.distcp").read_bytes()
                assert data == bytes([c.meta.step % 256]) * 20_000
        assert checkpoints.read(tmp_path / "checkpoints" / "latest").meta.step >= last - 1
        last = found[-1].meta.step
