"""How long a checkpoint holds training up: the same steps with one and without, in one process.

    save ─► step     against     step     and     step beside a bare write of as many bytes

What is written goes to the disk beside the steps, so that whatever it takes from them counts, not
only the copy in step. The bare write tells what of that the machine takes for any file of that
size. The buffer's part is its own process's and is left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import BenchError, Report, parser, run_bench
from learner_batch import Workload, make_part, make_samples

MODEL = "smollm2-135m"
QUICK_REPEATS, REPEATS = 2, 21
STEPS = 1
"""Of a side's turn: the checkpoint must be on the disk before they end. The fewer, the less of the
noise of other work is taken for the checkpoint's."""
PATIENCE_S = 0.1


@dataclass(slots=True)
class Turns:
    """Seconds of each turn; with a checkpoint, what it told."""

    saving: list[float]
    bare: list[float]
    plain: list[float]
    told: list[dict[str, Any]]


class Learner:
    """One rank with a real `Trainer` and `Saver`."""

    def __init__(self, model: str, run: Path, workload: Workload, threads: int) -> None:
        import torch
        import torch.distributed as dist

        from asyncrl.config.load import load
        from asyncrl.learner.checkpointing.saver import Saver
        from asyncrl.learner.step import Trainer
        from asyncrl.learner.undisturbed import train_undisturbed
        from asyncrl.roles import RoleSettings
        from asyncrl.waits import Waits

        torch.set_num_threads(threads)
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        config = load(None, [
            f"rollout.group_size={workload.group_size}", f"learner.batch_size={workload.samples}",
            f"rollout.max_prompt_tokens={workload.prompt[1]}", "learner.optim.lr=1e-6",
            f"rollout.max_new_tokens={workload.longest}", "checkpoint.keep=1",
            "learner.max_tokens_per_microbatch=2048", "checkpoint.score=null",
        ]).config  # fmt: skip
        settings = RoleSettings(
            role="learner", rank=0, world=1, model_path=model, device="cpu", threads=threads,
            weight_backend="gloo", run_id="bench", hub_endpoint="", run_dir=str(run),
        )  # fmt: skip
        self.told: list[dict[str, Any]] = []
        trainer = Trainer(config, model, rank=0, world=1, device="cpu")
        self._saver = Saver(
            trainer, config, settings, waits=Waits("learner-0"),
            tell=lambda **event: self.told.append(event),
        )  # fmt: skip
        tokens = sum(t.header.response_tokens for t in make_samples(workload))
        self._samples = make_samples(workload, np.full(tokens, -10.0, np.float32))
        self._train, self._step = trainer.train, 0
        self._file, self._bytes = run / "bare", np.ones(1 << 24, np.uint8)
        self._bare = ThreadPoolExecutor(1, initializer=Saver._give_way)
        self._writing: Future[None] | None = None
        train_undisturbed()

    def turn(self, steps: int, *, save: bool = False, bare: int = 0) -> float:
        """Seconds of so many steps; beside them, a checkpoint or so many bytes are written."""
        from asyncrl.types import INITIAL

        parts = [make_part(self._samples, self._step + k) for k in range(1, steps + 1)]
        began = time.perf_counter()
        if save:
            self._saver.save(self._step, self._step, {})
        if bare:
            self._writing = self._bare.submit(self._write, bare)
        for part in parts:
            self._train(part, INITIAL)
        seconds = time.perf_counter() - began
        self._step += steps
        return seconds

    def settle(self) -> float:
        """Wait for the disk; seconds."""
        began = time.perf_counter()
        self._saver.finish()
        if self._writing is not None:
            self._writing.result()
        seconds = time.perf_counter() - began
        self._writing = None
        self._file.unlink(missing_ok=True)  # which takes its time for so large a file
        return seconds

    def _write(self, nbytes: int) -> None:
        with self._file.open("wb", buffering=0) as file:
            while nbytes > 0:
                nbytes -= file.write(self._bytes[:nbytes].data)
            os.fsync(file.fileno())

    def close(self) -> None:
        """Leave the group."""
        import torch.distributed as dist

        self._bare.shutdown()
        self._saver.close()
        dist.destroy_process_group()


