"""Attention of a whole pack in one call of torch's variable-length flash kernel, on CUDA.

The kernel takes independent runs: queries that lie one after another, and their keys likewise. A
run's last query sits at its last key (causal, aligned at the bottom right). A pack has a run for
each prompt and each response; where a prompt is shared its keys and values are copied in front of
each response's own, by one index built once per pack:

    segment [prompt | response 1 | response 2] behind a prefix

    queries   prompt             response 1                     response 2
    keys      prefix prompt      prefix prompt response 1       prefix prompt response 2

Axis letters: S tokens of a pack, G gathered keys, A runs, H query heads, K key-value heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from asyncrl.errors import ModelError
from asyncrl.learner.packing import Ints, Segment

_MAX_HEAD_SIZE = 256


@dataclass(frozen=True, slots=True)
class FlashPlan:
    """What the kernel has to know of a pack."""

    cu_queries: Tensor
    """[A + 1] int32: where each run's queries begin in the pack, and S."""
    cu_keys: Tensor
    """[A + 1] int32: where each run's keys begin among the gathered ones, and G."""
    max_queries: int
    max_keys: int
    gather: Tensor | None
    """[G] pack position of each gathered key; None where that is 0, 1, ..., S - 1."""

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> FlashPlan:
        """The plan of a pack with these segments."""
        queries, keys = zip(*(run for s in segments for run in _runs(s)), strict=True)
        gather = np.concatenate(keys)
        tokens = sum(queries)
        shared = not np.array_equal(gather, np.arange(tokens))
        key_lengths = [len(k) for k in keys]
        return cls(
            cu_queries=_cumulated(queries, device),
            cu_keys=_cumulated(key_lengths, device),
            max_queries=max(queries),
            max_keys=max(key_lengths),
            gather=torch.from_numpy(gather).to(device) if shared else None,
        )


def _runs(s: Segment) -> Iterator[tuple[int, Ints]]:
    """The number of queries and the pack positions of the keys of each run, in pack order."""
    prefix = np.arange(s.prefix_tokens)
    if len(s.response_tokens) <= 1:
        yield s.tokens, np.concatenate([prefix, np.arange(s.start, s.start + s.tokens)])
        return
    end = s.start + s.prompt_tokens
    prompt = np.concatenate([prefix, np.arange(s.start, end)])
    yield s.prompt_tokens, prompt
    for length in s.response_tokens:
        yield length, np.concatenate([prompt, np.arange(end, end + length)])
        end += length


def _cumulated(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: FlashPlan, window: int | None, scale: float
) -> Tensor:
    """Attention of a pack: query [1, H, S, D], key and value [1, K, S, D]; returns [1, S, H, D].

    `window` counts a query's own position, as in transformers. The gradient of shared keys adds up
    in an order that varies from call to call.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if plan.gather is not None:
        k, v = (_Gather.apply(x, plan.gather) for x in (k, v))  # type: ignore[no-untyped-call]
    # Keys before a query's own that it sees; -1 for all.
    left = -1 if window is None or window >= plan.max_keys else window - 1
    return _kernel(
        q,
        k,
        v,
        plan.cu_queries,
        plan.cu_keys,
        plan.max_queries,
        plan.max_keys,
        scale=scale,
        window_size=(left, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )[None]


def _kernel(*args: Any, **options: Any) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # here: it loads the compiler

    out = varlen_attn(*args, **options)
    assert isinstance(out, Tensor)  # it also returns the normalisers if asked to
    return out


class _Gather(torch.autograd.Function):
    """x[index], with a gradient summed in float32.

    A prompt's keys collect a gradient from each of its responses; one by one in bfloat16 the later
    ones would be rounded away.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        grad = grads[0]
        exact = torch.promote_types(grad.dtype, torch.float32)
        sums = grad.new_zeros((ctx.rows, *grad.shape[1:]), dtype=exact)
        return sums.index_add_(0, index, grad.to(exact)).to(grad.dtype), None


def use_flash(
    setting: Literal["auto", "sdpa", "flash"],
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
) -> bool:
    """Whether to use the flash kernel for heads of `head_size` computed in `dtype`.

    Raises:
        ModelError: `flash` was asked for where it cannot work.
    """
    if setting == "sdpa":
        return False
    obstacle = _obstacle(device, dtype, head_size)
    if obstacle and setting == "flash":
        raise ModelError(f"learner.attention=flash needs {obstacle}: set it to auto or sdpa")
    return not obstacle


def _obstacle(device: torch.device, dtype: torch.dtype, head_size: int) -> str | None:
    """What is missing for the kernel."""
    if device.type != "cuda":
        return f"an NVIDIA GPU, and this learner runs on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"learner.dtype=bfloat16, not {str(dtype).removeprefix('torch.')}"
    if head_size > _MAX_HEAD_SIZE or head_size % 8:
        return f"heads of a multiple of 8 and at most {_MAX_HEAD_SIZE}, and these are {head_size}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"an Ampere GPU or newer, and this is a {torch.cuda.get_device_name(device)}"
    if not torch.backends.cuda.is_flash_attention_available():
        return "a torch that was built with flash attention"
    return None
