# ruff: noqa: E501  (tables of messages read best one case a line)
"""Which role runs where, for one machine and for clusters that do not exist."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.config.load import load
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.cluster import with_actors
from asyncrl.launch.placement import place, rows
from asyncrl.launch.placement.assign import assign
from asyncrl.launch.placement.nodes import Node, gpu_ids_here, launcher_address, nodes_of
from asyncrl.launch.placement.seats import Assignment, Placement

ADDRESS = "cluster.address=10.0.0.1:6379"
ROOT = Path(__file__).parents[2]

# What ray.nodes() of Ray 2.60 returns, less what nobody reads.
RAY_NODES = [
    {
        "NodeID": "fa22911c13e8898c", "Alive": True, "NodeManagerAddress": "192.0.2.9",
        "NodeManagerHostname": "worker", "NodeName": "192.0.2.9",
        "Resources": {"GPU": 2.0, "CPU": 2.0, "node:192.0.2.9": 1.0, "rack_a": 1.0, "memory": 1.7e10,
                      "object_store_memory": 7.4e9, "accelerator_type:H100": 1.0},
    },
    {
        "NodeID": "0b22911c13e8898c", "Alive": True, "NodeManagerAddress": "192.0.2.2",
        "NodeManagerHostname": "head", "NodeName": "192.0.2.2",
        "Resources": {"CPU": 4.0, "node:__internal_head__": 1.0, "node:192.0.2.2": 1.0},
    },
    {
        "NodeID": "dead", "Alive": False, "NodeManagerAddress": "192.0.2.3",
        "NodeManagerHostname": "gone", "NodeName": "192.0.2.3", "Resources": {},
    },
]  # fmt: skip


@pytest.fixture(autouse=True)
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")


def config(*overrides: str) -> Config:
    return load(None, overrides).config


def gpu_node(name: str, gpus: float, **more: object) -> Node:
    return Node(name, f"10.0.0.{len(name)}", name, {"CPU": 16.0, "GPU": gpus}, **more)  # type: ignore[arg-type]


def cpu_node(name: str, cpus: float, **custom: float) -> Node:
    return Node(name, f"10.0.0.{len(name)}", name, {"CPU": cpus} | custom)


def seats(nodes: list[Node], *overrides: str, device: str = "cuda") -> Assignment:
    c = config(ADDRESS, f"cluster.device={device}", *overrides)
    return assign(c, place(c), nodes)


def where(a: Assignment) -> tuple[list[str | None], list[str | None]]:
    return [s.node for s in a.actors], [s.node for s in a.learners]


# --- this machine ------------------------------------------------------------------------


def test_one_machine_leaves_nodes_and_gpus_to_ray() -> None:
    c = config("cluster.actors=3", "cluster.learners=2", "engine.tensor_parallel=2")
    p = place(c)
    assert (p.device, p.weight_backend, p.actor_gpus, p.learner_gpus) == ("cuda", "nccl", 2, 1)
    a = assign(c, p, ())
    assert {s.node for s in (*a.actors, *a.learners, a.buffer)} == {None}
    assert [s.num_gpus for s in a.actors] == [2, 2, 2]
    assert [s.num_gpus for s in a.learners] == [1, 1]
    assert {s.visible_gpus for s in (*a.actors, *a.learners)} == {None}
    assert a.place("learner", 1) == a.learners[1]
    assert a.place("buffer", 0).num_gpus == 0


def test_one_machine_without_gpus_divides_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    c = config("cluster.actors=3", "engine.threads=5")
    p = place(c)
    assert (p.device, p.weight_backend, p.actor_threads, p.learner_threads) == ("cpu", "gloo", 5, 2)
    a = assign(c, p, ())
    assert [(s.node, s.threads, s.num_gpus) for s in a.actors] == [(None, 5, 0)] * 3
    assert a.learners[0].threads == 2


@pytest.mark.parametrize(
    ("visible", "ids"),
    [
        ("0,1", ("0", "1")),
        ("", ()),
        ("-1", ()),
        ("3,-1,5", ("3",)),
        ("GPU-ab , 2", ("GPU-ab", "2")),
    ],
)
def test_visible_gpus_as_cuda_reads_them(
    monkeypatch: pytest.MonkeyPatch, visible: str, ids: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_ids_here() == ids


EXPLICIT = ("cluster.placement=explicit", "cluster.actors=2", "engine.tensor_parallel=2")


def test_named_gpus_are_for_the_role_alone() -> None:
    c = config(
        *EXPLICIT,
        'cluster.actor_places=["local:0,1","local:6,7"]',
        'cluster.learner_places=["local:3"]',
    )
    a = assign(c, place(c), ())
    assert [s.visible_gpus for s in a.actors] == ["0,1", "6,7"]
    assert [s.num_gpus for s in (*a.actors, *a.learners)] == [0, 0, 0]
    assert a.learners[0].visible_gpus == "3"
    table = list(rows(c, place(c)))
    assert table[0] == ("buffer-0", "local", "cpu", "1")
    assert table[2] == ("actor-1", "local", "gpu 6,7", "-")


def test_this_machine_goes_by_its_host_name() -> None:
    here = socket.gethostname()
    c = config(*EXPLICIT, f"cluster.actor_places=[{here}]", "cluster.learner_places=[local]")
    assert [s.num_gpus for s in assign(c, place(c), ()).actors] == [2, 2]


HERE_REFUSED = [
    ("cluster.actors=7 cluster.learners=2", "cluster: 7 actors + 2 learners need 9 GPUs, this machine has 8: lower cluster.actors or cluster.learners, or set cluster.address to a cluster"),
    ("cluster.actors=4 engine.tensor_parallel=2", "4 actors x 2 GPUs + 1 learners need 9 GPUs"),
    ("cluster.placement=explicit cluster.actor_places=[local:8] cluster.learner_places=[local:0]", "cluster.actor_places: local has no GPU 8 (for actor-0): its GPUs are 0, 1, 2, 3, 4, 5, 6, 7"),
    (f"cluster.placement=explicit cluster.actor_places=[local:1] cluster.learner_places=[{socket.gethostname()}:1]", "cluster.actor_places: GPU 1 of local (for actor-0) is that of learner-0: give another"),
    ("cluster.placement=explicit cluster.actor_places=[nowhere] cluster.learner_places=[local]", "cluster.actor_places: no machine is called nowhere (for actor-0); there are: "),
    ("cluster.placement=explicit cluster.actor_places=[local:1] cluster.learner_places=[local]", "cluster.learner_places: learner-0 lists no GPUs and actor-0 on the same machine ("),
    ("cluster.placement=explicit cluster.actors=8 cluster.actor_places=[local] cluster.learner_places=[local]", "cluster: actor-7 needs 1 GPU; free: "),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "expected"), HERE_REFUSED)
def test_what_this_machine_does_not_have_is_refused(overrides: str, expected: str) -> None:
    c = config(*overrides.split())
    with pytest.raises(ConfigError) as e:
        place(c)
    assert expected in str(e.value)


def test_gpus_that_are_hidden_cannot_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    places = ["cluster.placement=explicit", "cluster.actor_places=[local:4]"]
    place(config(*places, "cluster.learner_places=[local:5]"))
    with pytest.raises(ConfigError, match=r"has no GPU 0 .* its GPUs are 4, 5"):
        place(config(*places, "cluster.learner_places=[local:0]"))


# --- clusters ----------------------------------------------------------------------------


def test_nodes_of_what_ray_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "worker")
    worker, head, gone = nodes_of(RAY_NODES)
    assert (worker.id, worker.here, worker.room, worker.gpu_ids) == (
        "fa22911c13e8898c",
        True,
        2,
        ("0", "1"),
    )
    assert (head.hostname, head.here, head.room, head.alive) == ("head", False, 0, True)
    assert not gone.alive
    for name in ("worker", "192.0.2.9", "local", "rack_a"):
        assert worker.called(name), name
    for name in ("GPU", "CPU", "memory", "rack_b", ""):
        assert not worker.called(name), name
    assert not head.called("local")
    assert [n.here for n in nodes_of(reversed(RAY_NODES), here="0b22911c13e8898c")] == [
        True,
        False,
        False,
    ]
    busy = nodes_of(RAY_NODES, free={"fa22911c13e8898c": {"CPU": 2.0}})[0]
    assert (busy.room, busy.gpu_ids) == (0, ("0", "1"))


def test_packed_keeps_learners_together_and_fills_node_after_node() -> None:
    nodes = [gpu_node("a", 8), gpu_node("b", 8)]
    a = seats(nodes, "cluster.actors=6", "cluster.learners=4", "engine.tensor_parallel=2")
    assert where(a) == (["a", "a", "b", "b", "b", "b"], ["a"] * 4)
    assert a.buffer.node == "a"


def test_packed_begins_where_the_learners_fit_on_one_node() -> None:
    a = seats([gpu_node("a", 1), gpu_node("b", 4)], "cluster.actors=2", "cluster.learners=3")
    assert where(a) == (["b", "a"], ["b"] * 3)


def test_packed_begins_elsewhere_when_an_engine_would_not_fit() -> None:
    nodes = [gpu_node("a", 2), gpu_node("b", 3)]
    a = seats(nodes, "cluster.actors=2", "engine.tensor_parallel=2")
    assert where(a) == (["b", "a"], ["b"])


def test_spread_is_even() -> None:
    nodes = [gpu_node("a", 8), gpu_node("b", 8), gpu_node("head", 0)]
    options = ("cluster.placement=spread", "cluster.actors=5", "engine.tensor_parallel=2")
    a = seats(nodes, *options, "cluster.learners=3")
    actors, learners = where(a)
    assert Counter(actors) == {"a": 3, "b": 2}
    assert Counter(learners) == {"a": 1, "b": 2}


def test_an_engine_needs_its_gpus_on_one_node() -> None:
    nodes = [gpu_node("a", 6), gpu_node("b", 7)]
    with pytest.raises(ConfigError) as e:
        seats(nodes, "cluster.placement=spread", "cluster.actors=3", "engine.tensor_parallel=4")
    assert str(e.value) == (
        "cluster: actor-2 needs 4 GPUs on one node; free: a 2, b 3: "
        "lower engine.tensor_parallel or cluster.actors"
    )


def test_gpus_of_others_and_dead_nodes_do_not_count() -> None:
    nodes = [gpu_node("a", 8, free_gpus=2), gpu_node("bb", 8, alive=False)]
    with pytest.raises(
        ConfigError, match="6 actors . 2 learners need 8 GPUs, 2 of the cluster's are free"
    ):
        seats(nodes, "cluster.actors=6", "cluster.learners=2")
    with pytest.raises(ConfigError, match="has no node that is alive"):
        seats(nodes[1:])


def test_cores_are_what_cpu_nodes_have_and_roles_may_be_more() -> None:
    nodes = [cpu_node("a", 2), cpu_node("b", 6), cpu_node("head", 0)]
    a = seats(nodes, "cluster.actors=3", device="cpu")
    assert where(a) == (["a", "b", "b"], ["a"])
    assert [s.threads for s in a.actors] == [1, 3, 3]
    a = seats(
        nodes, "cluster.actors=3", "cluster.placement=spread", "engine.threads=7", device="cpu"
    )
    assert where(a) == (["b", "a", "b"], ["a"])
    assert [s.threads for s in a.actors] == [7, 7, 7]
    actors, _ = where(seats(nodes, "cluster.actors=15", device="cpu"))
    assert Counter(actors) == {"a": 3, "b": 12}
    assert where(seats([cpu_node("head", 0)], device="cpu")) == (["head"], ["head"])


def test_two_nodes_on_one_machine_go_by_custom_resources() -> None:
    """As Ray's cluster utility makes them: the same address and host name."""
    nodes = [
        Node(id, "127.0.0.9", "vm", {"CPU": 2.0, name: 1.0})
        for id, name in (("n1", "act"), ("n2", "learn"))
    ]
    places = (
        "cluster.placement=explicit",
        "cluster.actor_places=[act]",
        "cluster.learner_places=[learn]",
    )
    a = seats(nodes, *places, "cluster.actors=2", device="cpu")
    assert where(a) == (["n1", "n1"], ["n2"])
    assert a.learners[0].label == "vm/n2"
    assert a.buffer.node == "n2"


