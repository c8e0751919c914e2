"""From a rank's samples to microbatches on the device, with all that the loss needs per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.config.schema import LearnerConfig
from asyncrl.learner.logprobs import PackTensors
from asyncrl.learner.losses import token_coefficients
from asyncrl.learner.packing import Pack, dummy_pack, make_packs
from asyncrl.staleness import token_staleness
from asyncrl.types import Trajectory, Version

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LocalSamples:
    """The samples that a rank trains of a batch, with their advantages."""

    samples: list[Trajectory]
    advantage: npt.NDArray[np.float32]
    """[len(samples)]"""
    replayed: Bools
    """[len(samples)] True for samples that an earlier batch trained."""

    def counts(self) -> tuple[int, int, int]:
        """Tokens that carry loss and count, tokens whose log mu is missing, samples that count."""
        finite = [
            int(np.isfinite(t.behaviour_logprobs[t.loss_mask != 0]).sum()) for t in self.samples
        ]
        tokens = [int(np.count_nonzero(t.loss_mask)) for t in self.samples]
        return sum(finite), sum(tokens) - sum(finite), sum(n > 0 for n in finite)

    def split(self) -> tuple[list[int], list[int]]:
        """Samples that carry a gradient, and samples that are only looked at.

        An advantage of exactly 0 (a group whose rewards are all equal) makes the policy's
        gradient exactly 0, so its backward pass, two thirds of the work, is left out.
        """
        usable = [
            i
            for i, t in enumerate(self.samples)
            if np.isfinite(t.behaviour_logprobs[t.loss_mask != 0]).any()
        ]
        trained = [i for i in usable if self.advantage[i] != 0]
        return trained, [i for i in usable if self.advantage[i] == 0]


@dataclass(slots=True)
class Microbatch:
    """One pack on the device. Shapes [N] over its tokens that carry loss."""

    tensors: PackTensors
    advantage: Tensor
    coefficient: Tensor
    """0 where the token does not count."""
    behaviour: Tensor
    """log mu; NaN or infinite where missing."""
    counted: Bools
    log_mu: npt.NDArray[np.float32]
    staleness: npt.NDArray[np.int64]
    """V - v of each token, cut off at 0."""
    own_version: Bools
    """True where the token was sampled by exactly the learner's version."""
    replayed: Bools
    """True where the token's sample was trained before."""
    prox: Tensor | None = None
    """log pi_prox, once known."""
    entropy: Tensor | None = None
    """Entropy of the policy at the token, at prox."""

    def present_behaviour(self) -> Tensor:
        """log mu, and log pi_prox where it is missing (weight 1, coefficient 0)."""
        assert self.prox is not None
        return torch.where(torch.isfinite(self.behaviour), self.behaviour, self.prox)

    def table(self) -> npt.NDArray[np.float32]:
        """[n, 6] of the counted tokens: log mu, log prox, entropy, staleness, own version,
        replayed."""
        assert self.prox is not None
        assert self.entropy is not None
        columns = [
            self.log_mu,
            self.prox.cpu().numpy(),
            self.entropy.cpu().numpy(),
            self.staleness,
            self.own_version,
            self.replayed,
        ]
        return np.stack(columns, axis=1).astype(np.float32)[self.counted]


def make_microbatches(
    local: LocalSamples,
    packs: Sequence[Pack],
    count: int,
    batch_tokens: int,
    batch_sequences: int,
    version: Version,
    config: LearnerConfig,
    device: torch.device,
) -> list[Microbatch]:
    """Put packs on the device, padded with dummies to `count` (the most that any rank has)."""
    out = []
    for pack in [*packs, *[dummy_pack()] * (count - len(packs))]:
        counted = np.isfinite(pack.behaviour_logprobs)
        coefficient = token_coefficients(
            config.loss.aggregation, pack.sample, counted, batch_tokens, batch_sequences
        )
        v, i = _versions(local, pack)
        out.append(
            Microbatch(
                tensors=PackTensors.of(pack, device),
                advantage=torch.from_numpy(local.advantage[pack.sample]).to(device),
                coefficient=torch.from_numpy(coefficient).to(device),
                behaviour=torch.from_numpy(pack.behaviour_logprobs).to(device),
                counted=counted,
                log_mu=pack.behaviour_logprobs,
                staleness=token_staleness(v, version),
                own_version=(v == version.version) & (i == version.incarnation),
                replayed=local.replayed[pack.sample],
            )
        )
    return out


def pack_local(local: LocalSamples, which: list[int], config: LearnerConfig) -> list[Pack]:
    """The packs of the samples of `which`."""
    return make_packs(local.samples, which, config.max_tokens_per_microbatch, config.share_prompt)


def _versions(
    local: LocalSamples, pack: Pack
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Version and incarnation [N] of each token that carries loss."""
    versions = np.zeros(len(pack.sample), np.int64)
    incarnations = np.zeros(len(pack.sample), np.int64)
    for i in np.unique(pack.sample):
        here = pack.sample == i
        versions[here] = local.samples[i].versions[pack.offset[here]]
        incarnations[here] = local.samples[i].incarnations[pack.offset[here]]
    return versions, incarnations
