"""Log-probabilities and entropies from hidden states, without logits of [rows, vocabulary].

The logits exist for one block of the vocabulary at a time: the forward pass folds each block into
a running maximum, normaliser and entropy; the backward pass makes it again, turns it into the
gradient of the logits and multiplies that into the gradients of hidden states and weight. Beyond
its inputs and their gradients a call holds a few numbers per row and one block of constant size.

Axis letters: R predicting positions, H hidden size, V vocabulary, C a block of it, N tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncrl.errors import ModelError

_BLOCK_ELEMENTS = 1 << 20
"""Logits that exist at once on the CPU, where they then stay in the cache."""

_BLOCK_ELEMENTS_GPU = 1 << 26
"""The same on a GPU, where a call costs more than memory traffic."""

_KEEP_ELEMENTS = 1 << 26
"""Up to so many logits are kept, in the weight's type, instead of made again."""


def head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: Tensor,
    row: Tensor,
    target: Tensor,
    *,
    softcap: float | None,
    scale: float,
    vocab: int,
) -> tuple[Tensor, Tensor]:
    """log p[row, target] and the entropy of p[row], with p the softmax of the tempered logits.

    p[r] = softmax(cap(scale * (weight[:vocab] @ hidden[r] + bias[:vocab])) / temperature[r]), with
    cap(z) = softcap * tanh(z / softcap). The products are in the weight's type, all else is in
    float32 (float64 for a float64 weight). Gradients of both results, exact, reach `hidden`,
    `weight` and `bias`; there is no second derivative.

    Args:
        hidden: [R, H] last hidden states.
        weight: [V, H] of the head; rows from `vocab` on (padding) are outside of the softmax.
        bias: [V] of the head, or None.
        temperature: [R], positive.
        row: [N] int64, which hidden state predicts the token; several tokens may have one.
        target: [N] int64 token ids below `vocab`.
        softcap: bound of the logits (Gemma 2), or None.
        scale: multiplied into the logits.
        vocab: tokens that the softmax is over.

    Returns:
        Log-probability [N] and entropy [N], in nats.

    Raises:
        ModelError: a target outside of the vocabulary.
    """
    keep = torch.is_grad_enabled() and len(hidden) * vocab <= _KEEP_ELEMENTS
    options = _Options(softcap, scale, vocab, keep)
    out = _HeadLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden.to(weight.dtype), weight, bias, temperature, row, target, options
    )
    return out[0], out[1]


