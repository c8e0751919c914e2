"""Hugging Face folders: written whole or not at all, and copied in another type."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from asyncrl.errors import ModelError, UserError
from asyncrl.learner.policy.loading import load_checked

_TOKENIZER_FILE = "tokenizer_config.json"


def write_hf(
    folder: Path,
    model: Any,
    origin: Path,
    *,
    state: dict[str, Tensor] | None = None,
    trust_remote_code: bool = False,
    partial: Path | None = None,
    replace: bool = False,
) -> None:
    """Write `model` to `folder`, with the tokenizer of `origin`.

    Under a temporary name beside it, renamed when whole.

    Args:
        folder: missing or empty.
        model: a transformers model; without weights of its own if `state` has them.
        origin: folder of the model that it was made from.
        state: weights by name.
        trust_remote_code: run code that `origin` ships.
        partial: an empty folder of the caller's to write in, which is loaded before it gets its
            name; None is `folder`.partial, of which what a killed process left is removed.
        replace: remove what `folder` holds, once the new one is written.

    Raises:
        OSError, SafetensorError: the disk failed, or `folder` exists and is not empty.
        ModelError: what was written does not load, or the tokenizer of `origin` does not.
    """
    check = partial is not None
    if partial is None:
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial, state_dict=state)
    if (origin / _TOKENIZER_FILE).exists():
        _tokenizer(origin, trust_remote_code).save_pretrained(partial)
    if check:
        load_checked(partial, "auto", trust_remote_code=trust_remote_code)
    if replace:
        shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as e:
        why = " ".join(str(e).split())
        raise ModelError(f"cannot load the tokenizer of {folder}: {why}") from e


def export(
    source: Path, out: Path, dtype: str | None = None, *, trust_remote_code: bool = False
) -> torch.dtype:
    """Copy a Hugging Face folder to `out`, its weights cast to `dtype` (None: as they are).

    Returns:
        The type of the weights written.

    Raises:
        UserError: `out` is there already, or cannot be written.
        ModelError: the source does not load, or the copy does not.
    """
    check_free(out, source)
    transformers_logging.disable_progress_bar()
    model = load_checked(source, dtype or "auto", trust_remote_code=trust_remote_code)
    write_new(out, model, source, trust_remote_code=trust_remote_code)
    written: torch.dtype = model.dtype
    return written


def check_free(out: Path, source: Path) -> None:
    """Refuse to write over anything, or into what is exported.

    Raises:
        UserError: `out` is there already, lies within `source`, or cannot be looked at.
    """
    if out.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{out} lies within {source}, which is exported: name another folder")
    try:
        taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    except OSError as e:
        raise _unwritable(out, e) from e
    if taken:
        raise UserError(f"{out} exists and is not an empty folder: export to another name")


def write_new(
    out: Path,
    model: Any,
    origin: Path,
    *,
    state: dict[str, Tensor] | None = None,
    trust_remote_code: bool = False,
) -> None:
    """`write_hf` to a folder of the user's: whole, and checked that it loads.

    Raises:
        UserError: it cannot be written.
        ModelError: what was written does not load.
    """
    target = out.resolve()
    partial = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own: whatever lies beside OUT is the user's.
        partial = Path(tempfile.mkdtemp(prefix=".export-", dir=target.parent))
        partial.chmod(0o777 & ~_umask())
        write_hf(
            target, model, origin, state=state, trust_remote_code=trust_remote_code,
            partial=partial,
        )  # fmt: skip
    except (OSError, SafetensorError) as e:
        raise _unwritable(out, e) from e
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _umask() -> int:
    """What new folders of this process lack; `mkdtemp` gives nobody else a right."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _unwritable(out: Path, error: Exception) -> UserError:
    """What to say when `out` cannot be written; the error may be about a file in it."""
    text = getattr(error, "strerror", None) or " ".join(str(error).split())
    fix = "make room" if "o space left" in text else "name a folder that can be written"
    return UserError(f"{out} cannot be written ({text}): {fix}")
