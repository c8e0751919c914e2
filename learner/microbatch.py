"""One pack on the device with all that the loss needs per token, before and after a first pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.learner.packing import Pack, dummy_pack
from asyncrl.learner.policy.logprobs import PackTensors
from asyncrl.learner.samples import Bools, LocalSamples
from asyncrl.staleness import token_staleness
from asyncrl.types import Version

COLUMNS = (
    "mu", "start", "entropy", "staleness", "own_version", "replayed", "used", "kept", "lowered",
    "reference", "values", "targets", "advantage",
)  # fmt: skip
"""What `Microbatch.table` says of each token; NaN where a run has no such quantity."""


@dataclass(slots=True)
class Microbatch:
    """One forward pass. Shapes [N] over its tokens that carry loss."""

    tensors: PackTensors
    sample: Tensor
    """[N] which of the rank's samples the token belongs to."""
    numbers: npt.NDArray[np.int64]
    """The same, on the host."""
    counted: Tensor
    """False where log mu is missing: the token leaves loss and denominator."""
    mu: Tensor
    """log mu; log pi_start where it is missing, once that is known."""
    staleness: Tensor
    """V - v of each token, cut off at 0."""
    own_version: Bools
    """True where the token was sampled by exactly the learner's version."""
    replayed: Bools
    """True where the token's sample was trained before."""
    coefficient: Tensor
    """Of the token in the loss; 0 where it does not count."""
    policy_coefficient: Tensor
    """The same for the policy's term: another one with `learner.loss.denominator: kept`."""
    advantage: Tensor
    allowed: Tensor
    """False where a mask over the whole batch (M2PO) leaves the token out."""
    start: Tensor | None = None
    """log pi before the update, once known. Without a pass before it, the one that the first pass
    of the microbatch saw: another policy already, from the second minibatch on."""
    entropy: Tensor | None = None
    """Entropy of that policy at the token."""
    values: Tensor | None = None
    """The critic's values before the update."""
    targets: Tensor | None = None
    """What they should have been."""
    reference: Tensor | None = None
    """log pi_ref."""
    used: Tensor | None = None
    """Behaviour weight in the first pass that trained."""
    kept: Tensor | None = None
    """False where a mask left the token out in that pass."""
    lowered: Tensor | None = None
    """True where its weight was truncated."""

    def set_start(self, logprobs: Tensor, entropy: Tensor) -> None:
        """What the first forward pass saw."""
        self.start, self.entropy = logprobs.detach(), entropy.detach()
        self.mu = torch.where(self.counted, self.mu, self.start)

    def table(self) -> npt.NDArray[np.float32]:
        """[n, len(COLUMNS)] of the counted tokens."""
        columns = [getattr(self, name) for name in COLUMNS]
        n = len(self.numbers)
        rows = [np.full(n, np.nan) if c is None else _host(c) for c in columns]
        table: npt.NDArray[np.float32] = np.stack(rows, axis=1).astype(np.float32)
        counted: Bools = self.counted.cpu().numpy()
        return table[counted]


def _host(column: Tensor | Bools) -> npt.NDArray[np.generic]:
    return column.detach().cpu().numpy() if isinstance(column, Tensor) else column


def make_microbatches(
    local: LocalSamples, packs: Sequence[Pack], count: int, version: Version, device: torch.device
) -> list[Microbatch]:
    """Put packs on the device, padded with dummies to `count` (the most that any rank has)."""
    versions, incarnations, begins = local.tables()
    out = []
    for pack in [*packs, *[dummy_pack()] * (count - len(packs))]:
        token = begins[pack.sample] + pack.offset
        v, i = versions[token], incarnations[token]
        behaviour = torch.from_numpy(pack.behaviour_logprobs).to(device)
        zeros = torch.zeros_like(behaviour)
        out.append(
            Microbatch(
                tensors=PackTensors.of(pack, device),
                sample=torch.from_numpy(pack.sample).to(device),
                numbers=pack.sample,
                counted=torch.isfinite(behaviour),
                mu=behaviour,
                staleness=torch.from_numpy(token_staleness(v, version)).to(device),
                own_version=(v == version.version) & (i == version.incarnation),
                replayed=local.replayed[pack.sample],
                coefficient=zeros,
                policy_coefficient=zeros,
                advantage=zeros,
                allowed=torch.ones_like(behaviour, dtype=torch.bool),
            )
        )
    return out
