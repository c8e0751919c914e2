"""One optimizer batch, from a rank's part of it to new weights.

    part ─► staleness checks ─► advantages ─► packs ──► counts of all ranks (one all_gather)
                                                          │ denominators, microbatches per rank
             ┌────────────────────────────────────────────┘
             ▼
    no gradient: zero-advantage packs; all packs when epochs >= 2 (log pi_prox)
             ▼
    epochs x [ microbatch: forward, loss, backward ]* ─► clip, check, AdamW
             ▼
    metrics of all ranks (one gather) ─► StepResult

Whatever differs between ranks (their packs) is evened out before the first collective of the
model, so that every rank runs the same passes in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.learner.advantages import batch_advantages
from asyncrl.learner.collectives import gather_counts, gather_rows
from asyncrl.learner.corrections import check_present, token_weight
from asyncrl.learner.diagnostics import (
    Hist,
    Metrics,
    manifest_metrics,
    replay_metrics,
    token_metrics,
)
from asyncrl.learner.logprobs import pack_logprobs
from asyncrl.learner.losses import decoupled_ppo
from asyncrl.learner.microbatch import LocalSamples, Microbatch, make_microbatches, pack_local
from asyncrl.learner.model import Policy
from asyncrl.learner.optim import Applied, apply_gradient, lr_factor, make_optimizer
from asyncrl.staleness import check_bound
from asyncrl.types import BatchPart, SampleHeader, SampleId, Version
from asyncrl.wire import unpack_trajectory

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a batch came to; equal on every rank."""

    metrics: Metrics
    hist: Hist
    dropped: tuple[SampleId, ...]
    """Samples that the staleness check left out."""
    samples: int
    """Fresh samples trained, over all ranks."""
    tokens: int
    """Prompt and response tokens of all samples trained, replayed ones included."""
    skipped: int = 0
    """Optimizer steps left out because a gradient was not finite."""


@dataclass(slots=True)
class _Work:
    """A rank's microbatches, and the batch's counts."""

    trained: list[Microbatch]
    looked_at: list[Microbatch]
    tokens: int
    """Counted tokens of the batch."""
    missing: int
    """Tokens of the batch without a finite log mu."""


@dataclass(slots=True)
class _Progress:
    """Sums over epochs, of this rank."""

    loss: float = 0.0
    clipped: int = 0
    seen: int = 0
    applied: list[Applied] = field(default_factory=list)


