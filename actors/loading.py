"""From staged tensors to a serving model: merged with the base where adapters came alone.

staged A, B ──┐
              ├─► W + scaling B A, one tensor at a time ──► layerwise reload ──► model
model folder ─┘   (mapped: engines of a machine share its pages)

Runs in vLLM's worker, wherever the tensors were staged. `prepare` refuses what could not be
loaded, before the model is touched; `load` then changes it, all or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.adapters import A, Adapters, B
from asyncrl.errors import ModelError, WeightSyncError
from asyncrl.model_store.tensors import DTYPES, Stored, fingerprint, stored_tensors

Staged = Sequence[tuple[str, Tensor]]
"""Hugging Face name and tensor of whatever travelled."""


class Loader:
    """Loads publications into one model.

    Args:
        model: as vLLM serves it.
        model_config: vLLM's; its `model` is the folder that the engine started from.
    """

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self._model, self._config = model, model_config
        self._base: Base | None = None
        self._frozen: tuple[str, str] | None = None
        """The types that what is frozen was loaded through; None before that."""

    def prepare(self, adapters: Adapters) -> None:
        """Make sure that the base of the adapters is there.

        Raises:
            WeightSyncError: the model folder is not what they are to be merged with.
        """
        base = self._base or Base(Path(self._config.model))
        base.check(adapters)
        self._base = base

    @torch.no_grad()
    def load(self, staged: Staged, adapters: Adapters | None) -> None:
        """Load a publication; the engine must be paused.

        Adapters alone: the first time all weights are loaded, so that what is frozen is as the
        learner has it; from then on only the layers that they change.

        Raises:
            RuntimeError: a parameter of the model did not come; the model is then incomplete and
                must not serve.
        """
        if adapters is None:
            self._frozen = None
            reload_model(self._model, self._config, staged)
            return
        assert self._base is not None, "prepare() comes first"
        came = dict(staged)
        through = (adapters.base_dtype, adapters.dtype)
        first = list(self._base.stored)
        rest: list[str] = []
        if self._frozen == through:
            first, rest = split(self._model, first, adapters.changes(came))
        weights = merged(self._base, came, adapters, first)
        others = merged(self._base, came, adapters, rest) if rest else None
        reload_model(self._model, self._config, weights, others)
        self._frozen = through


class Base:
    """The weights that an engine started from, mapped from its model folder: no copy of them.

    Raises:
        WeightSyncError: its files cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._folder = folder
        try:
            self.stored: Mapping[str, Stored] = stored_tensors(folder)
            self._fingerprint = fingerprint(folder)
        except ModelError as e:
            raise WeightSyncError(f"adapters came without their base: {e}") from e
        files = {stored.file for stored in self.stored.values()}
        self._opened = {file: safe_open(file, "pt") for file in files}

    def tensor(self, name: str) -> Tensor:
        """A view of the file: not to be written to."""
        file: Any = self._opened[self.stored[name].file]
        tensor: Tensor = file.get_tensor(name)
        return tensor

    def check(self, adapters: Adapters) -> None:
        """Refuse adapters of another model.

        Raises:
            WeightSyncError: naming the folder.
        """
        if self._fingerprint != adapters.base:
            raise WeightSyncError(
                f"{self._folder} does not hold the weights that the adapters which came belong "
                "to: give this actor the learner's model folder"
            )


def merged(
    base: Base, came: Mapping[str, Tensor], adapters: Adapters, names: Iterable[str]
) -> Iterator[tuple[str, Tensor]]:
    """The weights `names` as the learner would have sent them whole, one at a time."""
    base_dtype, dtype = (getattr(torch, d) for d in (adapters.base_dtype, adapters.dtype))
    for name in names:
        if name in came:
            yield name, came[name]
            continue
        weight = base.tensor(name)
        if base.stored[name].dtype not in DTYPES:
            yield name, weight  # no weight, e.g. a table of positions
            continue
        weight = weight.to(base_dtype)
        if (merge := adapters.merges.get(name)) is not None:
            weight = merge(weight, came[name + A], came[name + B])
        yield name, weight.to(dtype)


def split(
    model: nn.Module, names: Sequence[str], changed: Iterable[str]
) -> tuple[list[str], list[str]]:
    """`names` of the layers that `changed` are in, and all others.

    vLLM loads layers as a whole, and some of them are several of the checkpoint's.
    """
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    partners = {part: parts for parts in packed.values() for part in parts}
    layers = set()
    for name in changed:
        parent, _, leaf = _layer(name).rpartition(".")
        layers |= {f"{parent}.{part}" for part in partners.get(leaf, (leaf,))}
    touched = [name for name in names if _layer(name) in layers]
    others = [name for name in names if _layer(name) not in layers]
    return touched, others


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def reload_model(
    model: nn.Module,
    model_config: Any,
    weights: Iterable[tuple[str, Tensor]],
    others: Iterable[tuple[str, Tensor]] | None = None,
) -> None:
    """Load checkpoint-format weights into a serving model.

    vLLM's CPU linear layers keep only a repacked copy of their weight, so a plain
    `load_weights` would fail half-way: the layerwise reload rebuilds each layer and copies
    the result over. A head tied to the embedding has a packed copy of its own, which that
    reload does not know of.

    `others` are weights that have not changed: a layer of which nothing comes stays as it is, and
    they are loaded only if one of which some came would be left without its other parts.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    heads = {n: m for n, m in model.named_modules() if isinstance(m, ParallelLMHead)}
    tied = getattr(model_config.hf_config, "tie_word_embeddings", False)
    initialize_layerwise_reload(model)
    expected = {name for name, _ in model.named_parameters()}
    loaded = model.load_weights(weights)  # type: ignore[operator]
    if others is not None and _unfinished(model):
        more = model.load_weights(others)  # type: ignore[operator]
        loaded, others = None if None in (loaded, more) else loaded | more, None
    finalize_layerwise_reload(model, model_config)
    if others is not None:
        return
    stale_heads = {n: m for n, m in heads.items() if tied and f"{n}.weight" not in (loaded or ())}
    if loaded is not None:
        missing = expected - loaded - {f"{n}.weight" for n in stale_heads}
        if missing:
            raise RuntimeError(
                f"publication lacks {len(missing)} parameters of the engine's model, "
                f"e.g. {min(missing)}"
            )
    for head in stale_heads.values():
        head.quant_method.process_weights_after_loading(head)


def _unfinished(model: nn.Module) -> bool:
    """Whether a layer has got some of its elements, and not all, in the reload under way."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    infos = (get_layerwise_info(layer) for layer in model.modules())
    return any(i.can_load() and 0 < i.load_numel < i.load_numel_total for i in infos)
