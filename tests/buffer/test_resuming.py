"""A run that goes on: from its own store or from a checkpoint's copy, and what differs then."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from asyncrl.buffer.copies import write_copy
from asyncrl.buffer.durable import Durability, Durable, Keeper, open_ledger
from asyncrl.buffer.ledger import Ledger
from asyncrl.buffer.resuming import resume_ledger
from asyncrl.checkpoints import ResumePoint
from asyncrl.errors import ConfigError, StoreError
from asyncrl.types import SampleId, Trajectory, Version
from asyncrl.wire import pack_trajectory
from tests.buffer.samples import prompts, same_arrays, trajectory

OPTIONS: dict[str, Any] = {
    "run_id": "r", "memory_bytes": 1, "store_bytes": 1 << 28, "recorded": True,
    "group_size": 2, "groups_per_batch": 2, "max_staleness": 9, "lease_timeout_s": 60.0,
    "retain": True, "ranks": 2,
}  # fmt: skip
BATCHES = 5


class Former:
    """A run of BATCHES batches whose checkpoints are of 1 and 3, and that was then killed."""

    def __init__(self, run_dir: Path, durability: Durability, **changes: Any) -> None:
        self.run_dir, self.durability = run_dir, durability
        self.sent: dict[SampleId, Trajectory] = {}
        self.batches: dict[int, list[SampleId]] = {}
        ledger, keeper = open_ledger(
            self.store, durability=durability, prompts=prompts(), **OPTIONS | changes
        )
        for batch in range(1, BATCHES + 1):
            self.batches[batch] = self.train(ledger, keeper, batch)
            if batch in (2, 4):  # the checkpoint is complete one batch later
                checkpoint = self.checkpoint(batch - 1)
                checkpoint.mkdir()
                write_copy(checkpoint / "ledger", "r", *ledger.copy(batch - 1))
                ledger.covered(batch - 1)
                keeper.settle(recorded=False)
        ledger.lease("a", ledger.version, 3, 0.0)  # in flight
        keeper.stopped("interrupted", Version(0, BATCHES), False)
        keeper.settle(recorded=False)
        keeper.close()

    @property
    def store(self) -> Path:
        return self.run_dir / "buffer"

    def checkpoint(self, batch: int) -> Path:
        return self.run_dir / f"step-{batch}"

    def train(self, ledger: Ledger, keeper: Keeper, batch: int) -> list[SampleId]:
        while (assignment := ledger.assign(batch)) is None:
            for lease in ledger.lease("a", ledger.version, 3, 0.0):
                for k in lease.samples:
                    t = self.sent[lease.group.sample(k)] = trajectory(lease, k, "a", float(k))
                    sample = pack_trajectory(t)
                    e = keeper.envelope(sample.header, sample.payload)
                    assert ledger.accept(e, 0.0) == "accepted"
            keeper.settle(recorded=False)
        ledger.commit(batch)
        ledger.published(Version(ledger.version.incarnation, batch))
        keeper.settle(recorded=False)
        return [h.id for h in assignment.manifest]

    def resume(
        self, step: int, incarnation: int = 1, *, goes_on: bool = False, **changes: Any
    ) -> tuple[Ledger, Keeper]:
        point = ResumePoint(str(self.checkpoint(step)), incarnation, step, step)
        return resume_ledger(
            self.store, resume=point, make_prompts=prompts, durability=self.durability,
            goes_on=goes_on, **OPTIONS | changes,
        )  # fmt: skip


def check(former: Former, ledger: Ledger, keeper: Keeper, step: int, ranks: int = 2) -> None:
    """What was trained after the checkpoint is served again, identical; then the run goes on."""
    assert (ledger.committed, ledger.version) == (step, Version(1, step))
    assert keeper.stops == ()
    assert ledger.lessees() == set()
    for batch in range(step + 1, BATCHES + 1):
        parts = [ledger.part(batch, rank) for rank in range(ranks)]
        if parts[0] is None:
            break  # it was not there yet when the copy was made
        assert [h.id for h in parts[0].manifest] == former.batches[batch]
        dealt = sorted(i for part in parts if part is not None for i in part.mine)
        assert dealt == list(range(4)), "each sample to one rank"
        for part in filter(None, parts):
            assert part.mine, "every rank has some"
            for e in part.envelopes:
                assert same_arrays(e, former.sent[e.header.id])
        ledger.commit(batch)
        ledger.published(Version(1, batch))
    for batch in range(ledger.committed + 1, BATCHES + 3):
        former.train(ledger, keeper, batch)
    counts = ledger.counts()
    assert (counts["trained"], ledger.conserved()) == (4 * (BATCHES + 2), True)


@pytest.mark.parametrize("durability", ["none", "process"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_run_goes_on_from_its_latest_checkpoint(
    durability: Durability, ranks: int, tmp_path: Path
) -> None:
    former = Former(tmp_path, durability)
    ledger, keeper = former.resume(3, ranks=ranks)
    first = 3 if durability == "process" else 4
    # With a store nothing is lost that was there; a copy has what was there when it was made.
    assert ledger.assigned(first + 1) or durability == "none"
    assert ledger.assigned(4)
    assert ledger.assigned(5) == (durability == "process")
    check(former, ledger, keeper, 3, ranks)
    for retired in ledger.take_retired():
        assert retired.rank is None or retired.rank < ranks
    keeper.close()


def test_an_older_checkpoint_needs_its_copy_and_the_store_is_set_aside(tmp_path: Path) -> None:
    former = Former(tmp_path, "process")
    ledger, keeper = former.resume(1)
    assert isinstance(keeper, Durable)
    check(former, ledger, keeper, 1)
    keeper.close()
    assert (tmp_path / "buffer.before-resume" / "data.mdb").exists()


def test_a_store_that_is_damaged_or_gone_is_replaced_by_the_copy(tmp_path: Path) -> None:
    former = Former(tmp_path, "process")
    file = former.store / "data.mdb"
    file.write_bytes(file.read_bytes()[:8192])
    ledger, keeper = former.resume(3)
    check(former, ledger, keeper, 3)
    keeper.close()
    shutil.rmtree(former.store)
    ledger, keeper = former.resume(3)
    check(former, ledger, keeper, 3)
    keeper.close()


def test_a_buffer_that_is_restarted_in_a_resumed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    former = Former(tmp_path, "process")
    ledger, keeper = former.resume(3)
    ledger.commit(4)
    ledger.published(Version(1, 4))
    keeper.stopped("enough", None, True)
    keeper.settle(recorded=False)
    keeper.close()
    ledger, keeper = former.resume(3, goes_on=True)
    assert (ledger.committed, ledger.version) == (4, Version(1, 4))
    assert [stop.reason for stop in keeper.stops] == ["enough"]
    keeper.close()
    ledger, keeper = former.resume(3, incarnation=2)
    assert (ledger.committed, ledger.version, keeper.stops) == (3, Version(2, 3), ())
    keeper.close()
    (former.store / "data.mdb").unlink()
    with pytest.raises(StoreError, match="missing or empty"):
        former.resume(3, incarnation=2, goes_on=True)


@pytest.mark.parametrize("durability", ["none", "process"])
def test_without_a_checkpoint_it_begins_again_with_what_was_produced(
    durability: Durability, tmp_path: Path
) -> None:
    point = ResumePoint(None, incarnation=1, step=0, version=0)
    options = OPTIONS | {"make_prompts": prompts, "durability": durability, "goes_on": False}
    ledger, keeper = resume_ledger(tmp_path / "buffer", resume=point, **options)
    assert ledger.version == Version(1, 0)
    (lease, _) = ledger.lease("a", Version(1, 0), 4, 0.0)
    for k in lease.samples:
        sample = pack_trajectory(trajectory(lease, k, "a"))
        ledger.accept(keeper.envelope(sample.header, sample.payload), 0.0)
    keeper.settle(recorded=False)
    keeper.close()
    point = ResumePoint(None, incarnation=2, step=0, version=0)
    ledger, keeper = resume_ledger(tmp_path / "buffer", resume=point, **options)
    assert ledger.counts()["completed"] == (2 if durability == "process" else 0)
    assert ledger.lessees() == set()
    keeper.close()


def test_a_buffer_that_was_killed_before_it_wrote_anything_has_lost_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "buffer").mkdir()
    (tmp_path / "buffer" / "data.mdb").touch()
    point = ResumePoint(None, incarnation=1, step=0, version=0)
    ledger, keeper = resume_ledger(
        tmp_path / "buffer", resume=point, make_prompts=prompts, durability="process",
        goes_on=False, **OPTIONS,
    )  # fmt: skip
    assert ledger.version == Version(1, 0)
    keeper.close()


@pytest.mark.parametrize("durability", ["none", "process"])
def test_what_a_resumed_run_takes_back_is_recorded(durability: Durability, tmp_path: Path) -> None:
    former = Former(tmp_path, durability, prior_incarnation="drop")
    ledger, keeper = former.resume(3, prior_incarnation="drop")
    assert "requeued" in [retired.outcome for retired in ledger.take_retired()]
    keeper.close()


def test_covered_batches_cannot_be_trained_from_the_initial_model(tmp_path: Path) -> None:
    Former(tmp_path, "process")
    with pytest.raises(StoreError, match="has batches 4 to 5, the run would go on from the init"):
        resume_ledger(
            tmp_path / "buffer", resume=ResumePoint(None, 1, 0, 0), make_prompts=prompts,
            durability="process", goes_on=False, **OPTIONS,
        )  # fmt: skip


def test_rules_that_outcomes_rest_on_may_not_differ(tmp_path: Path) -> None:
    former = Former(tmp_path, "none")
    with pytest.raises(ConfigError, match="max_staleness=8 differs from max_staleness=9"):
        former.resume(3, max_staleness=8)
