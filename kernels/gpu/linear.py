"""Linear layers of a few rows, at the speed of reading the weights.

With few rows a product takes as long as reading its weights, and each further kernel costs a
launch. So the gate, the residual sum and the norm are part of the products. A norm is shared
between two of them. The product that makes a residual sees elements but never a whole row; it
scales them by the norm's weight and stores sums of squares of some columns each. The product
that reads the row adds these up at its end: a row's size is a factor of its whole product.

A row has the same bits as in the matrix library's product of many rows, followed by the gate
(kernels/gpu/gate.py) or by the attention's kernels: all walk the inputs in order and round at
the same places.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.fp8 import Fp8Weight
from baton.kernels.gpu import packed_rows
from baton.kernels.gpu.few_adapters import (
    adapt,
    adapter_arguments,
    known_before,
    shrink_first,
)
from baton.kernels.gpu.fixed_order import awaited, square_columns
from baton.kernels.gpu.fp8_rows import fp8_rows
from baton.kernels.gpu.low_rank import ProductAdapters
from baton.kernels.gpu.norm import Scaled
from baton.kernels.gpu.packed_tiles import packed_tile
from baton.kernels.gpu.prefetch import piece_for, prefetch
from baton.kernels.gpu.row_results import Extras, finish
from baton.kernels.gpu.tilings import (
    LinearTiling,
    Weight,
    fp8_tiling_for,
    gated_tiling_for,
    packed_tiling_for,
    row_block,
    stages_for,
    tiling_for,
)
from baton.kernels.linear import Activation
from baton.kernels.packed import PackedWeight


def few_rows(
    source: Scaled,
    weight: Weight,
    bias: Tensor | None = None,
    gates: Activation | None = None,
    ahead: Tensor | None = None,
    adapters: ProductAdapters | None = None,
) -> Tensor:
    """norm(residual) @ weight.T + bias, for weight [N, K]: [M, N].

    With `gates`, weight holds gates, then as many ups: activation(gates) * ups, [M, N / 2].
    `ahead` are the weights of a later product, to prefetch if the next kernel leaves memory idle.
    `adapters` add to the product; then there are at most TILE_ROWS rows.
    """
    outputs = weight.shape[0] // 2 if gates else weight.shape[0]
    x, out = source.x, source.x.new_empty(len(source.x), outputs)
    extras = Extras(source=source, gates=gates, ahead=ahead, adapters=adapters)
    _launch(x, weight, bias, out, outputs, extras)
    return out


def few_rows_alone(
    x: Tensor, weight: Weight, out: Tensor | None = None, *, onto: bool = False
) -> Tensor:
    """x @ weight.T, for weight [N, K]: [M, N]. `onto`: with the bits of few_rows_onto."""
    out = x.new_empty(len(x), weight.shape[0]) if out is None else out
    _launch(x, weight, None, out, weight.shape[0], Extras(onto=onto))
    return out


def few_rows_onto(
    x: Tensor,
    weight: Weight,
    residual: Tensor,
    norm: Tensor,
    epsilon: float,
    bias: Tensor | None = None,
    adapters: ProductAdapters | None = None,
) -> Scaled:
    """residual [M, N] += x @ weight.T + bias, with what adapters add. Returns the residual scaled
    by `norm` [N]."""
    rows, outputs = residual.shape
    parts = triton.cdiv(outputs, square_columns(outputs))
    squares = residual.new_empty(parts, rows, dtype=torch.float32)
    target = Scaled(torch.empty_like(residual), squares, epsilon)
    extras = Extras(norm=norm, target=target, adapters=adapters)
    _launch(x, weight, bias, residual, outputs, extras)
    return target


class _Operands(NamedTuple):
    """A product's rows and weight as a kernel reads them."""

    tiling: LinearTiling
    x: Tensor
    row_scales: Tensor
    codes: Tensor
    scales: Tensor  # of the weight
    code_bits: int
    group: int = 0
    exact: bool = True

    @property
    def constants(self) -> dict[str, int | bool]:
        """BITS is 0 if weights are not packed."""
        packed = self.code_bits if self.group else 0
        return {"BITS": packed, "GROUP": self.group, "EXACT": self.exact}