@dataclass(frozen=True, slots=True)
class _Options:
    softcap: float | None
    scale: float
    vocab: int
    keep: bool

    def tempered(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """[R, C] in the type of `temperature` [R], a new tensor."""
        if self.softcap is None:
            return logits.to(temperature.dtype) * (self.scale / temperature)[:, None]
        capped = logits.to(temperature.dtype).mul(self.scale / self.softcap).tanh_()
        return capped.mul_((self.softcap / temperature)[:, None])

    def slope(self, tempered: Tensor, temperature: Tensor) -> Tensor | None:
        """[R, C] derivative of the soft cap at its result; None without one."""
        if self.softcap is None:
            return None
        return 1 - (tempered * (temperature / self.softcap)[:, None]).square_()


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens in the order of their ids, so that those of a block lie side by side."""

    order: Tensor
    row: Tensor
    target: Tensor

    @classmethod
    def of(cls, row: Tensor, target: Tensor) -> _Tokens:
        target, order = torch.sort(target, stable=True)
        return cls(order, row[order], target)

    def blocks(self, rows: int, vocab: int) -> Iterator[tuple[slice, slice]]:
        """Each block of the vocabulary, and the tokens whose ids are in it."""
        if not len(self.target):
            return  # nothing is asked for: a rank that only keeps step with others
        cpu = self.target.device.type == "cpu"
        step = max(1, (_BLOCK_ELEMENTS if cpu else _BLOCK_ELEMENTS_GPU) // rows)
        edges = [*range(0, vocab, step), vocab]
        bounds = torch.searchsorted(self.target, self.target.new_tensor(edges)).tolist()
        if bounds[0] > 0 or bounds[-1] < len(self.target):
            odd = self.target[0 if bounds[0] else -1].item()
            raise ModelError(
                f"a sample has the token id {odd}, but the model's vocabulary is 0 to {vocab - 1}: "
                "the engine ran another model or tokenizer"
            )
        for k in range(len(edges) - 1):
            yield slice(edges[k], edges[k + 1]), slice(bounds[k], bounds[k + 1])


class _HeadLogprobs(torch.autograd.Function):
    """See `head_logprobs`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        temperature: Tensor,
        row: Tensor,
        target: Tensor,
        options: _Options,
    ) -> tuple[Tensor, Tensor]:
        temperature = temperature.to(torch.promote_types(weight.dtype, torch.float32))
        tokens = _Tokens.of(row, target)
        # Per row, over the blocks so far: m = max z, sum exp(z - m), sum exp(z - m) (z - m).
        top = torch.full_like(temperature, torch.finfo(temperature.dtype).min)
        total, moment = torch.zeros_like(temperature), torch.zeros_like(temperature)
        chosen = temperature.new_empty(len(row))
        kept = []
        for block, mine in tokens.blocks(len(hidden), options.vocab):
            logits = _logits(hidden, weight, bias, block)
            if options.keep:
                kept.append(logits)
            z = options.tempered(logits, temperature)
            chosen[mine] = z[tokens.row[mine], tokens.target[mine] - block.start]
            higher = torch.maximum(top, z.amax(dim=-1))
            moved = top - higher
            shrink = moved.exp()
            moment = (moment + total * moved) * shrink
            total, top = total * shrink, higher
            z -= top[:, None]
            weights = z.exp()
            total += weights.sum(dim=-1)
            moment += weights.mul_(z).sum(dim=-1)
        entropy = total.log() - moment / total
        ctx.save_for_backward(
            hidden, weight, bias, temperature, row, target, top, total, entropy, *kept
        )
        ctx.set_materialize_grads(False)
        ctx.options = options
        logprobs = torch.empty_like(chosen)
        # In this order: m + log sum would round off what is small beside m.
        logprobs[tokens.order] = (chosen - top[tokens.row]) - total.log()[tokens.row]
        return logprobs, entropy[row]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """With z the tempered logits, h the entropy, g and e the incoming gradients of a row:

        d/dz_v = sum of g at v - p_v (sum g + e (log p_v + h)).
        """
        hidden, weight, bias, temperature, row, target, top, total, entropy, *kept = (
            ctx.saved_tensors
        )
        options: _Options = ctx.options
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_logit = options.scale / temperature  # dz/dlogit, but for the soft cap
        of_chosen, sums = _per_row(grads[0], row, of_logit)
        of_row = (sums / total)[:, None]  # p is exp(z - m) / total
        of_entropy = None
        if grads[1] is not None and grads[1].any():
            of_entropy = (_per_row(grads[1], row, of_logit)[1] / total)[:, None]
            above = (entropy - total.log())[:, None]  # log p + h is z - m + this
        grad_hidden = temperature.new_zeros(hidden.shape) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        grad_bias = torch.zeros_like(bias) if needs_bias else None
        tokens = _Tokens.of(row, target)
        for k, (block, mine) in enumerate(tokens.blocks(len(hidden), options.vocab)):
            z = options.tempered(
                kept[k] if kept else _logits(hidden, weight, bias, block), temperature
            )
            slope = options.slope(z, temperature)
            z -= top[:, None]
            if of_entropy is None:
                delta = z.exp_().mul_(-of_row)
            else:
                weights = z.exp()
                delta = z.add_(above).mul_(of_entropy).add_(of_row).mul_(weights).neg_()
            # Added before rounding to the weight's type: 1 - p may be small.
            at = (tokens.row[mine], tokens.target[mine] - block.start)
            delta.index_put_(at, of_chosen[tokens.order[mine]], accumulate=True)
            if slope is not None:
                delta *= slope
            if grad_bias is not None:
                grad_bias[block] = delta.sum(dim=0)
            delta = delta.to(weight.dtype)
            if grad_hidden is not None:
                grad_hidden += delta @ weight[block]
            if grad_weight is not None:
                torch.mm(delta.t(), hidden, out=grad_weight[block])
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, block: slice) -> Tensor:
    return F.linear(hidden, weight[block], None if bias is None else bias[block])


def _per_row(grad: Tensor | None, row: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """A gradient [N] of tokens times the factor [R] of their rows, and its sums [R] by row."""
    sums = torch.zeros_like(factor)
    if grad is None:
        return factor.new_zeros(len(row)), sums
    scaled = grad * factor[row]
    return scaled, sums.index_add_(0, row, scaled)
