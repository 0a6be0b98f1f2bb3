"""Decoding over pages of codes on this GPU has the bits of the kernel that runs anywhere."""

from __future__ import annotations

import pytest
import torch
from pools import CUDA

from baton.kernels import GPU_SCALE_BYTES
from baton.kernels.attention import Scoring
from baton.kernels.gpu.decode_attention import decode_anywhere, decode_attention
from baton.kernels.gpu.rotary import HeadShape, Projected
from baton.kernels.gpu.splits import SplitWorkspace

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")

CONTEXT = 1500


@pytest.mark.parametrize("code", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "page_size", "window"),
    [
        (1, 32, 8, 128, 16, None),
        (130, 28, 4, 128, 16, None),
        (5, 16, 1, 64, 64, None),
        (9, 8, 8, 128, 5, 200),
        (64, 24, 8, 64, 128, 300),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_codes_are_attended_with_the_bits_of_any_device(
    code: torch.dtype,
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    shape = HeadShape(heads, kv_heads, dim, window, True, 1e-5, Scoring(dim**-0.5))
    widest = -(-CONTEXT // page_size)
    table = torch.randperm(rows * widest, device="cuda", dtype=torch.int32).view(rows, widest)
    place = table.numel(), 2, page_size, kv_heads
    pages = torch.empty(*place, dim + GPU_SCALE_BYTES, dtype=torch.uint8, device="cuda")
    numbers = 60 * torch.randn(*place, dim, device="cuda")
    pages[..., :dim] = numbers.clamp(-127, 127).to(code).view(torch.uint8)
    scales = torch.rand(*place, 1, device="cuda") * 0.02 + 0.001
    pages[..., dim : dim + 4] = scales.view(torch.uint8)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, device="cuda", dtype=dtype)
    turns = torch.randn(CONTEXT, dim, device="cuda")
    positions = torch.randint(CONTEXT, (rows,), device="cuda", dtype=torch.int32)
    positions[0] = CONTEXT - 1
    positions[3:4] = -1  # a row without a sequence
    order = torch.arange(rows, device="cuda", dtype=torch.int32)
    workspace = SplitWorkspace.make(rows, CONTEXT, heads, kv_heads, dim, qkv.device)
    found, wanted = ((pages.clone(), qkv.new_zeros(rows, heads * dim)) for _ in range(2))
    for attend, (kv, out) in ((decode_attention, found), (decode_anywhere, wanted)):
        projected, layer = Projected(qkv), kv.view(code)
        attend(projected, turns, order, positions, table, layer, shape, workspace, out)
    assert wanted[1].isfinite().all()
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
