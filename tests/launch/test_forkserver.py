"""The fork server and the hosts: real processes, a light role (the buffer), no Ray."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from asyncrl.config.load import load
from asyncrl.errors import RoleDiedError
from asyncrl.hub import Hub
from asyncrl.launch.processes import forkserver
from asyncrl.launch.processes.hosts import RoleHost
from asyncrl.launch.processes.role_main import RoleSpec
from asyncrl.roles import RoleSettings

LIGHT = ("asyncrl.buffer.server", "no_such_module")
END_S = 30


@pytest.fixture
def hub():
    hub = Hub([], run_id="r")
    yield hub
    hub.close()


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    monkeypatch.setenv("ASYNCRL_TEST", str(tmp_path))  # all that is started here inherits it
    folder = tmp_path / "s"
    yield str(folder)
    for process in psutil.process_iter(["cmdline", "environ"]):
        mine = (process.info["environ"] or {}).get("ASYNCRL_TEST") == str(tmp_path)
        if mine and process.pid != os.getpid():
            process.kill()
    while forkserver._started:
        forkserver._started.pop().wait(END_S)


@pytest.fixture
def host(scratch, hub, tmp_path):
    """Makes hosts whose server imports little."""

    def make(**settings):
        forkserver.ensure(scratch, {}, str(tmp_path / "server.log"), LIGHT)
        spec = RoleSpec(
            load("tiny", (f"run.dir={tmp_path}",), {}).config,
            RoleSettings(
                role="buffer", rank=0, world=1, model_path="", threads=1, weight_backend="gloo",
                run_id="r", hub_endpoint=hub.endpoint, run_dir=str(tmp_path),
                **({"device": "cpu", "forked": True} | settings),
            ),
        )  # fmt: skip
        return RoleHost(spec, scratch, str(tmp_path / "role.log"))

    return make


def wait_gone(*processes):
    _, alive = psutil.wait_procs(processes, timeout=END_S)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


def server_of(role: int) -> psutil.Process:
    return psutil.Process(role).parent()


def test_roles_of_a_machine_are_forked_from_one_server(host, tmp_path):
    first, second = host(), host()
    assert server_of(first.pid()).pid == server_of(second.pid()).pid
    assert first.call("start").startswith("tcp://127.0.0.1:")
    assert psutil.Process(first.pid()).name() == "buffer-0"
    assert "not imported ahead: no_such_module" in (tmp_path / "server.log").read_text()


def test_what_a_role_raises_arrives_and_it_goes_on(host, tmp_path):
    role = host()
    with pytest.raises(RuntimeError, match="AttributeError.*no_such_method"):
        role.call("no_such_method")
    assert role.call("start").startswith("tcp://")
    assert "no_such_method failed" in (tmp_path / "role.log").read_text()


def test_a_killed_role_is_told_to_its_host(host, tmp_path):
    role = host()
    role.call("start")
    killer = threading.Timer(0.5, os.kill, (role.pid(), signal.SIGKILL))
    killer.start()
    with pytest.raises(RoleDiedError, match=f"buffer-0: its process {role.pid()} ended"):
        role.call("run")
    wait_for_text(tmp_path / "role.log", f"process {role.pid()} was killed by SIGKILL")


def wait_for_text(path, text):
    deadline = time.monotonic() + END_S
    while text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()
        threading.Event().wait(0.05)


def test_a_killed_server_leaves_its_roles_and_another_takes_its_place(host):
    first = host()
    server = server_of(first.pid())
    server.kill()
    wait_gone(server)
    assert first.call("start").startswith("tcp://")
    second = host()
    assert server_of(second.pid()).pid not in (server.pid, server_of(first.pid()).pid)
    assert second.call("start").startswith("tcp://")


def test_a_role_in_a_fresh_interpreter(host):
    """As where there is a GPU."""
    role = host(device="cuda", forked=False)
    assert role.call("start").startswith("tcp://127.0.0.1:")
    assert psutil.Process(role.pid()).ppid() == os.getpid()
    psutil.Process(role.pid()).kill()


HOST = """
import sys, time
from asyncrl.config.load import load
from asyncrl.launch.processes.hosts import RoleHost
from asyncrl.launch.processes.role_main import RoleSpec
from asyncrl.roles import RoleSettings
scratch, folder = sys.argv[1:]
settings = RoleSettings("buffer", 0, 1, "", "cpu", 1, "gloo", "r", "tcp://x", folder,
                        forked=True)
print(RoleHost(RoleSpec(load("tiny", (), {}).config, settings), scratch, folder + "/o.log").pid(),
      flush=True)
time.sleep(600)
"""


def test_a_role_does_not_outlive_its_host(scratch, tmp_path, host):
    role = host()  # a server with a light list of imports
    other = subprocess.Popen(
        [sys.executable, "-c", HOST, scratch, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    forked = psutil.Process(int(other.stdout.readline()))
    assert forked.is_running()
    other.kill()
    other.wait()
    other.stdout.close()
    wait_gone(forked)
    assert psutil.Process(role.pid()).is_running(), "another host's role goes on"


def test_an_idle_server_ends_by_itself(scratch, tmp_path, monkeypatch):
    monkeypatch.setenv("ASYNCRL_FORKSERVER_IDLE_S", "0.1")
    forkserver.ensure(scratch, {}, str(tmp_path / "l"), LIGHT)
    deadline = time.monotonic() + END_S
    while os.path.exists(forkserver.socket_path(scratch)):
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)
