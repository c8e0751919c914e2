"""Where the data plane may bind, and which keys a run has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.load import load
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.launch import data_plane
from asyncrl.launch.cluster import Cluster
from asyncrl.launch.data_plane import check_binding, check_launcher, keys_of
from asyncrl.launch.placement import place
from asyncrl.security import load_keys, write_keys

CPU = "cluster.device=cpu"


def config(*overrides: str) -> Config:
    return load(None, overrides).config


def at(address: str, *overrides: str) -> Config:
    return config(f"cluster.address={address}", CPU, *overrides)


@pytest.fixture
def launcher_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let the launcher find that it binds an address."""

    def use(address: str) -> None:
        monkeypatch.setattr(data_plane, "launcher_address", lambda _: address)

    return use


@pytest.mark.parametrize(
    ("cluster", "launcher", "named"),
    [
        ("10.0.0.1:6379", "10.0.0.5", "10.0.0.1"),
        ("10.0.0.1:6379", "127.0.1.1", "10.0.0.1"),  # a name service that does not know better
        ("head:6379", "10.0.0.5", "head"),
        ("auto", "10.0.0.5", "10.0.0.5"),
        ("127.0.0.1:6379", "10.0.0.5", "10.0.0.5"),
    ],
)
def test_plain_text_beyond_loopback_is_refused(
    cluster: str, launcher: str, named: str, launcher_at: Callable[[str], None]
) -> None:
    launcher_at(launcher)
    with pytest.raises(ConfigError) as e:
        check_launcher(at(cluster))
    assert str(e.value).startswith(
        f"cluster.address={cluster}: sockets would bind {named}, where others can reach them, in "
        "plain text"
    )
    for way_out in ("security.curve=true", "security.allow_plaintext=true"):
        assert way_out in str(e.value)
        check_launcher(at(cluster, way_out))
    assert e.value.exit_code == 2


@pytest.mark.parametrize("cluster", ["127.0.0.1:6379", "127.0.0.2:6379", "localhost:1", "auto"])
def test_loopback_needs_no_keys(cluster: str, launcher_at: Callable[[str], None]) -> None:
    launcher_at("127.0.0.1")
    check_launcher(at(cluster))
    check_binding(at(cluster), ["127.0.0.1", "127.0.0.2"])


def test_one_machine_needs_no_keys() -> None:
    check_launcher(config())
    assert keys_of(config()) is None


def nodes(*addresses: str) -> list[dict[str, Any]]:
    return [
        {
            "NodeID": f"n{k}", "Alive": True, "NodeManagerAddress": address,
            "NodeManagerHostname": f"host-{k}", "Resources": {"CPU": 4.0},
        }
        for k, address in enumerate(addresses)
    ]  # fmt: skip


def assigned(c: Config, monkeypatch: pytest.MonkeyPatch, *addresses: str) -> Any:
    """What the cluster assigns when Ray tells of nodes with these addresses."""
    from ray._private import state

    monkeypatch.setattr(state, "available_resources_per_node", dict)
    cluster: Any = object.__new__(Cluster)
    cluster._hosts = []
    cluster._ray = SimpleNamespace(
        nodes=lambda: nodes(*addresses), shutdown=lambda: None,
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "n0"),
    )  # fmt: skip
    return cluster._assign(c, place(c))


def test_ray_may_know_this_machine_by_an_address_that_others_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray takes 127.0.0.1 for "this machine's address in the network"."""
    c = at("127.0.0.1:6379")
    with pytest.raises(ConfigError, match=r"sockets would bind 10.0.0.5, .*security.curve=true"):
        assigned(c, monkeypatch, "10.0.0.5")
    curve = at("127.0.0.1:6379", "security.curve=true")
    assert assigned(curve, monkeypatch, "10.0.0.5").buffer.node == "n0"


def test_only_nodes_with_a_role_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    places = ("cluster.placement=explicit", "cluster.learner_places=[host-0]")
    here = at("127.0.0.2:6379", *places, "cluster.actor_places=[host-0]")
    assert assigned(here, monkeypatch, "127.0.0.2", "10.0.0.5").learners[0].node == "n0"
    both = at("127.0.0.2:6379", *places, "cluster.actor_places=[host-1]")
    with pytest.raises(ConfigError, match="sockets would bind 10.0.0.5"):
        assigned(both, monkeypatch, "127.0.0.2", "10.0.0.5")
    assert assigned(both, monkeypatch, "127.0.0.2", "127.0.0.3").actors[0].node == "n1"


def test_each_run_has_keys_of_its_own_unless_they_lie_in_a_folder(tmp_path: Path) -> None:
    c = config("security.curve=true")
    first, second = keys_of(c), keys_of(c)
    assert first is not None
    assert second is not None
    assert first.server_secret
    assert first != second
    made = write_keys(tmp_path)
    lasting = config("security.curve=true", f"security.keys={tmp_path}")
    assert keys_of(lasting) == made
    assert load_keys(tmp_path) == made.client()
    (tmp_path / "server.key_secret").unlink()
    with pytest.raises(ConfigError, match=r"security.keys: .*server.key_secret does not exist"):
        keys_of(lasting)


def test_the_preset_for_two_nodes_is_encrypted() -> None:
    assert load("math-2node", ["task.path=x"]).config.security.curve
