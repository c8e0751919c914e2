"""Log-probabilities of the sampled tokens of a pack, without float32 copies of the logits.

Axis letters: S tokens of a pack, R predicting positions, N tokens that carry loss, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.learner.attention import LAYOUT, PackLayout
from asyncrl.learner.packing import Pack

_CHUNK_ELEMENTS = 1 << 20
"""Logits taken to float32 at once on the CPU (they stay in the cache)."""

_CHUNK_ELEMENTS_GPU = 1 << 26
"""The same on a GPU, where a call costs more than memory traffic."""


@dataclass(frozen=True, slots=True)
class PackTensors:
    """A pack on the device."""

    input_ids: Tensor
    position_ids: Tensor
    layout: PackLayout
    rows: Tensor
    row_temperature: Tensor
    row: Tensor
    target: Tensor

    @classmethod
    def of(cls, pack: Pack, device: torch.device) -> PackTensors:
        """Copy a pack's arrays to `device`."""

        def put(array: Any) -> Tensor:
            return torch.from_numpy(array).to(device)

        return cls(
            input_ids=put(pack.input_ids),
            position_ids=put(pack.position_ids),
            layout=PackLayout(pack.segments, device),
            rows=put(pack.rows),
            row_temperature=put(pack.row_temperature),
            row=put(pack.row),
            target=put(pack.target),
        )


def pack_logprobs(model: nn.Module, pack: PackTensors) -> tuple[Tensor, Tensor]:
    """Log-probability [N] of each token that carries loss, and entropy [N] of its distribution.

    Both in nats, float32, at the sampling temperature. The model's own head makes the logits
    (soft caps and scalings stay as they are), for the predicting positions alone. The entropy
    carries no gradient.
    """
    output = model(
        input_ids=pack.input_ids[None],
        position_ids=pack.position_ids[None],
        logits_to_keep=pack.rows,
        use_cache=False,
        **{LAYOUT: pack.layout},
    )
    return token_logprobs(output.logits[0], pack.row_temperature, pack.row, pack.target)


def token_logprobs(
    logits: Tensor, temperature: Tensor, row: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """log softmax(logits[row] / temperature[row])[target] and the entropy of that distribution.

    logits [R, V] in any float type, temperature [R], row and target [N]; returns two [N] in
    float32. The softmax is in float32, in chunks of rows.
    """
    out = _TokenLogprobs.apply(logits, temperature, row, target)  # type: ignore[no-untyped-call]
    return out[0], out[1]


class _TokenLogprobs(torch.autograd.Function):
    """Keeps the logits as the model made them; the backward pass recomputes the softmax."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, temperature: Tensor, row: Tensor, target: Tensor
    ) -> tuple[Tensor, Tensor]:
        logsumexp = logits.new_empty(len(logits), dtype=torch.float32)
        entropy = torch.empty_like(logsumexp)
        for part in _chunks(logits):
            scaled = logits[part].to(torch.float32, copy=True).div_(temperature[part, None])
            top = scaled.amax(dim=-1, keepdim=True)
            scaled -= top
            weights = scaled.exp()
            total = weights.sum(dim=-1)
            # H = log Z - sum_v p_v z_v, with z shifted by its maximum
            entropy[part] = total.log() - (weights.mul_(scaled)).sum(dim=-1) / total
            logsumexp[part] = total.log() + top[:, 0]
        chosen = logits[row, target].float() / temperature[row]
        ctx.save_for_backward(logits, temperature, row, target, logsumexp)
        per_token = entropy[row]
        ctx.mark_non_differentiable(per_token)
        return chosen - logsumexp[row], per_token

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, temperature, row, target, logsumexp = ctx.saved_tensors
        grad = grads[0] / temperature[row]
        per_row = torch.zeros_like(logsumexp).index_add_(0, row, grad)
        out = torch.empty_like(logits)
        for part in _chunks(logits):
            scaled = logits[part].to(torch.float32, copy=True).div_(temperature[part, None])
            weights = scaled.sub_(logsumexp[part, None]).exp_()
            out[part] = weights.mul_(-per_row[part, None])
        # In float32 before rounding: the chosen entry is the sum of both terms.
        keys, inverse = torch.unique(row * logits.shape[1] + target, return_inverse=True)
        total = grad.new_zeros(len(keys)).index_add_(0, inverse, grad)
        key_row, key_target = keys // logits.shape[1], keys % logits.shape[1]
        exponent = logits[key_row, key_target].float() / temperature[key_row]
        chosen = total - (exponent - logsumexp[key_row]).exp() * per_row[key_row]
        out[key_row, key_target] = chosen.to(out.dtype)
        return out, None, None, None


def _chunks(logits: Tensor) -> list[slice]:
    elements = _CHUNK_ELEMENTS if logits.device.type == "cpu" else _CHUNK_ELEMENTS_GPU
    step = max(1, elements // max(1, logits.shape[1]))
    return [slice(a, a + step) for a in range(0, len(logits), step)]
