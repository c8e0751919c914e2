"""Which policy is the proximal one, against its definition."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch

from asyncrl.config.learning import CorrectionConfig, LearnerConfig
from asyncrl.learner.microbatch import Microbatch, make_microbatches
from asyncrl.learner.objective import prox_of
from asyncrl.learner.packing import make_packs
from asyncrl.learner.samples import LocalSamples
from asyncrl.types import Version
from tests.helpers.tiny_model import make_trajectory

V = Version(0, 5)


def microbatch() -> Microbatch:
    """One sample whose six tokens are of versions 5, 4, 3, 1, 5 and 4; its log mu of the last is
    missing."""
    t = make_trajectory(np.random.default_rng(0), 0, 0, [3, 4], 6)
    t.versions[:] = [5, 4, 3, 1, 5, 4]
    t.behaviour_logprobs[-1] = np.nan
    local = LocalSamples([t], np.array([0]), np.array([False]))
    (m,) = make_microbatches(local, make_packs([t], [0], 64, True), 1, V, torch.device("cpu"))
    m.set_start(torch.full((6,), -2.0), torch.zeros(6))
    return m


def test_interpolated_prox_is_log_linear_in_the_version() -> None:
    """log prox = log mu + a (log theta - log mu), a = (V - v)/(V + 1 - v)."""
    m = microbatch()
    theta = torch.tensor([-1.0, -1.5, -2.0, -2.5, -3.0, -3.5], requires_grad=True)
    config = LearnerConfig(correction=CorrectionConfig(prox="interpolate"))
    got = prox_of(config, m, theta)
    want = []
    for t, mu, v in zip(theta.tolist(), m.mu.tolist(), [5, 4, 3, 1, 5, 4], strict=True):
        share = (V.version - v) / (V.version + 1 - v)
        want.append(mu + share * (t - mu))
    assert got.tolist() == pytest.approx(want, rel=1e-6)
    assert got[0] == m.mu[0]  # the learner's own version: prox is mu
    assert not got.requires_grad


@pytest.mark.parametrize("prox", ["recompute", "behaviour"])
def test_the_other_choices_of_prox(prox: Literal["recompute", "behaviour"]) -> None:
    m = microbatch()
    got = prox_of(LearnerConfig(correction=CorrectionConfig(prox=prox)), m, torch.zeros(6))
    assert torch.equal(got, m.start if prox == "recompute" else m.mu)  # type: ignore[arg-type]
    assert m.mu[-1] == -2.0  # where log mu is missing, the policy before the update stands in