def _operands(x: Tensor, weight: Weight, outputs: int, gated: bool) -> _Operands:
    if isinstance(weight, Fp8Weight):
        return _Operands(fp8_tiling_for(outputs, len(x)), *fp8_rows(x), *weight, 8)
    if isinstance(weight, PackedWeight):
        tiling = packed_tiling_for(outputs, len(x), gated)
        parts = weight.words, weight.scales, weight.bits, weight.group, weight.exact
        return _Operands(tiling, x, x, *parts)
    tiling = gated_tiling_for(outputs, len(x)) if gated else tiling_for(outputs, len(x))
    return _Operands(tiling, x, x, weight, x, 8 * weight.itemsize)


def _launch(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    out: Tensor,
    outputs: int,
    extras: Extras,
) -> None:
    if isinstance(weight, PackedWeight) and extras.adapters is None:
        found = packed_rows.tiling_for(x, outputs, gated=extras.gates is not None)
        if found is not None:
            return packed_rows.multiply(x, weight, bias, out, outputs, extras, found)
    rows, depth = x.shape
    read = _operands(x, weight, outputs, extras.gates is not None)
    tiling, block_m = read.tiling, row_block(read.tiling, rows)
    packed = isinstance(weight, PackedWeight)
    # A tile of packed gates includes their ups.
    block_n = tiling.outputs // 2 if packed and extras.gates else tiling.outputs
    programs, threads = triton.cdiv(outputs, block_n), 32 * tiling.warps
    piece = piece_for(extras.ahead, programs * threads)
    shrinkers, adapted = adapter_arguments(x, extras.adapters, programs, threads, block_m)
    _few_rows[(shrinkers + programs, triton.cdiv(rows, block_m))](
        read.x,
        read.codes,
        read.row_scales,
        read.scales,
        *extras.tensors(x, bias, out),
        rows=rows,
        outputs=outputs,
        piece=piece,
        epsilon=extras.epsilon,
        **extras.constants(depth, outputs, bias),
        AHEAD=threads if piece else 0,
        FP8=isinstance(weight, Fp8Weight),
        ROUNDS_SUMS=extras.onto or extras.target is not None,
        **read.constants,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=tiling.depth,
        EVEN=depth % tiling.depth == 0 and outputs % block_n == 0,
        **adapted,
        num_warps=tiling.warps,
        enable_fp_fusion=False,
        num_stages=stages_for(
            tiling, block_m, bool(extras.gates) and not packed, read.code_bits, 8 * read.x.itemsize
        ),
    )
    return None