def test_a_name_of_several_nodes_fills_one_after_the_other() -> None:
    nodes = [Node(n, n, n, {"GPU": 2.0, "box": 1.0}) for n in ("a", "b")]
    places = (
        "cluster.placement=explicit",
        "cluster.actor_places=[box]",
        "cluster.learner_places=[b]",
    )
    assert where(seats(nodes, *places, "cluster.actors=3")) == (["a", "a", "b"], ["b"])
    with pytest.raises(ConfigError, match="actor-3 needs 1 GPU; free: a 0, b 0"):
        seats(nodes, *places, "cluster.actors=4")


def test_gpus_of_a_named_node() -> None:
    nodes = [gpu_node("a", 8), gpu_node("bb", 8)]
    places = (
        "cluster.placement=explicit",
        'cluster.actor_places=["bb:0,1"]',
        "engine.tensor_parallel=2",
    )
    a = seats(nodes, *places, "cluster.learner_places=[a]")
    assert (a.actors[0].node, a.actors[0].visible_gpus, a.learners[0].num_gpus) == ("bb", "0,1", 1)
    with pytest.raises(
        ConfigError, match=r"GPU 1 of 10.0.0.2 \(for actor-0\)|GPU 1 of bb \(for actor-0\)"
    ):
        seats(nodes, *places, "cluster.learner_places=[10.0.0.2:1]")


