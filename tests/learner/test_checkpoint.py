"""A learner that goes on from a checkpoint is the learner that was never stopped, bit for bit."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from transformers import AutoModelForCausalLM

from asyncrl import checkpoints
from asyncrl.checkpoints import writing
from asyncrl.disk import checksum
from asyncrl.errors import CheckpointError
from asyncrl.learner.checkpointing import large_files, state
from asyncrl.learner.checkpointing.export import export_checkpoint
from asyncrl.learner.checkpointing.failure import explain
from asyncrl.learner.checkpointing.shards import write_shards
from asyncrl.learner.checkpointing.staging import Staging, local
from asyncrl.learner.checkpointing.state import parameters, state_of
from asyncrl.learner.step import Trainer
from tests.helpers.metric_names import undocumented
from tests.helpers.ranks import join, two_ranks
from tests.helpers.tiny_model import save_tiny_model
from tests.learner.checkpoint_ranks import (
    V2,
    VARIANTS,
    Arrays,
    FailsAtFirst,
    full,
    keep,
    never_stopped,
    part,
    restored,
    settings,
    variant,
)

pytestmark = pytest.mark.usefixtures("one_rank")

FIRST = next(iter(VARIANTS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


@pytest.fixture(scope="module")
def alone(
    model: Path, tmp_path_factory: pytest.TempPathFactory, one_rank: None
) -> tuple[Path, Arrays]:
    """A run of one rank with a checkpoint of batch 2, and what was in it."""
    torch.set_num_threads(1)
    run = tmp_path_factory.mktemp("alone")
    return run, never_stopped(model, run, FIRST, 0, 1)[0]


@pytest.fixture(scope="module")
def pair(
    model: Path, alone: tuple[Path, Arrays], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Arrays]]:
    """Runs of two ranks, one of each variant, compared bit for bit in the ranks themselves."""
    out = tmp_path_factory.mktemp("pair")
    step_2 = alone[0] / "checkpoints" / "step-000002"
    with two_ranks("tests.learner.checkpoint_ranks", out / "store", model, out, step_2) as ranks:
        join(ranks)
    return out, [dict(np.load(out / f"{n}.0.npz")) for n in range(len(VARIANTS))]


def of(arrays: Arrays, kind: str) -> Arrays:
    return {n.removeprefix(kind): v for n, v in arrays.items() if n.startswith(kind)}


def assert_equal(got: Arrays, want: Arrays) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def test_two_ranks_go_on_bit_for_bit(pair: tuple[Path, list[Arrays]]) -> None:
    for number, name in enumerate(VARIANTS):
        meta = checkpoints.find(pair[0] / str(number), "2").meta
        assert (meta.step, meta.version, meta.world, meta.samples) == (2, 2, 2, 64), name
        assert [n for n in meta.files if n.endswith(".distcp")] == [
            "__0_0.distcp", "__1_0.distcp",
        ]  # fmt: skip
    asked = checkpoints.list_checkpoints(pair[0] / str(list(VARIANTS).index("own critic")))
    assert [c.meta.step for c in asked] == [2, 3, 4]
    again = checkpoints.find(pair[0] / "again", "2").meta
    assert again.world == 2, "rank 0 could not seal it at first"


@pytest.mark.parametrize("number", range(len(VARIANTS)), ids=list(VARIANTS))
def test_one_rank_goes_on_from_two(
    model: Path, pair: tuple[Path, list[Arrays]], number: int
) -> None:
    out, arrays = pair
    name = list(VARIANTS)[number]
    folder = out / str(number) / "checkpoints" / "step-000002"
    trainer, _ = restored(model, folder, name, 0, 1)
    assert_equal(full(state_of(trainer)), of(arrays[number], "saved:"))
    trainer.train(part(3, 0, 1), V2)
    if variant(name).learner.dtype == "float32":
        want = of(arrays[number], "then:")
        for key, value in full(state_of(trainer)).items():
            np.testing.assert_allclose(value, want[key], rtol=1e-4, atol=1e-6, err_msg=key)


def test_two_ranks_go_on_from_one(
    alone: tuple[Path, Arrays], pair: tuple[Path, list[Arrays]]
) -> None:
    assert_equal(of(pair[1][0], "alone:"), of(alone[1], "saved:"))


@pytest.mark.parametrize("number", [0, 3], ids=["all weights", "adapters"])
def test_the_export_of_a_checkpoint_is_the_policy(
    pair: tuple[Path, list[Arrays]], tmp_path: Path, number: int
) -> None:
    out, arrays = pair
    export_checkpoint(out / str(number) / "checkpoints" / "latest", tmp_path / "last")
    folder = out / str(number) / "checkpoints" / "step-000002"
    assert export_checkpoint(folder, tmp_path / "out") == torch.float32
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert_equal(
        {name: state[name].numpy() for name in of(arrays[number], "model:")},
        of(arrays[number], "model:"),
    )


def test_a_copy_outlives_the_step(model: Path) -> None:
    trainer = Trainer(variant(FIRST), model, rank=0, world=1, device="cpu")
    trainer.train(part(1, 0, 1), V2)
    staging = Staging(pinned=False)

    def held() -> dict[str, torch.Tensor]:
        return {n: t for n, t in state_of(trainer).items() if not n.startswith("rng/")}

    before = {name: local(t).clone() for name, t in held().items()}
    copies = staging.copy(held())
    trainer.train(part(2, 0, 1), V2)
    for name, copy in copies.items():
        assert torch.equal(local(copy), before[name]), name
    places = {name: local(copy).data_ptr() for name, copy in copies.items()}
    again, now = staging.copy(held()), held()
    assert all(torch.equal(local(copy), local(now[name])) for name, copy in again.items())
    assert {name: local(copy).data_ptr() for name, copy in again.items()} == places


# --- what can go wrong --------------------------------------------------------------------------


@contextmanager
def _full_disk(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size`: the error is that of a full disk but for its
    number."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_told_and_the_checkpoints_before_stay(
    model: Path, alone: tuple[Path, Arrays], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(alone[0], run, symlinks=True)
    before = sorted(p.name for p in (run / "checkpoints").iterdir())
    trainer, of_rank = restored(model, run / "checkpoints" / "step-000004", FIRST, 0, 1)
    events: list[dict[str, Any]] = []
    keeper = keep(trainer, variant(FIRST), of_rank, tell=lambda **e: events.append(e))
    with _full_disk(100_000):
        keeper.trained(trainer.train(part(5, 0, 1), V2), asked=True)
        keeper.after_batch(5)
        with pytest.raises(
            CheckpointError,
            match=r"batch 5 .*\(file too large, the limit is 100,000 bytes\): raise it \(ulimit",
        ):
            keeper.finish(in_step=False)
    assert [e["event"] for e in events] == ["checkpoint_failed"]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == before
    with pytest.raises(CheckpointError, match="batch 5 cannot be written"):
        keeper.check()  # nothing would make room for another batch
    keeper.trained(trainer.train(part(6, 0, 1), V2), asked=False)
    keeper.after_batch(6)
    keeper.finish()  # there is room again
    keeper.close()
    assert [e["event"] for e in events] == ["checkpoint_failed", "checkpoint"]
    newest = checkpoints.latest(run)
    assert newest is not None
    assert (newest.meta.step, newest.meta.incarnation, newest.meta.samples) == (6, 1, 192)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "full"), r"\(no space left on device, .* free\): make room there"),
        (OSError(errno.EROFS, "read-only"), r"\(read-only file system\): let this user write"),
        (OSError(errno.EACCES, "denied"), r"\(permission denied\): let this user write there"),
        (OSError(errno.EFBIG, "large"), r"\(file too large\): use a file system that takes files"),
        (RuntimeError("odd\nmore"), r"\(RuntimeError: odd\): see the logs of the learners"),
    ],
)
def test_failures_say_what_to_do(tmp_path: Path, error: Exception, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        raise CheckpointError(explain(error, tmp_path / "not" / "there", 7))


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("at", [1, 3, 5])
def test_why_the_disk_took_no_shards_is_told_wherever_it_was(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, at: int
) -> None:
    """torch has an error of its own for a write that failed inside of a tensor."""
    real, writes = os.write, count(1)

    def write(fd: int, piece: Any) -> int:
        if next(writes) == at:
            raise OSError(number, os.strerror(number))
        return real(fd, piece)

    trainer = Trainer(variant(FIRST), model, rank=0, world=1, device="cpu")
    state = {name: t.clone() for name, t in state_of(trainer).items()}
    monkeypatch.setattr(large_files, "_PIECE", 8192)
    monkeypatch.setattr(large_files.os, "write", write)
    with pytest.raises(CheckpointException) as caught:
        write_shards(state, tmp_path / "x", dist.group.WORLD)
    assert os.strerror(number).lower() in explain(caught.value, tmp_path / "x", 7).lower()


def test_parameters_without_moments_stay_so(model: Path, tmp_path: Path) -> None:
    """And each has its own number of steps."""
    name = "bfloat16, value head"
    trainer = Trainer(variant(name), model, rank=0, world=1, device="cpu")
    keeper = keep(trainer, variant(name), settings(model, tmp_path, 0, 1))
    keeper.trained(trainer.train(part(1, 0, 1), V2), asked=True)
    own = parameters(trainer.policy)
    some = next(iter(trainer.policy.trainable.policy.values()))
    moments = next(iter(trainer.optimizer.state.values()))
    trainer.optimizer.state[some] = {slot: torch.zeros_like(some) for slot in moments}
    for steps, of_one in enumerate(trainer.optimizer.state.values()):
        of_one["step"] = torch.tensor(float(steps))
    keeper.after_batch(1)
    keeper.finish()
    keeper.close()
    restored_one, _ = restored(model, tmp_path / "checkpoints" / "step-000001", name, 0, 1)
    taken = [
        {name: t.optimizer.state[p]["step"].item() for name, p in parameters(t.policy).items()
         if p in t.optimizer.state}
        for t in (trainer, restored_one)
    ]  # fmt: skip
    assert 1 < len(taken[0]) < len(own)
    assert taken[0] == taken[1]


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(
    model: Path, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    trainer = Trainer(variant(FIRST), model, rank=0, world=1, device="cpu")
    with pytest.raises(CheckpointError, match="cannot be written"):
        keep(trainer, variant(FIRST), settings(model, tmp_path, 0, 1))


def test_a_checkpoint_of_another_model_is_refused(
    model: Path, alone: tuple[Path, Arrays], tmp_path: Path
) -> None:
    folder = alone[0] / "checkpoints" / "step-000002"
    with pytest.raises(CheckpointError, match=r"of another model .*, only it has lm_head|model\."):
        restored(model, folder, "adapters", 0, 1)
    larger = save_tiny_model(tmp_path / "larger", "qwen3", tied=True, intermediate_size=96)
    with pytest.raises(CheckpointError, match=r"mlp.* has \(64, 32\) there and \(96, 32\) here"):
        restored(larger, folder, FIRST, 0, 1)


def test_a_checkpoint_without_numbers_of_steps_is_refused(
    model: Path, alone: tuple[Path, Arrays], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a former form are."""
    real = state.metadata

    def older(folder: Path) -> dict[str, Any]:
        return {name: m for name, m in real(folder).items() if name != "optim/steps"}

    monkeypatch.setattr(state, "metadata", older)
    with pytest.raises(CheckpointError, match=r"step-000002 lacks optim/steps: go on with the"):
        restored(model, alone[0] / "checkpoints" / "step-000002", FIRST, 0, 1)


