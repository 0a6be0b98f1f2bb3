"""Root-mean-square normalization: one program per row, which it reads once.

The residual sum before a norm is part of the product that makes it or, where that product is
made in parts, of the norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu.linear import Scaled

FEW_ROWS = 256
"""Up to this many rows latency counts: more warps, one 16-byte load per thread."""


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, out: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight: x [T, H] with whole rows -> [T, H]."""
    rows, size = x.shape
    if out is None:
        out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    _norm[(rows,)](
        x,
        weight,
        out,
        epsilon,
        x.stride(0),
        out.stride(0),
        SIZE=size,
        BLOCK=block,
        num_warps=_warps(rows, block),
    )
    return out


def add_and_norm(parts: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """residual [T, H] += the sum of parts [n, T, H]; then its norm, [T, H]."""
    count, rows, size = parts.shape
    out = torch.empty_like(residual)
    block = triton.next_power_of_2(size)
    _add_and_norm[(rows,)](
        parts,
        residual,
        weight,
        out,
        epsilon,
        rows * size,
        PARTS=count,
        SIZE=size,
        BLOCK=block,
        num_warps=_warps(rows, block),
    )
    return out


def add_and_scale(part: Tensor, residual: Tensor, weight: Tensor, target: Scaled) -> None:
    """residual [T, H] += part [T, H]; stores it in `target`, scaled by `weight` [H].

    target.squares is [1, T].
    """
    rows, size = residual.shape
    block = triton.next_power_of_2(size)
    _add_and_scale[(rows,)](
        part,
        residual,
        weight,
        target.x,
        target.squares,
        SIZE=size,
        BLOCK=block,
        num_warps=_warps(rows, block),
    )


def _warps(rows: int, block: int) -> int:
    elements_a_warp = 256 if rows <= FEW_ROWS else 512
    return min(max(block // elements_a_warp, 1), 16)


@triton.jit
def _norm(
    x_pointer,
    weight_pointer,
    out_pointer,
    epsilon,
    x_stride,
    out_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(x_pointer + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_pointer + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + epsilon)
    normed = (x * scale * weight).to(out_pointer.dtype.element_ty)
    tl.store(out_pointer + row * out_stride + column, normed, mask=inside)


@triton.jit(do_not_specialize=["part_stride"])
def _add_and_norm(
    parts_pointer,
    residual_pointer,
    weight_pointer,
    out_pointer,
    epsilon,
    part_stride,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    place = tl.program_id(0).to(tl.int64) * SIZE + column
    x = tl.load(residual_pointer + place, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        here = parts_pointer + part * part_stride + place
        x += tl.load(here, mask=inside, other=0.0).to(tl.float32)
    rounded = x.to(out_pointer.dtype.element_ty)
    tl.store(residual_pointer + place, rounded, mask=inside)
    x = rounded.to(tl.float32)
    weight = tl.load(weight_pointer + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + epsilon)
    normed = (x * scale * weight).to(out_pointer.dtype.element_ty)
    tl.store(out_pointer + place, normed, mask=inside)


@triton.jit
def _add_and_scale(
    part_pointer,
    residual_pointer,
    weight_pointer,
    scaled_pointer,
    squares_pointer,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    place = row.to(tl.int64) * SIZE + column
    x = tl.load(residual_pointer + place, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(part_pointer + place, mask=inside, other=0.0).to(tl.float32)
    rounded = x.to(scaled_pointer.dtype.element_ty)
    tl.store(residual_pointer + place, rounded, mask=inside)
    x = rounded.to(tl.float32)
    weight = tl.load(weight_pointer + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(scaled_pointer + place, (x * weight).to(scaled_pointer.dtype.element_ty), mask=inside)
    tl.store(squares_pointer + row, tl.sum(x * x, axis=0))
