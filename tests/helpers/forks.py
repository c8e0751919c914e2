"""Processes forked from one that has imported torch, vLLM and the learner's code.

    Process, forked_cores ──► multiprocessing's fork server ──fork──► the process

As in a run, where roles come from a server of their own: a fresh interpreter would import all of
it again. The server is started at the first need, lives as long as pytest and never computes.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from asyncrl.actors.vllm_setup import HOST_PID_ENV, engine_environment, prepare_environment
from asyncrl.launch.processes.start import MODULES


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    os.environ.pop(HOST_PID_ENV, None)  # else what is imported would wait for the host's end
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def ensure_server() -> None:
    """Have it begin to import what a run's server does; whoever needs it waits for the end."""
    with _environment(engine_environment(device="cpu", threads=1, eager=True)):
        forkserver.set_forkserver_preload(list(MODULES))
        forkserver.ensure_running()


class Process(ForkServerProcess):
    """A fork that has the environment in which it was started."""

    def start(self) -> None:
        self.environment = dict(os.environ)
        ensure_server()
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        self.prepare()
        super().run()

    def prepare(self) -> None:
        """What comes before the target, in the fork."""


class EngineCore(Process):
    """One of vLLM's, that ends with its host as a spawned one does."""

    def prepare(self) -> None:
        from asyncrl.actors.gloo_transfer import end_with_host

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        end_with_host()


class _Context(ForkServerContext):
    Process: Any = EngineCore


@contextlib.contextmanager
def forked_cores() -> Iterator[None]:
    """vLLM's engines that are started within are forked from the server, not spawned."""
    ensure_server()
    # Before vLLM is imported; the engine that is started says the same.
    prepare_environment(device="cpu", threads=1, eager=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.v1.engine import utils
    theirs = utils.get_mp_context
    utils.get_mp_context = _Context
    try:
        yield
    finally:
        utils.get_mp_context = theirs


def run_module(name: str, arguments: list[str], out: Path) -> None:
    """The module's `main` with these arguments, stdout to OUT.out and stderr to OUT.err."""
    for number, suffix in ((1, "out"), (2, "err")):
        fd = os.open(f"{out}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, number)
        os.close(fd)
    sys.argv = [name, *arguments]
    importlib.import_module(name).main()