def test_checksums_of_shards_are_of_what_was_to_be_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of what lies on the disk, which may be something else, and is slow to read."""
    read: list[str] = []

    def note(path: Path) -> str:
        read.append(path.name)
        return checksum(path)

    monkeypatch.setattr(writing, "checksum", note)
    trainer = Trainer(variant(FIRST), model, rank=0, world=1, device="cpu")
    keeper = keep(trainer, variant(FIRST), settings(model, tmp_path, 0, 1))
    keeper.trained(trainer.train(part(1, 0, 1), V2), asked=True)
    keeper.after_batch(1)
    keeper.finish()
    keeper.close()
    assert sorted(read) == [".metadata", "config.yaml"]
    made = checkpoints.find(tmp_path, "1")
    assert set(made.meta.checksums) == {".metadata", "__0_0.distcp", "config.yaml"}
    checkpoints.verify(made)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_damage_inside_a_file_is_named(
    model: Path, alone: tuple[Path, Arrays], tmp_path: Path, name: str
) -> None:
    copy = tmp_path / "checkpoints" / "step-000002"
    shutil.copytree(alone[0] / "checkpoints" / "step-000002", copy)
    (copy / name).write_bytes(os.urandom((copy / name).stat().st_size))
    for load in (lambda: restored(model, copy, FIRST, 0, 1),
                 lambda: export_checkpoint(copy, tmp_path / "out")):  # fmt: skip
        with pytest.raises(CheckpointError, match=rf"{name}: the checkpoint is damaged \(its chec"):
            load()
    meta = json.loads((copy / "meta.json").read_text())
    del meta["checksum"], meta["checksums"]  # as older ones are
    (copy / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(CheckpointError, match=r"step-000002 cannot be read \(.*restore it, or"):
        restored(model, copy, FIRST, 0, 1)


def test_checkpoints_are_taken_when_they_are_due(model: Path, tmp_path: Path) -> None:
    """Every two batches, when the buffer asks, and at the end."""
    config = variant(FIRST, "checkpoint.background=false", "checkpoint.keep=2")
    trainer = Trainer(config, model, rank=0, world=1, device="cpu")
    events: list[dict[str, Any]] = []
    ledger = _Ledger()
    keeper = keep(
        trainer, config, settings(model, tmp_path, 0, 1),
        tell=lambda **e: events.append(e), rest=lambda: {"mine": [1, 2.5]},
    )  # fmt: skip
    keeper.connect(lambda: ledger)
    for k in range(1, 6):
        keeper.trained(trainer.train(part(k, 0, 1), V2), asked=k == 3)
        keeper.after_batch(k)
        assert len(events) == (0, 1, 2, 3, 3)[k - 1], "on the disk when the call returns"
    timings = keeper.take_timings()
    keeper.last(5)
    keeper.finish()
    keeper.last(5)  # it is there
    keeper.close()
    assert [e["batch"] for e in events] == [2, 3, 4, 5]
    assert ledger.calls == [c for k in (2, 3, 4, 5) for c in (("save", k), ("covered", k))] + ["-"]
    assert timings.keys() == {"checkpoint/stall_s", "checkpoint/write_s", "checkpoint/bytes"}
    assert undocumented(timings, "Learner rank 0") == []
    kept = checkpoints.list_checkpoints(tmp_path)
    scores = {e["batch"]: e["score"] for e in events}
    best = max(scores, key=lambda k: (scores[k], k))
    assert {c.meta.step for c in kept} == {5, best if best < 5 else 4}
    assert (kept[-1].meta.state["mine"], kept[-1].ledger.is_dir()) == ([1, 2.5], True)
    resumed, of_rank = restored(model, kept[-1].path, FIRST, 0, 1)
    again = keep(resumed, variant(FIRST), of_rank)
    assert again.remembered["mine"] == [1, 2.5]
    again.last(5)  # nothing was trained since
    again.finish()
    again.close()
    assert len(checkpoints.list_checkpoints(tmp_path)) == len(kept)


@pytest.mark.parametrize("times", [0, 1, 2])
def test_the_last_one_is_tried_once_more(model: Path, tmp_path: Path, times: int) -> None:
    """With the state and the score that it was begun with."""
    trainer = Trainer(variant(FIRST), model, rank=0, world=1, device="cpu")
    events: list[dict[str, Any]] = []
    of_rank = settings(model, tmp_path, 0, 1)
    keeper = keep(trainer, variant(FIRST), of_rank, tell=lambda **e: events.append(e))
    keeper.connect(lambda: FailsAtFirst(times))
    keeper.trained(trainer.train(part(2, 0, 1), V2), asked=False)
    keeper.after_batch(2)
    keeper.last(2)
    if times == 2:
        with pytest.raises(CheckpointError, match="checkpoint of batch 2 cannot be written"):
            keeper.finish()
    else:
        keeper.finish()
        assert isinstance(events[-1]["score"], float)
    keeper.close()
    want = ["checkpoint_failed"] * times + ["checkpoint"] * (times < 2)
    assert [e["event"] for e in events] == want


def test_the_buffer_is_not_obeyed_twice(model: Path, tmp_path: Path) -> None:
    """While a checkpoint is being written training goes on, and no other is taken for bytes."""
    trainer = Trainer(variant(FIRST), model, rank=0, world=1, device="cpu")
    events: list[dict[str, Any]] = []
    ledger = _Ledger()
    ledger.may_go_on.clear()
    of_rank = settings(model, tmp_path, 0, 1)
    keeper = keep(trainer, variant(FIRST), of_rank, tell=lambda **e: events.append(e))
    keeper.connect(lambda: ledger)
    for k in (2, 3):
        keeper.trained(trainer.train(part(k, 0, 1), V2), asked=True)
        keeper.after_batch(k)
    keeper.check()
    assert events == []
    ledger.may_go_on.set()
    keeper.finish()
    keeper.close()
    assert [e["batch"] for e in events] == [2]


def test_where_a_run_went_back_to_stays_until_it_has_one_of_its_own(
    model: Path, alone: tuple[Path, Arrays], tmp_path: Path
) -> None:
    shutil.copytree(alone[0] / "checkpoints", tmp_path / "checkpoints", symlinks=True)
    base = tmp_path / "checkpoints" / "step-000002"
    for path in base.parent.glob("step-*/meta.json"):  # none of them is the best
        meta = json.loads(path.read_text())
        del meta["checksum"]
        path.write_text(json.dumps(meta | {"score": None}))
    there = []

    class Looks(_Ledger):
        def save_ledger(self, path: str | os.PathLike[str], batch: int) -> None:
            there.append(base.exists())
            super().save_ledger(path, batch)

    trainer, of_rank = restored(model, base, FIRST, 0, 1)
    keeper = keep(trainer, variant(FIRST, "checkpoint.keep=1"), of_rank)
    keeper.connect(Looks)
    keeper.trained(trainer.train(part(3, 0, 1), V2), asked=False)
    keeper.after_batch(4)
    keeper.finish()
    keeper.close()
    assert there == [True]
    assert [c.meta.step for c in checkpoints.list_checkpoints(tmp_path)] == [4]


class _Ledger:
    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def save_ledger(self, path: str | os.PathLike[str], batch: int) -> None:
        assert self.may_go_on.wait(60)
        Path(path).mkdir()
        (Path(path) / "data").write_bytes(b"1")
        self.calls.append(("save", batch))

    def covered(self, batch: int) -> None:
        self.calls.append(("covered", batch))

    def close(self) -> None:
        self.calls.append("-")
