"""What to change when a batch's metrics say that it teaches little."""

from __future__ import annotations

from collections.abc import Mapping

ESS_COLLAPSE = 0.3
"""Advice below this share: the gradient is then as noisy as that of an on-policy batch of less than
a third of the tokens, and two thirds of the work of generating it are lost."""


def advice(metrics: Mapping[str, float]) -> dict[str, str]:
    """A line for each thing that is wrong with the batch, by its name.

    Args:
        metrics: of the step, before those that are not finite are dropped.
    """
    found = {
        "ess": ess_collapse(metrics), "lone": _lone_samples(metrics), "mask": _all_masked(metrics)
    }  # fmt: skip
    return {name: text for name, text in found.items() if text is not None}


def ess_collapse(metrics: Mapping[str, float]) -> str | None:
    """What to do when a batch's effective sample size collapses; None when it did not."""
    ess = metrics.get("is/ess_frac")
    if ess is None or not ess < ESS_COLLAPSE:
        return None
    mismatch, drift = (metrics.get(f"kl/{name}_k3", 0.0) for name in ("mismatch", "drift"))
    seen = f"kl/mismatch_k3 is {mismatch:.2g}, kl/drift_k3 {drift:.2g}"
    if mismatch > drift:
        cause = (
            f"engine precision is to blame ({seen}): bring engine.dtype and learner.dtype closer"
        )
    else:
        cause = f"staleness is to blame ({seen}): lower buffer.max_staleness"
    return (
        f"is/ess_frac is {ess:.2g}: the raw importance weights leave this batch worth {ess:.0%} of "
        f"its tokens; {cause}. learner.correction bounds what a weight does to the gradient, not "
        "this figure; learner.optim.ess_ref makes such a batch's step smaller"
    )


def _all_masked(metrics: Mapping[str, float]) -> str | None:
    if metrics.get("is/mask_frac", 0.0) < 1:
        return None
    return (
        "is/mask_frac is 1: every token is masked and nothing was learned: widen the bounds of "
        "learner.correction (low, high, m2po, opsm)"
    )


def _lone_samples(metrics: Mapping[str, float]) -> str | None:
    lone = int(metrics.get("loss/lone_samples", 0.0))
    if not lone:
        return None
    return (
        f"{lone} samples are all that is left of their groups: their advantage is 0 and they teach "
        "nothing (rollout.failed_member=drop leaves such groups out)"
    )
