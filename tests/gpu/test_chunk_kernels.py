"""The kernel of chunks on this GPU has the bits of the one that runs anywhere."""

from __future__ import annotations

import math

import pytest
import torch
from pools import CUDA

from baton.kernels.attention import Scoring
from baton.kernels.gpu.chunk_attention import BLOCK_QUERIES, attend_anywhere, chunk_attention
from baton.kernels.gpu.rotary import HeadShape

pytestmark = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")

CHUNKS = [(0, 70), (130, 5), (24, 300), (1000, 129), (63, 1), (127, 1), (0, 128), (640, 192)]
"""Start and count of each sequence's rows."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size", "window", "sinks"),
    [(8, 2, 128, 16, None, False), (5, 1, 128, 8, 300, True), (6, 6, 64, 256, 128, True)],
)
def test_chunks_have_the_bits_of_any_device(
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    window: int | None,
    sinks: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    scores = torch.linspace(-3, 3, heads, device="cuda") if sinks else None
    shape = HeadShape(heads, kv_heads, dim, window, False, 1e-5, Scoring(dim**-0.5), scores)
    widest = -(-max(map(sum, CHUNKS)) // page_size)
    table = torch.randperm(widest * len(CHUNKS)).view(len(CHUNKS), widest)
    kv = torch.randn(table.numel(), 2, page_size, kv_heads, dim).to("cuda", dtype)
    blocks, rows = [(0, 0, 0, 0)], 0
    for slot, (start, count) in enumerate(CHUNKS):
        # What pages hold after a sequence must not be seen.
        unused = torch.arange(start + count, widest * page_size)
        kv[table[slot, unused // page_size], :, unused % page_size] = math.nan
        for offset in range(0, count, BLOCK_QUERIES):
            size = min(BLOCK_QUERIES, count - offset)
            blocks.append((rows + offset, start + offset, size, slot))
        rows += count
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to("cuda", dtype)
    found, wanted = (qkv.new_zeros(rows, heads * dim) for _ in range(2))
    entries = torch.tensor(blocks, dtype=torch.int32, device="cuda")
    for attend, out in ((chunk_attention, found), (attend_anywhere, wanted)):
        attend(qkv, entries, table.int().cuda(), kv, shape, out)
    assert wanted.isfinite().all()
    assert torch.equal(found, wanted)
