"""What the learner advises, by the metrics of a batch."""

from __future__ import annotations

import math

from asyncrl.learner.advice import advice as advise
from asyncrl.learner.advice import ess_collapse


def test_the_advice_on_a_collapse_names_the_cause() -> None:
    stale = {"is/ess_frac": 0.12, "kl/mismatch_k3": 0.001, "kl/drift_k3": 0.4}
    advice = ess_collapse(stale)
    assert advice is not None
    assert "\n" not in advice
    for words in ("is/ess_frac is 0.12", "12% of its tokens", "buffer.max_staleness", "0.4"):
        assert words in advice
    assert "learner.optim.ess_ref" in advice
    assert "engine precision" not in advice
    imprecise = ess_collapse(stale | {"kl/mismatch_k3": 0.5})
    assert imprecise is not None
    assert "engine.dtype" in imprecise
    assert "buffer.max_staleness" not in imprecise
    fresh = ess_collapse({"is/ess_frac": 0.29, "kl/mismatch_k3": 0.5})  # no stale token
    assert fresh is not None
    assert "engine.dtype" in fresh
    for healthy in ({"is/ess_frac": 0.3}, {"is/ess_frac": math.nan}, {}):
        assert ess_collapse(healthy) is None


def test_each_fault_has_its_line() -> None:
    found = advise({"is/ess_frac": 0.1, "loss/lone_samples": 3.0, "is/mask_frac": 1.0})
    assert found.keys() == {"ess", "lone", "mask"}
    assert found["lone"].startswith("3 samples")
    assert advise({"is/ess_frac": 0.9, "is/mask_frac": 0.99}) == {}
