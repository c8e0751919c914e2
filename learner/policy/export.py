"""Hugging Face folders: written whole or not at all, and copied in another type."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from asyncrl.errors import ModelError, UserError

_TOKENIZER_FILE = "tokenizer_config.json"


def write_hf(
    folder: Path,
    model: Any,
    origin: Path,
    *,
    state: dict[str, Tensor] | None = None,
    trust_remote_code: bool = False,
    check: bool = False,
) -> None:
    """Write `model` to `folder`, with the tokenizer of `origin`.

    Under a temporary name beside it, renamed when whole.

    Args:
        folder: missing or empty.
        model: a transformers model; without weights of its own if `state` has them.
        origin: folder of the model that it was made from.
        state: weights by name.
        trust_remote_code: run code that `origin` ships.
        check: load what was written before it gets its name.

    Raises:
        OSError: the disk failed, or `folder` exists and is not empty.
        ModelError: what was written does not load.
    """
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    model.save_pretrained(partial, state_dict=state)
    if (origin / _TOKENIZER_FILE).exists():
        tokenizer = AutoTokenizer.from_pretrained(origin, trust_remote_code=trust_remote_code)
        tokenizer.save_pretrained(partial)
    if check:
        _load(partial, "auto", trust_remote_code)
    partial.rename(folder)


def export(
    source: Path, out: Path, dtype: str | None = None, *, trust_remote_code: bool = False
) -> torch.dtype:
    """Copy a Hugging Face folder to `out`, its weights cast to `dtype` (None: as they are).

    Returns:
        The type of the weights written.

    Raises:
        UserError: `out` is there already.
        ModelError: the source does not load, or the copy does not.
        OSError: the disk failed.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder: export to another name")
    transformers_logging.disable_progress_bar()
    model = _load(source, dtype or "auto", trust_remote_code)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_hf(out, model, source, trust_remote_code=trust_remote_code, check=True)
    finally:
        shutil.rmtree(out.with_name(out.name + ".partial"), ignore_errors=True)
    written: torch.dtype = model.dtype
    return written


def _load(folder: Path, dtype: str, trust_remote_code: bool) -> Any:
    """The model of a folder, all of whose weights are there."""
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as e:
        raise ModelError(f"cannot load a causal language model from {folder}: {e}") from e
    if found["missing_keys"]:
        raise ModelError(f"{folder} lacks weights: {', '.join(sorted(found['missing_keys']))}")
    return model
