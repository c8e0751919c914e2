"""Everybody dies at random, the buffer too: what was acknowledged is trained, once, in order.

The proof uses no count of the ledger's alone: actors and learner ranks write what they did into
logs of their own (tests/helpers/chaos_roles.py), and what must be trained follows from the ids.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from asyncrl.buffer.client import BufferClient
from tests.helpers.buffer_process import ROOT, BufferProcess, BufferSpec
from tests.helpers.chaos_roles import (
    GROUP,
    GROUPS,
    RANKS,
    RUN_ID,
    STALENESS,
    Spec,
    fails,
    reward_of,
    whole_lines,
    write_version,
)
from tests.helpers.eventually import eventually

Id = tuple[int, int]
"""Index of the group, sample."""
LEDGER = {
    "group_size": GROUP, "groups_per_batch": GROUPS, "max_staleness": STALENESS, "ranks": RANKS,
    "lease_timeout_s": 5.0, "filter_zero_variance": True, "max_attempts": 2, "retain": True,
}  # fmt: skip
VICTIMS = ("actor",) * 5 + ("learner",) * 2 + ("buffer",) * 3
PAUSE_S = (0.05, 0.8)
"""Between two kills."""


OF_A_PROCESS = (
    "malformed", "strangers", "unknown_results", "repeated_results", "protocol_errors",
)  # fmt: skip
"""Counts of messages since the buffer's process began; all others are of the run."""


class Fleet:
    """The processes of a run, each of which may be killed and started again."""

    def __init__(self, folder: Path, actors: int, durability: str) -> None:
        self.folder = folder
        (folder / "store").mkdir()
        write_version(folder / "version", 0)
        self.kills: Counter[str] = Counter()
        self.pids: list[int] = []
        spec = BufferSpec(
            ledger=LEDGER, durability=durability, folder=str(folder / "store"), silent_after_s=3.0,
            memory_mib=1,
        )  # fmt: skip
        self.buffer = BufferProcess(spec, folder / "buffer.err")
        self.pids.append(self.buffer.pid)
        names = [f"learner-{r}" for r in range(RANKS)] + [f"actor-{r}" for r in range(actors)]
        self.roles = {name: self._start(name) for name in names}

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        role, _, rank = name.partition("-")
        spec = Spec(int(rank), self.buffer.endpoint, str(self.folder))
        command = [sys.executable, "-m", "tests.helpers.chaos_roles", role]
        with (self.folder / f"{name}.err").open("ab") as err:
            process = subprocess.Popen(
                [*command, json.dumps(asdict(spec))], cwd=ROOT, stdin=subprocess.DEVNULL,
                stdout=err, stderr=err,
            )  # fmt: skip
        self.pids.append(process.pid)
        return process

    def kill(self, rng: random.Random) -> None:
        """SIGKILL somebody, and put another process in its place."""
        role = rng.choice(VICTIMS)
        self.kills[role] += 1
        if role == "buffer":
            self.buffer.kill()
            if rng.random() < 0.5:
                self.kill(rng)  # somebody dies, and somebody starts, while there is no buffer
            if self.buffer.process.poll() is not None:
                self.buffer.restart()
                self.pids.append(self.buffer.pid)
            return
        name = rng.choice([name for name in self.roles if name.startswith(role)])
        self.roles[name].kill()
        self.roles[name].wait(30)
        self.roles[name] = self._start(name)

    def check(self) -> None:
        """Nobody ends without being told to."""
        for name, process in (*self.roles.items(), ("buffer", self.buffer.process)):
            code = process.poll()
            assert code is None, f"{name} ended with {code}: {self.words(name)}"

    def words(self, name: str) -> str:
        return (self.folder / f"{name}.err").read_text(errors="replace")[-2000:]

    def trained(self) -> int:
        """The last batch that all ranks have trained."""
        logs = [self.folder / f"learner-{r}.log" for r in range(RANKS)]
        return min(len(whole_lines(log)) for log in logs)

    def goes_on(self, batches: int) -> None:
        """As many further batches are trained."""
        goal = self.trained() + batches

        def reached() -> bool:
            self.check()
            return self.trained() >= goal

        eventually(reached, lambda: f"no batch after {self.trained()}", timeout_s=90)

    def stop(self) -> dict[str, int]:
        """End the run; the ledger's last counts, which a restarted buffer still knows."""
        client = BufferClient(self.buffer.endpoint, RUN_ID, "launcher", 0, resend_s=0.5)
        try:
            client.hello()
            client.stop("enough")
            for name, process in self.roles.items():
                assert process.wait(60) == 0, f"{name}: {self.words(name)}"
            stats = client.stats()
            assert stats.conserved
            self.buffer.kill()
            self.buffer.restart()
            self.pids.append(self.buffer.pid)
            again = client.stats()
            assert again.conserved
            assert again.state == "stopping"
            kept = [k for k in stats.counts if k not in OF_A_PROCESS]
            assert [again.counts[k] for k in kept] == [stats.counts[k] for k in kept]
            return stats.counts
        finally:
            client.close()

    def close(self) -> None:
        for process in self.roles.values():
            if process.poll() is None:
                process.kill()
                process.wait(30)
        self.buffer.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def chaos(
    folder: Path, *, actors: int, durability: str, seed: int, kills: int = 0, seconds: float = 0.0
) -> None:
    """Kill so often, or for so long; let it end; reconcile."""
    rng = random.Random(seed)
    fleet = Fleet(folder, actors, durability)
    try:
        fleet.goes_on(2)
        until = time.monotonic() + seconds
        while fleet.kills.total() < kills or time.monotonic() < until:
            time.sleep(rng.uniform(*PAUSE_S))
            fleet.check()
            fleet.kill(rng)
        fleet.goes_on(3)
        counts = fleet.stop()
    finally:
        fleet.close()
    assert not [pid for pid in fleet.pids if psutil.pid_exists(pid)]
    facts = reconcile(folder, actors, counts)
    print(f"\n{durability}: kills {dict(fleet.kills)}; {facts}")


