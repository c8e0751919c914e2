"""A Hugging Face causal LM from its folder; what could not be trained faithfully is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from asyncrl.errors import ModelError
from asyncrl.learner.policy.attention import FLASH_NAME, NAME
from asyncrl.learner.policy.flash import use_flash
from asyncrl.model_store.tensors import DTYPES, stored_tensors

_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


def load_causal_lm(path: Path, *, trust_remote_code: bool) -> Any:
    """The model of a folder: on the CPU, in float32, with packed attention, in eval mode.

    Raises:
        ModelError: there is none, it cannot be packed, or its weights are not those of its
            configuration (an embedding with more rows than `vocab_size`, a tensor left out).
    """
    model = load_checked(
        path, torch.float32, attn_implementation=NAME, trust_remote_code=trust_remote_code
    )
    _check_config(model.config, path)
    if not model._supports_attention_backend or getattr(model, "_is_stateful", False):
        raise ModelError(
            f"{type(model).__name__} ({path}) computes its attention in its own way, so sequences "
            "cannot be packed: use a model that supports transformers' attention interface"
        )
    # Dropout would make the engine's policy and the learner's differ: no module is in training
    # mode, whatever its rate.
    return model.eval()


def load_checked(path: Path, dtype: torch.dtype | str, **options: Any) -> Any:
    """The model of a folder, all of whose weights are the folder's.

    Args:
        path: the folder.
        dtype: of the weights; "auto": as they were saved.
        options: further ones of `from_pretrained`.

    Raises:
        ModelError: there is none, or its weights are not those of its configuration.
    """
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            ignore_mismatched_sizes=True,  # reported below, by name
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as e:
        why = " ".join(str(e).split())
        raise ModelError(f"cannot load a causal language model from {path}: {why}") from e
    _check_weights(found, path)
    return model


def holds_plainly(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a folder's safetensors files hold the parameters of these names and shapes as they
    are, not under other names, quantised or cut otherwise.
    """
    try:
        stored = stored_tensors(path)
    except ModelError:
        return False
    return all(
        name in stored and stored[name].shape == shape and stored[name].dtype in DTYPES
        for name, shape in shapes.items()
    )


def _check_config(config: Any, path: Path) -> None:
    odd = set(getattr(config, "layer_types", None) or ()) - _SUPPORTED_LAYERS
    if odd:
        raise ModelError(
            f"{path} has layers of type {', '.join(sorted(odd))}, which would mix packed "
            f"sequences: only {', '.join(sorted(_SUPPORTED_LAYERS))} are supported"
        )


def _check_weights(found: Any, path: Path) -> None:
    """Refuse a model of which transformers made up a part.

    An embedding padded beyond `vocab_size` is one such: transformers and vLLM both want the
    checkpoint's rows to be config.json's. (Ids that no tokenizer produces, below `vocab_size`, are
    no padding to either: they are in the engine's softmax and in the learner's.)
    """
    if found["mismatched_keys"]:
        name, shape, expected = min(found["mismatched_keys"])
        raise ModelError(
            f"{path}: {name} is {tuple(shape)} in the weights and {tuple(expected)} by "
            "config.json, which the engine refuses too: make them agree (a padded embedding: set "
            "vocab_size to its rows)"
        )
    missing = sorted(found["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{path} lacks the weights {missing[0]}{more}: the folder is incomplete")


def set_attention(model: Any, setting: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Use the attention of `learner.attention` on `device` (see `use_flash`).

    Raises:
        ModelError: flash was asked for where it cannot work.
    """
    config = model.config.get_text_config()
    head_size = getattr(config, "head_dim", None)
    head_size = head_size or config.hidden_size // config.num_attention_heads
    if use_flash(setting, device, dtype, head_size):
        model.set_attn_implementation(FLASH_NAME)


def checkpoint_layers(model: Any) -> None:
    """Recompute the activations of each decoder layer in the backward pass.

    Raises:
        ModelError: the model cannot.
    """
    if not model.supports_gradient_checkpointing:
        raise ModelError(
            f"{type(model).__name__} does not support gradient checkpointing: "
            "set learner.gradient_checkpointing=false"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # the flag it looks at; its children stay in eval mode


def decoder_layers(model: Any) -> list[nn.Module]:
    """The layers that a model repeats, in order."""
    names = set(model._no_split_modules or ())
    return [m for m in model.modules() if type(m).__name__ in names]


def cast_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep the parameters that do not train in `dtype`; in place, so that tied ones stay tied.

    The forward pass is the same to the bit: sharding casts the others to `dtype` for it.
    """
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
