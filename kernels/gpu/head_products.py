"""Products of heads, each with its own weight."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

MANY_ROWS = 256
"""Beyond this many rows a product has large tiles."""


def head_products(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """x [T, heads, K] and weight [heads, N, K] -> the first N of out [T, heads, N or more].

    Inputs are walked in order, so that a row's bits do not depend on the other rows.
    """
    rows, (heads, outputs, depth) = len(x), weight.shape
    block_m, block_n, block_k, warps = tiling_of(rows, outputs, depth)
    if rows:
        _head_products[(triton.cdiv(rows, block_m), triton.cdiv(outputs, block_n), heads)](
            x,
            weight,
            out,
            rows,
            x.stride(0),
            x.stride(1),
            out.stride(0),
            out.stride(1),
            N=outputs,
            K=depth,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            num_warps=warps,
            num_stages=4,
            enable_fp_fusion=False,
        )
    return out


def tiling_of(rows: int, outputs: int, depth: int) -> tuple[int, int, int, int]:
    """Rows, outputs and inputs of a tile, and its warps: small tiles for few rows."""
    depth = max(16, triton.next_power_of_2(depth))
    if rows <= MANY_ROWS:
        return (16 if rows <= 16 else 32 if rows <= 32 else 64), 32, min(128, depth), 4
    return 128, min(128, max(16, triton.next_power_of_2(outputs))), min(64, depth), 8


@triton.jit(do_not_specialize=["rows"])
def _head_products(
    x_pointer,
    weight_pointer,
    out_pointer,
    rows,
    x_stride,
    x_head,
    out_stride,
    out_head,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    head = tl.program_id(2).to(tl.int64)
    multiply(
        x_pointer + head * x_head, weight_pointer + head * (N * K), out_pointer + head * out_head,
        tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N, rows, x_stride, out_stride,
        N, K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip


@triton.jit
def multiply(
    x_pointer,
    weight_pointer,
    out_pointer,
    first_row,
    first_column,
    rows,
    x_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Computes and stores a tile of x [rows, K] @ weight [N, K].T."""
    row, column = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    in_rows, in_columns = (row < rows)[:, None], (column < N)[:, None]
    x_at = x_pointer + row.to(tl.int64)[:, None] * x_stride + lane[None, :]
    weight_at = weight_pointer + column[:, None] * K + lane[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_at + start, mask=in_rows, other=0.0)
            weights = tl.load(weight_at + start, mask=in_columns, other=0.0)
        else:
            in_depth = (start + lane < K)[None, :]
            x = tl.load(x_at + start, mask=in_rows & in_depth, other=0.0)
            weights = tl.load(weight_at + start, mask=in_columns & in_depth, other=0.0)
        sums = tl.dot(x, tl.trans(weights), sums, input_precision="ieee")
    to = out_pointer + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    mask = in_rows & (column < N)[None, :]
    tl.store(to, sums.to(out_pointer.dtype.element_ty), mask=mask)
