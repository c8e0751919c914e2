"""The flash path sees the same keys as the path by segments; on a GPU, the kernel itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.errors import ModelError
from asyncrl.learner.packing import Segment, make_packs
from asyncrl.learner.policy import attention, flash
from asyncrl.learner.policy.attention import FLASH_NAME, NAME, PackLayout
from asyncrl.learner.policy.flash import FlashPlan, flash_attention, use_flash
from tests.helpers.tiny_model import make_batch, save_tiny_model
from tests.learner.packed import CPU, load_packed, scores_of

# A prefix of 3; a prompt of 2 with responses of 2 and 1; a prompt of 1 with a response of 2.
SEGMENTS = (
    Segment(0, 0, 3, ()),
    Segment(3, 3, 2, (2, 1)),
    Segment(8, 3, 1, (2,)),
)


def test_the_plan_of_a_pack() -> None:
    plan = FlashPlan.of(SEGMENTS, CPU)
    assert plan.gather is not None
    keys = [[0, 1, 2], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 7]]
    keys += [[0, 1, 2, 8, 9, 10]]
    assert plan.gather.tolist() == sum(keys, [])
    assert plan.cu_keys.tolist() == [0, 3, 8, 15, 21, 27]
    assert plan.cu_queries.tolist() == [0, 3, 5, 7, 8, 11]
    assert (plan.max_queries, plan.max_keys) == (3, 7)
    assert plan.cu_keys.dtype == plan.cu_queries.dtype == torch.int32


def test_nothing_is_copied_where_nothing_is_shared() -> None:
    plan = FlashPlan.of([Segment(0, 0, 2, (3,)), Segment(5, 0, 1, (4,))], CPU)
    assert plan.gather is None
    assert plan.cu_keys.tolist() == plan.cu_queries.tolist() == [0, 5, 10]


def literal_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """What torch documents of varlen_attn, by the definition of attention."""
    assert max_q == cu_q.diff().max()
    assert max_k == cu_k.diff().max()
    assert enable_gqa == (q.shape[1] != k.shape[1])
    left, right = window_size
    assert right == 0
    out = []
    for a in range(len(cu_q) - 1):
        mine, keys = q[cu_q[a] : cu_q[a + 1]], k[cu_k[a] : cu_k[a + 1]]
        values = v[cu_k[a] : cu_k[a + 1]]
        groups = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", mine, keys) * scale
        at = torch.arange(len(mine)) + len(keys) - len(mine)
        distance = at[:, None] - torch.arange(len(keys))
        seen = (distance >= 0) & ((distance <= left) if left >= 0 else True)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(out)


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("llama", {}),
        ("qwen3", {"tied": True}),
        ("mistral", {"sliding_window": 7}),
        ("mistral", {"sliding_window": 1000}),
    ],
)
@pytest.mark.parametrize("share", [True, False])
def test_equals_attention_by_segments(
    kind: str, extra: dict[str, Any], share: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Log-probabilities and gradients of every weight, with a literal kernel in its place."""
    monkeypatch.setattr(flash, "_kernel", literal_kernel)
    folder = save_tiny_model(tmp_path, kind, **extra)
    batch = make_batch(3, groups=3, group_size=3, prefix=10)
    for pack in make_packs(batch, range(9), 60, share):
        results = []
        for name in (NAME, FLASH_NAME):
            model = load_packed(folder, name)
            logprobs, _ = scores_of(model, pack)
            (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()  # type: ignore[no-untyped-call]
            results.append([logprobs.detach(), *(p.grad for p in model.parameters())])
        for want, got in zip(*results, strict=True):
            scale = float(want.abs().max())
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * scale)


def test_torch_takes_the_call() -> None:
    """The real kernel's own checks of arguments and shapes, forward and backward, without data."""
    meta = torch.device("meta")
    shapes = [(1, 4, 11, 8), (1, 2, 11, 8), (1, 2, 11, 8)]
    inputs = [torch.empty(s, device=meta, requires_grad=True) for s in shapes]
    for window in (None, 2):
        q, k, v = inputs
        out = flash_attention(q, k, v, FlashPlan.of(SEGMENTS, meta), window, 0.5)
        assert out.shape == (1, 11, 4, 8)
        assert [g.shape for g in torch.autograd.grad(out.sum(), inputs)] == shapes


