"""Whether two folders of weights hold the same bits. Reads safetensors files without torch."""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import ModelError


@dataclass(frozen=True, slots=True)
class _Tensor:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def form(self) -> tuple[str, tuple[int, ...]]:
        return self.dtype, self.shape

    def data(self, open_files: dict[Path, mmap.mmap]) -> memoryview:
        if self.file not in open_files:
            with open(self.file, "rb") as f:
                open_files[self.file] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        return memoryview(open_files[self.file])[self.begin : self.end]


def different(one: Path, other: Path) -> list[str]:
    """Names of the tensors of two model folders that differ, or are in one alone.

    Raises:
        ModelError: one of them cannot be read.
    """
    first, second = _tensors(one), _tensors(other)
    odd = sorted(first.keys() ^ second.keys())
    files: dict[Path, mmap.mmap] = {}
    try:
        for name in sorted(first.keys() & second.keys()):
            a, b = first[name], second[name]
            if a.form != b.form or a.data(files) != b.data(files):
                odd.append(name)
    finally:
        for open_file in files.values():
            open_file.close()
    return odd


def _tensors(folder: Path) -> dict[str, _Tensor]:
    found: dict[str, _Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with open(path, "rb") as f:
                size = int.from_bytes(f.read(8), "little")
                header = json.loads(f.read(size))
            for name, t in header.items():
                if name != "__metadata__":
                    begin, end = t["data_offsets"]
                    found[name] = _Tensor(
                        path, t["dtype"], tuple(t["shape"]), 8 + size + begin, 8 + size + end
                    )
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise ModelError(f"{path} cannot be compared: {e}") from e
    if not found:
        raise ModelError(f"{folder} has no safetensors file: there is nothing to compare")
    return found
