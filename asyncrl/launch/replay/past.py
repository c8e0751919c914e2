"""What a run's folder says of how it was trained: all that a replay must repeat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncrl import checkpoints, models
from asyncrl.config.fields import flatten
from asyncrl.config.load import load
from asyncrl.config.schema import Config
from asyncrl.errors import DataError, UserError
from asyncrl.launch.placement import place
from asyncrl.launch.replay.job import Job, Told
from asyncrl.launch.replay.plan import RecordedBatch
from asyncrl.launch.resume.branches import Branches
from asyncrl.launch.resume.lineage import branches_of, lines_of

RECORDED = ("learner.batch_size", "learner.batches_per_publication")
"""Settings of the learner that the recording fixes."""
COMPARED = ("loss/", "is/", "kl/", "advantage/", "reward/", "value/")
"""Metrics of a step that follow from weights and batch alone."""


@dataclass(frozen=True, slots=True)
class Target:
    """Weights to compare: those that the replay writes, and the run's."""

    made: str
    folder: str
    name: str


@dataclass(frozen=True, slots=True)
class Past:
    """A run, and what is to be trained of it."""

    run: Path
    config: Config
    """As tried: the run's, with the overrides."""
    changed: tuple[str, ...]
    """The overrides that change something."""
    first: int
    last: int
    start: checkpoints.Checkpoint | None
    end: checkpoints.Checkpoint | None
    """The checkpoint of step `last`, if the run has it."""
    steps: int | None
    """What the run trained; None if it has not ended in order."""
    run_id: str
    recording_ended: str
    threads: tuple[int, ...]
    inexact: tuple[str, ...]
    """Why the weights would not be the run's bits."""
    told: dict[int, dict[str, float]]
    """The run's own metrics of each step."""

    @property
    def world(self) -> int:
        """Learner ranks of the run."""
        return len(self.threads)

    def on_lineage(self, batches: Sequence[RecordedBatch]) -> Past:
        """Without the checkpoint of step `last` if the run went back behind it later."""
        incarnation = batches[-1].version.incarnation
        if self.end is None or self.end.meta.incarnation >= incarnation:
            return self
        return replace(self, end=None)

    def job(self, world: int, scratch: Path, out: Path, *, compare: bool) -> Job:
        """The job of `world` ranks."""
        device = place(self.config).device
        threads = (*self.threads, *[self.threads[-1]] * world)[:world]
        return Job(
            run=str(self.run), config=json.loads(self.config.model_dump_json()),
            model_path=str(models.resolve(self.config.model.name)),
            checkpoint=None if self.start is None else str(self.start.path),
            first=self.first, last=self.last, world=world, threads=threads, device=device,
            scratch=str(scratch), model_out=str(out / "model"), exact_out=str(scratch / "exact"),
            target=str(self.end.path) if compare and self.end else "",
            target_out=str(scratch / "run"),
        )  # fmt: skip

    def target(self, job: Job) -> Target:
        """Which weights to compare with which.

        Raises:
            DataError: it kept none.
        """
        if self.end is not None:
            return Target(job.exact_out, job.target_out, f"checkpoint {self.last}")
        final = self.run / checkpoints.FOLDER / "final"
        if self.last == self.steps and (final / "config.json").is_file():
            return Target(job.model_out, str(final), "the final model")
        raise DataError(
            f"{self.run} kept no weights of step {self.last}: nothing to compare with; give "
            "--steps of a checkpoint, or launch with checkpoint.every or learner.save_final=true"
        )

    def differs(self, told: Told, *, exact: bool) -> str:
        """What came out otherwise than in the run, in words; "" if nothing did.

        Raises:
            DataError: samples of the batch are missing from the recording.
        """
        then = self.told.get(told.step, {})
        for name in ("loss/tokens", "is/missing"):
            now = told.metrics.get(name)
            if name in then and then[name] != now:
                raise DataError(
                    f"batch {told.step} has {name} {now}, in the run it had {then[name]}: samples "
                    "of it are missing from the recording (record/unrecorded says how many)"
                )
        if not exact:
            return ""
        for name, value in then.items():
            if name.startswith(COMPARED) and told.metrics.get(name) != value:
                return f"step {told.step}, {name} {told.metrics.get(name)} instead of {value}"
        return ""


