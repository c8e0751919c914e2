"""The metrics of a batch, over all ranks: one gather of its tokens' table and one sum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from asyncrl.config.learning import LearnerConfig
from asyncrl.learner.collectives import gather_rows, sum_over_ranks
from asyncrl.learner.diagnostics import Hist, Metrics, manifest_metrics, token_metrics
from asyncrl.learner.microbatch import COLUMNS
from asyncrl.learner.objective import Sums, ratio_moves
from asyncrl.learner.policy.optim import Applied
from asyncrl.learner.work import Work
from asyncrl.types import SampleHeader, Version

TERMS = ("policy", "kl", "value")
"""Of `Sums.loss`, in the order in which ranks add them up."""


def step_metrics(
    learner: LearnerConfig,
    work: Work,
    sums: Sums,
    applied: Sequence[Applied],
    headers: Sequence[SampleHeader],
    version: Version,
    device: torch.device,
) -> tuple[Metrics, Hist]:
    """What a batch's record says (docs/metrics.md). Collective; equal on every rank.

    Args:
        learner: the learner's configuration.
        work: the batch, after all its passes.
        sums: what the passes of this rank added up to.
        applied: its optimizer steps.
        headers: the fresh samples trained, over all ranks.
        version: of the learner for this batch.
        device: of the ranks' collectives.
    """
    tables = [m.table() for m in work.all() if m.start is not None]
    rows = np.concatenate([np.zeros((0, len(COLUMNS)), np.float32), *tables])
    table = gather_rows(rows, device)
    metrics, hist = manifest_metrics(headers, version, learner.batches_per_publication)
    of_tokens, token_hist = token_metrics(dict(zip(COLUMNS, table.T, strict=True)))
    metrics |= of_tokens | _loss_metrics(learner, work, sums, device)
    norms = [a.grad_norm for a in applied if not a.skipped]
    if norms:
        metrics["loss/grad_norm"] = norms[-1]
    metrics["loss/skipped"] = float(sum(a.skipped for a in applied))
    if applied:
        metrics["loss/lr_factor"] = sums.lr_factor
    metrics["is/missing"] = float(work.missing)
    if work.lone:
        metrics["loss/lone_samples"] = float(work.lone)
    # A step with no value for a metric writes none.
    return {k: v for k, v in metrics.items() if math.isfinite(v)}, hist | token_hist


def _loss_metrics(learner: LearnerConfig, work: Work, sums: Sums, device: torch.device) -> Metrics:
    mine = [sums.loss.get(name, 0.0) for name in TERMS]
    total = sum_over_ranks(
        np.array([*mine, sums.clipped, sums.value_clipped, sums.seen], np.float64), device
    )
    terms, (clipped, value_clipped, seen) = total[: len(TERMS)], total[len(TERMS) :]
    metrics: Metrics = {"loss/tokens": float(work.tokens)}
    steps = learner.epochs * learner.minibatches
    for name, value in zip(TERMS, terms, strict=True):
        # Every rank ran the same passes, so what one has a term of all have; a batch without any
        # gradient has a policy loss all the same: 0.
        if name in sums.loss or (name == "policy" and work.tokens and not sums.loss):
            metrics[f"loss/{name}"] = float(value) / steps
    if seen and learner.loss.clips != (0.0, 0.0) and ratio_moves(learner):
        metrics["loss/clip_frac"] = float(clipped / seen)
    if seen and learner.critic.clip is not None and "value" in sums.loss:
        metrics["loss/value_clip_frac"] = float(value_clipped / seen)
    return metrics
