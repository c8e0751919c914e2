"""Microbatches of flat tokens for the tests of the maths, hard cases among them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class Tokens:
    """Shapes [N]."""

    theta: Tensor
    prox: Tensor
    mu: Tensor
    advantage: Tensor
    coefficient: Tensor
    sample: Tensor
    counted: Tensor

    def to(self, dtype: torch.dtype) -> Tokens:
        """The same in another floating type."""
        names = ("theta", "prox", "mu", "advantage", "coefficient")
        return replace(self, **{n: getattr(self, n).to(dtype) for n in names})

    def at(self, index: Tensor) -> Tokens:
        """The tokens of a mask or an index alone."""
        return Tokens(**{name: value[index] for name, value in vars(self).items()})


def make_tokens(
    lengths: list[int], *, seed: int = 0, skip: int = 1, missing: float = 0.0, spread: float = 0.6
) -> Tokens:
    """Sequences of these lengths; `skip` is the distance of their numbers.

    Probabilities are spread over (0, 1), so that ratios and differences of probability are both
    of interest. Every third advantage is 0. A missing log mu is replaced by prox, coefficient 0.
    """
    g = torch.Generator().manual_seed(seed)

    def normal(n: int) -> Tensor:
        return torch.randn(n, generator=g, dtype=torch.float64)

    n = sum(lengths)
    sample = torch.repeat_interleave(torch.arange(len(lengths)) * skip, torch.tensor(lengths))
    logit = normal(n) * 1.5
    prox, mu, theta = (logsigmoid(logit + spread * normal(n)) for _ in range(3))
    of_sequence = normal(len(lengths)).where(torch.arange(len(lengths)) % 3 != 2, 0.0)
    counted = torch.rand(n, generator=g) >= missing
    coefficient = torch.rand(n, generator=g, dtype=torch.float64) + 0.1
    return Tokens(
        theta=theta,
        prox=prox,
        mu=mu.where(counted, prox),
        advantage=of_sequence[sample // skip],
        coefficient=coefficient.where(counted, 0.0),
        sample=sample,
        counted=counted,
    )


def _extreme() -> Tokens:
    """Log-ratios of 30 in both directions, theta against prox and prox against mu."""
    t = make_tokens([4, 4, 4])
    low, high = torch.tensor(-30.5, dtype=torch.float64), torch.tensor(-0.5, dtype=torch.float64)
    pattern = torch.arange(12) % 4
    return replace(
        t,
        theta=torch.where(pattern % 2 == 0, high, low),
        prox=torch.where(pattern < 2, low, high),
        mu=torch.where((pattern == 1) | (pattern == 2), high, low),
        advantage=torch.tensor([1.0, -1.5, 0.0], dtype=torch.float64)[t.sample],
    )


def _fully_masked() -> Tokens:
    """One sequence of three of which nothing counts."""
    t = make_tokens([3, 4, 5], seed=2)
    counted = t.sample != 1
    return replace(
        t,
        counted=counted,
        mu=t.mu.where(counted, t.prox),
        coefficient=t.coefficient.where(counted, 0.0),
    )


def _on_policy() -> Tokens:
    t = make_tokens([5, 1, 9], seed=3)
    return replace(t, prox=t.theta, mu=t.theta)


CASES = {
    "ragged": make_tokens([5, 1, 17, 3, 9, 12], skip=3, missing=0.2),
    "length 1": make_tokens([1], seed=1),
    "one sequence": make_tokens([12], seed=4),
    "zero advantage": replace(make_tokens([3, 4]), advantage=torch.zeros(7, dtype=torch.float64)),
    "log-ratio 30": _extreme(),
    "fully masked sequence": _fully_masked(),
    "nothing counts": make_tokens([3, 2], missing=1.1),
    "4096 tokens": make_tokens([4096], seed=5, missing=0.1),
    "on-policy": _on_policy(),
    "no tokens": make_tokens([2]).at(torch.zeros(2, dtype=torch.bool)),
}
"""By name; log-probabilities in nats, float64."""
