"""The down projections of a single row's experts, with their sum, the residual and the next norm.

A program computes some columns for all of the row's experts and sums them in order of rank, so no
second kernel is needed. The tall side of its tile has these columns of one expert after another,
the other side the pairs' inputs. Of the results only those of an expert with its own pair are used:
the hardware has no narrower product. The bits equal those of experts.weighted and norm.scale_rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu.fixed_order import settle, square_columns, square_sums
from baton.kernels.gpu.norm import Scaled
from baton.kernels.gpu.prefetch import piece_for, prefetch
from baton.kernels.gpu.routing import Routed

STAGE_BYTES = 224 << 10
"""Shared memory of a multiprocessor for what a program loads ahead."""

LEAST_PAIRS = 16
"""Columns of the hardware's narrowest product."""

TILE = 1 << 14
"""Weights per iteration, of all experts together."""
WARPS = 8


def weighted_onto(
    x: Tensor,
    routed: Routed,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    norm: Tensor,
    epsilon: float,
    ahead: Tensor | None = None,
) -> Scaled:
    """residual [1, H] += the sum of experts.weighted(x, routed, weight, bias), in order. Returns
    the residual scaled by `norm` [H]. `ahead` are the weights of the next product, to prefetch."""
    (_, outputs, depth), per_row = weight.shape, routed.chosen.shape[1]
    pairs, columns = triton.next_power_of_2(per_row), square_columns(outputs)
    block_k = max(16, min(TILE // (pairs * columns), triton.next_power_of_2(depth)))
    turn = (pairs * columns + max(pairs, LEAST_PAIRS)) * block_k * weight.element_size()
    programs, threads = triton.cdiv(outputs, columns), 32 * WARPS
    piece = piece_for(ahead, programs * threads)
    squares = residual.new_empty(programs, 1, dtype=torch.float32)
    scaled = torch.empty_like(residual)
    _weighted_onto[(programs,)](
        x,
        weight,
        weight if bias is None else bias,
        routed.chosen,
        routed.weights,
        residual,
        norm,
        scaled,
        squares,
        weight if ahead is None else ahead,
        outputs,
        piece,
        K=depth,
        PER_ROW=per_row,
        PAIRS=pairs,
        BIAS=bias is not None,
        AHEAD=threads if piece else 0,
        COLUMNS=columns,
        BLOCK_M=max(pairs, LEAST_PAIRS),
        BLOCK_K=block_k,
        EVEN=depth % block_k == 0 and pairs == per_row,
        num_warps=WARPS,
        num_stages=max(1, STAGE_BYTES // turn),
        enable_fp_fusion=False,
    )
    return Scaled(scaled, squares, epsilon)


@triton.jit(do_not_specialize=["piece"])
def _weighted_onto(
    x_pointer,
    weight_pointer,
    bias_pointer,
    chosen_pointer,
    weights_pointer,
    residual_pointer,
    norm_pointer,
    scaled_pointer,
    squares_pointer,
    ahead_pointer,
    outputs,
    piece,
    K: tl.constexpr,
    PER_ROW: tl.constexpr,
    PAIRS: tl.constexpr,
    BIAS: tl.constexpr,
    AHEAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    program = tl.program_id(0)
    tall, other = tl.arange(0, PAIRS * COLUMNS), tl.arange(0, BLOCK_M)
    rank, lane = tall // COLUMNS, tl.arange(0, BLOCK_K)
    real = rank < PER_ROW
    expert = tl.load(chosen_pointer + rank, mask=real, other=0)
    # Columns beyond the last repeat it; their results are not stored.
    column = tl.minimum(program * COLUMNS + tall % COLUMNS, outputs - 1)
    weight_row = expert.to(tl.int64) * outputs + column
    x_at = x_pointer + other[None, :] * K + lane[:, None]  # [BLOCK_K, BLOCK_M]
    weight_at = weight_pointer + weight_row[:, None] * K + lane[None, :]
    in_pairs = (other < PER_ROW)[None, :]
    sums = tl.zeros([PAIRS * COLUMNS, BLOCK_M], dtype=tl.float32)
    for depth in range(0, K, BLOCK_K):
        if EVEN:
            x = tl.load(x_at + depth, mask=in_pairs, other=0.0)
            weights = tl.load(weight_at + depth, eviction_policy="evict_first")
        else:
            in_depth = depth + lane < K
            x = tl.load(x_at + depth, mask=in_pairs & in_depth[:, None], other=0.0)
            mask = real[:, None] & in_depth[None, :]
            weights = tl.load(weight_at + depth, mask=mask, other=0.0)
        sums = tl.dot(weights, x, sums, input_precision="ieee")
    if AHEAD > 0:
        prefetch(ahead_pointer, piece, tl.program_id(0), tl.arange(0, AHEAD))
    dtype = residual_pointer.dtype.element_ty
    own = tl.sum(tl.where(rank[:, None] == other[None, :], sums, 0.0), axis=1)
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_pointer + weight_row, mask=real, other=0.0).to(tl.float32)
    share = tl.load(weights_pointer + rank, mask=real, other=0.0)
    own = settle(own, 1.0, bias, False, BIAS) * share
    parts = tl.reshape(own.to(dtype).to(tl.float32), (PAIRS, COLUMNS))
    mine = program * COLUMNS + tl.arange(0, COLUMNS)
    inside = mine < outputs
    total = tl.load(residual_pointer + mine, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(PER_ROW):
        at_rank = (tl.arange(0, PAIRS) == part)[:, None]
        total += tl.sum(tl.where(at_rank, parts, 0.0), axis=0)
    total = tl.where(inside, total.to(dtype).to(tl.float32), 0.0)
    norm = tl.load(norm_pointer + mine, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual_pointer + mine, total.to(dtype), mask=inside)
    tl.store(scaled_pointer + mine, (total * norm).to(dtype), mask=inside)
    tl.store(squares_pointer + program, square_sums(total, 0, COLUMNS))