class Trainer:
    """The learner's state on one rank: policy and optimizer. Every method is collective.

    Args:
        config: the whole run's configuration.
        model_path: folder of the Hugging Face model to start from.
        rank: this learner rank.
        world: number of ranks, those of the default process group, which must stand.
        device: "cpu" or "cuda:0".
    """

    def __init__(
        self,
        config: Config,
        model_path: str | Path,
        *,
        rank: int,
        world: int,
        device: str | torch.device,
    ):
        torch.manual_seed(config.run.seed)
        self.config = config
        self.rank = rank
        self.world = world
        self.device = torch.device(device)
        self.policy = Policy(
            model_path,
            world=world,
            device=self.device,
            dtype=DTYPES[config.learner.dtype],
            gradient_checkpointing=config.learner.gradient_checkpointing,
            trust_remote_code=config.model.trust_remote_code,
        )
        self.optimizer = make_optimizer(self.policy.module, config.learner.optim)

    def train(self, part: BatchPart, version: Version) -> StepResult:
        """Train batch `part.batch` with the learner at `version`.

        Raises:
            StalenessError: a sample over the bound, with `buffer.on_stale: raise`.
            ConfigError: a sample that does not fit into a microbatch.
            DataError: a reward that is not finite.
            AsyncRLError: most behaviour log-probabilities are missing.
        """
        buffer, bound = self.config.buffer, self.config.replay.max_staleness
        fresh, replayed = part.manifest[: part.fresh], part.manifest[part.fresh :]
        stale = check_bound(fresh, version, buffer.max_staleness, buffer.on_stale)
        over = check_bound(replayed, version, bound, buffer.on_stale, "replay.max_staleness")
        dropped = {*stale, *(part.fresh + i for i in over)}
        kept = [i for i in range(len(part.manifest)) if i not in dropped]
        work = self._prepare(part, kept, version)
        progress = self._run(work, part.batch)
        of_fresh = [part.manifest[i] for i in kept if i < part.fresh]
        metrics, hist = self._report(work, progress, of_fresh, version)
        metrics["staleness/limit"] = float(buffer.max_staleness)
        metrics["staleness/violations"] = float(len(stale))
        if replayed:
            again = [part.manifest[i] for i in kept if i >= part.fresh]
            of_replay, replay_hist = replay_metrics(again, version)
            metrics |= of_replay | {
                "replay/limit": float(bound),
                "replay/violations": float(len(over)),
            }
            hist |= replay_hist
        return StepResult(
            metrics=metrics,
            hist=hist,
            dropped=tuple(part.manifest[i].id for i in sorted(dropped)),
            samples=len(of_fresh),
            tokens=sum(part.manifest[i].tokens for i in kept),
            skipped=sum(a.skipped for a in progress.applied),
        )

    def full_parameters(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.full_parameters`."""
        return self.policy.full_parameters(dtype)

    def save_hf(self, folder: str | Path) -> None:
        """Write the policy as a Hugging Face folder, in the type that the engines run."""
        self.policy.save_hf(folder, DTYPES[self.config.engine.dtype])

    def _prepare(self, part: BatchPart, kept: Sequence[int], version: Version) -> _Work:
        """Pack this rank's samples and agree with the others on counts."""
        learner = self.config.learner
        advantage = batch_advantages(part.manifest, kept, learner.loss.advantage)
        alive = set(kept)
        mine = [(i, e) for i, e in zip(part.mine, part.envelopes, strict=True) if i in alive]
        local = LocalSamples(
            [unpack_trajectory(e) for _, e in mine],
            advantage[[i for i, _ in mine]],
            np.array([i >= part.fresh for i, _ in mine], bool),
        )
        packs = [pack_local(local, which, learner) for which in local.split()]
        counts = [*local.counts(), *map(len, packs)]
        all_counts = gather_counts(counts, self.device)
        tokens, missing, sequences = all_counts[:, :3].sum(axis=0).tolist()
        check_present(missing, tokens + missing)
        trained, looked_at = (
            make_microbatches(
                local, p, int(count), tokens, sequences, version, learner, self.device
            )
            for p, count in zip(packs, all_counts[:, 3:].max(axis=0), strict=True)
        )
        return _Work(trained, looked_at, tokens, missing)

    def _run(self, work: _Work, batch: int) -> _Progress:
        """All passes of a batch. A batch whose advantages are all 0 leaves the weights alone."""
        learner = self.config.learner
        self._set_prox(work.looked_at)
        if learner.epochs > 1:
            self._set_prox(work.trained)
        progress = _Progress()
        if work.trained:
            lr = learner.optim.lr * lr_factor(batch, learner.optim, self.config.run.steps)
            for _ in range(learner.epochs):
                self._accumulate(work.trained, progress)
                applied = apply_gradient(self.optimizer, lr, learner.optim.grad_clip)
                progress.applied.append(applied)
        self.policy.reshard()  # a pass without gradient leaves gathered copies in its place
        return progress

    @torch.no_grad()
    def _set_prox(self, microbatches: Sequence[Microbatch]) -> None:
        for m in microbatches:
            m.prox, m.entropy = pack_logprobs(self.policy.module, m.tensors)

    def _accumulate(self, microbatches: Sequence[Microbatch], progress: _Progress) -> None:
        """Add up the gradient of the whole batch's loss."""
        loss_config = self.config.learner.loss
        for m in microbatches:
            logprobs, entropy = pack_logprobs(self.policy.module, m.tensors)
            if m.prox is None:  # one epoch: the policy has not moved, prox is theta
                m.prox, m.entropy = logprobs.detach(), entropy
            loss, clipped = decoupled_ppo(
                logprobs,
                m.prox,
                token_weight(m.prox, m.present_behaviour(), loss_config.truncate),
                m.advantage,
                m.coefficient,
                loss_config.clip_low,
                loss_config.clip_high,
                loss_config.dual_clip,
            )
            # FSDP averages gradients over ranks; the parts of one loss must add up.
            (loss * self.world).backward()  # type: ignore[no-untyped-call]
            progress.loss += loss.item()
            progress.clipped += int((clipped.cpu().numpy() & m.counted).sum())
            progress.seen += int(m.counted.sum())

    def _report(
        self,
        work: _Work,
        progress: _Progress,
        headers: Sequence[SampleHeader],
        version: Version,
    ) -> tuple[Metrics, Hist]:
        learner = self.config.learner
        tables = [m.table() for m in [*work.trained, *work.looked_at]]
        table = gather_rows(np.concatenate([np.zeros((0, 6), np.float32), *tables]), self.device)
        metrics, hist = manifest_metrics(headers, version, learner.batches_per_publication)
        of_tokens, token_hist = token_metrics(table, learner.loss.truncate)
        sums = torch.tensor(
            [progress.loss, progress.clipped, progress.seen], dtype=torch.float64
        ).to(self.device)
        dist.all_reduce(sums)
        loss, clipped, seen = sums.tolist()
        metrics |= of_tokens
        metrics["loss/tokens"] = float(work.tokens)
        metrics["is/missing"] = float(work.missing)
        if work.tokens:
            metrics["loss/policy"] = loss / learner.epochs
        if learner.epochs > 1 and seen:
            metrics["loss/ppo_clip_frac"] = clipped / seen
        norms = [a.grad_norm for a in progress.applied if not a.skipped]
        if norms:
            metrics["loss/grad_norm"] = norms[-1]
        metrics["loss/skipped"] = float(sum(a.skipped for a in progress.applied))
        # A step with no value for a metric writes none.
        metrics = {k: v for k, v in metrics.items() if math.isfinite(v)}
        return metrics, hist | token_hist
