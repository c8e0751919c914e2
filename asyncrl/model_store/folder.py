"""What a usable model folder holds; read without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncrl.errors import ModelError

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def missing_parts(folder: Path) -> list[str]:
    """What a folder lacks to be a model: config, weights (every shard), tokenizer."""
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    missing += _missing_weights(folder)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        missing.append(f"a tokenizer ({' or '.join(_TOKENIZERS[:2])})")
    return missing


def _missing_weights(folder: Path) -> list[str]:
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / index).is_file():
            shards = set(read_json(folder / index).get("weight_map", {}).values())
            return sorted(s for s in shards if not (folder / s).is_file())
    files = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    if not files:
        return ["weights (model.safetensors)"]
    return [f"{f.name} (it is empty)" for f in files if f.stat().st_size == 0]


def check_folder(folder: Path, name: str) -> None:
    """Refuse a folder that cannot be a model.

    Raises:
        ModelError: naming what is missing.
    """
    missing = missing_parts(folder)
    if missing:
        raise ModelError(
            f"model.name={name}: {folder} is not a whole model, it lacks {', '.join(missing)}: "
            "give a folder as `save_pretrained` of model and tokenizer writes it"
        )
    read_config(folder)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelError: it cannot be read or is no object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise ModelError(f"{path}: cannot be read as JSON ({e}); fetch the model again") from e
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object; fetch the model again")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json."""
    return read_json(folder / "config.json")


def context_length(folder: Path) -> int | None:
    """Positions that the model was made for; None if its config does not say."""
    config = read_config(folder)
    for part in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            if isinstance(part.get(key), int):
                return int(part[key])
    return None


def has_chat_template(folder: Path) -> bool:
    """True if the tokenizer can render chat turns."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    config = folder / "tokenizer_config.json"
    return config.is_file() and bool(read_json(config).get("chat_template"))
