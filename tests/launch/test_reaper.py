"""Nothing of a run stays behind, however it ends."""

import os
import signal
import subprocess
import sys
import uuid

import psutil
import pytest

from asyncrl.launch.processes.reaper import MARK, kill_role, processes_of, sweep

SLEEPER = "import time, sys; print('up', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('up', flush=True); time.sleep(600)"
)


def start(code, run_id, *arguments):
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {MARK: run_id},
        stdout=subprocess.PIPE,
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


def test_who_wiped_its_environment_is_known_by_its_open_files(run_id, tmp_path):
    holder = "import time, sys; f = open(sys.argv[1], 'w');" + SLEEPER
    (tmp_path / "scratch").mkdir()
    mine = start(holder, "wiped", str(tmp_path / "scratch" / "log"))
    other = start(holder, "wiped", str(tmp_path / "scratch-not"))
    try:
        assert processes_of(run_id) == []
        assert sweep(run_id, scratch=str(tmp_path / "scratch")) == [mine.pid]
        assert other.poll() is None
    finally:
        for process in (mine, other):
            process.kill()
            process.wait()
            process.stdout.close()


def test_a_role_that_is_stopped_is_killed_by_its_name_and_nobody_else(run_id):
    named = "import time; from asyncrl.roles import name_process; name_process('buffer-0');"
    named += "print('up', flush=True); time.sleep(600)"
    role, rest = start(named, run_id), start(SLEEPER, run_id)
    other = start(named, run_id + "-other")
    try:
        os.kill(role.pid, signal.SIGSTOP)
        kill_role(run_id, "buffer-0")
        assert not psutil.pid_exists(role.pid)
        assert rest.poll() is None
        assert other.poll() is None
    finally:
        for process in (role, rest, other):
            process.kill()
            process.wait()
            process.stdout.close()


PARENT_OF_TITLED = """
import subprocess, sys, time
code = "from setproctitle import setproctitle; setproctitle('x' * 300);" + sys.argv[1]
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
print("up", flush=True)
time.sleep(600)
"""


def test_a_process_that_overwrote_its_environment_is_found(run_id):
    """Setting a title, as Ray's and vLLM's processes do, may overwrite the environment."""
    process = start(PARENT_OF_TITLED, run_id, SLEEPER)
    (child,) = psutil.Process(process.pid).children()
    assert child.environ().get(MARK) is None
    assert {p.pid for p in processes_of(run_id)} == {process.pid, child.pid}
    sweep(run_id)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    process.wait()
    process.stdout.close()


GUARDED = """
import os, subprocess, sys, time
from asyncrl.launch.processes.reaper import Guard, MARK
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
