"""Products in FP8 on a GPU (kernels/fp8.py): rows become codes, then the matrix library multiplies.

Tensor cores add FP8 products with 14 bits. Products with scales keep all sums in these; the library
does so with `use_fast_accum`, and takes a tenth less time for it. Their error is a tenth of a
percent, far below that of FP8 codes. Products onto the residual add the sums of every 128 inputs in
float32, in order. kernels/gpu/linear.py does both in the same way, so a row has the same bits in
both.

Without scales per row and output the library is up to twice as fast with few rows. Products onto
the residual use this: their sums are rounded, and the kernel that adds them applies the scales. For
other products the kernels that read them would take longer for the scales than the library does.
Without scales `use_fast_accum` makes no difference in time, and some rows of the library then have
other bits than others.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.fp8 import FP8, INVERSE_MOST, LEAST_PEAK, MOST, Fp8Weight

LIBRARY_MULTIPLE = 16
"""The matrix library multiplies weights whose inputs and outputs are multiples of this."""

SCALED_BLOCK = 1024
"""Numbers of a row that one program scales."""


def library_multiplies(weight: Fp8Weight) -> bool:
    return all(size % LIBRARY_MULTIPLE == 0 for size in weight.shape) and weight.codes.is_cuda


class Fp8Rows(NamedTuple):
    codes: Tensor  # [M, K]
    scales: Tensor  # [M], float32


def library_product(x: Tensor | Fp8Rows, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """x [M, K] @ weight.T, in dtype."""
    codes, scales = fp8_rows(x) if isinstance(x, Tensor) else x
    row_scales, column_scales = scales.unsqueeze(1), weight.scales.unsqueeze(0)
    return torch._scaled_mm(
        codes, weight.codes.t(), row_scales, column_scales, out_dtype=dtype, use_fast_accum=True
    )


class Fp8Scales(NamedTuple):
    """Scales of a product's rows [M] and outputs [N], float32."""

    rows: Tensor
    outputs: Tensor


class Fp8Sums(NamedTuple):
    """A product of codes, rounded, before its scales."""

    sums: Tensor  # [M, N]
    scales: Fp8Scales

    def scaled(self) -> Tensor:
        """Applies the scales in place and returns the product."""
        rows, outputs = self.sums.shape
        grid = rows, triton.cdiv(outputs, SCALED_BLOCK)
        _scale[grid](self.sums, *self.scales, outputs, BLOCK=SCALED_BLOCK, enable_fp_fusion=False)
        return self.sums


def library_sums(x: Tensor | Fp8Rows, weight: Fp8Weight, dtype: torch.dtype) -> Fp8Sums:
    """x [M, K] @ weight.T in dtype, without its scales."""
    codes, scales = fp8_rows(x) if isinstance(x, Tensor) else x
    one = _one(codes.device)
    sums = torch._scaled_mm(
        codes, weight.codes.t(), one, one, out_dtype=dtype, use_fast_accum=False
    )
    return Fp8Sums(sums, Fp8Scales(scales, weight.scales))


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), device=device)


def empty_rows(rows: int, size: int, device: torch.device) -> Fp8Rows:
    codes = torch.empty(rows, size, dtype=FP8, device=device)
    return Fp8Rows(codes, torch.empty(rows, dtype=torch.float32, device=device))


def row_warps(block: int) -> int:
    """Warps of a program that reads a row of `block` elements."""
    return min(max(block // 512, 1), 16)


def fp8_rows(x: Tensor) -> Fp8Rows:
    rows, size = x.shape
    found, block = empty_rows(rows, size, x.device), triton.next_power_of_2(size)
    _fp8_rows[(rows,)](x, *found, SIZE=size, BLOCK=block, num_warps=row_warps(block))
    return found


@triton.jit
def _fp8_rows(x_pointer, codes_pointer, scales_pointer, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_pointer + row * SIZE + column, mask=column < SIZE, other=0.0).to(tl.float32)
    store_codes(codes_pointer, scales_pointer, x, row, column, SIZE)


@triton.jit
def store_codes(codes_pointer, scales_pointer, x, row, column, SIZE: tl.constexpr):
    """Stores the codes and the scale of a row x, float32, zero beyond SIZE."""
    peak = tl.maximum(tl.max(tl.abs(x), axis=0), LEAST)
    codes = (x * tl.div_rn(GREATEST, peak)).to(codes_pointer.dtype.element_ty)
    tl.store(codes_pointer + row * SIZE + column, codes, mask=column < SIZE)
    tl.store(scales_pointer + row, peak * INVERSE)


@triton.jit
def _scale(sums_pointer, rows_pointer, outputs_pointer, outputs, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = sums_pointer + row * outputs + column, column < outputs
    scales = tl.load(outputs_pointer + column, mask=inside, other=0.0)
    product = apply_scales(tl.load(at, mask=inside), tl.load(rows_pointer + row), scales)
    tl.store(at, product, mask=inside)


@triton.jit
def apply_scales(sums, row_scales, output_scales):
    """Applies scales to rounded sums and rounds the product in the same way."""
    return (sums.to(tl.float32) * output_scales * row_scales).to(sums.dtype)


LEAST, GREATEST, INVERSE = map(tl.constexpr, (LEAST_PEAK, MOST, INVERSE_MOST))
