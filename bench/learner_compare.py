"""Runs a side of bench/learner.py, checks that all did the same work, and makes the figures."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from harness import BenchError, Report, ratios, significant
from learner_batch import make_samples
from learner_meter import Measured
from learner_sides import Spec, advantages_of
from peers import trl_version, with_trl
from runs import environment

SCRIPT = Path(__file__).with_name("learner_sides.py")
LIMIT_S = 1200.0
"""Longest life of a side."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""Largest relative difference of loss and gradient norm between asyncrl and padded. Autocast keeps
the residual stream in float32, FSDP does not: norms in bfloat16 differ by some per cent."""
TRL_TOLERANCE = 0.15
"""The same of TRL's gradient norm, which has no behaviour weight."""


def side(name: str, spec: Spec) -> Measured:
    """One process of a side.

    Raises:
        BenchError: it failed or took too long.
    """
    line = child(name, spec)
    measured = Measured(**json.loads(line))
    if len(measured.seconds) != spec.steps or len(measured.loss) != spec.steps:
        raise BenchError(f"{len(measured.seconds)} steps instead of {spec.steps}")
    return measured


def child(name: str, spec: Spec) -> str:
    """Run learner_sides.py; the last line that it printed."""
    env = environment()
    try:
        done = subprocess.run(
            [sys.executable, str(SCRIPT), name, json.dumps(asdict(spec))],
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
            env=with_trl(env) if name == "trl" else env,
        )  # fmt: skip
    except subprocess.TimeoutExpired as e:
        raise BenchError(f"still running after {LIMIT_S:.0f} s") from e
    if done.returncode:
        words = done.stderr.strip().splitlines()
        raise BenchError(f"exit code {done.returncode}: {' | '.join(words[-3:])}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def same_work(runs: dict[str, list[Measured]], spec: Spec) -> str:
    """Compare what the sides computed in their first steps; a line that says it.

    Raises:
        BenchError: a loss or a gradient norm differs: the sides did not do the same.
    """
    ours, tolerance = runs["asyncrl"][0], TOLERANCE[spec.dtype]
    for name in [n for n in ("padded", "trimmed") if n in runs]:
        theirs = runs[name][0]
        for what in ("loss", "grad_norm"):
            a, b = getattr(ours, what)[0], getattr(theirs, what)[0]
            if not math.isclose(a, b, rel_tol=tolerance):
                raise BenchError(
                    f"{what} is {a:.6g}, but that of {name} {b:.6g}: not the same step"
                )
    text = [f"loss {m[0].loss[0]:.6f}, gradient norm {m[0].grad_norm[0]:.5g} ({name})"
            for name, m in runs.items()]  # fmt: skip
    if "trl" in runs:
        _same_as_trl(ours, runs["trl"][0], spec)
    return "first step: " + "; ".join(text)


def _same_as_trl(ours: Measured, theirs: Measured, spec: Spec) -> None:
    """TRL's weights are 1, so that its loss is known: -sum_i A_i n_i / sum_i n_i."""
    samples = make_samples(spec.workload)
    tokens = [t.header.response_tokens for t in samples]
    want = -sum(a * n for a, n in zip(advantages_of(samples), tokens, strict=True)) / sum(tokens)
    if not math.isclose(theirs.loss[0], want, rel_tol=1e-2):
        raise BenchError(f"TRL's loss is {theirs.loss[0]:.6g} instead of {want:.6g}")
    if not math.isclose(ours.grad_norm[0], theirs.grad_norm[0], rel_tol=TRL_TOLERANCE):
        raise BenchError(
            f"gradient norm is {ours.grad_norm[0]:.6g}, but that of TRL "
            f"{theirs.grad_norm[0]:.6g}: not the same step"
        )


def summarise(report: Report, runs: dict[str, list[Measured]], spec: Spec) -> None:
    """Table and values."""
    headers = [t.header for t in make_samples(spec.workload)]
    tokens = sum(h.tokens for h in headers)
    report.note(
        f"{len(headers)} samples, {tokens} tokens, longest {max(h.tokens for h in headers)}, "
        f"{spec.dtype}, {spec.threads} threads, micro-batches of {spec.budget} tokens"
    )
    report.note(same_work(runs, spec))
    report.row(
        "side", "s a step", "tokens/s", "GiB loaded", "between steps", "peak", "above loaded"
    )
    for name, each in runs.items():
        for m in each:
            memory = [x / 2**30 for x in (m.before, m.rest, m.peak, m.peak - m.before)]
            report.row(name, step_s(m), tokens / step_s(m), *memory)
    times = {name: [step_s(m) for m in each] for name, each in runs.items()}
    common: dict[str, Any] = {
        "model": Path(spec.model).name, "dtype": spec.dtype, "threads": spec.threads,
        "samples": len(headers),
        "tokens": tokens, "budget": spec.budget, "checkpointing": spec.checkpointing,
    }  # fmt: skip

    def faster(key: str, than: str, per_step: int, **more: Any) -> None:
        report.add(
            key, ratios(times[than], times["asyncrl"]), "ratio", "higher", **common, **more,
            asyncrl_s=[significant(per_step / t) for t in times["asyncrl"]],
            other_s=[significant(per_step / t) for t in times[than]],
        )  # fmt: skip

    faster("tok_s_vs_padded", "padded", tokens)
    if "trimmed" in runs:
        faster("tok_s_vs_trimmed", "trimmed", tokens)
    above = {name: [m.peak - m.before for m in each] for name, each in runs.items()}
    report.add(
        "peak_mem_vs_padded", ratios(above["asyncrl"], above["padded"]), "ratio", "lower", **common,
        asyncrl_gib=[significant(x / 2**30, 3) for x in above["asyncrl"]],
        padded_gib=[significant(x / 2**30, 3) for x in above["padded"]],
        above_rest=_above_rest(runs),
    )  # fmt: skip
    if "trl" in runs:
        faster(
            "step_samples_s_vs_trl", "trl", len(headers), trl=trl_version(),
            trl_variant=spec.trl_variant,
        )  # fmt: skip


def _above_rest(runs: dict[str, list[Measured]]) -> list[float]:
    """Ratio of what a step takes above the memory between two, where the moments are in."""
    pairs = zip(runs["asyncrl"], runs["padded"], strict=True)
    return [significant((a.peak - a.rest) / (b.peak - b.rest), 3) for a, b in pairs]


def step_s(measured: Measured) -> float:
    """Seconds of a step, median over those after the first."""
    return statistics.median(measured.seconds[1:])