def take_turns(learner: Learner, repeats: int, steps: int, patience_s: float = PATIENCE_S) -> Turns:
    """All sides, every second repeat the other way round.

    Args:
        patience_s: how much later than its turn a checkpoint may be on the disk.

    Raises:
        BenchError: what was written was not on the disk by the end of its turn.
    """
    learner.turn(2, save=False)  # warm-up: kernels, and the optimizer's moments
    learner.turn(1, save=True)
    learner.settle()
    nbytes = learner.told.pop()["bytes"]
    turns = Turns([], [], [], learner.told)
    sides: list[tuple[list[float], dict[str, int]]] = [
        (turns.saving, {"save": True}), (turns.bare, {"bare": nbytes}), (turns.plain, {}),
    ]  # fmt: skip
    for repeat in range(repeats):
        print(
            f"[{repeat + 1}/{repeats}] steps with a checkpoint, with a bare write, alone ...",
            flush=True,
        )
        for taken, beside in sides if repeat % 2 == 0 else sides[::-1]:
            taken.append(learner.turn(steps, **beside))
            if (left := learner.settle()) > patience_s:
                raise BenchError(f"the disk took {left:.1f} s more than {steps} step(s)")
    return turns


def summarise(report: Report, turns: Turns, steps: int, **params: Any) -> None:
    """The figures; a step's time is that of the turn without."""
    step_s = [plain / steps for plain in turns.plain]
    stall_s = [a - b for a, b in zip(turns.saving, turns.plain, strict=True)]
    params |= {
        "steps": steps, "step_s": round(statistics.median(step_s), 3),
        "bytes": turns.told[0]["bytes"],
        **{k: [told[k] for told in turns.told] for k in ("stage_s", "write_s", "sync_s")},
    }  # fmt: skip
    report.add(
        "stall_frac", [s / t for s, t in zip(stall_s, step_s, strict=True)], "of a step", "lower",
        **params,
    )  # fmt: skip
    bare_s = [a - b for a, b in zip(turns.bare, turns.plain, strict=True)]
    report.add(
        "bare_write_frac", [s / t for s, t in zip(bare_s, step_s, strict=True)], "of a step",
        "lower", **params,
    )  # fmt: skip
    copied = [told["stage_s"] / t for told, t in zip(turns.told, step_s, strict=True)]
    report.add("copy_frac", copied, "of a step", "lower", **params)
    report.row("turn", "seconds of each")
    report.row("with a checkpoint", " ".join(f"{s:.2f}" for s in turns.saving))
    report.row("with a bare write", " ".join(f"{s:.2f}" for s in turns.bare))
    report.row("without", " ".join(f"{s:.2f}" for s in turns.plain))
    for name in ("stage_s", "write_s", "sync_s"):
        report.row(name, " ".join(f"{told[name]:.2f}" for told in turns.told))


def measure(report: Report, given: argparse.Namespace) -> None:
    """All sides in turns."""
    from asyncrl import models

    if given.folder is not None and not os.path.isdir(given.folder):
        raise BenchError(f"--folder {given.folder} is no folder: make it, or name another")
    repeats = given.repeats or (QUICK_REPEATS if given.quick else REPEATS)
    threads = given.threads or len(os.sched_getaffinity(0))
    workload = Workload(groups=4, group_size=8)
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=given.folder) as run:
        learner = Learner(str(models.resolve(MODEL)), Path(run), workload, threads)
        try:
            turns = take_turns(learner, repeats, STEPS)
        finally:
            learner.close()
    summarise(report, turns, STEPS, model=MODEL, threads=threads, samples=workload.samples)


def main() -> int:
    """Read the command line and measure."""
    p = parser(__doc__ or "")
    p.add_argument("--threads", type=int, metavar="N", help="of the learner (default: all cores)")
    p.add_argument("--folder", metavar="DIR", help="where to write (default: the system's own)")
    return run_bench("checkpoint", p, measure)


if __name__ == "__main__":
    sys.exit(main())
