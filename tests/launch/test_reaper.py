"""Nothing of a run stays behind, however it ends."""

import os
import subprocess
import sys
import uuid

import psutil
import pytest

from asyncrl.launch.reaper import MARK, processes_of, sweep

SLEEPER = "import time, sys; print('up', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('up', flush=True); time.sleep(600)"
)


def start(code, run_id):
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {MARK: run_id}, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"up\n"
    return process


@pytest.fixture
def run_id():
    name = f"test-{uuid.uuid4().hex}"
    yield name
    sweep(name)


def test_sweep_ends_only_the_run_s_processes(run_id):
    mine, stubborn = start(SLEEPER, run_id), start(STUBBORN, run_id)
    other = start(SLEEPER, run_id + "-other")
    try:
        assert set(sweep(run_id, grace_s=0.5)) == {mine.pid, stubborn.pid}
        assert mine.poll() is not None
        assert stubborn.poll() is not None
        assert other.poll() is None
        assert processes_of(run_id) == []
    finally:
        for process in (mine, stubborn, other):
            process.kill()
            process.wait()
            process.stdout.close()


GUARDED = """
import os, subprocess, sys, time
from asyncrl.launch.reaper import Guard, MARK
run_id = sys.argv[1]
os.environ[MARK] = run_id
guard = Guard(run_id, sys.argv[3])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
print(child.pid, guard._process.pid, flush=True)
if sys.argv[2] == "dismiss":
    guard.dismiss()
    print("dismissed", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["killed", "dismiss"])
def test_guard_sweeps_when_the_launcher_is_killed(run_id, how, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "-c", GUARDED, run_id, how, str(scratch)],
        stdout=subprocess.PIPE,
        text=True,
    )
    child, guard = (psutil.Process(int(p)) for p in launcher.stdout.readline().split())
    if how == "dismiss":
        assert launcher.stdout.readline() == "dismissed\n"
        assert not guard.is_running()
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    if how == "killed":
        psutil.wait_procs([child, guard], timeout=30)
        assert not child.is_running()
        assert not guard.is_running()
        assert not scratch.exists()
    else:
        assert child.is_running()
        child.kill()
