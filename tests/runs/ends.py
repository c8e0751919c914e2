"""The ways in which a launch can end, and what it must not leave behind."""

from __future__ import annotations

import contextlib
import getpass
import os
import signal
from pathlib import Path

from asyncrl.launch.processes.reaper import processes_of
from tests.helpers.eventually import eventually

GONE_S = 45.0
"""After the launcher was killed, its guard has 30 s."""
CACHES = {f"torchinductor_{getpass.getuser()}"}
"""Of the user, not of a launch: torch keeps what it has compiled there."""


class Footprint:
    """Processes, shared memory, sockets and temporary folders of the launches below a folder.

    The launches have `folder` as their TMPDIR, by which their processes are found.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._shm = set(os.listdir("/dev/shm"))
        assert self.left() == {}

    def left(self) -> dict[str, object]:
        found = {
            "processes": self._processes(),
            "shared memory": sorted(set(os.listdir("/dev/shm")) - self._shm),
            "temporary folders": sorted(set(os.listdir(self._folder)) - CACHES),
            "sockets": [
                line for line in Path("/proc/net/unix").read_text().splitlines()
                if self._folder in line
            ],
        }  # fmt: skip
        return {what: names for what, names in found.items() if names}

    def _processes(self) -> list[str]:
        found = []
        mark = f"TMPDIR={self._folder}".encode()  # a role's is below it
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                marked = b"\0" + mark in b"\0" + (entry / "environ").read_bytes()
                if marked or self._opened(entry):
                    found.append(f"{entry.name} {(entry / 'comm').read_text().strip()}")
        return found

    def _opened(self, entry: Path) -> bool:
        for fd in (entry / "fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(fd).startswith(self._folder + "/"):
                    return True
        return False

    def check(self, how: str) -> None:
        eventually(lambda: not self.left(), lambda: f"{how}: {self.left()}", GONE_S)


def kill(run, name):
    """SIGKILL of a role of the run, or of its engine's core."""
    for process in processes_of(run.run_id()):
        with contextlib.suppress(Exception):
            if process.name() == name:
                os.kill(process.pid, signal.SIGKILL)
                return
    raise AssertionError(f"no {name}")


def begun(run):
    run.wait_for(run.events, "the first event")


def finishes(start):
    return start("run.steps=2").wait()


def is_drained(start):
    run = start("run.steps=100000")
    run.wait_for_step(1)
    run.process.send_signal(signal.SIGINT)
    return run.wait(200)


def is_terminated(start):
    run = start("run.steps=100000", "--learners", "2")
    run.wait_for_step(1)
    run.process.terminate()
    return run.wait(200)


def is_interrupted_at_its_start(start):
    run = start("run.steps=100000")
    begun(run)
    run.process.send_signal(signal.SIGINT)
    return run.wait(120)


def is_interrupted_twice(start):
    run = start("run.steps=100000")
    run.wait_for_step(1)
    run.process.send_signal(signal.SIGINT)
    run.wait_for(lambda: "stopping" in run.output, "the first one heard")
    run.process.send_signal(signal.SIGINT)
    return run.wait(120)


def loses_its_launcher(start):
    run = start("run.steps=100000", "buffer.durability=process")
    run.wait_for_step(1)
    run.process.kill()
    return run.process.wait()


def loses_its_launcher_at_its_start(start):
    run = start("run.steps=100000")
    begun(run)
    run.process.kill()
    return run.process.wait()


def is_refused(start):
    return start("learner.batch_size=33").wait()


def has_no_reward(start):
    return start("task.reward=no_such_module:reward").wait()


def has_no_room_for_its_engine(start):
    return start("engine.kv_cache_gib=0.0001").wait()


def loses_its_only_actor(start):
    run = start("run.steps=100000", "cluster.max_restarts=0")
    run.wait_for_step(1)
    kill(run, "actor-0-core")
    return run.wait(120)


def loses_its_learner(start):
    run = start("run.steps=100000", "checkpoint.every=null")
    run.wait_for_step(1)
    kill(run, "learner-0")
    return run.wait(120)


def loses_its_buffer(start):
    run = start("run.steps=100000", "cluster.max_restarts=0")
    run.wait_for_step(1)
    kill(run, "buffer-0")
    return run.wait(120)


WAYS = {
    finishes: (0,),
    is_drained: (0,),
    is_terminated: (0,),
    is_interrupted_at_its_start: (0, 130),
    is_interrupted_twice: (0, 130),
    loses_its_launcher: (-9,),
    loses_its_launcher_at_its_start: (-9,),
    is_refused: (2,),
    has_no_reward: (2,),
    has_no_room_for_its_engine: (2,),
    loses_its_only_actor: (1,),
    loses_its_learner: (1,),
    loses_its_buffer: (1,),
}
"""What a launch may do, and the exit codes of that."""
