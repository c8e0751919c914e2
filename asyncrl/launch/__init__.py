"""Start a run, watch it, end it; nothing of it stays behind."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from asyncrl.config.schema import Config
from asyncrl.disk import log_stream

if TYPE_CHECKING:
    from asyncrl.launch.folder import RunFolder
    from asyncrl.launch.placement import Placement
    from asyncrl.launch.processes.reaper import Guard
    from asyncrl.launch.resume.plan import Resumption

__all__ = ["launch"]

LONGEST_TMPDIR = 24
"""Of TMPDIR; a longer one is not used for sockets."""


def launch(
    config: Config, *, sources: Mapping[str, str], preset: str, model_path: str,
    debug: bool = False, resumption: Resumption | None = None,
    origin: Mapping[str, object] | None = None,
) -> int:  # fmt: skip
    """Run to the end; the exit code: 0 also after an orderly Ctrl-C, 130 after a second one, 2 if
    summary.json cannot be written.

    Args:
        config: checked by preflight.
        sources: where each value comes from, for config.yaml.
        preset: name of the configuration, the start of the folder's default name.
        model_path: folder of the model.
        debug: all roles in this process (`asyncrl.launch.debug`).
        resumption: the run that goes on; `config` is its own then. It is closed at the end.
        origin: of the weights of a new run that begins from another's, for the events.

    Raises:
        AsyncRLError: a role died for good, or nothing became ready in time.
    """
    from asyncrl.config.render import to_yaml
    from asyncrl.config.sources import RESOLVED
    from asyncrl.launch.folder import RunFolder
    from asyncrl.launch.interrupt import Interrupt
    from asyncrl.launch.placement import place
    from asyncrl.launch.processes.reaper import MARK, Guard
    from asyncrl.launch.resume.lineage import Lineage
    from asyncrl.launch.scratch import remove_orphans

    if debug:
        from asyncrl.launch.debug import for_debugging

        config, sources = for_debugging(config, sources)
    placement = place(config)
    text = f"{RESOLVED}\n{to_yaml(config, sources)}"
    resume = None
    if resumption is None:
        folder = RunFolder(config, preset)
        folder.create(text)
        lineage = Lineage.begin(Path(folder.path), f"{folder.name}-{uuid.uuid4().hex[:8]}")
    else:
        folder, lineage, resume = resumption.folder, resumption.lineage, resumption.point()
        folder.take_up(resume.incarnation, text if resumption.changes else "")
    remove_orphans()
    run_id = lineage.run_id
    os.environ[MARK] = run_id
    # Sockets of Ray and vLLM: a short path, of this run alone, that goes with it.
    # A Unix socket's path may have 107 bytes, of which Ray needs most.
    short = len(tempfile.gettempdir()) <= LONGEST_TMPDIR
    scratch = tempfile.mkdtemp(prefix="asyncrl-", dir=None if short else "/tmp")
    os.environ["VLLM_RPC_BASE_PATH"] = scratch
    lineage.uses(scratch)
    guard = Guard(run_id, scratch)
    if debug:
        try:
            return _debug(config, folder, placement, run_id, model_path)
        finally:
            _tidy(guard, run_id, scratch)
            lineage.close()
    interrupt = Interrupt()
    if placement.device == "cpu":
        _import_ahead(config, placement.actor_threads, scratch, folder.log_of("forkserver"))

    from asyncrl.launch.desk import Desk
    from asyncrl.launch.ray_logs import keep_ray_logs
    from asyncrl.launch.run import Run
    from asyncrl.logs import written_to

    view_file, run = sys.stdout, None
    # Ray writes its own remarks to both streams; they belong to a log, not between our lines.
    log_fd = os.open(folder.log_of("launcher"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    with (
        log_stream(log_fd, closefd=True) as log,
        redirect_stdout(log),
        redirect_stderr(log),
        written_to(log, "launcher", run_id),
    ):
        try:
            desk = Desk(
                config, folder, run_id, view_file, _began(), resume=resume, wall_s=lineage.wall_s
            )
            if origin is not None:
                desk.event("weights_from", **origin)
            if resumption is not None and resume is not None:
                desk.resumed(resume, resumption.changes)
                for line in resumption.lines():
                    desk.view.say(line)
            run = Run(desk, placement, model_path, scratch, interrupt, lineage, resume)
            return run.go()
        finally:
            interrupt.mute()
            keep_ray_logs(scratch, folder.log_of("ray"))  # before the end makes it complain
            if run is not None:
                run.close()
            _tidy(guard, run_id, scratch)
            lineage.close()
            interrupt.restore()


def _debug(
    config: Config, folder: RunFolder, placement: Placement, run_id: str, model_path: str
) -> int:
    from asyncrl.actors.vllm_setup import engine_environment
    from asyncrl.launch.debug import DebugRun
    from asyncrl.launch.desk import Desk
    from asyncrl.launch.processes.hosts import OFFLINE

    threads = placement.actor_threads
    os.environ.update(
        OFFLINE
        | engine_environment(device="cpu", threads=threads, eager=config.engine.enforce_eager)
    )
    desk = Desk(config, folder, run_id, sys.stdout, _began())
    return DebugRun(desk, placement, model_path).go()


def _tidy(guard: Guard, run_id: str, scratch: str) -> None:
    """Leave nothing of the run behind but its folder."""
    from asyncrl.launch.processes.reaper import MARK, sweep

    sweep(run_id, scratch=scratch)
    guard.dismiss()
    shutil.rmtree(scratch, ignore_errors=True)
    for name in (MARK, "VLLM_RPC_BASE_PATH"):
        os.environ.pop(name, None)


def _import_ahead(config: Config, threads: int, scratch: str, log_path: str) -> None:
    """Start this machine's fork server, whose imports then run beside the start of Ray."""
    from asyncrl.actors.vllm_setup import engine_environment
    from asyncrl.launch.processes.start import ensure

    env = engine_environment(device="cpu", threads=threads, eager=config.engine.enforce_eager)
    ensure(scratch, env, log_path)


def _began() -> float:
    """When this process began, on the clock of time.monotonic."""
    return time.monotonic() - (time.time() - psutil.Process().create_time())
