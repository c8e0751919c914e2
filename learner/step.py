"""One optimizer batch, from a rank's part of it to new weights.

part ─► staleness checks ─► work: minibatches of microbatches, evened out over the ranks
                              │
         no gradient: samples that are only looked at; all of them, if something must be
         known of the policy before the update (log pi_prox, values, batch-wide numbers)
                              │
epochs x minibatches x [ [ forward, loss, backward ]* ─► clip, check, AdamW ]
                              │
metrics of all ranks (one gather) ─► StepResult
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.learner.credit import settle
from asyncrl.learner.diagnostics import Hist, Metrics, replay_metrics
from asyncrl.learner.maths.shaping import load_function
from asyncrl.learner.microbatch import Microbatch
from asyncrl.learner.objective import Sums, loss_of, note_treatment
from asyncrl.learner.policy.model import Policy
from asyncrl.learner.policy.optim import (
    Applied,
    apply_gradient,
    ess_scale,
    lr_factor,
    make_optimizer,
)
from asyncrl.learner.policy.packed import Scores
from asyncrl.learner.report import step_metrics
from asyncrl.learner.samples import check_vocabulary
from asyncrl.learner.work import Work, prepare
from asyncrl.spans import SpanLog
from asyncrl.staleness import check_bound
from asyncrl.types import BatchPart, SampleId, Version

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
    advice: Mapping[str, str] = field(default_factory=dict)
    """What to change, by what is wrong with the batch."""


class Trainer:
    """The learner's state on one rank: policy and optimizer. Every method is collective.

    Args:
        config: the whole run's configuration.
        model_path: folder of the Hugging Face model to start from.
        rank: this learner rank.
        world: number of ranks, those of the default process group, which must stand.
        device: "cpu" or "cuda:0".

    Raises:
        ModelError: see `Policy`.
        ConfigError: `learner.shaping.function` cannot be loaded.
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
            learner=config.learner,
            trust_remote_code=config.model.trust_remote_code,
        )
        self.optimizer = make_optimizer(self.policy, config.learner)
        if config.learner.shaping.function is not None:
            load_function(config.learner.shaping.function)  # its faults show now, not at batch 1
        self._vocab = self.policy.module.model.config.get_text_config().vocab_size
        self._with_values = config.learner.advantage.critic
        self.spans = SpanLog()
        """Gets the phases of each batch."""

    def train(self, part: BatchPart, version: Version) -> StepResult:
        """Train batch `part.batch` with the learner at `version`.

        Raises:
            StalenessError: a sample over the bound, with `buffer.on_stale: raise`.
            ConfigError: a sample that does not fit into a microbatch.
            DataError: a reward that is not finite.
            AsyncRLError: most behaviour log-probabilities are missing.
            ModelError: a token id that the model does not have.
        """
        buffer, bound = self.config.buffer, self.config.replay.max_staleness
        fresh, replayed = part.manifest[: part.fresh], part.manifest[part.fresh :]
        stale = check_bound(fresh, version, buffer.max_staleness, buffer.on_stale)
        over = check_bound(replayed, version, bound, buffer.on_stale, "replay.max_staleness")
        dropped = {*stale, *(part.fresh + i for i in over)}
        kept = [i for i in range(len(part.manifest)) if i not in dropped]
        with self.spans.span("batch", "prepare"):
            work = prepare(self.config, part, kept, version, self.device)
        check_vocabulary(work.local.samples, self._vocab)
        warming_up = self._with_values and part.batch <= self.config.learner.critic.warmup_steps
        with self.spans.span("batch", "look"):
            share, sums = self._look(work, warming_up=warming_up), Sums()
        with self.spans.span("batch", "update"):
            applied = self._update(work, part.batch, share, sums, warming_up=warming_up)
            self.policy.reshard()  # a pass without gradient leaves gathered copies in its place
        of_fresh = [part.manifest[i] for i in kept if i < part.fresh]
        with self.spans.span("batch", "measure"):
            metrics, hist, said = step_metrics(
                self.config.learner, work, sums, applied, of_fresh, version, self.device
            )
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
            skipped=sum(a.skipped for a in applied),
            advice=said,
        )

    def full_parameters(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.full_parameters`."""
        return self.policy.full_parameters(dtype)

    def save_hf(self, folder: str | Path, *, replace: bool = False) -> None:
        """Write the policy as a Hugging Face folder, in the type that the engines run."""
        self.policy.save_hf(folder, DTYPES[self.config.engine.dtype], replace=replace)

    @torch.no_grad()
    def _look(self, work: Work, *, warming_up: bool) -> float:
        """Passes without gradient, before the update; the ESS share, where it is asked for."""
        learner = self.config.learner
        for m in work.all() if learner.first_pass_for else work.looked_at:
            scores = self._score(m)
            m.set_start(scores.logprobs, scores.entropy)
            m.values = scores.values
        if learner.kl.coefficient:
            for m in work.trained():
                m.reference = self.policy.reference(m.tensors)
        share = settle(learner, work, self.device)
        for m in work.all() if warming_up else work.looked_at:
            note_treatment(learner, m)
        return share

    def _score(self, m: Microbatch, *, detach_trunk: bool = False) -> Scores:
        """One forward pass of the policy, and of a critic of its own."""
        critic = self.policy.critic
        scores = self.policy.score(
            m.tensors, values=self._with_values and critic is None, detach_trunk=detach_trunk
        )
        return scores if critic is None else scores._replace(values=critic.values(m.tensors))

    def _update(
        self, work: Work, batch: int, share: float, sums: Sums, *, warming_up: bool
    ) -> list[Applied]:
        """All optimizer steps. A minibatch whose advantages are all 0 leaves the weights alone."""
        learner = self.config.learner
        factor = lr_factor(batch, learner.optim, self.config.run.steps)
        if learner.optim.ess_ref is not None:
            factor *= ess_scale(share, learner.optim.ess_ref)
        sums.lr_factor = factor
        applied = []
        for _ in range(learner.epochs):
            for microbatches in filter(None, work.minibatches):
                self._accumulate(microbatches, sums, warming_up=warming_up)
                applied.append(apply_gradient(self.optimizer, factor, learner.optim.grad_clip))
        return applied

    def _accumulate(
        self, microbatches: Sequence[Microbatch], sums: Sums, *, warming_up: bool
    ) -> None:
        """Add up the gradient of the whole (mini)batch's loss."""
        for m in microbatches:
            scores = self._score(m, detach_trunk=warming_up)
            loss = loss_of(self.config.learner, m, scores, sums, warming_up=warming_up)
            # FSDP averages gradients over ranks; the parts of one loss must add up.
            (loss * self.world).backward()  # type: ignore[no-untyped-call]
