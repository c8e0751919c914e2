"""What runs in Ray's worker processes: a thin host for each role, light to start.

Ray places it, watches it and ends it; the role itself is a process of its own, which lives no
longer than its host: forked from the machine's fork server, or a fresh interpreter (`start`).
"""

from __future__ import annotations

import getpass
import os
import tempfile
from dataclasses import replace
from typing import Any

from asyncrl.actors.vllm_setup import engine_environment
from asyncrl.errors import RoleDiedError
from asyncrl.launch.processes.role_main import RoleSpec
from asyncrl.launch.processes.start import Start, start_role

OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""No network for what lies on disk, and no threads in tokenizers."""


def role_env(spec: RoleSpec, scratch: str) -> dict[str, str]:
    """Environment of a role: its host's, its engine's, and of a fork server that it may start.

    Temporary files go where they end with the run, however a role ends.
    """
    s = spec.settings
    env = dict(os.environ) | OFFLINE | {"VLLM_RPC_BASE_PATH": scratch, "TMPDIR": scratch}
    # What torch has compiled is kept from run to run.
    cache = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    env.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)
    env |= engine_environment(
        device=s.device, threads=s.threads, eager=spec.config.engine.enforce_eager
    )
    if s.visible_gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = s.visible_gpus
    return env


class RoleHost:
    """Starts a role's process and passes calls on to it, one at a time."""

    def __init__(self, spec: RoleSpec, scratch: str, log_path: str) -> None:
        if spec.config.cluster.address is not None:
            import ray

            # Where this machine's sockets bind.
            address = str(ray.util.get_node_ip_address())
            spec = replace(spec, settings=replace(spec.settings, host=address))
        os.makedirs(scratch, mode=0o700, exist_ok=True)  # not there yet on another machine
        self._name = spec.settings.name
        start = Start(
            name=self._name, env=role_env(spec, scratch),
            cwd=os.getcwd(), log_path=log_path, host_pid=os.getpid(), spec=spec,
        )  # fmt: skip
        self._connection, self.role_pid = start_role(scratch, start, fork=spec.settings.forked)

    def pid(self) -> int:
        """Of the role's process."""
        return self.role_pid

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the role and wait for its result.

        Raises:
            RoleDiedError: its process ended.
            Exception: what the role raised.
        """
        try:
            self._connection.send((method, arguments))
            good, result = self._connection.recv()
        except (EOFError, OSError):
            raise RoleDiedError(f"{self._name}: its process {self.role_pid} ended") from None
        if not good:
            raise result
        return result
