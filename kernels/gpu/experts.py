"""Products of experts: each expert multiplies the rows that chose it, in tiles of some pairs.

A tile finds its expert among the starts of all experts' pairs. Few rows take as long as reading the
chosen experts' weights, many rows as long as their products; only the pairs per tile differ. As in
the products of few rows (kernels/gpu/linear.py) the weights are the tall side of a tile and the
inputs are walked in order, so that a row's bits do not depend on the tile.

A tile of gates and ups alternates between eight of each, so that a thread has a gate and its up.
The last tile of an expert is as wide as the pairs left need, so that large tiles waste little.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu.fixed_order import gate, settle
from baton.kernels.gpu.norm import Scaled
from baton.kernels.gpu.routing import Routed
from baton.kernels.linear import Activation
from baton.kernels.routing import Routing

STAGE_BYTES = 200 << 10
"""Shared memory of a multiprocessor for what its programs load ahead."""


@dataclass(frozen=True, slots=True)
class GroupedTiling:
    pairs: int
    height: int  # rows of a weight; a multiple of 64
    depth: int  # inputs per iteration
    warps: int
    stages: int
    programs: int  # per multiprocessor: one begins or ends while others load
    tails: int = 0  # how often a tile's pairs may be halved for the last pairs of an expert

    def stages_of(self, itemsize: int) -> int:
        """How many iterations are loaded ahead: as many as fit."""
        turn = (self.height + self.pairs) * self.depth * itemsize
        return max(1, min(self.stages, STAGE_BYTES // self.programs // turn))


TILINGS = {
    10: GroupedTiling(16, 64, 128, 4, 6, 2),
    22: GroupedTiling(32, 64, 128, 4, 6, 2),
    48: GroupedTiling(64, 128, 64, 4, 4, 2, 1),
}
"""By the mean number of pairs per expert: most experts then need one tile."""

LARGEST = GroupedTiling(128, 256, 64, 8, 4, 1, 2)


def tiling_for(pairs: int, experts: int) -> GroupedTiling:
    fitting = (tiling for mean, tiling in TILINGS.items() if pairs <= mean * experts)
    return next(fitting, LARGEST)


def rows_of_tilings(routing: Routing) -> list[int]:
    """Row counts that lead to each of the tilings."""
    most = [limit * routing.every // routing.per_row for limit in TILINGS]
    return [*most, most[-1] + 1]


def most_tiles(pairs: int, experts: int, tile: int) -> int:
    """The most tiles that any choice can need: an expert's last tile may hold a single pair."""
    used = min(pairs, experts)
    return (pairs + used * (tile - 1)) // tile


def gated(
    source: Scaled,
    routed: Routed,
    weight: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
) -> Tensor:
    """activation(gates) * ups of norm(residual), for every pair: [pairs, N], in the order of
    routed.pairs. weight [experts, 2 * N, H] and bias [experts, 2 * N] hold gates, then ups."""
    columns = weight.shape[1] // 2
    out = source.x.new_empty(routed.chosen.numel(), columns)
    _launch(source.x, routed, weight, bias, out, columns, activation)
    return out