@triton.jit(
    do_not_specialize=["rows", "piece", "tiles", "groups", "shrinkers", "b_lines"],
    do_not_specialize_on_alignment=[
        "slots_pointer",
        "tiles_pointer",
        "done_pointer",
        "ready_pointer",
    ],
)
def _few_rows(
    x_pointer,
    weight_pointer,
    row_scales_pointer,
    column_scales_pointer,
    bias_pointer,
    out_pointer,
    squares_pointer,
    norm_pointer,
    scaled_pointer,
    ahead_pointer,
    slots_pointer,
    tiles_pointer,
    shrunk_x_pointer,
    a_pointer,
    b_pointer,
    split_sums_pointer,
    shrunk_pointer,
    done_pointer,
    ready_pointer,
    tiles,
    groups,
    shrinkers,
    a_stride,
    b_stride,
    b_lines,
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
    FP8: tl.constexpr,
    ROUNDS_SUMS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    SPLIT: tl.constexpr,
    MODULES: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    FIRST_END: tl.constexpr,
    SECOND_END: tl.constexpr,
    AHEAD_OF_B: tl.constexpr,
):
    program = tl.program_id(0) - shrinkers
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    if RANK > 0:
        if program < 0:
            shrink_first(
                program + shrinkers, slots_pointer, tiles_pointer, shrunk_x_pointer, a_pointer,
                b_pointer, split_sums_pointer, shrunk_pointer, done_pointer, ready_pointer, rows,
                tiles, groups, shrinkers, a_stride, b_stride, b_lines, K, SPLIT, MODULES, RANK,
                WIDTH, DEPTH, STAGES, BLOCK_M, AHEAD_OF_B,
            )  # fmt: skip
            return
        # Loaded here, since all programs would wait for it after their sums.
        known = known_before(slots_pointer, tiles_pointer, rows, tiles, RANK, WIDTH, BLOCK_M)
    column = program * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    in_rows, in_columns = row < rows, column < outputs
    x_at = x_pointer + row[None, :] * K + lane[:, None]  # [BLOCK_K, BLOCK_M]
    weight_at = weight_pointer + column.to(tl.int64)[:, None] * K + lane[None, :]
    to_up = outputs.to(tl.int64) * K
    # Inputs whose products tensor cores add: see kernels/gpu/fp8_rows.py.
    together: tl.constexpr = 128 if FP8 and ROUNDS_SUMS else None
    tile: tl.constexpr = 2 * BLOCK_N if GATED and BITS > 0 else BLOCK_N  # with gates and ups
    sums = tl.zeros([tile, BLOCK_M], dtype=tl.float32)
    ups = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        in_depth = start + lane < K
        mask = in_columns[:, None] & in_depth[None, :]
        if EVEN:
            x = tl.load(x_at + start, mask=in_rows[None, :], other=0.0)
        else:
            x = tl.load(x_at + start, mask=in_rows[None, :] & in_depth[:, None], other=0.0)
        if BITS > 0:
            weights = packed_tile(
                weight_pointer, column_scales_pointer, start, program * BLOCK_N, outputs,
                K, BITS, GROUP, EXACT, x.dtype, tile, BLOCK_K, EVEN, GATED,
            )  # fmt: skip
        elif EVEN:
            weights = tl.load(weight_at + start, eviction_policy="evict_first")
        else:
            weights = tl.load(weight_at + start, mask=mask, other=0.0)
        sums = tl.dot(weights, x, sums, input_precision="ieee", max_num_imprecise_acc=together)
        if BITS > 0:
            sums = awaited(sums)
        if GATED and BITS == 0:
            if EVEN:
                weights = tl.load(weight_at + to_up + start, eviction_policy="evict_first")
            else:
                weights = tl.load(weight_at + to_up + start, mask=mask, other=0.0)
            ups = tl.dot(weights, x, ups, input_precision="ieee", max_num_imprecise_acc=together)
    if tile > BLOCK_N:
        halves = tl.permute(tl.reshape(sums, (2, BLOCK_N, BLOCK_M)), (1, 2, 0))
        sums, ups = tl.split(halves)
    if AHEAD > 0:
        prefetch(ahead_pointer, piece, program, tl.arange(0, AHEAD))
    dtype = out_pointer.dtype.element_ty
    if FP8:
        if ROUNDS_SUMS:  # as the library leaves them: see kernels/gpu/fp8_rows.py
            sums = sums.to(dtype).to(tl.float32)
        row_scales = tl.load(row_scales_pointer + row, mask=in_rows, other=0.0)[None, :]
        scales_at = column_scales_pointer + column
        sums *= tl.load(scales_at, mask=in_columns, other=0.0)[:, None]
        sums *= row_scales
        if GATED:
            ups *= tl.load(scales_at + outputs, mask=in_columns, other=0.0)[:, None]
            ups *= row_scales
    # Rounded as the matrix library rounds a product, before adapters add to it.
    sums = sums.to(dtype).to(tl.float32)
    if GATED:
        ups = ups.to(dtype).to(tl.float32)
    if RANK > 0:
        sums, ups = adapt(
            sums, ups, known, program * BLOCK_N, tiles_pointer, b_pointer, shrunk_pointer,
            ready_pointer, dtype, outputs, tiles, groups, shrinkers, b_stride, GATED, RANK, WIDTH,
            FIRST_END, SECOND_END, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    part = tl.arange(0, BLOCK_PARTS)
    if ADDS:
        part = program * (BLOCK_N // SQUARES) + tl.arange(0, BLOCK_N // SQUARES)
    finish(
        sums, ups, row, column, row, part, bias_pointer, out_pointer, squares_pointer, norm_pointer,
        scaled_pointer, rows, outputs, epsilon, PARTS, BLOCK_PARTS, K, BIAS, GATED, ACTIVATION,
        ADDS, SQUARES, BLOCK_M, BLOCK_N,
    )  # fmt: skip
