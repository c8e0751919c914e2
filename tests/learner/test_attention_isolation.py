"""No attention across sequences: change one, and nothing of the others moves, not by one bit.

Everything a token takes part in beside its own sequence is either per token (linear layers, norms,
head), whose products have the same shapes before and after, or a masked entry of an attention,
whose weight is exactly 0: adding 0 times a finite number changes no bit. The same holds backwards,
for the gradient of a loss over the other sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncrl.learner.packing import Ints, Pack, make_packs
from asyncrl.learner.policy import attention, flash
from asyncrl.learner.policy.attention import FLASH_NAME, NAME
from tests.helpers.tiny_model import VOCAB, make_batch, save_tiny_model
from tests.learner.packed import load_packed, scores_of
from tests.learner.test_flash import literal_kernel

GROUP = (3, 4, 5)
"""The samples that are changed, one at a time: the second group of three."""

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tied": True},
    "mistral": {"sliding_window": 7},
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = request.param
    return save_tiny_model(tmp_path_factory.mktemp(kind), kind, **MODELS[kind])


@pytest.fixture(params=["block", "split", "fused", "flash"])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The attention, made to go one of its ways. The flash kernel's stand-in is a literal one."""
    if request.param == "split":
        monkeypatch.setattr(attention, "_CALL_COST", 0)
    if request.param != "block":
        monkeypatch.setattr(attention, "_DENSE_PAIRS", 0)
    monkeypatch.setattr(flash, "_kernel", literal_kernel)
    return FLASH_NAME if request.param == "flash" else NAME


def _places(pack: Pack) -> Iterator[tuple[int, slice, slice]]:
    """Each sample of a pack, with the places of its own part of the prompt and its response."""
    samples = iter(dict.fromkeys(pack.sample.tolist()))
    for s in pack.segments:
        at = s.start + s.prompt_tokens
        prompt = slice(s.start, at)
        for length in s.response_tokens:
            yield next(samples), prompt, slice(at, at + length)
            at += length


def _other_ids(ids: Ints) -> Ints:
    return (ids + 1) % (VOCAB - 3) + 3


def _change(pack: Pack, sample: int, part: str) -> tuple[Pack, set[int]]:
    """The pack with other tokens in the response or prompt of a sample, and whose those are."""
    places = {i: (prompt, response) for i, prompt, response in _places(pack)}
    prompt, response = places[sample]
    changed = prompt if part == "prompt" else response
    whose = {i for i, p in places.items() if i == sample or (part, p[0]) == ("prompt", prompt)}
    ids, target = pack.input_ids.copy(), pack.target.copy()
    ids[changed] = _other_ids(ids[changed])
    target[pack.sample == sample] = ids[response][pack.offset[pack.sample == sample]]
    return replace(pack, input_ids=ids, target=target), whose


def _results(model: Any, pack: Pack, counted: Tensor) -> tuple[Tensor, list[Tensor]]:
    """[2, N] log-probabilities and entropies, and the gradient of a loss of the counted ones."""
    model.zero_grad()
    results = torch.stack(scores_of(model, pack))
    weight = torch.linspace(-1, 1, results.numel()).view_as(results)
    (results * weight)[:, counted].sum().backward()  # type: ignore[no-untyped-call]
    return results.detach(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("part", ["response", "prompt"])
def test_the_others_do_not_change_by_one_bit(
    folder: Path, name: str, share: bool, part: str
) -> None:
    batch = make_batch(5, groups=3, group_size=3, prefix=10, response=(3, 12))
    (pack,) = make_packs(batch, range(9), 4096, share)
    model = load_packed(folder, name)
    for sample in GROUP[:1] if share and part == "prompt" else GROUP:
        changed, whose = _change(pack, sample, part)
        assert whose == (set(GROUP) if share and part == "prompt" else {sample})
        others = torch.from_numpy(~np.isin(pack.sample, list(whose)))
        before, gradient = _results(model, pack, others)
        after, gradient_after = _results(model, changed, others)
        assert torch.equal(before[:, others], after[:, others])
        for g, h in zip(gradient, gradient_after, strict=True):
            assert g.any()
            assert torch.equal(g, h)
        assert (before != after)[:, ~others].float().mean() > 0.8  # the change is one
