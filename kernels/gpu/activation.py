"""The gate of the feed-forward layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Elements of a program: with 4 warps, one 16-byte load of each half a thread."""


def silu_and_multiply(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """gate_up [T, 2 * size], whole rows -> silu(gate) * up, [T, size]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    _silu_and_multiply[(rows, triton.cdiv(size, BLOCK))](
        gate_up, out, gate_up.stride(0), out.stride(0), SIZE=size, BLOCK=BLOCK, num_warps=4
    )
    return out


@triton.jit
def _silu_and_multiply(
    gate_up_pointer,
    out_pointer,
    gate_up_stride,
    out_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate_at = gate_up_pointer + row * gate_up_stride + column
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + SIZE, mask=inside, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    out_at = out_pointer + row * out_stride + column
    tl.store(out_at, product.to(out_pointer.dtype.element_ty), mask=inside)
