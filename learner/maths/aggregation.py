"""From a loss per token to the loss of a batch.

Every aggregation is a sum over tokens with coefficients that the whole batch fixes. So it does not
matter how the batch is cut into packs, microbatches and ranks: the parts add up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm", "prompt-mean"]


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """What counts in a batch: what one optimizer step trains, over all ranks.

    With `denominator: kept`, what is counted is what the masks keep.

    >>> BatchCounts(tokens=5, sequences=2, prompts=1,
    ...             sample_tokens=np.array([3, 2]), prompt_tokens=np.array([5, 5])).tokens
    5
    """

    tokens: int
    """Counted tokens."""
    sequences: int
    """Samples with a counted token."""
    prompts: int
    """Groups with a counted token."""
    sample_tokens: npt.NDArray[np.int64]
    """[samples of this rank] Counted tokens of each sample."""
    prompt_tokens: npt.NDArray[np.int64]
    """[samples of this rank] Counted tokens of each sample's group, over all ranks."""


def token_coefficients(
    aggregation: Aggregation,
    sample: npt.NDArray[np.int64],
    counted: npt.NDArray[np.bool_],
    batch: BatchCounts,
    norm_tokens: int,
) -> npt.NDArray[np.float32]:
    """What each token's loss is multiplied by, [N]; 0 where it does not count.

    * token-mean: 1 / tokens of the batch (DAPO, arXiv 2503.14476);
    * seq-mean-token-mean: 1 / (sequences * tokens of the sequence) (GRPO, arXiv 2402.03300);
    * seq-mean-token-sum-norm: 1 / (sequences * norm_tokens) (Dr. GRPO, arXiv 2503.20783);
    * prompt-mean: 1 / (prompts * tokens of the prompt's sequences) (ScaleRL, arXiv 2510.13786).

    A batch in which nothing counts has coefficients 0.

    Args:
        aggregation: which of them.
        sample: [N] each token's sample, as an index into `batch.sample_tokens`.
        counted: [N] False where a token leaves the loss and the denominator.
        batch: counts of the whole batch.
        norm_tokens: the constant length of seq-mean-token-sum-norm.
    """
    if aggregation == "token-mean":
        denominator = np.full(len(sample), float(batch.tokens))
    elif aggregation == "seq-mean-token-mean":
        denominator = float(batch.sequences) * batch.sample_tokens[sample]
    elif aggregation == "seq-mean-token-sum-norm":
        denominator = np.full(len(sample), float(batch.sequences) * norm_tokens)
    else:
        denominator = float(batch.prompts) * batch.prompt_tokens[sample]
    return np.where(counted, 1.0 / np.maximum(denominator, 1.0), 0.0).astype(np.float32)