@settings(deadline=None, max_examples=150)
@given(
    gpus=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    actors=st.integers(1, 9), learners=st.integers(1, 6), tp=st.sampled_from([1, 2, 3, 4, 8]),
    mode=st.sampled_from(["packed", "spread"]),
)  # fmt: skip
def test_never_more_than_a_node_has(
    gpus: list[int], actors: int, learners: int, tp: int, mode: str
) -> None:
    nodes = [Node(f"n{i}", f"10.0.0.{i}", f"n{i}", {"GPU": float(g)}) for i, g in enumerate(gpus)]
    cluster = {"actors": actors, "learners": learners, "address": "h:1", "placement": mode}
    c = Config.model_validate({"cluster": cluster, "engine": {"tensor_parallel": tp}})
    p = Placement("cuda", "nccl", 1, 1, actor_gpus=tp, learner_gpus=1)
    possible = sum(g // tp for g in gpus) >= actors and sum(gpus) >= actors * tp + learners
    try:
        a = assign(c, p, nodes)
    except ConfigError:
        # packed keeps the learners together, so it may fail where another order would do.
        assert not (possible and (mode == "spread" or tp == 1))
        return
    assert possible
    used: Counter[str] = Counter()
    for seat in (*a.actors, *a.learners):
        assert seat.node is not None
        used[seat.node] += seat.num_gpus
    assert (len(a.actors), len(a.learners)) == (actors, learners)
    assert all(used[f"n{i}"] <= g for i, g in enumerate(gpus))


# --- the presets -------------------------------------------------------------------------


def test_one_node_preset_fits_eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    c = load("gsm8k-1node", ["task.path=x"]).config
    p = place(c)
    assert p.gpus(c.cluster.actors, c.cluster.learners) == 8
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    with pytest.raises(ConfigError, match="6 actors . 2 learners need 8 GPUs, this machine has 4"):
        place(c)


def test_two_node_preset_fills_two_nodes_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    c = load("math-2node", ["task.path=x", ADDRESS]).config
    a = assign(c, place(c), [gpu_node("a", 8), gpu_node("b", 8)])
    assert where(a) == (["a", "a", "b", "b", "b", "b"], ["a"] * 4)
    alone = load("math-2node", ["task.path=x"]).config
    with pytest.raises(ConfigError, match=r"need 16 GPUs, this machine has 8: .*cluster.address"):
        place(alone)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"no NVIDIA GPU on this machine; .*cluster.address"):
        place(alone)


