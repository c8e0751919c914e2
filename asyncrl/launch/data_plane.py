"""The data plane of a run: where its sockets may bind, and the keys that guard them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from asyncrl.config.paths import expand
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.placement.nodes import launcher_address
from asyncrl.weights import uses_loopback

if TYPE_CHECKING:
    from asyncrl.security import Keys


def keys_of(config: Config) -> Keys | None:
    """Those of `security.keys`, else new ones for this run; None without `security.curve`.

    Raises:
        ConfigError: the folder does not hold a run's keys, or there is no CURVE here.
    """
    from asyncrl.security import load_keys, new_keys

    security = config.security
    if not security.curve:
        return None
    if security.keys is None:
        return new_keys()
    return load_keys(expand(security.keys, "security.keys"), client_only=False)


def check_launcher(config: Config) -> None:
    """Refuse a cluster that others reach, before anything starts, unless the settings allow it.

    Raises:
        ConfigError: as `check_binding`.
    """
    address = config.cluster.address
    if address is not None:
        head = address.rpartition(":")[0]  # "auto" has none
        check_binding(config, [*([head] if head else []), launcher_address(address)])


def check_binding(config: Config, addresses: Iterable[str]) -> None:
    """Refuse plain text on anything but loopback, unless `security.allow_plaintext`.

    Raises:
        ConfigError: naming the first such address.
    """
    security = config.security
    if security.curve or security.allow_plaintext:
        return
    for address in addresses:
        if not uses_loopback(address):
            raise ConfigError(
                f"cluster.address={config.cluster.address}: sockets would bind {address}, where "
                "others can reach them, in plain text and open to all: set security.curve=true "
                "(keys are made for the run), or security.allow_plaintext=true on a network that "
                "you trust"
            )