# --- the proof -------------------------------------------------------------------------------


def reconcile(folder: Path, actors: int, counts: dict[str, int]) -> str:
    """Ids of actors and ranks against each other, then against the ledger; a line about it."""
    by_status: dict[str, Counter[Id]] = {}
    for rank in range(actors):
        for status, *sample in map(json.loads, whole_lines(folder / f"actor-{rank}.log")):
            by_status.setdefault(status, Counter())[tuple(sample)] += 1
    accepted = by_status["accepted"]
    assert set(accepted.values()) == {1}, "a sample was accepted twice"
    delivered = set(accepted) | set(by_status.get("duplicate", ()))
    made = set(by_status["made"])

    trained, batches = trained_ids(folder)
    assert len(trained) == len(set(trained)), "a sample was trained twice"
    assert set(trained) <= made
    frontier = max(index for index, _ in trained)
    # In strict order nothing is passed over: every group up to the last one that was trained is
    # trained whole, in the order of the prompts, or was filtered.
    assert trained == [sample for i in range(frontier + 1) for sample in trainable(i)]
    beyond = {sample for sample in delivered if sample[0] > frontier}
    assert {s for s in delivered - beyond if not trainable(s[0])} | set(trained) >= (
        delivered - beyond
    )

    assert counts["trained"] == len(trained) == counts["groups_trained"] * GROUP - missing(trained)
    assert counts["dropped_stale"] == counts["assigned"] == counts["leased"] == 0
    assert counts["groups_failed"] == counts["unknown_results"] == 0
    filtered = sum(len(members(i)) for i in range(frontier + 1) if not trainable(i))
    ahead = counts["queued"] + counts["assembling"] + counts["filtered"] - filtered
    assert counts["completed"] == len(trained) + filtered + ahead
    # What the buffer holds beyond is what was delivered, and what it accepted from somebody who
    # died before the answer came.
    unheard = ahead - len(beyond)
    assert 0 <= unheard <= len({s for s in made if s[0] > frontier} - beyond)
    return (
        f"{batches} batches, {len(trained)} samples trained once, {filtered} filtered, {ahead} "
        f"held or filtered beyond; {len(accepted)} acknowledged, {counts['requeued']} requeued, "
        f"{counts['duplicate']} duplicates"
    )


def trained_ids(folder: Path) -> tuple[list[Id], int]:
    """What the ranks say they trained, in the order of consumption; the number of batches."""
    logs = [
        [json.loads(line) for line in whole_lines(folder / f"learner-{rank}.log")]
        for rank in range(RANKS)
    ]
    trained: list[Id] = []
    for number, parts in enumerate(zip(*logs, strict=True), 1):
        manifest = [tuple(sample) for sample in parts[0]["manifest"]]
        for part in parts:
            assert part["batch"] == number
            assert part["staleness"] <= STALENESS
            assert [tuple(sample) for sample in part["manifest"]] == manifest
        assert sorted(tuple(s) for part in parts for s in part["mine"]) == sorted(manifest)
        assert len({index for index, _ in manifest}) == GROUPS
        trained += manifest
    return trained, len(logs[0])


def members(index: int) -> list[Id]:
    """The samples of a group that can be made."""
    return [(index, k) for k in range(GROUP) if not fails(index, k)]


def trainable(index: int) -> list[Id]:
    """The samples of a group that must be trained: none if it is filtered out."""
    rewards = {reward_of(*sample) for sample in members(index)}
    return members(index) if len(rewards) > 1 else []


def missing(trained: list[Id]) -> int:
    """Samples of trained groups that cannot be made."""
    return sum(GROUP - len(members(i)) for i in {index for index, _ in trained})


def test_whoever_dies_what_was_acknowledged_is_trained_once(folder: Path) -> None:
    chaos(folder, actors=8, durability="process", kills=14, seed=1)


def test_with_an_fsync_too(folder: Path) -> None:
    chaos(folder, actors=2, durability="disk", kills=5, seed=2)


@pytest.mark.soak
@pytest.mark.parametrize("durability", ["process", "disk"])
def test_a_minute_of_kills(folder: Path, durability: str) -> None:
    chaos(folder, actors=8, durability=durability, seconds=60, seed=3)
