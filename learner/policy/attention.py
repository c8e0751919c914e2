"""Attention within the segments of a pack, registered with transformers under two names.

    NAME          segment by segment with torch's own attention, anywhere
    FLASH_NAME    the whole pack in one call of a CUDA kernel (flash.py)

Linear layers, norms and rotary embeddings run over the whole pack [1, S]; attention runs segment
by segment, so that no token sees another sequence. The layout travels as a keyword argument
through the model's forward, hence gradient checkpointing recomputes with the same one.

A segment [prompt | response 1 | response 2 | ...], whose prompt may begin with the pack's common
prefix, is computed in one of two exact ways:

    block   all its tokens at once under a boolean mask        short responses, few calls
    split   the prompt causally; then each response, its       long responses, no wasted work
            queries over [prompt | itself]

Axis letters: S tokens of a pack, H query heads, K key-value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from asyncrl.errors import ModelError
from asyncrl.learner.packing import Segment
from asyncrl.learner.policy.flash import FlashPlan, flash_attention

NAME = "asyncrl_packed"
"""Pass as `attn_implementation` to transformers."""

FLASH_NAME = "asyncrl_packed_varlen"
"""The same where `use_flash` allows it. (With "flash" in it transformers wants its own kernels.)"""

LAYOUT = "asyncrl_layout"
"""Keyword argument of the model's forward that carries the `PackLayout`."""

_CALL_COST = 128 * 128
"""Query-key pairs that cost as much as one more attention call: decides block or split."""

_DENSE_PAIRS = 512 * 512
"""CPU: up to this many query-key pairs plain products beat the fused kernel's slow backward."""


class PackLayout:
    """The segments of a pack and the masks of its blocks, each built once for all layers."""

    def __init__(self, segments: Sequence[Segment], device: torch.device | str):
        self.segments = tuple(segments)
        self.device = torch.device(device)
        self._masks: dict[tuple[object, ...], Tensor] = {}

    @cached_property
    def flash_plan(self) -> FlashPlan:
        """What the flash kernel has to know of the pack."""
        return FlashPlan.of(self.segments, self.device)

    def block_mask(self, s: Segment, window: int | None) -> Tensor:
        """[S, C + S] boolean mask of a whole segment over prefix and segment."""
        shape = (s.prefix_tokens + s.prompt_tokens, *s.response_tokens)

        def build() -> Tensor:
            lengths = torch.tensor(shape)
            owner = torch.repeat_interleave(torch.arange(len(shape)), lengths)
            position = torch.cat(
                [torch.arange(shape[0])] + [shape[0] + torch.arange(t) for t in shape[1:]]
            )
            same = (owner[:, None] == owner[None, :]) | (owner[None, :] == 0)
            return (same & _causal(position, position, window))[s.prefix_tokens :]

        return self.cached(("block", window, s.prefix_tokens, shape), build)

    def tail_mask(self, queries: int, keys: int, window: int | None) -> Tensor:
        """[queries, keys] mask of the last `queries` of `keys` tokens of one sequence."""

        def build() -> Tensor:
            position = torch.arange(keys)
            return _causal(position[keys - queries :], position, window)

        return self.cached(("tail", window, queries, keys), build)

    def additive_mask(self, mask: Tensor, dtype: torch.dtype, heads: int) -> Tensor:
        """[heads * queries, keys]: 0 where the boolean `mask` of this layout holds, else -inf."""

        def build() -> Tensor:
            zeros = torch.zeros_like(mask, dtype=dtype)
            return zeros.masked_fill_(~mask, float("-inf")).repeat(heads, 1)

        return self.cached(("additive", id(mask), dtype, heads), build)

    def cached(self, key: tuple[object, ...], build: Callable[[], Tensor]) -> Tensor:
        """The tensor of `key`, built and moved to the device once."""
        if key not in self._masks:
            self._masks[key] = build().to(self.device)
        return self._masks[key]