def weighted(x: Tensor, routed: Routed, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The pairs' weights times x @ weight.T + bias: [per_row, T, H]. x [pairs, N] is in the order
    of routed.pairs; weight [experts, H, N], bias [experts, H]."""
    (rows, per_row), outputs = routed.chosen.shape, weight.shape[1]
    out = x.new_empty(per_row, rows, outputs)
    _launch(x, routed, weight, bias, out, outputs)
    return out


def _launch(
    x: Tensor,
    routed: Routed,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    outputs: int,
    gates: Activation | None = None,
) -> None:
    experts, height, depth = weight.shape
    (rows, per_row), count = routed.chosen.shape, routed.chosen.numel()
    tiling = tiling_for(count, experts)
    tiles = most_tiles(count, experts, tiling.pairs)
    _grouped[(triton.cdiv(height, tiling.height), tiles)](
        x,
        weight,
        weight if bias is None else bias,
        routed.chosen if routed.pairs is None else routed.pairs,
        routed.chosen if routed.starts is None else routed.starts,
        routed.sizes,
        routed.weights,
        out,
        rows,
        outputs,
        K=depth,
        EXPERTS=experts,
        BLOCK_EXPERTS=triton.next_power_of_2(experts),
        PER_ROW=per_row,
        SINGLE=routed.pairs is None,
        GATED=gates is not None,
        ACTIVATION=gates or "",
        BIAS=bias is not None,
        TAILS=tiling.tails,
        BLOCK_M=tiling.pairs,
        BLOCK_N=tiling.height,
        BLOCK_K=tiling.depth,
        EVEN=depth % tiling.depth == 0,
        num_warps=tiling.warps,
        num_stages=tiling.stages_of(weight.element_size()),
        enable_fp_fusion=False,
    )


@triton.jit
def _tile(starts_pointer, tile, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    """The tile's expert, its first pair and the end of the expert's pairs. Beyond the last tile the
    expert is EXPERTS."""
    lane = tl.arange(0, BLOCK)
    inside = lane < EXPERTS
    starts = tl.load(starts_pointer + lane, mask=inside, other=0)
    ends = tl.load(starts_pointer + 1 + lane, mask=inside, other=0)
    tiles = (ends - starts + PAIRS - 1) // PAIRS
    expert = tl.sum((inside & (tl.cumsum(tiles, axis=0) <= tile)).to(tl.int32), axis=0)
    earlier = tl.sum(tl.where(lane < expert, tiles, 0), axis=0)
    start = tl.sum(tl.where(lane == expert, starts, 0), axis=0)
    end = tl.sum(tl.where(lane == expert, ends, 0), axis=0)
    return expert, start + (tile - earlier) * PAIRS, end


@triton.jit(do_not_specialize=["rows"])
def _grouped(
    x_pointer,
    weight_pointer,
    bias_pointer,
    pairs_pointer,
    starts_pointer,
    sizes_pointer,
    weights_pointer,
    out_pointer,
    rows,
    outputs,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    PER_ROW: tl.constexpr,
    SINGLE: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    TAILS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    tile = tl.program_id(1)
    if SINGLE:
        expert = tl.load(pairs_pointer + tile)  # routed.chosen, in order of rank
        start, end = tile, tile + 1
    else:
        expert, start, end = _tile(starts_pointer, tile, EXPERTS, BLOCK_EXPERTS, BLOCK_M)
        if expert == EXPERTS:
            return
    pointers = (
        x_pointer, weight_pointer, bias_pointer, pairs_pointer, sizes_pointer, weights_pointer,
        out_pointer,
    )  # fmt: skip
    _fit(
        pointers, expert, start, end, rows, outputs, K, PER_ROW, SINGLE, GATED, ACTIVATION, BIAS,
        TAILS, BLOCK_M, BLOCK_N, BLOCK_K, EVEN,
    )  # fmt: skip


@triton.jit
def _fit(
    pointers,
    expert,
    start,
    end,
    rows,
    outputs,
    K: tl.constexpr,
    PER_ROW: tl.constexpr,
    SINGLE: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    TAILS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Computes the products in a tile that fits the pairs left: BLOCK_M wide, or halved up to TAILS
    times."""
    if TAILS == 0 or end - start > BLOCK_M // 2:
        _products(
            pointers, expert, start, end, rows, outputs, K, PER_ROW, SINGLE, GATED, ACTIVATION,
            BIAS, BLOCK_M, BLOCK_N, BLOCK_K, EVEN,
        )  # fmt: skip
    else:
        _fit(
            pointers, expert, start, end, rows, outputs, K, PER_ROW, SINGLE, GATED, ACTIVATION,
            BIAS, TAILS - 1, BLOCK_M // 2, BLOCK_N, BLOCK_K, EVEN,
        )  # fmt: skip


@triton.jit
def _pairs(pairs_pointer, place, inside, SINGLE: tl.constexpr):
    """The pairs at these places. With a single row a pair equals its place."""
    if SINGLE:
        pair = tl.where(inside, place, 0)
    else:
        pair = tl.load(pairs_pointer + place, mask=inside, other=0)
    return pair


@triton.jit
def _products(
    pointers,
    expert,
    start,
    end,
    rows,
    outputs,
    K: tl.constexpr,
    PER_ROW: tl.constexpr,
    SINGLE: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Computes an expert's products for up to BLOCK_M pairs from `start` on."""
    x_pointer, weight_pointer, bias_pointer, pairs_pointer = pointers[:4]
    sizes_pointer, weights_pointer, out_pointer = pointers[4:]
    place = start + tl.arange(0, BLOCK_M)
    in_rows = place < end
    tall = tl.arange(0, BLOCK_N)
    if GATED:
        turned = tall // 16 * 8 + tall % 8  # eight gates, then their ups
        # Columns beyond the last repeat it; their results are not stored.
        column = tl.minimum(tl.program_id(0) * (BLOCK_N // 2) + turned, outputs - 1)
        weight_row = expert.to(tl.int64) * (2 * outputs) + tall // 8 % 2 * outputs + column
        x_row = _pairs(pairs_pointer, place, in_rows, SINGLE).to(tl.int64) // PER_ROW
    else:
        column = tl.minimum(tl.program_id(0) * BLOCK_N + tall, outputs - 1)
        weight_row = expert.to(tl.int64) * outputs + column
        x_row = place.to(tl.int64)
    lane = tl.arange(0, BLOCK_K)
    x_at = x_pointer + x_row[None, :] * K + lane[:, None]  # [BLOCK_K, BLOCK_M]
    weight_at = weight_pointer + weight_row[:, None] * K + lane[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for depth in range(0, K, BLOCK_K):
        if EVEN:
            x = tl.load(x_at + depth, mask=in_rows[None, :], other=0.0)
            weights = tl.load(weight_at + depth)
        else:
            in_depth = depth + lane < K
            x = tl.load(x_at + depth, mask=in_rows[None, :] & in_depth[:, None], other=0.0)
            weights = tl.load(weight_at + depth, mask=in_depth[None, :], other=0.0)
        sums = tl.dot(weights, x, sums, input_precision="ieee")
    # Loaded only now, since the loop needs all registers.
    pair = _pairs(pairs_pointer, place, in_rows, SINGLE)
    row = (pair // PER_ROW).to(tl.int64)
    dtype = out_pointer.dtype.element_ty
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_pointer + weight_row).to(tl.float32)[:, None]
    if GATED:
        # Rounded as products of an MLP are.
        size = tl.load(sizes_pointer + row, mask=in_rows, other=0.0)
        sums = settle(sums.to(dtype).to(tl.float32), size[None, :], bias, True, BIAS)
        in_turn = tl.reshape(sums, (BLOCK_N // 16, 2, 8, BLOCK_M))
        gates, ups = tl.split(tl.permute(in_turn, (0, 2, 3, 1)))
        sums = tl.reshape(gate(gates, ups, ACTIVATION), (BLOCK_N // 2, BLOCK_M))
        column = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        out_row = place.to(tl.int64)
    else:
        share = tl.load(weights_pointer + pair, mask=in_rows, other=0.0)
        sums = settle(sums, 1.0, bias, False, BIAS) * share[None, :]
        column = tl.program_id(0) * BLOCK_N + tall
        out_row = (pair % PER_ROW).to(tl.int64) * rows + row
    at = out_pointer + out_row[None, :] * outputs + column[:, None]
    tl.store(at, sums.to(dtype), mask=in_rows[None, :] & (column < outputs)[:, None])


SUM_BLOCK = 1024


def sum_parts(parts: Tensor) -> Tensor:
    """Sums parts [n, T, H] in order -> [T, H]."""
    out = torch.empty_like(parts[0])
    _sum_parts[(triton.cdiv(out.numel(), SUM_BLOCK),)](
        parts, out, out.numel(), PARTS=len(parts), BLOCK=SUM_BLOCK, num_warps=4
    )
    return out


@triton.jit(do_not_specialize=["size"])
def _sum_parts(parts_pointer, out_pointer, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for part in tl.static_range(PARTS):
        start = parts_pointer + part * size.to(tl.int64)
        total += tl.load(start + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(out_pointer + at, total.to(out_pointer.dtype.element_ty), mask=at < size)
