"""From adapters to a model: vLLM's layerwise reload of a small model that fuses two layers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from asyncrl.actors.loading import Base, Loader, merged
from asyncrl.adapters import A, Adapters, B, Merge, bytes_to_load
from asyncrl.errors import ModelError, WeightSyncError
from asyncrl.model_store.tensors import fingerprint, stored_tensors

SHAPES = {
    "embed.weight": (7, 3), "0.q.weight": (4, 3), "0.k.weight": (2, 3), "0.k.bias": (2,),
    "0.o.weight": (3, 4),
}  # fmt: skip
"""A checkpoint; the model has q and k in one layer."""
MINE = {"0.q.weight": "qk.weight", "0.k.weight": "qk.weight", "0.k.bias": "qk.bias"}
"""What the model calls them."""


def adapters(*names: str, **given: Any) -> Adapters:
    merges = {name: Merge(0.5, transposed=False) for name in names}
    settings: Any = {"base_dtype": "float32", "dtype": "float32", "load_bytes": 1000, "base": 0}
    return Adapters(merges, **(settings | given))


def came(seed: int, *names: str) -> dict[str, Tensor]:
    """A and B of some parameters, of rank 2."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in names:
        rows, columns = SHAPES[name]
        found[name + A] = torch.randn(2, columns, generator=generator)
        found[name + B] = torch.randn(rows, 2, generator=generator)
    return found


class Fused(nn.Module):
    """As vLLM's models are: it takes a checkpoint's names, and has fewer and larger layers."""

    packed_modules_mapping = {"qk": ["q", "k"]}  # noqa: RUF012 (as vLLM has it)

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qk, self.o = (nn.Module() for _ in range(3))
        for layer, name, shape in (
            (self.embed, "weight", (7, 3)),
            (self.qk, "weight", (6, 3)),
            (self.qk, "bias", (2,)),
            (self.o, "weight", (3, 4)),
        ):
            parameter = nn.Parameter(torch.zeros(shape), requires_grad=False)
            parameter.weight_loader = place  # type: ignore[attr-defined]
            layer.register_parameter(name, parameter)
        self.seen: list[str] = []

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, value in weights:
            self.seen.append(name)
            mine = MINE.get(name, name.removeprefix("0."))
            parameter: Any = self.get_parameter(mine)
            parameter.weight_loader(parameter, value, 4 if name == "0.k.weight" else 0)
            loaded.add(mine)
        return loaded

    def values(self) -> dict[str, Tensor]:
        """By the checkpoint's names."""
        qk = self.qk.get_parameter("weight")
        return {
            "embed.weight": self.embed.get_parameter("weight"), "0.q.weight": qk[:4],
            "0.k.weight": qk[4:], "0.k.bias": self.qk.get_parameter("bias"),
            "0.o.weight": self.o.get_parameter("weight"),
        }  # fmt: skip


