"""Linear layers of a few rows, at the speed of reading the weights.

With few rows a product costs what reading its weights costs, and each further kernel costs a
launch. So the gate, the residual sum and the norm are part of the products. A norm is shared
between two of them: the product that makes a residual sees elements but never a whole row; it
scales them by the norm's weight and stores sums of squares of some columns each. The product
that reads the row adds these up at its end: a row's size is a factor of its whole product.

A row has the same bits as in the matrix library's product of many rows, followed by
`gate_and_multiply` or by the attention's kernels: all walk the inputs in order and round at
the same places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu.fixed_order import (
    gate,
    inverse_size,
    part_sums,
    settle,
    square_columns,
    square_sums,
)
from baton.kernels.gpu.norm import Scaled
from baton.kernels.gpu.prefetch import piece_for, prefetch
from baton.kernels.linear import Activation

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

NARROW = LinearTiling(32, 256, 4, 6)
MIDDLE = LinearTiling(64, 128, 4, 6)
SHALLOW = LinearTiling(64, 64, 4, 8)
WIDE = LinearTiling(128, 128, 8, 3)
"""Measured on an H200, for 1 to 32 rows of Llama 3.2 1B, Phi 3 mini and Llama 3.1 8B."""


def tiling_for(outputs: int, rows: int) -> LinearTiling:
    """Few outputs need small tiles to fill the chip; many are read faster in large ones."""
    if outputs < 8192:
        return NARROW if outputs < 4096 and rows <= 16 else MIDDLE
    return SHALLOW if outputs < 12288 else WIDE


def stages_for(tiling: LinearTiling, block_m: int, gated: bool, dtype: torch.dtype) -> int:
    """Iterations loaded ahead: the tiling's, or as many as fit."""
    turn = (tiling.outputs * (1 + gated) + block_m) * tiling.depth * dtype.itemsize
    return min(tiling.stages, STAGE_BYTES // turn)


def few_rows(
    source: Scaled,
    weight: Tensor,
    bias: Tensor | None = None,
    gates: Activation | None = None,
    ahead: Tensor | None = None,
) -> Tensor:
    """norm(residual) @ weight.T + bias, for weight [N, K]: [M, N].

    With `gates`, weight holds those, then as many ups: activation(gates) * ups, [M, N / 2].
    `ahead`: the weights of a later product, after a kernel that leaves memory idle.
    """
    outputs = len(weight) // 2 if gates else len(weight)
    out = source.x.new_empty(len(source.x), outputs)
    _launch(source.x, weight, bias, out, outputs, source=source, gates=gates, ahead=ahead)
    return out


def few_rows_alone(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x @ weight.T, for weight [N, K]: [M, N]."""
    out = x.new_empty(len(x), len(weight)) if out is None else out
    _launch(x, weight, None, out, len(weight))
    return out


def few_rows_onto(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm: Tensor,
    epsilon: float,
    bias: Tensor | None = None,
) -> Scaled:
    """residual [M, N] += x @ weight.T + bias; and scaled by `norm` [N]."""
    rows, outputs = residual.shape
    parts = triton.cdiv(outputs, square_columns(outputs))
    squares = residual.new_empty(parts, rows, dtype=torch.float32)
    target = Scaled(torch.empty_like(residual), squares, epsilon)
    _launch(x, weight, bias, residual, outputs, norm=norm, target=target)
    return target


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
    gates: Activation | None = None,
    ahead: Tensor | None = None,
) -> None:
    rows, depth = x.shape
    tiling = tiling_for(outputs, rows)
    programs, threads = triton.cdiv(outputs, tiling.outputs), 32 * tiling.warps
    piece = piece_for(ahead, programs * threads)
    block_m = max(16, triton.next_power_of_2(rows))
    read = source.squares if source else None
    written = target.squares if target else None
    _few_rows[(programs,)](
        x,
        weight,
        bias if bias is not None else weight,
        out,
        read if read is not None else (written if written is not None else x),
        norm if norm is not None else weight,
        target.x if target else out,
        weight if ahead is None else ahead,
        rows,
        outputs,
        piece,
        source.epsilon if source else 0.0,
        PARTS=0 if read is None else len(read),
        BLOCK_PARTS=1 if read is None else triton.next_power_of_2(len(read)),
        K=depth,
        BIAS=bias is not None,
        GATED=gates is not None,
        ACTIVATION=gates or "",
        ADDS=target is not None,
        AHEAD=threads if piece else 0,
        SQUARES=square_columns(outputs),
        BLOCK_M=block_m,
        BLOCK_N=tiling.outputs,
        BLOCK_K=tiling.depth,
        EVEN=depth % tiling.depth == 0 and outputs % tiling.outputs == 0,
        num_warps=tiling.warps,
        enable_fp_fusion=False,
        num_stages=stages_for(tiling, block_m, gates is not None, weight.dtype),
    )


@triton.jit(do_not_specialize=["rows", "piece"])
def _few_rows(
    x_pointer,
    weight_pointer,
    bias_pointer,
    out_pointer,
    squares_pointer,
    norm_pointer,
    scaled_pointer,
    ahead_pointer,
    rows,
    outputs,
    piece,
    epsilon,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADDS: tl.constexpr,
    AHEAD: tl.constexpr,
    SQUARES: tl.constexpr,
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
    if AHEAD > 0:
        prefetch(ahead_pointer, piece, AHEAD)
    at = row.to(tl.int64)[None, :] * outputs + column[:, None]
    mask = in_rows[None, :] & in_columns[:, None]
    dtype = out_pointer.dtype.element_ty
    if BIAS:
        bias = tl.load(bias_pointer + column, mask=in_columns, other=0.0).to(tl.float32)[:, None]
    else:
        bias = 0.0
    if ADDS:
        # Rounded as many rows are: the product, with its bias, with the residual.
        sums = sums.to(dtype).to(tl.float32)
        if BIAS:
            sums = (sums + bias).to(dtype).to(tl.float32)
        sums += tl.load(out_pointer + at, mask=mask, other=0.0).to(tl.float32)
        sums = tl.where(mask, sums.to(dtype).to(tl.float32), 0.0)
        norm = tl.load(norm_pointer + column, mask=in_columns, other=0.0).to(tl.float32)
        tl.store(scaled_pointer + at, (sums * norm[:, None]).to(dtype), mask=mask)
        left: tl.constexpr = BLOCK_N // SQUARES
        squares = square_sums(tl.reshape(sums, (left, SQUARES, BLOCK_M)), 1, SQUARES)
        part = program * left + tl.arange(0, left)
        squares_at = squares_pointer + part[:, None] * rows + row[None, :]
        tl.store(squares_at, squares, mask=in_rows[None, :] & (part * SQUARES < outputs)[:, None])
    else:
        # Rounded as the matrix library leaves a product, before a row's size is applied.
        sums, ups = sums.to(dtype).to(tl.float32), ups.to(dtype).to(tl.float32)
        size = 1.0
        if PARTS > 0:
            part = tl.arange(0, BLOCK_PARTS)
            squares = tl.load(
                squares_pointer + part[:, None] * rows + row[None, :],
                mask=(part < PARTS)[:, None] & in_rows[None, :],
                other=0.0,
            )
            size = inverse_size(part_sums(squares, 0, BLOCK_PARTS), epsilon, K)[None, :]
        sums = settle(sums, size, bias, PARTS > 0, BIAS)
        if GATED:
            up_bias = 0.0
            if BIAS:
                up_bias = tl.load(bias_pointer + outputs + column, mask=in_columns, other=0.0)
                up_bias = up_bias.to(tl.float32)[:, None]
            sums = gate(sums, settle(ups, size, up_bias, PARTS > 0, BIAS), ACTIVATION)
    tl.store(out_pointer + at, sums.to(dtype), mask=mask)


GATE_BLOCK = 1024
"""Elements per program: with 4 warps, one 16-byte load of each half per thread."""


def gate_and_multiply(
    gate_up: Tensor, source: Scaled, bias: Tensor | None, activation: Activation
) -> Tensor:
    """gate_up [T, 2 * size], the product of `source` -> activation(gate) * up, [T, size]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    _gate_and_multiply[(rows, triton.cdiv(size, GATE_BLOCK))](
        gate_up,
        gate_up if source.squares is None else source.squares,
        gate_up if bias is None else bias,
        out,
        source.epsilon,
        SIZE=size,
        K=source.x.shape[1],
        SCALED=source.squares is not None,
        BIAS=bias is not None,
        ACTIVATION=activation,
        BLOCK=GATE_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _gate_and_multiply(
    gate_up_pointer,
    squares_pointer,
    bias_pointer,
    out_pointer,
    epsilon,
    SIZE: tl.constexpr,
    K: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate_at = gate_up_pointer + row * (2 * SIZE) + column
    gates = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(gate_at + SIZE, mask=inside, other=0.0).to(tl.float32)
    size, bias, up_bias = 1.0, 0.0, 0.0
    if SCALED:
        size = inverse_size(tl.load(squares_pointer + row), epsilon, K)
    if BIAS:
        bias = tl.load(bias_pointer + column, mask=inside, other=0.0).to(tl.float32)
        up_bias = tl.load(bias_pointer + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    gates = settle(gates, size, bias, SCALED, BIAS)
    product = gate(gates, settle(ups, size, up_bias, SCALED, BIAS), ACTIVATION)
    tl.store(
        out_pointer + row * SIZE + column, product.to(out_pointer.dtype.element_ty), mask=inside
    )
