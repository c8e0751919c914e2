"""Ray: one process a role, placed on devices; its start and its end."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from dataclasses import dataclass
from typing import Any, Literal

from asyncrl.config.schema import Config
from asyncrl.errors import ConfigError
from asyncrl.launch.reaper import MARK


@dataclass(frozen=True, slots=True)
class Placement:
    """Where each role runs and with what.

    >>> Placement("cpu", "gloo", actor_threads=1, learner_threads=1).gpus(6, 2)
    0
    """

    device: Literal["cpu", "cuda"]
    weight_backend: Literal["gloo", "nccl"]
    actor_threads: int
    learner_threads: int
    actor_gpus: int = 0
    """GPUs of each actor."""
    learner_gpus: int = 0
    """GPUs of each learner rank."""

    def gpus(self, actors: int, learners: int) -> int:
        """GPUs that the run needs."""
        return actors * self.actor_gpus + learners * self.learner_gpus


def gpus_here() -> int:
    """NVIDIA GPUs that this process may use, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([d for d in visible.split(",") if d.strip() not in ("", "-1")])
    folder = "/proc/driver/nvidia/gpus"
    return len(os.listdir(folder)) if os.path.isdir(folder) else 0


def place(config: Config) -> Placement:
    """Resolve device and threads.

    Raises:
        ConfigError: cuda is asked for and there is no GPU here.
    """
    c = config.cluster
    have = gpus_here()
    device = c.device
    if device == "auto" and c.address is not None and not have:
        raise ConfigError(
            "cluster.device=auto: this machine has no GPU and says nothing about the cluster at "
            "cluster.address: set cluster.device=cpu or cuda"
        )
    if device == "auto":
        device = "cuda" if have else "cpu"
    if device == "cuda" and not have and c.address is None:
        raise ConfigError(
            "cluster.device=cuda: there is no NVIDIA GPU on this machine; "
            "set cluster.device=cpu or cluster.address"
        )
    cores = len(os.sched_getaffinity(0))
    share = max(1, cores // (c.actors + c.learners))
    backend = config.weights.backend
    cuda = device == "cuda"
    return Placement(
        device=device,
        weight_backend=("nccl" if cuda else "gloo") if backend == "auto" else backend,
        actor_threads=config.engine.threads or share,
        learner_threads=config.learner.threads or share,
        actor_gpus=config.engine.tensor_parallel if cuda else 0,
        learner_gpus=1 if cuda else 0,
    )


def launcher_address(cluster: str | None) -> str:
    """Where the launcher binds: loopback, or its address on the network of the cluster."""
    if cluster is None:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connecting a datagram socket only picks the route's own address.
        try:
            probe.connect((cluster.rpartition(":")[0] or socket.gethostname(), 1))
        except OSError:
            return socket.gethostbyname(socket.gethostname())
        return str(probe.getsockname()[0])


class Cluster:
    """A local Ray of this run's own, or a connection to a running one."""

    def __init__(self, config: Config, placement: Placement, run_id: str, scratch: str) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        os.environ["RAY_DEDUP_LOGS"] = "0"
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  (else roles run at nice 15)
        import ray

        self._ray = ray
        self._gpus = placement.gpus(config.cluster.actors, config.cluster.learners)
        self._actors: list[Any] = []
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
            ray.init(
                address="local", namespace=run_id, num_cpus=roles, num_gpus=self._gpus,
                object_store_memory=80 << 20, _temp_dir=scratch, **common,
            )  # fmt: skip
        self._check_gpus()

    def _check_gpus(self) -> None:
        have = int(self._ray.cluster_resources().get("GPU", 0))
        if self._gpus > have:
            raise ConfigError(
                f"cluster: the run needs {self._gpus} GPUs (actors x tensor_parallel + "
                f"learners), Ray has {have}: lower cluster.actors or cluster.learners"
            )

    def start(self, host: type, *args: Any, gpus: int = 0) -> Any:
        """Start a role's process; its Ray handle."""
        remote = self._ray.remote(host).options(num_cpus=0, num_gpus=gpus, max_restarts=0)
        handle = remote.remote(*args)
        self._actors.append(handle)
        return handle

    def close(self) -> None:
        """End every role and, if it is ours, Ray."""
        for handle in self._actors:
            with contextlib.suppress(Exception):
                self._ray.kill(handle)
        with contextlib.suppress(Exception):
            self._ray.shutdown()