def place(param: Tensor, value: Tensor, at: int) -> None:  # vLLM wants it called param
    param.data[at : at + len(value)].copy_(value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_file({n: torch.randn(s) for n, s in SHAPES.items()}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def model(folder: Path) -> Fused:
    """Serving what the folder holds."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    made = Fused()
    record_metadata_for_reloading(made)
    base = Base(folder)
    made.load_weights((name, base.tensor(name)) for name in base.stored)
    made.seen.clear()
    return made


def loader(model: Fused, folder: Path) -> Loader:
    return Loader(model, SimpleNamespace(model=str(folder), hf_config=SimpleNamespace()))


def publish(loader: Loader, tensors: dict[str, Tensor], how: Adapters | None) -> None:
    if how is not None:
        loader.prepare(how)
    loader.load(list(tensors.items()), how)


def check(model: Fused, folder: Path, tensors: dict[str, Tensor], how: Adapters) -> None:
    base = Base(folder)
    for name, value in model.values().items():
        want = base.tensor(name)
        if name in how.merges:
            want = want + 0.5 * tensors[name + B] @ tensors[name + A]
        torch.testing.assert_close(value, want, rtol=0, atol=1e-6)


def test_only_the_layers_that_change_are_loaded_again(model: Fused, folder: Path) -> None:
    how, load = adapters("0.q.weight", base=fingerprint(folder)), loader(model, folder)
    for seed in (1, 2, 3):
        model.seen.clear()
        tensors = came(seed, "0.q.weight")
        publish(load, tensors, how)
        check(model, folder, tensors, how)
        assert set(model.seen) == (
            set(SHAPES) if seed == 1 else {"0.q.weight", "0.k.weight", "0.k.bias"}
        )


def test_what_was_loaded_whole_is_loaded_from_the_folder_again(model: Fused, folder: Path) -> None:
    how, load = adapters("0.o.weight", base=fingerprint(folder)), loader(model, folder)
    tensors = came(1, "0.o.weight")
    for _ in range(2):
        publish(load, {name: torch.ones(shape) for name, shape in SHAPES.items()}, None)
        assert all((value == 1).all() for value in model.values().values())
        publish(load, tensors, how)
        check(model, folder, tensors, how)


def test_a_layer_fused_without_a_word_is_loaded_with_all_others(
    model: Fused, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fused, "packed_modules_mapping", {})
    how, load = adapters("0.q.weight", base=fingerprint(folder)), loader(model, folder)
    for seed in (1, 2):
        tensors = came(seed, "0.q.weight")
        publish(load, tensors, how)
        check(model, folder, tensors, how)


def test_the_sum_starts_from_the_learners_numbers_and_is_rounded_once(folder: Path) -> None:
    tensors = came(1, "0.o.weight")
    how = adapters("0.o.weight", base_dtype="bfloat16", dtype="float16")
    got = dict(merged(Base(folder), tensors, how, SHAPES))
    for name, value in got.items():
        want = Base(folder).tensor(name).bfloat16().float()
        if name == "0.o.weight":
            want += tensors[name + B] @ tensors[name + A] * 0.5
        assert torch.equal(value, want.half()), name


@pytest.mark.parametrize("at", [-1, -200])
def test_adapters_of_another_model_are_refused_before_anything_changes(
    model: Fused, folder: Path, at: int
) -> None:
    """A byte is enough: 4 KiB at each of 1,024 places are all of a small file."""
    other = adapters("0.o.weight", base=fingerprint(folder))
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[at] ^= 1
    file.write_bytes(raw)
    with pytest.raises(WeightSyncError, match="does not hold the weights that the adapters"):
        loader(model, folder).prepare(other)
    assert model.seen == []


def test_a_folder_that_comes_back_is_taken(model: Fused, folder: Path) -> None:
    weights, away = folder / "model.safetensors", folder / "away"
    load, tensors = loader(model, folder), came(1, "0.o.weight")
    how = adapters("0.o.weight", base=fingerprint(folder))
    weights.rename(away)
    with pytest.raises(WeightSyncError, match="does not hold the weights"):
        publish(load, tensors, how)
    weights.write_bytes(b"no such thing")
    with pytest.raises(WeightSyncError, match=r"without their base: .*cannot be read"):
        publish(load, tensors, how)
    away.rename(weights)
    publish(load, tensors, how)
    check(model, folder, tensors, how)


def test_shards_of_an_index_are_one_folder(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"more": torch.ones(2, dtype=torch.int64)}, folder / "b.safetensors")
    index = '{"weight_map": {"more": "b.safetensors", "embed.weight": "a.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    stored = stored_tensors(folder)
    assert {n: s.shape for n, s in stored.items()} == SHAPES | {"more": (2,)}
    got = dict(merged(Base(folder), {}, adapters(dtype="bfloat16"), ["more", "embed.weight"]))
    assert [t.dtype for t in got.values()] == [torch.int64, torch.bfloat16]
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors: cannot be read"):
        stored_tensors(folder)


def test_the_info_says_what_is_to_be_loaded() -> None:
    how = adapters("0.q.weight", "0.o.weight")
    info = {"names": ["0.q.weight:A"], "dtype_names": ["float32"], "shapes": [[2, 3]]}
    assert bytes_to_load(info) == 24
    assert bytes_to_load(info | {"adapters": how.to_info()}) == 1000
    assert Adapters.from_info(how.to_info()) == how
    for broken in ({}, how.to_info() | {"merges": {"0.q.weight": [1.0]}}):
        with pytest.raises(WeightSyncError, match="malformed adapters"):
            Adapters.from_info(broken)
