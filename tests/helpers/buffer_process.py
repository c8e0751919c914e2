"""A real buffer in a process of its own: it can be killed, and started again on the same port.

    python -m tests.helpers.buffer_process '{"durability": "process", "folder": "...", ...}'

prints its endpoint and serves until it is killed, until SIGTERM (an orderly end), or until the
process that started it ends. Its log is its standard error.
"""

from __future__ import annotations

import contextlib
import cProfile
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0
"""Longest time to an endpoint, a recovery from the store included."""


@dataclass(frozen=True)
class BufferSpec:
    """What a buffer is made from, as JSON on its command line."""

    ledger: dict[str, Any] = field(default_factory=dict)
    """Settings of the ledger."""
    durability: str = "none"
    folder: str = ""
    """Of the store."""
    port: int = 0
    run_id: str = "r"
    keys: str = ""
    """Folder of CURVE keys; empty: plain text."""
    memory_mib: int = 1024
    store_mib: int = 8192
    silent_after_s: float = 10.0
    drain_s: float = 60.0
    profile: str = ""
    """File for the statistics of a profiled run; empty: no profile."""


class BufferProcess:
    """The buffer as its parent sees it."""

    def __init__(self, spec: BufferSpec, log: Path | None = None) -> None:
        self._spec, self._log = spec, log
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "tests.helpers.buffer_process"]
        with open(self._log or os.devnull, "ab") as log:
            self.process = subprocess.Popen(
                [*command, json.dumps(asdict(self._spec))], cwd=ROOT, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip
        self.endpoint = self._first_line()

    def _first_line(self) -> str:
        """The endpoint; a process that hangs before it has one is killed by an alarm of its own."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            code = self.process.wait(START_S)
            tail = self._log.read_text(errors="replace")[-2000:] if self._log else ""
            raise RuntimeError(f"the buffer did not start (exit code {code}): {tail}")
        return line

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    @property
    def rss_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)

    def thread_seconds(self) -> dict[str, float]:
        """Processor time of its own thread, and of ZeroMQ's and all others."""
        threads = {t.id: t.user_time + t.system_time for t in psutil.Process(self.pid).threads()}
        own = threads.pop(self.pid)
        return {"main": own, "others": sum(threads.values())}

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self._reap(30)

    def end(self) -> int:
        """An orderly end; the exit code."""
        self.process.terminate()
        return self._reap(60)

    def restart(self) -> None:
        """Another process in its place, on the same port, from the same store."""
        self._spec = replace(self._spec, port=self.port)
        self._start()

    def close(self) -> None:
        """Nothing is left. Safe to call twice."""
        if self.process.poll() is None:
            self.kill()

    def _reap(self, timeout_s: float) -> int:
        code = self.process.wait(timeout_s)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code


def serve(spec: BufferSpec) -> None:
    """Be the buffer."""
    import asyncio

    import uvloop

    from asyncrl.buffer.durable import open_ledger
    from asyncrl.buffer.server import BufferServer
    from asyncrl.security import load_keys
    from tests.buffer.samples import prompts

    ledger, keeper = open_ledger(
        spec.folder, durability=spec.durability, run_id=spec.run_id,  # type: ignore[arg-type]
        prompts=prompts(1 << 40), memory_bytes=spec.memory_mib << 20,
        store_bytes=spec.store_mib << 20, **spec.ledger,
    )  # fmt: skip
    server = BufferServer(
        ledger, run_id=spec.run_id, port=spec.port, keeper=keeper,
        keys=load_keys(Path(spec.keys), client_only=False) if spec.keys else None,
        silent_after_s=spec.silent_after_s, drain_s=spec.drain_s,
    )  # fmt: skip

    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        print(await server.start(), flush=True)
        signal.alarm(0)
        with contextlib.suppress(asyncio.CancelledError):
            await server.run()

    profile = cProfile.Profile() if spec.profile else None
    with profile or contextlib.nullcontext():
        uvloop.run(main())
    if profile is not None:
        profile.dump_stats(spec.profile)


if __name__ == "__main__":
    import logging

    from asyncrl.roles import end_with

    signal.alarm(int(START_S))  # until the endpoint is told
    end_with(os.getppid())
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    serve(BufferSpec(**json.loads(sys.argv[1])))
