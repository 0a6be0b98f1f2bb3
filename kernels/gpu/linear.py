"""Linear layers of a few rows, at the speed of reading the weights.

With few rows a product costs what reading its weights costs, and each further kernel costs a
launch. So the gate, the residual sum and the norm are part of the products. A norm is shared
between two of them: the product that makes a residual sees elements but never a whole row; it
scales them by the norm's weight and stores, per program, their sum of squares. The product
that reads the row adds these up at its end: a row's scale is a factor of its whole product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 32
"""Beyond this many rows the matrix library is faster."""


@dataclass(frozen=True, slots=True)
class LinearTiling:
    outputs: int  # of a program
    depth: int  # inputs per iteration of its loop
    warps: int
    stages: int


STAGE_BYTES = 224 << 10
"""Of a multiprocessor's shared memory, for what a program loads ahead."""

NARROW = LinearTiling(64, 128, 4, 6)
WIDE = LinearTiling(128, 128, 8, 3)
"""Both measured on an H200, for 1 to 32 rows of Llama 3.1 8B's shapes: docs/PERFORMANCE.md."""


def tiling_for(outputs: int) -> LinearTiling:
    """Few outputs need small tiles to fill the chip; many are read faster in large ones."""
    return NARROW if outputs < 8192 else WIDE


