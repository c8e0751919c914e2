"""The behaviour weight w = pi_prox / mu: its truncation, and what it says about the data.

mu is the engine at the moment of sampling, prox the learner's policy at the start of the update.
Everything is per token, logs are natural.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from asyncrl.errors import AsyncRLError

Floats64 = npt.NDArray[np.float64]

LOG_RATIO_CLAMP = 20.0
"""A log-ratio beyond this is cut off before exp, with gradient 0."""

MAX_MISSING = 0.5
"""Largest share of a batch's behaviour log-probabilities that may be missing."""


def exp_clamped(log_ratio: Tensor) -> Tensor:
    """exp of the log-ratio clamped to +-LOG_RATIO_CLAMP; the gradient beyond is 0."""
    return log_ratio.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()


def token_weight(prox: Tensor, behaviour: Tensor, truncate: float | None) -> Tensor:
    """sg(min(w, C)) of each token: truncated importance sampling at token level.

    Args:
        prox: [N] log pi_prox, in nats.
        behaviour: [N] log mu.
        truncate: C; None leaves the weight as it is.
    """
    weight = exp_clamped((prox - behaviour).detach())
    return weight if truncate is None else weight.clamp(max=truncate)


def check_present(missing: int, total: int) -> None:
    """Refuse a batch in which most behaviour log-probabilities are not finite.

    Raises:
        AsyncRLError: with the numbers and what to look at.
    """
    if missing > MAX_MISSING * total:
        raise AsyncRLError(
            f"{missing} of {total} behaviour log-probabilities of the batch are not finite, so its "
            "importance weights mean nothing: check that the engine returns log-probabilities of "
            "the sampled tokens (logprobs_mode=processed_logprobs) and that its weights are finite"
        )


def weight_statistics(log_weight: Floats64, truncate: float | None) -> dict[str, float]:
    """Diagnostics of the weights w of a batch; all but `used` and `clip_frac` before any clamp.

    ESS is (sum w)^2 / (n sum w^2), as a share of n; chi2 is E_mu[w^2] - 1.

    >>> weight_statistics(np.zeros(4), truncate=2.0)["ess_frac"]
    1.0
    """
    with np.errstate(over="ignore"):
        raw = np.exp(log_weight)
    used = np.exp(np.clip(log_weight, -LOG_RATIO_CLAMP, LOG_RATIO_CLAMP))
    used = used if truncate is None else np.minimum(used, truncate)
    out = {"ess_frac": effective_sample_share(log_weight)}
    with np.errstate(over="ignore"):
        out["chi2"] = float(np.mean(raw**2) - 1)
    out["clip_frac"] = 0.0 if truncate is None else float(np.mean(raw > truncate))
    out["clamped"] = float(np.sum(np.abs(log_weight) > LOG_RATIO_CLAMP))
    for name, values in (("ratio_raw", raw), ("ratio_used", used)):
        out[f"{name}/mean"] = float(values.mean())
        out[f"{name}/p95"] = float(np.quantile(values, 0.95))
        out[f"{name}/max"] = float(values.max())
    return out


def effective_sample_share(log_weight: Floats64) -> float:
    """(sum w)^2 / (n sum w^2), between 1/n and 1; scale-free, hence exact for any log-weights."""
    scaled = np.exp(log_weight - log_weight.max())
    return float(scaled.sum() ** 2 / (len(scaled) * (scaled**2).sum()))


def k3(log_weight: Floats64) -> float:
    """Estimate of KL(mu || prox) from tokens of mu: mean of w - 1 - log w, never negative."""
    with np.errstate(over="ignore"):
        return float(np.mean(np.expm1(log_weight) - log_weight))
