"""Products in FP8 on a GPU (kernels/fp8.py): rows become codes, then the matrix library multiplies.

Tensor cores add FP8 products with 14 bits; every 128 inputs these sums are added up in float32,
in order. The library does so unless it is told to be fast, and kernels/gpu/linear.py does too: a
row has the same bits in both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.fp8 import FP8, INVERSE_MOST, LEAST_PEAK, MOST, Fp8Weight

LIBRARY_MULTIPLE = 16
"""Of inputs and of outputs, for the matrix library's products."""


def library_multiplies(weight: Fp8Weight) -> bool:
    return all(size % LIBRARY_MULTIPLE == 0 for size in weight.shape) and weight.codes.is_cuda


def library_product(x: Tensor, weight: Fp8Weight) -> Tensor:
    """x [M, K] @ weight.T, in x's type."""
    codes, scales = fp8_rows(x)
    row_scales, column_scales = scales.unsqueeze(1), weight.scales.unsqueeze(0)
    return torch._scaled_mm(
        codes, weight.codes.t(), row_scales, column_scales, out_dtype=x.dtype, use_fast_accum=False
    )


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, K] -> codes [M, K] and scales [M]."""
    rows, size = x.shape
    codes = torch.empty(rows, size, dtype=FP8, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    warps = min(max(block // 512, 1), 16)
    _fp8_rows[(rows,)](x, codes, scales, SIZE=size, BLOCK=block, num_warps=warps)
    return codes, scales


@triton.jit
def _fp8_rows(x_pointer, codes_pointer, scales_pointer, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(x_pointer + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    peak = tl.maximum(tl.max(tl.abs(x), axis=0), LEAST)
    codes = (x * tl.div_rn(GREATEST, peak)).to(codes_pointer.dtype.element_ty)
    tl.store(codes_pointer + row * SIZE + column, codes, mask=inside)
    tl.store(scales_pointer + row, peak * INVERSE)


LEAST, GREATEST, INVERSE = map(tl.constexpr, (LEAST_PEAK, MOST, INVERSE_MOST))
