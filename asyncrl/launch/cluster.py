"""Ray: one thin host a role, placed on the machines that there are; its start and its end."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import replace
from typing import Any

from asyncrl.config.rules.fleet import MAX_MEMBERS
from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError, RoleDiedError
from asyncrl.launch.data_plane import check_binding
from asyncrl.launch.placement import Assignment, Placement, Seat, assign, gpus_here, nodes_of
from asyncrl.launch.placement.machine import check_machine
from asyncrl.launch.processes.reaper import MARK, kill_role
from asyncrl.launch.processes.role_main import RoleSpec


def with_actors(config: Config, actors: int) -> Config:
    """The configuration with so many actors, and no more places for them than that.

    >>> with_actors(Config(), 3).cluster.actors
    3
    """
    places = config.cluster.actor_places
    if places is not None and len(places) > 1:  # an only one stands for all
        places = places[:actors]
    cluster = config.cluster.model_copy(update={"actors": actors, "actor_places": places})
    return config.model_copy(update={"cluster": cluster})


class Cluster:
    """A local Ray of this run's own, or a connection to a running one."""

    def __init__(self, config: Config, placement: Placement, run_id: str, scratch: str) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        os.environ["RAY_DEDUP_LOGS"] = "0"
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  (else roles run at nice 15)
        import ray

        self._ray, self._config, self._placement = ray, config, placement
        self._hosts: list[tuple[Any, Seat]] = []
        self._relays: list[Seat] = []
        self._run_id, self._scratch = run_id, scratch
        common: dict[str, Any] = {
            "include_dashboard": False, "log_to_driver": False,
            "logging_level": logging.ERROR,
        }  # fmt: skip
        if config.cluster.address:
            common.pop("include_dashboard")
            try:
                mark = {"env_vars": {MARK: run_id}}
                ray.init(
                    address=config.cluster.address, namespace=run_id, runtime_env=mark, **common
                )  # fmt: skip
            except (ConnectionError, ValueError, RuntimeError) as e:
                raise ConfigError(
                    f"cluster.address={config.cluster.address}: no Ray cluster answers there "
                    f"({str(e).splitlines()[0]})"
                ) from e
        else:
            # A folder of its own, so that two runs never meet.
            roles = config.cluster.actors + config.cluster.learners + 1
            gpus = gpus_here() if placement.device == "cuda" else 0  # more actors may come
            try:
                ray.init(
                    address="local", namespace=run_id, num_cpus=roles, num_gpus=gpus,
                    object_store_memory=80 << 20, _temp_dir=scratch, **common,
                )  # fmt: skip
            except Exception as e:  # Ray's own start raises no narrower one
                raise RoleDiedError(
                    f"Ray did not start ({str(e).splitlines()[0]}): the machine is overloaded, or "
                    f"has no memory or room on its disk for {scratch}"
                ) from e
        try:
            self._assignment = self._assign(config, placement)
        except ConfigError:
            self.close()
            raise

    def _assign(
        self, config: Config, placement: Placement, keep: Assignment | None = None
    ) -> Assignment:
        from ray._private.state import available_resources_per_node

        here = self._ray.get_runtime_context().get_node_id()
        free = None
        if config.cluster.address:
            free = available_resources_per_node()
            for _, seat in self._hosts:  # what this run uses it may use
                if seat.num_gpus and seat.node in free:
                    free[seat.node]["GPU"] = free[seat.node].get("GPU", 0) + seat.num_gpus
        nodes = nodes_of(self._ray.nodes(), here, free)
        made = assign(config, placement, nodes, keep)
        if config.cluster.address:
            used = {seat.node for seat in (*made.actors, *made.learners)}
            check_binding(config, [n.address for n in nodes if n.id in used])
        return made

    def scale(self, actors: int) -> None:
        """Have seats for so many actors; who has one keeps it.

        Raises:
            ConfigError: as at the launch; nothing has changed.
        """
        had = self._assignment
        if actors <= len(had.actors):
            self._assignment = replace(had, actors=had.actors[:actors])
            return
        config = with_actors(self._config, actors)
        if actors > MAX_MEMBERS:
            raise ConfigError(
                f"cluster.actors={actors} is over {MAX_MEMBERS}, more than one buffer serves: "
                "lower it"
            )
        check_machine(config, self._placement)
        self._assignment = self._assign(config, self._placement, had)

    def seat(self, name: str) -> Seat:
        """Where the role of this name, e.g. "actor-3", was assigned."""
        role, _, rank = name.partition("-")
        if role == "relay":
            return self._relays[int(rank)]
        return self._assignment.place(role, int(rank))

    def relays(self) -> int:
        """How many receivers of weights there must be: one on each machine that has, or has had, an
        actor; none where weights are broadcast."""
        if self._placement.weight_strategy == "relay":
            for seat in self._assignment.actors:
                if all(seat.node != relay.node for relay in self._relays):
                    self._relays.append(Seat(seat.node, seat.label, threads=1))
        return len(self._relays)

    def relay_of(self, name: str) -> str:
        """Where that receiver offers weights which an actor's machine has, or a receiver's own; ""
        for other roles, and where weights are broadcast."""
        if not self.relays() or not name.startswith(("actor-", "relay-")):
            return ""
        nodes = [seat.node for seat in self._relays]
        return os.path.join(self._scratch, f"relay-{nodes.index(self.seat(name).node)}.json")

    def start(self, spec: RoleSpec, log_path: str) -> Any:
        """Start a role's host where the role was assigned; its Ray handle."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from asyncrl.launch.processes.hosts import RoleHost

        seat = self.seat(spec.settings.name)
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": seat.num_gpus, "max_restarts": 0}
        if seat.node is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(seat.node, soft=False)
        host = self._ray.remote(RoleHost).options(**options).remote(spec, self._scratch, log_path)
        self._hosts.append((host, seat))
        return host

    def check(self) -> None:
        """See whether this machine's Ray is alive: without it the driver would only hang.

        Raises:
            RoleDiedError: one of its processes died.
        """
        from ray._private import worker

        node = worker._global_node
        dead = [kind for kind, _ in node.dead_processes()] if node is not None else []
        fatal = {"gcs_server", "raylet"}.intersection(dead)
        if fatal:
            raise RoleDiedError(f"Ray's {' and '.join(sorted(fatal))} died: killed, or no memory?")

    def kill(self, host: Any) -> None:
        """End a host, and with it its role."""
        with contextlib.suppress(Exception):
            self._ray.kill(host)
        self._hosts = [pair for pair in self._hosts if pair[0] is not host]

    def kill_role(self, name: str) -> None:
        """Kill a role that does not answer, if it runs on this machine."""
        kill_role(self._run_id, name)

    def close(self) -> None:
        """End every role and, if it is ours, Ray."""
        for host, _ in list(self._hosts):
            self.kill(host)
        with contextlib.suppress(Exception):
            self._ray.shutdown()
