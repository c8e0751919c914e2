"""The metrics of a batch, over all ranks: one gather of its tokens' table and one sum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from asyncrl.config.learning import LearnerConfig
from asyncrl.learner.advice import advice
from asyncrl.learner.collectives import gather_rows, sum_over_ranks
from asyncrl.learner.diagnostics import Hist, Metrics, manifest_metrics, token_metrics
from asyncrl.learner.microbatch import COLUMNS
from asyncrl.learner.objective import Sums, ratio_moves
from asyncrl.learner.policy.optim import Applied
from asyncrl.learner.work import Work
from asyncrl.types import SampleHeader, Version

TERMS = ("policy", "kl", "value", "clipped", "value_clipped", "seen")
"""Of `Sums.terms`, in the order in which ranks add them up."""


def step_metrics(
    learner: LearnerConfig,
    work: Work,
    sums: Sums,
    applied: Sequence[Applied],
    headers: Sequence[SampleHeader],
    version: Version,
    device: torch.device,
) -> tuple[Metrics, Hist, dict[str, str]]:
    """What a batch's record says (docs/metrics.md), and advice. Collective; equal on every rank.

    Args:
        learner: the learner's configuration.
        work: the batch, after all its passes.
        sums: what the passes of this rank added up to.
        applied: its optimizer steps.
        headers: the fresh samples trained, over all ranks.
        version: of the learner for this batch.
        device: of the ranks' collectives.
    """
    # From the second minibatch on, without a pass before the update, the policy had moved.
    known = work.all() if learner.first_pass_for else [*work.minibatches[0], *work.looked_at]
    tables = [m.table() for m in known if m.start is not None]
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
        metrics["loss/lr"] = learner.optim.lr * sums.lr_factor
        metrics["loss/lr_factor"] = sums.lr_factor
    metrics["is/missing"] = float(work.missing)
    if work.shaped_mean is not None:
        metrics["reward/shaped_mean"] = work.shaped_mean
    if work.lone:
        metrics["loss/lone_samples"] = float(work.lone)
    said = advice(metrics)
    # A step with no value for a metric writes none.
    return {k: v for k, v in metrics.items() if math.isfinite(v)}, hist | token_hist, said


def _loss_metrics(learner: LearnerConfig, work: Work, sums: Sums, device: torch.device) -> Metrics:
    mine = [sums.terms[name].item() if name in sums.terms else 0.0 for name in TERMS]
    total = dict(zip(TERMS, sum_over_ranks(np.array(mine, np.float64), device), strict=True))
    seen = total["seen"]
    metrics: Metrics = {"loss/tokens": float(work.tokens)}
    for name in ("policy", "kl", "value"):
        # Every rank ran the same passes, so what one has a term of all have; a batch without any
        # gradient has a policy loss all the same: 0.
        if name in sums.terms or (name == "policy" and work.tokens and not sums.terms):
            metrics[f"loss/{name}"] = float(total[name]) / learner.updates
    if seen and "clipped" in sums.terms and ratio_moves(learner):
        metrics["loss/clip_frac"] = float(total["clipped"] / seen)
    if seen and learner.critic.clip is not None and "value" in sums.terms:
        metrics["loss/value_clip_frac"] = float(total["value_clipped"] / seen)
    return metrics
