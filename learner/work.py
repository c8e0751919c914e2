"""What a rank has to do for a batch: minibatches of microbatches, with coefficients and advantages.

    part ─► shaped rewards ─► group advantages ─► per minibatch: packs ─► counts of all ranks
                                                                │ (one all_reduce, one all_gather)
              coefficients, and as many microbatches on every rank ◄┘

Whatever differs between ranks (their packs) is evened out here, before the first collective of the
model, so that every rank runs the same passes in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.config.learning import LearnerConfig, ShapingConfig
from asyncrl.config.schema import Config
from asyncrl.learner.collectives import gather_counts, sum_over_ranks
from asyncrl.learner.maths.advantages import Estimator, batch_advantages
from asyncrl.learner.maths.aggregation import Aggregation, BatchCounts, token_coefficients
from asyncrl.learner.maths.corrections import check_present
from asyncrl.learner.maths.shaping import shaped_rewards
from asyncrl.learner.microbatch import Microbatch, make_microbatches
from asyncrl.learner.packing import Pack, make_packs
from asyncrl.learner.samples import (
    Ints,
    LocalSamples,
    batch_counts,
    group_numbers,
    minibatch_numbers,
)
from asyncrl.types import BatchPart, Version


@dataclass(slots=True)
class Work:
    """A rank's microbatches, and what is known of the whole batch."""

    local: LocalSamples
    rewards: npt.NDArray[np.float64]
    """[n] shaped reward of each local sample."""
    minibatches: list[list[Microbatch]]
    """That carry a gradient, one optimizer step each; empty where no rank has any."""
    looked_at: list[Microbatch]
    """Samples without gradient, for the metrics alone."""
    groups: Ints
    """[manifest] number of each sample's group."""
    minibatch: Ints
    """[manifest] minibatch of each sample; -1 for one that was dropped."""
    tokens: int
    """Counted tokens of the batch."""
    missing: int
    """Tokens of the batch without a finite log mu."""
    lone: int
    """Samples that are alone in their group, where the advantage is relative to it."""
    shaped_mean: float | None
    """Mean shaped reward of the batch's fresh samples; None without shaping."""
    norm_tokens: int
    aggregation: Aggregation

    def trained(self) -> Iterator[Microbatch]:
        """The microbatches of all minibatches, in order."""
        for microbatches in self.minibatches:
            yield from microbatches

    def all(self) -> Iterator[Microbatch]:
        """Those and the ones that are looked at."""
        yield from self.trained()
        yield from self.looked_at

    def set_coefficients(self, tokens: Ints) -> None:
        """Coefficients of the policy's term.

        Args:
            tokens: [manifest] tokens of each sample that count, over all ranks.
        """
        for number, microbatches in enumerate(self.minibatches):
            counts = batch_counts(
                np.where(self.minibatch == number, tokens, 0), self.groups, self.local.index
            )
            for m in microbatches:
                m.policy_coefficient = self._coefficients(m, counts)

    def _coefficients(self, m: Microbatch, counts: BatchCounts) -> torch.Tensor:
        values = token_coefficients(
            self.aggregation, m.numbers, m.counted.cpu().numpy(), counts, self.norm_tokens
        )
        return torch.from_numpy(values).to(m.mu.device)


def prepare(
    config: Config, part: BatchPart, kept: Sequence[int], version: Version, device: torch.device
) -> Work:
    """Pack this rank's samples and agree with the others on counts. Collective.

    Raises:
        ConfigError: a sample that does not fit into a microbatch.
        DataError: a reward that is not finite.
        AsyncRLError: most behaviour log-probabilities are missing.
    """
    learner = config.learner
    rewards = shaped_rewards(part.manifest, learner.shaping, config.rollout.max_new_tokens)
    local = LocalSamples.of(part, kept)
    tokens, missing = sum_over_ranks(local.tokens(len(part.manifest)), device)
    check_present(int(missing.sum()), int((tokens + missing).sum()))
    groups = group_numbers(part.manifest)
    minibatch = minibatch_numbers(groups, kept, learner.minibatches)
    advantage, lone = np.full(len(part.manifest), np.nan, np.float32), 0
    if learner.advantage.relative:
        lone = int(np.sum(np.bincount(groups[list(kept)]) == 1))
        estimator = cast(Estimator, learner.advantage.estimator)
        advantage = batch_advantages(rewards, part.manifest, kept, estimator)
    usable = [k for k, i in enumerate(local.index) if tokens[i]]
    zero = {k for k in usable if advantage[local.index[k]] == 0 and skips_zero(learner)}
    sets = [
        [k for k in usable if k not in zero and minibatch[local.index[k]] == number]
        for number in range(learner.minibatches)
    ]
    *minibatches, looked_at = _even(local, [*sets, sorted(zero)], learner, version, device)
    work = Work(
        local, rewards[local.index], minibatches, looked_at, groups, minibatch,
        int(tokens.sum()), int(missing.sum()), lone, _shaped_mean(learner, rewards, part, kept),
        learner.loss.norm_tokens or config.rollout.max_new_tokens, learner.loss.aggregation,
    )  # fmt: skip
    work.set_coefficients(tokens)
    mine = torch.from_numpy(advantage[local.index]).to(device)
    for m in work.all():
        m.advantage, m.coefficient = mine[m.sample], m.policy_coefficient
    return work


def _shaped_mean(
    learner: LearnerConfig, rewards: npt.NDArray[np.float64], part: BatchPart, kept: Sequence[int]
) -> float | None:
    fresh = [i for i in kept if i < part.fresh]
    if learner.shaping == ShapingConfig() or not fresh:
        return None
    return float(rewards[fresh].mean())


def skips_zero(learner: LearnerConfig) -> bool:
    """Whether a sample whose advantage is exactly 0 has no gradient at all.

    Its backward pass, two thirds of the work, is left out then.
    """
    other_terms = bool(learner.loss.entropy or learner.kl.coefficient)
    return learner.advantage.relative and not other_terms


def _even(
    local: LocalSamples,
    sets: Sequence[Sequence[int]],
    learner: LearnerConfig,
    version: Version,
    device: torch.device,
) -> list[list[Microbatch]]:
    """The microbatches of each set of samples, as many on every rank."""
    packs: list[list[Pack]] = [
        make_packs(local.samples, which, learner.max_tokens_per_microbatch, learner.share_prompt)
        for which in sets
    ]
    most = gather_counts([len(p) for p in packs], device).max(axis=0)
    return [
        make_microbatches(local, p, int(count), version, device)
        for p, count in zip(packs, most, strict=True)
    ]