def stages_for(tiling: LinearTiling, block_m: int, gated: bool, dtype: torch.dtype) -> int:
    """Iterations loaded ahead: the tiling's, or as many as fit."""
    turn = (tiling.outputs * (1 + gated) + block_m) * tiling.depth * dtype.itemsize
    return min(tiling.stages, STAGE_BYTES // turn)


@dataclass(frozen=True, slots=True)
class Scaled:
    """Rows of a residual within a norm: scaled by its weight, not yet by their size."""

    x: Tensor  # [M, K]
    squares: Tensor  # [parts, M], float32: each part's sum of squares of the residual
    epsilon: float


def squares_for(rows: int, outputs: int, device: torch.device) -> Tensor:
    """The buffer for `few_rows_onto`'s squares."""
    parts = triton.cdiv(outputs, tiling_for(outputs).outputs)
    return torch.empty(parts, rows, dtype=torch.float32, device=device)


def few_rows(
    source: Scaled, weight: Tensor, out: Tensor, bias: Tensor | None = None, *, gated: bool = False
) -> Tensor:
    """out [M, N] = norm(residual) @ weight.T + bias, for weight [N, K].

    `gated`: weight holds gates, then as many ups: out = silu(gates) * ups, [M, N / 2].
    """
    outputs = len(weight) // 2 if gated else len(weight)
    _launch(source.x, weight, bias, out, outputs, source=source, gated=gated)
    return out


def few_rows_alone(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """out [M, N] = x @ weight.T + bias, for weight [N, K]."""
    _launch(x, weight, bias, out, len(weight))
    return out


def few_rows_onto(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm: Tensor,
    target: Scaled,
    bias: Tensor | None = None,
) -> None:
    """residual [M, N] += x @ weight.T + bias; stores it in `target`, scaled by `norm` [N]."""
    _launch(x, weight, bias, residual, len(weight), norm=norm, target=target)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    outputs: int,
    *,
    source: Scaled | None = None,
    norm: Tensor | None = None,
    target: Scaled | None = None,
    gated: bool = False,
) -> None:
    rows, depth = x.shape
    tiling = tiling_for(outputs)
    block_m = max(16, triton.next_power_of_2(rows))
    squares = source.squares if source else (target.squares if target else x)
    _few_rows[(triton.cdiv(outputs, tiling.outputs),)](
        x,
        weight,
        bias if bias is not None else weight,
        out,
        squares,
        norm if norm is not None else weight,
        target.x if target else out,
        rows,
        outputs,
        source.epsilon if source else 0.0,
        PARTS=len(squares) if source else 0,
        BLOCK_PARTS=triton.next_power_of_2(len(squares)) if source else 1,
        K=depth,
        BIAS=bias is not None,
        GATED=gated,
        ADDS=target is not None,
        BLOCK_M=block_m,
        BLOCK_N=tiling.outputs,
        BLOCK_K=tiling.depth,
        EVEN=depth % tiling.depth == 0 and outputs % tiling.outputs == 0,
        num_warps=tiling.warps,
        num_stages=stages_for(tiling, block_m, gated, weight.dtype),
    )


@triton.jit
def _few_rows(
    x_pointer,
    weight_pointer,
    bias_pointer,
    out_pointer,
    squares_pointer,
    norm_pointer,
    scaled_pointer,
    rows,
    outputs,
    epsilon,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    program = tl.program_id(0)
    row = tl.arange(0, BLOCK_M)
    column = program * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    in_rows, in_columns = row < rows, column < outputs
    x_at = x_pointer + row[None, :] * K + lane[:, None]  # [BLOCK_K, BLOCK_M]
    weight_at = weight_pointer + column.to(tl.int64)[:, None] * K + lane[None, :]
    to_up = outputs.to(tl.int64) * K
    sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if EVEN:
            x = tl.load(x_at + start, mask=in_rows[None, :], other=0.0)
            weights = tl.load(weight_at + start, eviction_policy="evict_first")
        else:
            in_depth = start + lane < K
            x = tl.load(x_at + start, mask=in_rows[None, :] & in_depth[:, None], other=0.0)
            mask = in_columns[:, None] & in_depth[None, :]
            weights = tl.load(weight_at + start, mask=mask, other=0.0)
        sums = tl.dot(weights, x, sums, input_precision="ieee")
        if GATED:
            if EVEN:
                up_weights = tl.load(weight_at + to_up + start, eviction_policy="evict_first")
            else:
                up_weights = tl.load(weight_at + to_up + start, mask=mask, other=0.0)
            ups = tl.dot(up_weights, x, ups, input_precision="ieee")
    if PARTS > 0:
        part = tl.arange(0, BLOCK_PARTS)
        squares = tl.load(
            squares_pointer + part[:, None] * rows + row[None, :],
            mask=(part < PARTS)[:, None] & in_rows[None, :],
            other=0.0,
        )
        size = tl.rsqrt(tl.sum(squares, axis=0) / K + epsilon)[None, :]
        sums *= size
        ups *= size
    if BIAS:
        sums += tl.load(bias_pointer + column, mask=in_columns, other=0.0).to(tl.float32)[:, None]
        if GATED:
            up_bias = tl.load(bias_pointer + outputs + column, mask=in_columns, other=0.0)
            ups += up_bias.to(tl.float32)[:, None]
    if GATED:
        sums = sums * tl.sigmoid(sums) * ups
    at = row.to(tl.int64)[None, :] * outputs + column[:, None]
    mask = in_rows[None, :] & in_columns[:, None]
    dtype = out_pointer.dtype.element_ty
    if ADDS:
        sums += tl.load(out_pointer + at, mask=mask, other=0.0).to(tl.float32)
        # The sum as later kernels read it.
        sums = tl.where(mask, sums.to(dtype).to(tl.float32), 0.0)
        norm = tl.load(norm_pointer + column, mask=in_columns, other=0.0).to(tl.float32)
        tl.store(scaled_pointer + at, (sums * norm[:, None]).to(dtype), mask=mask)
        left = squares_pointer + program * rows + row
        tl.store(left, tl.sum(sums * sums, axis=0), mask=in_rows)
    tl.store(out_pointer + at, sums.to(dtype), mask=mask)


GATE_BLOCK = 1024
"""Elements per program: with 4 warps, one 16-byte load of each half per thread."""


def silu_and_multiply(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """gate_up [T, 2 * size], whole rows -> silu(gate) * up, [T, size]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    _silu_and_multiply[(rows, triton.cdiv(size, GATE_BLOCK))](
        gate_up, out, gate_up.stride(0), out.stride(0), SIZE=size, BLOCK=GATE_BLOCK, num_warps=4
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