def test_the_gradient_of_shared_keys_is_summed_before_rounding() -> None:
    """512 contributions of 1 to a key: one by one, bfloat16 would stop at 256."""
    x = torch.zeros(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    index = torch.tensor([1] * 512 + [0])
    flash._Gather.apply(x, index).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert x.grad.flatten().tolist() == [1, 512]


CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "dtype", "size", "reason"),
    [
        (CPU, torch.bfloat16, 64, "NVIDIA GPU, and this learner runs on cpu"),
        (CUDA, torch.float32, 64, "learner.dtype=bfloat16, not float32"),
        (CUDA, torch.bfloat16, 260, "at most 256, and these are 260"),
        (CUDA, torch.bfloat16, 36, "multiple of 8 .* these are 36"),
    ],
)
def test_flash_is_refused_where_it_cannot_work(
    device: torch.device, dtype: torch.dtype, size: int, reason: str
) -> None:
    assert not use_flash("sdpa", device, dtype, size)
    assert not use_flash("auto", device, dtype, size)
    with pytest.raises(ModelError, match=f"learner.attention=flash needs .*{reason}"):
        use_flash("flash", device, dtype, size)


def test_flash_is_used_on_a_gpu_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch would say of a GPU that can, and of one that cannot."""
    monkeypatch.setattr("torch.backends.cuda.is_flash_attention_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (8, 0))
    assert use_flash("auto", CUDA, torch.bfloat16, 64)
    assert use_flash("flash", CUDA, torch.bfloat16, 64)
    assert not use_flash("sdpa", CUDA, torch.bfloat16, 64)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "T4")
    assert not use_flash("auto", CUDA, torch.bfloat16, 64)
    with pytest.raises(ModelError, match="Ampere GPU or newer, and this is a T4"):
        use_flash("flash", CUDA, torch.bfloat16, 64)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("size", [64, 128])
def test_the_kernel_equals_attention_by_segments(
    window: int | None, kv_heads: int, size: int
) -> None:
    """In bfloat16, outputs and gradients, with shared prompts behind a common prefix."""
    torch.manual_seed(0)
    segments = (
        Segment(0, 0, 70, ()),
        Segment(70, 70, 33, (200, 1, 129)),
        Segment(433, 70, 5, (64,)),
        Segment(502, 70, 1, (3, 300)),
    )
    layout = PackLayout(segments, CUDA)
    shapes = [(1, 8, 806, size), (1, kv_heads, 806, size), (1, kv_heads, 806, size)]
    inputs = [torch.randn(s, device=CUDA) for s in shapes]
    grad = torch.randn(1, 806, 8, size, device=CUDA)
    results = []
    for dtype, by_flash in ((torch.float32, False), (torch.bfloat16, True)):
        q, k, v = (x.to(dtype).requires_grad_() for x in inputs)
        if by_flash:
            out = flash_attention(q, k, v, layout.flash_plan, window, size**-0.5)
        else:
            options: dict[str, Any] = {attention.LAYOUT: layout, "sliding_window": window}
            out, _ = attention.packed_attention(torch.nn.Module(), q, k, v, None, **options)
        results.append([out, *torch.autograd.grad(out, (q, k, v), grad.to(dtype))])
    for want, got in zip(*results, strict=True):
        error = (got.float() - want).norm() / want.norm()
        assert error < 0.02


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("kind", "extra"), [("llama", {}), ("mistral", {"sliding_window": 7})])
def test_a_model_on_a_gpu(kind: str, extra: dict[str, Any], tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path, kind, **extra)
    batch = make_batch(3, groups=3, group_size=3, prefix=10)
    (pack,) = make_packs(batch, range(9), 4096, True)
    with torch.no_grad():
        want, _ = scores_of(load_packed(folder).to(CUDA), pack)
        got, _ = scores_of(load_packed(folder, FLASH_NAME).to(CUDA, torch.bfloat16), pack)
    assert (got - want).abs().mean() < 0.1
