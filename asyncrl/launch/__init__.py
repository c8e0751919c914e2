"""Start a run, watch it, end it; nothing of it stays behind."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import uuid
from contextlib import redirect_stderr, redirect_stdout

from asyncrl.config.schema import Config

__all__ = ["launch"]


def launch(config: Config, *, config_text: str, preset: str, model_path: str) -> int:
    """Run to the end; the exit code: 0 also after an orderly Ctrl-C, 130 after a second one.

    Args:
        config: checked by preflight.
        config_text: the resolved configuration, written to config.yaml.
        preset: name of the configuration, the start of the folder's default name.
        model_path: folder of the model.

    Raises:
        AsyncRLError: a role died, or nothing became ready in time.
    """
    from asyncrl.launch.cluster import place
    from asyncrl.launch.folder import RunFolder
    from asyncrl.launch.interrupt import Interrupt
    from asyncrl.launch.reaper import MARK, Guard, sweep
    from asyncrl.launch.run import Run

    placement = place(config)
    folder = RunFolder(config, preset)
    folder.create(config_text)
    run_id = f"{folder.name}-{uuid.uuid4().hex[:8]}"
    os.environ[MARK] = run_id
    # Sockets of Ray and vLLM: a short path, of this run alone, that goes with it.
    scratch = tempfile.mkdtemp(prefix="asyncrl-")
    os.environ["VLLM_RPC_BASE_PATH"] = scratch
    guard, interrupt = Guard(run_id, scratch), Interrupt()
    view_file, run = sys.stdout, None
    # Ray writes its own remarks to both streams; they belong to a log, not between our lines.
    with (
        open(folder.log_of("launcher"), "a", encoding="utf-8") as log,
        redirect_stdout(log),
        redirect_stderr(log),
    ):
        try:
            run = Run(config, folder, placement, run_id, model_path, scratch, interrupt, view_file)
            return run.go()
        finally:
            interrupt.mute()
            if run is not None:
                run.close()
            sweep(run_id)
            guard.dismiss()
            shutil.rmtree(scratch, ignore_errors=True)
            for name in (MARK, "VLLM_RPC_BASE_PATH"):
                os.environ.pop(name, None)
            interrupt.restore()
