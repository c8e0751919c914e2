"""What a model folder's safetensors files hold, by name; read without torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import xxhash

from asyncrl.errors import ModelError
from asyncrl.model_store.folder import read_json

_INDEX = "model.safetensors.index.json"
_PLACES, _BLOCK = 1024, 4096
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Types of plain weights, as safetensors writes and as torch names them."""


class Stored(NamedTuple):
    """A tensor in a file.

    >>> Stored(Path("model.safetensors"), "BF16", (49152, 576)).numel
    28311552
    """

    file: Path
    dtype: str
    """As safetensors writes it."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the files that transformers would load; {} where they are of another kind.

    Raises:
        ModelError: a file is missing or is none of safetensors.
    """
    from safetensors import SafetensorError, safe_open

    found = {}
    for file in _files(folder):
        try:
            with safe_open(file, "np") as opened:
                for name in opened.keys():  # noqa: SIM118 (it is no dict)
                    part = opened.get_slice(name)
                    found[name] = Stored(file, part.get_dtype(), tuple(part.get_shape()))
        except (OSError, SafetensorError) as e:
            raise ModelError(f"{file}: cannot be read ({e}); fetch the model again") from e
    return found


def fingerprint(folder: Path) -> int:
    """A number that tells the weights of two folders apart: xxh3_64 of each file's size and of
    4 KiB at each of 1,024 places.

    Raises:
        ModelError: a file cannot be read.
    """
    digest = xxhash.xxh3_64()
    for file in _files(folder):
        try:
            size = file.stat().st_size
            digest.update(size.to_bytes(8, "little"))
            with file.open("rb") as opened:
                for place in range(_PLACES):
                    opened.seek(size * place // _PLACES)
                    digest.update(opened.read(_BLOCK))
        except OSError as e:
            raise ModelError(f"{file}: cannot be read ({e}); fetch the model again") from e
    return digest.intdigest()


def _files(folder: Path) -> list[Path]:
    whole = folder / "model.safetensors"
    if whole.is_file():
        return [whole]
    if (folder / _INDEX).is_file():
        shards = read_json(folder / _INDEX).get("weight_map", {}).values()
        return [folder / shard for shard in sorted(set(shards))]
    return []