def read_past(
    run: Path, overrides: Sequence[str], from_step: int | None, steps: int | None
) -> Past:
    """What the run was, and the range of its batches that is asked for.

    Raises:
        UserError: settings that the recording fixes, a run that recorded nothing, no such step.
    """
    path = str(run / "config.yaml")
    was, config = load(path).config, load(path, overrides).config
    changed = _changed(was, config)
    if not was.record.trajectories:
        raise DataError(f"{run} has no recording, record.trajectories=false: launch with true")
    if was.replay_groups:
        raise DataError(
            f"{run} trained samples again, replay.fraction={was.replay.fraction:g}: which ones "
            "came with which batch is not recorded: launch with replay.fraction=0 for a run that "
            "can be replayed"
        )
    branches, kept = branches_of(run), checkpoints.list_checkpoints(run)
    line = [c for c in kept if branches.left_at(c.meta.incarnation, c.meta.step) is None]
    start = None if not from_step else _start(run, from_step, line, branches)
    events = list(lines_of(run / "events.jsonl"))
    ended = _trained(run)
    first, last = (1 if start is None else start.meta.step + 1), steps or ended
    if last is None and line:  # it was killed: no later weights are there
        last = line[-1].meta.step
    if last is None:
        last = max((r["step"] for r in _learner(run, branches)), default=0)
    if ended is not None and not first <= last <= ended:
        raise UserError(f"no batches {first} to {last}: {run} has trained {ended}")
    end = next((c for c in line if c.meta.step == last), None)
    return Past(
        run=run, config=config, changed=changed, first=first, last=last, start=start, end=end,
        steps=ended, run_id=events[0].get("run_id", "") if events else "",
        recording_ended=_reason(events, "recording_ended"), threads=_threads(was, events),
        inexact=_inexact(was, events, branches, first, last),
        told=_metrics(run, branches, first, last),
    )  # fmt: skip


def _start(
    run: Path, step: int, line: list[checkpoints.Checkpoint], branches: Branches
) -> checkpoints.Checkpoint:
    """The checkpoint of that step; the batches after it must have been trained from it."""
    found = checkpoints.find(run, str(step))
    left = branches.left_at(found.meta.incarnation, found.meta.step)
    if left is None:
        return found
    have = ", ".join(str(c.meta.step) for c in line)
    raise UserError(
        f"--from-step {step}: {found.path.name} is of a branch that the run left at batch {left}, "
        "the batches after it were trained from other weights: "
        + (f"name one of steps {have}" if line else "leave --from-step out")
    )


def _changed(was: Config, config: Config) -> tuple[str, ...]:
    before, after = flatten(was), flatten(config)
    keys = [k for k in after if before[k] != after[k]]
    for key in keys:
        if not key.startswith("learner.") or key in RECORDED:
            raise UserError(
                f"{key}={after[key]}: the recording fixes it (it was {before[key]}); a replay "
                f"takes learner.* but {' and '.join(RECORDED)}"
            )
    return tuple(f"{key}={after[key]}" for key in keys)


def _threads(config: Config, events: list[dict[str, Any]]) -> tuple[int, ...]:
    """Of each rank: as the run had placed it, else as it would be placed here."""
    here = place(config).learner_threads
    placed = {e.get("name"): e.get("threads", here) for e in events if e.get("event") == "placed"}
    return tuple(placed.get(f"learner-{r}", here) for r in range(config.cluster.learners))


def _inexact(
    config: Config, events: list[dict[str, Any]], branches: Branches, first: int, last: int
) -> tuple[str, ...]:
    reasons = []
    if any(e.get("event") == "launch" and e.get("device") == "cuda" for e in events):
        reasons.append("it was trained on GPUs, whose sums come in no fixed order")
    for e in events:
        if e.get("event") == "resumed" and first <= e["batch"] < last:
            if branches.left_at(e.get("incarnation", 0), e["batch"] + 1) is not None:
                continue  # what was changed there has trained nothing of this line
            keys = [c["field"] for c in e["changes"]]
            schedule = ["run.steps"] if config.learner.optim.schedule != "constant" else []
            if learner := [k for k in keys if k.startswith("learner.") or k in schedule]:
                reasons.append(f"{learner[0]} was changed at step {e['batch']}: give --from-step")
    return tuple(reasons)


def _reason(events: list[dict[str, Any]], what: str) -> str:
    return next((str(e.get("reason", "")) for e in events if e.get("event") == what), "")


def _trained(run: Path) -> int | None:
    """Steps that the run trained; None if it has no summary."""
    path = run / "summary.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    steps = content.get("steps") if isinstance(content, dict) else None
    if steps is None or type(steps) is int:
        return steps
    raise DataError(
        f"{path}: steps is {json.dumps(steps)}, no whole number: restore the file, or remove it to "
        "replay up to the newest checkpoint"
    )


def _learner(run: Path, branches: Branches) -> Iterator[dict[str, Any]]:
    """Records of learner rank 0 that speak of a batch of the run's line."""
    for record in lines_of(run / "metrics.jsonl"):
        mine = (record.get("role"), record.get("rank")) == ("learner", 0)
        of_batch = mine and "step" in record and "loss/tokens" in (record.get("metrics") or {})
        if of_batch and branches.left_at(record.get("incarnation", 0), record["step"]) is None:
            yield record


def _metrics(run: Path, branches: Branches, first: int, last: int) -> dict[int, dict[str, float]]:
    found: dict[int, tuple[int, dict[str, float]]] = {}
    for record in _learner(run, branches):
        step, incarnation = record["step"], record.get("incarnation", 0)
        if first <= step <= last and incarnation >= found.get(step, (0, {}))[0]:
            found[step] = incarnation, record["metrics"]
    return {step: metrics for step, (_, metrics) in found.items()}
