"""The samples that a rank trains of a batch, and the batch's counts that every rank agrees on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from asyncrl.errors import ModelError
from asyncrl.learner.maths.aggregation import BatchCounts
from asyncrl.types import BatchPart, GroupId, SampleHeader, Trajectory
from asyncrl.wire import unpack_trajectory

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

ROUNDING = 0.01
"""A log-probability may be so much above 0 by the engine's rounding."""


@dataclass(frozen=True, slots=True)
class LocalSamples:
    """The samples of a rank. Shapes [n] over them."""

    samples: list[Trajectory]
    index: Ints
    """[n] place of each in the batch's manifest."""
    replayed: Bools
    """[n] True for samples that an earlier batch trained."""

    @classmethod
    def of(cls, part: BatchPart, kept: Sequence[int]) -> LocalSamples:
        """Decode this rank's samples, those of `kept` alone (places in the manifest)."""
        alive = set(kept)
        mine = [(i, e) for i, e in zip(part.mine, part.envelopes, strict=True) if i in alive]
        return cls(
            [_without_impossible(unpack_trajectory(e)) for _, e in mine],
            np.array([i for i, _ in mine], np.int64),
            np.array([i >= part.fresh for i, _ in mine], bool),
        )

    def tokens(self, manifest: int) -> Ints:
        """[2, manifest] tokens that carry loss: with a finite log mu, and without; 0 elsewhere."""
        out = np.zeros((2, manifest), np.int64)
        for i, t in zip(self.index, self.samples, strict=True):
            finite = np.isfinite(t.behaviour_logprobs[t.loss_mask != 0])
            out[:, i] = finite.sum(), (~finite).sum()
        return out

    def tables(self) -> tuple[Ints, Ints, Ints]:
        """Versions and incarnations of all tokens, sample after sample, and where each begins."""
        lengths = [len(t.versions) for t in self.samples]
        empty = np.zeros(0, np.int64)
        return (
            np.concatenate([empty, *[t.versions for t in self.samples]]),
            np.concatenate([empty, *[t.incarnations for t in self.samples]]),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        )


def _without_impossible(t: Trajectory) -> Trajectory:
    """The sample, without log-probabilities above 0: they count as missing."""
    impossible = t.behaviour_logprobs > ROUNDING
    if not impossible.any():
        return t
    return replace(t, behaviour_logprobs=np.where(impossible, np.nan, t.behaviour_logprobs))


def check_vocabulary(samples: Sequence[Trajectory], vocab: int) -> None:
    """Refuse token ids that the model does not have, before its embedding does.

    Raises:
        ModelError: naming the first sample with one.
    """
    for t in samples:
        for ids in (t.prompt_ids, t.response_ids):
            if ids.size and (ids.min() < 0 or ids.max() >= vocab):
                odd = int(ids.min()) if ids.min() < 0 else int(ids.max())
                raise ModelError(
                    f"sample {tuple(t.header.id)} has the token id {odd}, but the model's "
                    f"vocabulary is 0 to {vocab - 1}: the engine ran another model or tokenizer"
                )


def group_numbers(manifest: Sequence[SampleHeader]) -> Ints:
    """[len(manifest)] number of each sample's group, in the order of first appearance."""
    seen: dict[GroupId, int] = {}
    return np.array([seen.setdefault(h.id.group, len(seen)) for h in manifest], np.int64)


def minibatch_numbers(groups: Ints, kept: Sequence[int], minibatches: int) -> Ints:
    """[len(groups)] minibatch of each kept sample, -1 for the others: whole groups, in order.

    >>> minibatch_numbers(np.array([0, 0, 1, 1, 2]), [0, 1, 2, 3, 4], 2).tolist()
    [0, 0, 0, 0, 1]
    """
    out = np.full(len(groups), -1, np.int64)
    present = np.unique(groups[list(kept)])
    rank_of = np.searchsorted(present, groups[list(kept)])
    out[list(kept)] = rank_of * minibatches // max(1, len(present))
    return out


def batch_counts(tokens: Ints, groups: Ints, index: Ints) -> BatchCounts:
    """The denominators of a (mini)batch.

    Args:
        tokens: [manifest] tokens that count, over all ranks; 0 for what is not in the minibatch.
        groups: [manifest] from `group_numbers`.
        index: [n] places of this rank's samples in the manifest.
    """
    of_group = np.bincount(groups, weights=tokens, minlength=1).astype(np.int64)
    return BatchCounts(
        tokens=int(tokens.sum()),
        sequences=int(np.count_nonzero(tokens)),
        prompts=int(np.count_nonzero(of_group)),
        sample_tokens=tokens[index],
        prompt_tokens=of_group[groups[index]],
    )