def _causal(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Mask by position: not after the query, and less than `window` before it."""
    distance = query[:, None] - key[None, :]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def as_block(s: Segment) -> bool:
    """Whether one masked call over the segment is cheaper than one call for each response."""
    prompt = s.prefix_tokens + s.prompt_tokens
    split = s.prompt_tokens * prompt + sum(t * (prompt + t) for t in s.response_tokens)
    block = s.tokens * (s.prefix_tokens + s.tokens)
    return block <= split + _CALL_COST * len(s.response_tokens)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, H, S, D], key and value [1, K, S, D].

    Returns [1, S, H, D] and no weights.

    Raises:
        ModelError: the model did not hand the layout down, or asks for what is not supported.
    """
    layout = _checked_layout(module, attention_mask, dropout, sliding_window, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # One split, not slices: the backward of a slice fills a gradient of the whole pack.
    sizes = [s.tokens for s in layout.segments]
    queries, keys, values = (torch.split(x, sizes, dim=2) for x in (query, key, value))
    out: list[Tensor] = []
    for s, q, k, v in zip(layout.segments, queries, keys, values, strict=True):
        if s.prefix_tokens:
            k, v = torch.cat([keys[0], k], dim=2), torch.cat([values[0], v], dim=2)
        attend = _block if as_block(s) else _split
        out += attend(q, k, v, s, layout, sliding_window, scale)
    return torch.cat(out, dim=2).transpose(1, 2), None


def packed_flash_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The same as `packed_attention`, by the flash kernel."""
    layout = _checked_layout(module, attention_mask, dropout, sliding_window, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return flash_attention(query, key, value, layout.flash_plan, sliding_window, scale), None


def _block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Segment,
    layout: PackLayout,
    window: int | None,
    scale: float,
) -> list[Tensor]:
    if len(s.response_tokens) <= 1:
        return [_tail(q, k, v, layout, window, scale)]
    return [_attend(q, k, v, layout, layout.block_mask(s, window), scale)]


def _split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    s: Segment,
    layout: PackLayout,
    window: int | None,
    scale: float,
) -> list[Tensor]:
    prompt = s.prefix_tokens + s.prompt_tokens
    queries = torch.split(q, [s.prompt_tokens, *s.response_tokens], dim=2)
    keys, values = (torch.split(x, [prompt, *s.response_tokens], dim=2) for x in (k, v))
    out = [_tail(queries[0], keys[0], values[0], layout, window, scale)]
    for q_t, k_t, v_t in zip(queries[1:], keys[1:], values[1:], strict=True):
        k_all, v_all = torch.cat([keys[0], k_t], dim=2), torch.cat([values[0], v_t], dim=2)
        out.append(_tail(q_t, k_all, v_all, layout, window, scale))
    return out


def _tail(
    q: Tensor, k: Tensor, v: Tensor, layout: PackLayout, window: int | None, scale: float
) -> Tensor:
    """Causal attention of the last queries of one sequence over all of it."""
    queries, keys = q.shape[2], k.shape[2]
    if window is not None and window >= keys:
        window = None
    if queries == keys and window is None and not _dense_is_faster(q, k):
        return _attend(q, k, v, layout, None, scale)
    return _attend(q, k, v, layout, layout.tail_mask(queries, keys, window), scale)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, layout: PackLayout, mask: Tensor | None, scale: float
) -> Tensor:
    """Attention under a boolean mask; None is the plain causal one. Shapes [1, heads, ., D]."""
    if mask is not None and _dense_is_faster(q, k):
        return _dense(q, k, v, layout, mask, scale)
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and mask is not None:  # the memory-efficient CUDA kernel knows no GQA
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        scale=scale,
        is_causal=mask is None and q.shape[2] > 1,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _dense_is_faster(q: Tensor, k: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[2] * k.shape[2] <= _DENSE_PAIRS


def _dense(
    q: Tensor, k: Tensor, v: Tensor, layout: PackLayout, mask: Tensor, scale: float
) -> Tensor:
    """Attention by two plain products, the query heads of a key-value head side by side."""
    _, heads, queries, size = q.shape
    kv_heads = k.shape[1]
    add = layout.additive_mask(mask, q.dtype, heads // kv_heads).expand(kv_heads, -1, -1)
    grouped = q[0].reshape(kv_heads, -1, size)
    scores = torch.baddbmm(add, grouped, k[0].transpose(1, 2), alpha=scale)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    return torch.bmm(weights, v[0]).view(1, heads, queries, -1)


_REFUSED = ("softcap", "s_aux", "position_bias", "head_mask", "cache")
"""Attention arguments that change the result and are not implemented here."""


def _checked_layout(
    module: nn.Module,
    attention_mask: Tensor | None,
    dropout: float,
    window: int | None,
    kwargs: dict[str, Any],
) -> PackLayout:
    name = type(module).__name__
    layout = kwargs.get(LAYOUT)
    if not isinstance(layout, PackLayout):
        raise ModelError(
            f"{name} does not hand keyword arguments down to its attention function: "
            "packed training needs a model that does (Llama, Qwen, Mistral, Gemma and their kin)"
        )
    for argument in _REFUSED:
        if kwargs.get(argument) is not None:
            raise ModelError(f"{name} uses attention with `{argument}`, which is not supported")
    if dropout or attention_mask is not None or kwargs.get("is_causal") is False:
        raise ModelError(f"{name} asks for dropout or a mask of its own, which is not supported")
    types = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if types and index is not None and types[index] == "sliding_attention" and window is None:
        raise ModelError(f"{name} does not hand its sliding window down, which is not supported")
    return layout


AttentionInterface.register(NAME, packed_attention)
AttentionInterface.register(FLASH_NAME, packed_flash_attention)
