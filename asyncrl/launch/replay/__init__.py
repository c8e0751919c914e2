"""`asyncrl replay`: a run's recorded batches to a learner alone, without actors, buffer or Ray.

config.yaml + overrides ┐
trajectories/ ──────────┼─► Job ─► ranks (as many as the run had) ─► steps ─► weights
initial model ──────────┘                                             │          └─► --check
                                                                      └─► OUT/metrics.jsonl
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.paths import expand
from asyncrl.errors import UserError
from asyncrl.launch.replay.compare import different
from asyncrl.launch.replay.job import Job, Told
from asyncrl.launch.replay.past import Past, read_past
from asyncrl.launch.replay.plan import RecordedBatch, read_batches
from asyncrl.launch.replay.ranks import alone, listen, patience_s
from asyncrl.launch.scratch import Scratch, remove_orphans
from asyncrl.sinks import JsonlSink
from asyncrl.waits import Waits

__all__ = ["Wish", "replay"]

SHOWN_TENSORS = 5
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Wish:
    """What a replay is asked for (see the options of `asyncrl replay`)."""

    overrides: tuple[str, ...] = ()
    out: str | None = None
    check: bool = False
    learners: int | None = None
    from_step: int | None = None
    steps: int | None = None


def replay(run: Path, wish: Wish, say: Say) -> int:
    """Train a run's batches once more; the exit code: 1 if `check` finds other weights.

    Raises:
        UserError: what is asked for makes no sense, or the run cannot be replayed; says why.
        AsyncRLError: a rank failed or died.
    """
    past = read_past(run, wish.overrides, wish.from_step, wish.steps)
    if wish.check and past.changed:
        raise UserError(
            f"--check compares with the run's own weights, {past.changed[0]} makes others: "
            "leave one of them out"
        )
    if (wish.learners or 1) > past.config.learner.batch_size:
        raise UserError(
            f"--learners {wish.learners}: a batch has {past.config.learner.batch_size} samples "
            "(learner.batch_size), so that some ranks would have none: ask for fewer"
        )
    batches = read_batches(run, past.first, past.last, past.recording_ended)
    past = past.on_lineage(batches)
    world = wish.learners or past.world
    why_not = _inexact(past, batches, world)
    if wish.check and why_not:
        raise UserError(f"--check: the weights cannot be the same bits, {why_not[0]}")
    with ExitStack() as stack:
        remove_orphans()
        scratch = stack.enter_context(Scratch())
        out = scratch / "out" if wish.out is None else _new_folder(wish.out)
        out.mkdir(parents=True, exist_ok=True)
        job = past.job(world, scratch, out, compare=wish.check)
        target = past.target(job) if wish.check else None
        for reason in why_not:
            say(f"not the run's bits: {reason}")
        differs = _steps(job, past, batches, out, say)
        if wish.out is not None:
            say(f"files: {out}")
        if target is None:
            return 0
        odd = different(Path(target.made), Path(target.folder))
        return _verdict(odd, target.name, past.last, differs, say)


def _inexact(past: Past, batches: list[RecordedBatch], world: int) -> list[str]:
    """Why the weights would not be the run's bits, whatever the learner does."""
    reasons = list(past.inexact)
    if world != past.world:
        reasons.append(f"{world} ranks instead of the run's {past.world}: sums round otherwise")
    else:
        odd = [b for b in batches if not b.as_recorded(world)]
        reasons += [
            f"batch {b.batch} was trained by {b.ranks} ranks, not by {world}: give --from-step, "
            "the step of a checkpoint after it"
            for b in odd[-1:]
        ]
    return reasons


def _new_folder(out: str) -> Path:
    folder = expand(out, "--out")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--out {out}: exists and is not an empty folder: give another name")
    return folder


def _steps(job: Job, past: Past, batches: list[RecordedBatch], out: Path, say: Say) -> str:
    """Let the ranks train; what first came out otherwise than in the run, in words."""
    began, waits = time.monotonic(), Waits("replay")
    tokens = max(sum(r.entry.bytes for r in b.samples) for b in batches) // 17
    patience = patience_s(tokens, past.config.cluster.ready_timeout_s)
    logs = out / "logs"
    logs.mkdir(exist_ok=True)
    told_by = alone(job, waits) if job.world == 1 else listen(job, logs, waits, patience)
    sink = JsonlSink(str(out / "metrics.jsonl"), str(out / "events.jsonl"))
    differs = ""
    try:
        for told in told_by:
            if told.what != "step":
                continue
            sink.write(_record(told, past.run_id, time.monotonic() - began))
            say(_line(told, past.last))
            if not past.changed and not differs:
                differs = past.differs(told, exact=not past.inexact)
    finally:
        sink.close()
    return differs


def _record(told: Told, run_id: str, wall_s: float) -> dict[str, object]:
    return {
        "role": "learner", "rank": 0, "step": told.step, "version": told.version,
        "incarnation": told.incarnation, "metrics": told.metrics, "hist": told.hist,
        "event": None, "run_id": run_id, "wall_s": round(wall_s, 3),
    }  # fmt: skip


def _line(told: Told, last: int) -> str:
    shown = ("reward/mean", "loss/policy", "loss/grad_norm", "is/ess_frac", "kl/drift_k3")
    parts = [f"{name} {told.metrics[name]:.6g}" for name in shown if name in told.metrics]
    return f"step {told.step}/{last}  version {told.version}  " + "  ".join(parts)


def _verdict(odd: list[str], target: str, last: int, differs: str, say: Say) -> int:
    if not odd:
        say(f"check: after step {last} every bit of the weights is that of {target}")
        if differs:
            say(f"check: but this came out otherwise: {differs}")
        return 1 if differs else 0
    more = f" and {len(odd) - SHOWN_TENSORS} more" if len(odd) > SHOWN_TENSORS else ""
    say(
        f"check: after step {last} {len(odd)} tensors differ from {target}: "
        f"{', '.join(odd[:SHOWN_TENSORS])}{more}"
    )
    if differs:
        say(f"check: the first thing that came out otherwise: {differs}")
    return 1