# --- the launcher itself -------------------------------------------------------------------


def test_the_launcher_binds_loopback_without_a_cluster() -> None:
    assert launcher_address(None) == "127.0.0.1"
    assert launcher_address("127.0.0.1:6379") == "127.0.0.1"


def test_placement_loads_nothing_heavy() -> None:
    code = (
        "import sys, asyncrl.launch.placement\n"
        "assert not {'ray', 'torch', 'vllm', 'numpy', 'zmq'} & set(sys.modules)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=env,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# --- more actors, while the others run ---------------------------------------------------


@pytest.mark.parametrize("how", ["packed", "spread"])
def test_who_runs_keeps_its_seat_when_more_come(how: str) -> None:
    nodes = [gpu_node("a", 3), gpu_node("bb", 4)]
    few = (ADDRESS, "cluster.device=cuda", f"cluster.placement={how}", "cluster.learners=2")
    had = seats(nodes, *few, "cluster.actors=2")
    more = config(*few, "cluster.actors=5")
    got = assign(more, place(more), nodes, had)
    assert (got.actors[:2], got.learners) == (had.actors, had.learners)
    assert Counter(where(got)[0] + where(got)[1]) == {"a": 3, "bb": 4}
    many = config(*few, "cluster.actors=6")
    with pytest.raises(ConfigError, match="6 actors . 2 learners need 8 GPUs, 7 of the cluster"):
        assign(many, place(many), nodes, had)


def test_a_seat_on_a_node_that_is_gone_is_given_anew() -> None:
    few = (ADDRESS, "cluster.device=cuda", "cluster.placement=spread", "cluster.learners=1")
    had = seats([gpu_node("a", 2), gpu_node("bb", 2)], *few, "cluster.actors=2")
    assert sorted(map(str, where(had)[0])) == ["a", "bb"]
    c = config(*few, "cluster.actors=3")
    got = assign(
        c, place(c), [gpu_node("a", 2), gpu_node("bb", 2, alive=False), gpu_node("ccc", 2)], had
    )
    kept = where(had)[0].index("a")
    assert got.actors[kept] == had.actors[kept]
    assert "bb" not in where(got)[0]


def test_places_for_those_who_join_must_be_named() -> None:
    places = ("cluster.placement=explicit", "cluster.learner_places=[local:0]")
    two = config(*places, "cluster.actors=2", "cluster.actor_places=[local:1,local:2]")
    had = assign(two, place(two), ())
    three = with_actors(two, 3)
    with pytest.raises(
        ConfigError, match=r"cluster.actor_places has 2 entries and cluster.actors=3"
    ):
        assign(three, place(two), (), had)
    one = with_actors(two, 1)
    assert one.cluster.actor_places == ("local:1",)
    assert with_actors(
        config(*places, "cluster.actor_places=[local:1]"), 3
    ).cluster.actor_places == ("local:1",)


def test_one_machine_has_no_room_for_more_actors_than_gpus() -> None:
    c = config("cluster.actors=6", "cluster.learners=2")
    had = assign(c, place(c), ())
    with pytest.raises(ConfigError, match="7 actors . 2 learners need 9 GPUs, this machine has 8"):
        assign(with_actors(c, 7), place(c), (), had)
