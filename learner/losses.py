"""Policy losses and their aggregation over a batch.

A loss is a sum over tokens with coefficients fixed by the whole batch, so that it does not matter
how the batch is cut into packs, microbatches and ranks: the parts add up.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from asyncrl.learner.corrections import exp_clamped

Aggregation = Literal["token-mean", "seq-mean-token-mean"]


def token_coefficients(
    aggregation: Aggregation,
    sample: npt.NDArray[np.int64],
    counted: npt.NDArray[np.bool_],
    batch_tokens: int,
    batch_sequences: int,
) -> npt.NDArray[np.float32]:
    """What each token's loss is multiplied by, [N].

    * token-mean: 1 / tokens of the batch (DAPO, arXiv 2503.14476);
    * seq-mean-token-mean: 1 / (sequences of the batch * tokens of the sequence) (GRPO).

    Args:
        aggregation: which of them.
        sample: [N] sample of each token; all tokens of a sample must be present.
        counted: [N] False where a token leaves the loss and the denominator.
        batch_tokens: counted tokens of the batch, over all ranks.
        batch_sequences: samples of the batch with a counted token, over all ranks.
    """
    if aggregation == "token-mean":
        return np.where(counted, 1.0 / max(1, batch_tokens), 0.0).astype(np.float32)
    lengths = np.bincount(sample[counted], minlength=int(sample.max(initial=-1)) + 1)
    per_token = 1.0 / (max(1, batch_sequences) * np.maximum(1, lengths))
    return np.where(counted, per_token[sample], 0.0).astype(np.float32)


def decoupled_ppo(
    logprobs: Tensor,
    prox: Tensor,
    weight: Tensor,
    advantage: Tensor,
    coefficient: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """-sum c w min(r A, clip(r, 1 - e, 1 + e_hi) A), r = pi_theta / pi_prox.

    Decoupled PPO (AReaL, arXiv 2505.24298) with asymmetric clip (2503.14476) and, if given, the
    dual clip that bounds the surrogate of negative advantages below by c A (1912.09729).

    Args:
        logprobs: [N] log pi_theta, with gradient.
        prox: [N] log pi_prox.
        weight: [N] behaviour weight, without gradient.
        advantage: [N] A.
        coefficient: [N] from `token_coefficients`; tokens with 0 have no influence.
        clip_low: e.
        clip_high: e_hi.
        dual_clip: c, above 1.

    Returns:
        The loss, and [N] booleans: True where a clip decides the token's surrogate.
    """
    ratio = exp_clamped(logprobs - prox.detach())
    plain = ratio * advantage
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    surrogate = torch.minimum(plain, clipped)
    if dual_clip is not None:
        bounded = torch.maximum(surrogate, dual_clip * advantage)
        surrogate = torch.where(advantage < 0, bounded, surrogate)
    loss = -(coefficient * weight.detach() * surrogate).sum()
    return loss, (surrogate != plain).detach()
