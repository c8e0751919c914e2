"""The fork server and the hosts: real processes, a light role (the buffer), no Ray."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial

import psutil
import pytest

from asyncrl.actors.vllm_setup import engine_environment
from asyncrl.config.load import load
from asyncrl.errors import RoleDiedError
from asyncrl.hub import Hub
from asyncrl.launch.processes import forkserver, start
from asyncrl.launch.processes.hosts import RoleHost, role_env
from asyncrl.launch.processes.role_main import RoleSpec
from asyncrl.roles import RoleSettings
from tests.helpers.eventually import eventually

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
    while start._started:
        start._started.pop().wait(END_S)


@pytest.fixture
def host(scratch, hub, tmp_path):
    """Makes hosts whose server imports little."""

    def make(modules=LIGHT, **settings):
        if modules is not None:
            env = {"PYTHONPATH": str(tmp_path)}
            start.ensure(scratch, env, str(tmp_path / "server.log"), modules)
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
    eventually(lambda: text in path.read_text(), path.read_text, END_S)


def test_a_killed_server_leaves_its_roles_and_another_takes_its_place(host):
    first = host()
    server = server_of(first.pid())
    server.kill()
    wait_gone(server)
    assert first.call("start").startswith("tcp://")
    second = host()
    assert server_of(second.pid()).pid not in (server.pid, server_of(first.pid()).pid)
    assert second.call("start").startswith("tcp://")


def test_of_several_that_find_no_server_one_starts_it(scratch, host, monkeypatch):
    first = host()  # kept: a role ends with its host
    server = server_of(first.pid())
    server.kill()
    wait_gone(server)
    assert os.path.exists(start.socket_path(scratch)), "what a killed server leaves"
    monkeypatch.setattr(start, "ensure", partial(start.ensure, modules=LIGHT))
    roles = []
    threads = [threading.Thread(target=lambda: roles.append(host(None))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(roles) == 6
    assert len({server_of(role.pid()).pid for role in roles}) == 1


def test_a_server_has_the_same_environment_whoever_starts_it(scratch):
    config = load("tiny", ("engine.threads=3",), {}).config
    settings = RoleSettings("actor", 0, 1, "", "cpu", 3, "gloo", "r", "tcp://x", "", forked=True)
    env = role_env(RoleSpec(config, settings), scratch)
    expected = engine_environment(device="cpu", threads=3, eager=config.engine.enforce_eager)
    assert "TORCHDYNAMO_DISABLE" in expected
    assert expected.items() <= env.items()


NO_MEMORY = """
import errno, os
fork = os.fork
def fail():
    os.fork = fork
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
os.fork = fail
"""


def test_a_fork_that_fails_is_told_and_the_server_goes_on(host, tmp_path):
    (tmp_path / "no_memory.py").write_text(NO_MEMORY)
    modules = (*LIGHT, "no_memory")
    with pytest.raises(RoleDiedError, match=r"buffer-0.*could not start it: OSError.*Cannot alloc"):
        host(modules)
    assert host(modules).call("start").startswith("tcp://")
    log = (tmp_path / "server.log").read_text()
    assert log.count("imports took") == 1, "the same server"
    assert "Cannot allocate memory" in log


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


def test_a_request_that_cannot_be_read_is_told_and_the_server_goes_on(host, scratch, tmp_path):
    role = host()
    log = str(tmp_path / "o.log")
    request = start.Start("actor-7", dict(os.environ), ".", log, os.getpid(), Unreadable())
    with pytest.raises(RoleDiedError, match="actor-7: .*ValueError.*no number"):
        start.start_role(scratch, request, fork=True)
    other = host()  # kept: a role ends with its host
    assert server_of(other.pid()).pid == server_of(role.pid()).pid
    assert "no number" in (tmp_path / "server.log").read_text()


def test_a_client_that_says_nothing_holds_nobody(host, scratch, tmp_path):
    host()
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as gone:
        for client in (silent, gone):
            client.connect(start.socket_path(scratch))
        gone.close()
        began = time.monotonic()
        assert host().call("start").startswith("tcp://")
        assert time.monotonic() - began < forkserver.REQUEST_S
        assert "sent no request" not in (tmp_path / "server.log").read_text()


def test_a_client_that_says_nothing_is_forgotten(scratch, tmp_path):
    (tmp_path / "brief.py").write_text("import __main__; __main__.REQUEST_S = 0.2")
    env = {"PYTHONPATH": str(tmp_path)}
    start.ensure(scratch, env, str(tmp_path / "l"), ("brief",), idle_s=0.1)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.settimeout(END_S)
        silent.connect(start.socket_path(scratch))
        assert silent.recv(1) == b""
    wait_for_text(tmp_path / "l", "a client sent no request")


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
host = RoleHost(RoleSpec(load("tiny", (), {}).config, settings), scratch, folder + "/o.log")
print(host.pid(), flush=True)
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
    log = (tmp_path / "o.log").read_text()
    assert "killed" not in log, "its connection closed, or it ended itself: that is in order"
    assert psutil.Process(role.pid()).is_running(), "another host's role goes on"


def test_an_idle_server_ends_by_itself_and_another_may_come(scratch, tmp_path):
    for _ in range(2):
        start.ensure(scratch, {}, str(tmp_path / "l"), LIGHT, idle_s=0.1)
        assert start._started.pop().wait(END_S) == 0
        assert not os.path.exists(scratch)
