"""The launcher's rules for receivers of weights, against a cluster that only takes notes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from asyncrl.config.load import load
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, RoleDiedError
from asyncrl.launch import relays as relays_module
from asyncrl.launch.cluster import Cluster
from asyncrl.launch.placement import Assignment, Placement, Seat, place, weights_text
from asyncrl.launch.relays import SILENT_S, Relays
from asyncrl.preflight import room
from asyncrl.preflight.room import check_relay
from tests.launch.test_fleet import FakeCluster, fails

DIED = RoleDiedError("relay-0 died: killed")


class Machines(FakeCluster):
    """So many machines have actors."""

    def __init__(self, machines: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.machines = machines
        self.killed: list[str] = []

    def relays(self) -> int:
        return self.machines

    def kill_role(self, name: str) -> None:
        self.killed.append(name)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(relays_module, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


class Made:
    """Relays with what they told."""

    def __init__(self, machines: int, *overrides: str) -> None:
        self.cluster = Machines(machines)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.placed: list[str] = []
        config = load("tiny", ("weights.strategy=relay", *overrides), {}).config
        self.relays = Relays(
            config, self.cluster, spec_of=lambda rank: rank,  # type: ignore[arg-type,return-value]
            log_of=str, fleet="tcp://learner",
            tell=lambda event, **fields: self.events.append((event, fields)),
            placed=self.placed.extend,
        )  # fmt: skip

    def tick(self, silent: Callable[[Any, float], bool] = lambda slot, limit_s: False) -> list[str]:
        return self.relays.tick(silent)


def test_each_machine_with_an_actor_gets_one_also_later(clock: SimpleNamespace) -> None:
    made = Made(1)
    assert made.tick() == []
    made.tick()
    assert [h.calls for h in made.cluster.hosts] == [[("run", ("tcp://learner",))]]
    made.cluster.machines = 2
    made.tick()
    assert made.placed == ["relay-0", "relay-1"]
    assert len(made.relays.refs()) == 2


def test_one_that_dies_is_restarted_with_back_off(clock: SimpleNamespace) -> None:
    made = Made(1, "cluster.restart_backoff_s=2")
    made.tick()
    slot = made.relays.slots[0]
    told = made.relays.ended(slot, fails(DIED))  # type: ignore[no-untyped-call]
    assert told.startswith("relay-0 died: killed; restarting, its machine's actors go on with")
    assert made.cluster.killed == ["relay-0"]
    assert not made.cluster.hosts[0].alive
    made.tick()
    assert made.relays.refs() == {}
    clock.now += 2
    made.tick()
    assert (slot.state, slot.restarts, len(made.cluster.hosts)) == ("running", 1, 2)
    waits = []
    for _ in range(2):
        made.relays.ended(slot, fails(DIED))  # type: ignore[no-untyped-call]
        waits.append(slot.until - clock.now)
        clock.now = slot.until
        made.tick()
    made.relays.write({"role": "relay", "rank": 0, "incarnation": 1, "version": 0})
    made.relays.ended(slot, fails(DIED))  # type: ignore[no-untyped-call]
    waits.append(slot.until - clock.now)
    assert waits == [4, 8, 2]
    assert [e for e, _ in made.events] == ["relay_died", "relay_restarted"] * 3 + ["relay_died"]
    assert made.events[0][1] == {
        "relay": "relay-0", "reason": "relay-0 died: killed", "restart_in_s": 2.0,
    }  # fmt: skip


def test_one_that_never_gets_a_version_ends_the_run(clock: SimpleNamespace) -> None:
    made = Made(1, "cluster.max_restarts=1")
    made.tick()
    slot = made.relays.slots[0]
    made.relays.ended(slot, fails(DIED))  # type: ignore[no-untyped-call]
    clock.now += 60
    made.tick()
    with pytest.raises(RoleDiedError, match=r"max_restarts=1 times in a row: the actors of its"):
        made.relays.ended(slot, fails(DIED))  # type: ignore[no-untyped-call]


def test_one_that_stands_still_is_ended_and_restarted(clock: SimpleNamespace) -> None:
    made = Made(2)
    made.tick()

    def silent(slot: Any, limit_s: float) -> bool:
        return slot.rank == 1 and limit_s <= SILENT_S

    assert made.tick(silent) == [], "it may be starting"
    made.relays.write({"role": "relay", "rank": 1, "incarnation": 0, "version": 0})
    (told,) = made.tick(silent)
    assert told.startswith(f"relay-1 stood still: no sign of life of it for {SILENT_S:.0f} s; ")
    assert [s.state for s in made.relays.slots] == ["running", "backoff"]
    assert made.cluster.killed == ["relay-1"], "a stopped process does not notice its host's end"


def test_two_that_stand_still_at_once_are_both_told(clock: SimpleNamespace) -> None:
    made = Made(2)
    made.tick()
    told = made.tick(lambda slot, limit_s: True)
    assert [line.split()[0] for line in told] == ["relay-0", "relay-1"]


def test_actors_are_told_the_receiver_of_their_machine() -> None:
    cluster = object.__new__(Cluster)
    a, b = Seat("a", "gpu-a", 4), Seat("b", "gpu-b", 4)
    cluster._assignment = Assignment(actors=(b, a, b), learners=(a,))
    cluster._relays, cluster._scratch = [], "/scratch"
    cluster._placement = Placement("cpu", "gloo", 1, 1, weight_strategy="relay")
    names = ["actor-0", "actor-1", "actor-2", "relay-0", "relay-1", "learner-0", "buffer-0"]
    offers = [f"/scratch/relay-{rank}.json" for rank in (0, 1, 0, 0, 1)]
    assert [cluster.relay_of(name) for name in names] == [*offers, "", ""]
    assert [cluster.seat(f"relay-{rank}").node for rank in (0, 1)] == ["b", "a"]
    cluster._assignment = Assignment(actors=(b,), learners=(a,))  # scaled down
    assert cluster.relays() == 2
    cluster._relays = []
    cluster._placement = Placement("cpu", "gloo", 1, 1)
    assert cluster.relay_of("actor-0") == ""


def test_roles_are_told_what_auto_has_become() -> None:
    placement = Placement("cpu", "gloo", 1, 1, weight_strategy="relay")
    assert Config().weights.strategy == "auto"
    assert placement.resolved(Config()).weights.strategy == "relay"


# --- before any process starts ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("cluster.actors=6", "relay over gloo, 1 receiver for 6 actors"),
        ("cluster.actors=1", "broadcast over gloo to 1 actor"),
        (
            "cluster.actors=6 cluster.address=auto cluster.device=cpu",
            "broadcast over gloo to 6 actors",
        ),
        ("weights.strategy=relay", "relay over gloo, 1 receiver for 1 actor"),
        ("weights.strategy=broadcast cluster.actors=2", "broadcast over gloo to 2 actors"),
    ],
)
def test_the_choice_is_shown(overrides: str, expected: str) -> None:
    config = load("tiny", tuple(overrides.split())).config
    assert weights_text(config, place(config)) == expected


def test_on_gpus_a_relay_receives_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    given = ("cluster.actors=2", "cluster.learners=2", "cluster.device=cuda")
    p = place(load("tiny", given).config)
    assert (p.weight_strategy, p.weight_backend) == ("broadcast", "nccl")
    p = place(load("tiny", (*given, "weights.strategy=relay")).config)
    assert (p.weight_strategy, p.weight_backend) == ("relay", "gloo")


def test_copies_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"w": np.zeros((1 << 20, 3), np.float32)}  # 12 MiB, 6 in bfloat16
    save_file(weights, tmp_path / "model.safetensors")
    given = ("weights.strategy=relay", "engine.dtype=bfloat16", "engine.kv_cache_gib=0.01")
    config = load("tiny", (*given, "cluster.actors=2")).config
    monkeypatch.setattr(room, "memory_gib", lambda: 0.035)
    check_relay(config, place(config), tmp_path)
    monkeypatch.setattr(room, "memory_gib", lambda: 0.028)
    with pytest.raises(ConfigError) as e:
        check_relay(config, place(config), tmp_path)
    assert str(e.value) == (
        "weights.strategy=relay keeps 2 copies of the weights (0.00586 GiB each) in shared memory, "
        "with the engines' caches (0.02 GiB) 0.0317 GiB; this machine has 0.028: lower "
        "cluster.actors or engine.kv_cache_gib"
    )
    broadcast = load("tiny", ("weights.strategy=broadcast",)).config
    check_relay(broadcast, place(broadcast), tmp_path)
