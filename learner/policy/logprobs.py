"""From a pack to the log-probabilities of its sampled tokens: trunk, chosen rows, chunked head.

The head of a Hugging Face model is not called, since it would make the logits whole. What it does
is read from its configuration (`head_spec`) and compared with the model itself once (`check_head`).

Axis letters: S tokens of a pack, R predicting positions, H hidden size, V vocabulary, N tokens
that carry loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.errors import ModelError
from asyncrl.learner.packing import Pack, Segment
from asyncrl.learner.policy.attention import LAYOUT, PackLayout
from asyncrl.learner.policy.head import head_logprobs


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


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """How a model makes logits of its last hidden state; see `head_logprobs`."""

    weight: Tensor
    """[V, H]"""
    bias: Tensor | None
    softcap: float | None
    scale: float
    vocab: int
    """Tokens of the softmax; further rows of the weight are padding."""


def head_spec(model: Any) -> HeadSpec:
    """The head of a Hugging Face causal LM, with its weight as it is at this moment.

    Under FSDP, call it in the forward of the root, where the weight is whole.

    Raises:
        ModelError: the head is no plain linear layer.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(
            f"the head of {type(model).__name__} is a {type(head).__name__}, but only a plain "
            "linear layer can be trained (with LoRA: leave the head out of learner.lora.targets)"
        )
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0  # Cohere
    return HeadSpec(
        weight=head.weight,
        bias=head.bias,
        softcap=getattr(config, "final_logit_softcapping", None),  # Gemma
        scale=scale / (getattr(config, "logits_scaling", None) or 1.0),  # Granite
        vocab=min(config.vocab_size, len(head.weight)),
    )


def trunk_of(model: Any) -> Any:
    """The part of a Hugging Face causal LM that ends with its last hidden state.

    Raises:
        ModelError: the model has no such part.
    """
    trunk = model.get_decoder()
    if trunk is model:
        raise ModelError(f"{type(model).__name__} has no trunk apart from its head")
    return trunk


def pack_scores(trunk: Any, head: HeadSpec, pack: PackTensors) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability [N] and entropy [N] of each token, and hidden states [R, H] of `pack.rows`.

    In nats, float32, at the sampling temperature; all three differentiable. The hidden states are
    in the trunk's type.
    """
    output = trunk(
        input_ids=pack.input_ids[None],
        position_ids=pack.position_ids[None],
        use_cache=False,
        **{LAYOUT: pack.layout},
    )
    # Not by [rows]: the gradient of an index_select is the cheaper one.
    hidden = output.last_hidden_state[0].index_select(0, pack.rows)
    logprobs, entropy = head_logprobs(
        hidden,
        head.weight,
        head.bias,
        pack.row_temperature,
        pack.row,
        pack.target,
        softcap=head.softcap,
        scale=head.scale,
        vocab=head.vocab,
    )
    return logprobs, entropy, hidden


_PROBE_TOKENS = 8
_PROBE_TARGETS = 64
_PROBE_TOLERANCE = 1e-4


@torch.no_grad()
def check_head(model: Any) -> None:
    """Compare `pack_scores` with the logits of the model itself on a few random tokens.

    So that a scaling of logits this module does not know is an error and never a wrong gradient.
    The model must be whole (before sharding) and in float32.

    Raises:
        ModelError: they differ by more than 1e-4 nats, or the model's logits are not finite.
    """
    spec = head_spec(model)
    pack = _probe(spec)
    output = model(
        input_ids=pack.input_ids[None],
        position_ids=pack.position_ids[None],
        use_cache=False,
        **{LAYOUT: pack.layout},
    )
    full = torch.log_softmax(output.logits[0, :, : spec.vocab].float(), dim=-1)
    logprobs, entropy, _ = pack_scores(trunk_of(model), spec, pack)
    difference = max(
        (logprobs - full[pack.row, pack.target]).abs().max().item(),
        (entropy + (full.exp() * full).sum(dim=-1)[pack.row]).abs().max().item(),
    )
    if not difference <= _PROBE_TOLERANCE:  # so that NaN is refused too
        raise ModelError(
            f"{type(model).__name__} makes its logits in a way that is not supported: log-"
            f"probabilities from its last hidden states are off by {difference:.2g} (scale "
            f"{spec.scale:g}, soft cap {spec.softcap}): use a model whose head is linear"
        )


def _probe(head: HeadSpec) -> PackTensors:
    """One sequence of random tokens; each position predicts many."""
    device, random = head.weight.device, torch.Generator().manual_seed(0)
    size = (_PROBE_TOKENS * (_PROBE_TARGETS + 1),)
    ids = torch.randint(head.vocab, size, generator=random).to(device)
    rows = torch.arange(_PROBE_TOKENS, device=device)
    return PackTensors(
        input_ids=ids[:_PROBE_TOKENS],
        position_ids=rows,
        layout=PackLayout([Segment(0, 0, _PROBE_TOKENS, ())], device),
        rows=rows,
        row_temperature=torch.ones(_PROBE_TOKENS, device=device),
        row=rows.repeat_interleave(_PROBE_TARGETS),
        target=ids[_PROBE_TOKENS:],
    )
