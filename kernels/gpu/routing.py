"""Routing on a GPU: each row's experts, and all pairs of row and expert sorted by expert.

The host reads nothing: later kernels are launched for the most tiles that any choice can need, so
that a step can be recorded. Each row has one program of fixed shape, so its bits are fixed too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu.fixed_order import inverse_size, part_sums, settle
from baton.kernels.gpu.norm import Scaled
from baton.kernels.linear import Linear
from baton.kernels.routing import Routing

LOWEST = tl.constexpr(-(1 << 31))
"""Below the order of any score."""


@dataclass(frozen=True, slots=True)
class RouterTiling:
    rows: int
    experts: int
    depth: int  # inputs per iteration
    stages: int


FEW_ROWS = 32
FEW = RouterTiling(16, 16, 512, 4)
MANY = RouterTiling(64, 32, 128, 4)
"""With few rows all loads are in flight at once, and a small expert router still occupies several
multiprocessors."""

STAGE_BYTES = 200 << 10
"""Shared memory of a multiprocessor for what a program loads ahead."""

SORT_BLOCKS = (512, 4096)
"""Pairs that a program reads at once, for few and for many pairs."""


@dataclass(frozen=True, slots=True)
class Routed:
    """The experts of T rows. A pair is a row's index times per_row, plus the expert's rank.

    A single row's pairs are not sorted: each has its own expert.
    """

    chosen: Tensor  # [T, per_row], int32
    weights: Tensor  # [T, per_row], float32
    sizes: Tensor  # [T], float32: the factor of a row's products, as its norm is applied late
    pairs: Tensor | None = None  # [T * per_row], int32, sorted by expert, then by row
    starts: Tensor | None = None  # [every + 1], int32: where an expert's pairs begin


def route(source: Scaled, router: Linear, correction: Tensor | None, routing: Routing) -> Routed:
    """Chooses the experts of norm(residual): see kernels/experts.route."""
    rows, device = len(source.x), source.x.device
    logits = _logits(source.x, router.weight)
    chosen = torch.empty(rows, routing.per_row, dtype=torch.int32, device=device)
    weights = torch.empty(rows, routing.per_row, dtype=torch.float32, device=device)
    sizes = torch.empty(rows, dtype=torch.float32, device=device)
    squares = source.squares
    _choose[(rows,)](
        logits,
        logits if squares is None else squares,
        logits if router.bias is None else router.bias,
        logits if correction is None else correction,
        chosen,
        weights,
        sizes,
        rows,
        source.epsilon,
        routing.scale,
        K=source.x.shape[1],
        PARTS=0 if squares is None else len(squares),
        BLOCK_PARTS=1 if squares is None else triton.next_power_of_2(len(squares)),
        EXPERTS=routing.experts,
        OUTPUTS=routing.outputs,
        TOP_K=routing.top_k,
        SHARED=routing.shared,
        BIAS=router.bias is not None,
        SIGMOID=routing.scores == "sigmoid",
        CORRECTED=correction is not None,
        NORMALIZED=routing.normalized,
        GROUPS=routing.groups,
        TOP_GROUPS=routing.top_groups,
        GROUP_BEST=routing.group_best,
        BLOCK=triton.next_power_of_2(routing.experts),
        BLOCK_SHARED=triton.next_power_of_2(max(routing.shared, 1)),
        BLOCK_GROUPS=triton.next_power_of_2(routing.groups),
        num_warps=1,
        enable_fp_fusion=False,
    )
    if rows == 1:
        return Routed(chosen, weights, sizes)
    return Routed(chosen, weights, sizes, *_sorted(chosen, routing.every))


def _logits(x: Tensor, router: Tensor) -> Tensor:
    """x [T, H] @ router [outputs, H].T -> [T, outputs], float32."""
    (rows, depth), outputs = x.shape, len(router)
    logits = torch.empty(rows, outputs, dtype=torch.float32, device=x.device)
    tiling = FEW if rows <= FEW_ROWS else MANY
    turn = (tiling.rows + tiling.experts) * tiling.depth * x.element_size()
    _products[(triton.cdiv(outputs, tiling.experts), triton.cdiv(rows, tiling.rows))](
        x,
        router,
        logits,
        rows,
        outputs,
        K=depth,
        BLOCK_M=tiling.rows,
        BLOCK_N=tiling.experts,
        BLOCK_K=tiling.depth,
        num_warps=4,
        num_stages=min(tiling.stages, STAGE_BYTES // turn),
        enable_fp_fusion=False,
    )
    return logits


def _sorted(chosen: Tensor, every: int) -> tuple[Tensor, Tensor]:
    """chosen [T, per_row] -> Routed.pairs and starts."""
    count = chosen.numel()
    pairs = torch.empty(count, dtype=torch.int32, device=chosen.device)
    starts = torch.empty(every + 1, dtype=torch.int32, device=chosen.device)
    few, many = SORT_BLOCKS
    block = few if count <= few else many
    _sort[(every,)](
        chosen,
        pairs,
        starts,
        count,
        EVERY=every,
        BLOCK=block,
        STAGES=1 if block == few else 3,
        num_warps=block // 512,
    )
    return pairs, starts


@triton.jit(do_not_specialize=["rows"])
def _products(
    x_pointer,
    router_pointer,
    logits_pointer,
    rows,
    outputs,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    lane = tl.arange(0, BLOCK_K)
    in_rows, in_outputs = row < rows, output < outputs
    sums = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        depth = start + lane
        x = tl.load(
            x_pointer + row[None, :] * K + depth[:, None],
            mask=in_rows[None, :] & (depth < K)[:, None],
            other=0.0,
        )
        weights = tl.load(
            router_pointer + output[:, None] * K + depth[None, :],
            mask=in_outputs[:, None] & (depth < K)[None, :],
            other=0.0,
        )
        sums = tl.dot(weights, x, sums, input_precision="ieee")
    at = logits_pointer + row[None, :] * outputs + output[:, None]
    tl.store(at, sums, mask=in_rows[None, :] & in_outputs[:, None])


@triton.jit
def _ordered(x):
    """Integers in the order of floats x, above LOWEST: a warp finds the largest of these in one
    instruction."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    return tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST + 1)


@triton.jit
def _best(scores, lane, BLOCK: tl.constexpr):
    """The lane of the highest score, the lowest among equal ones. Always a valid lane."""
    found = tl.where(scores == tl.max(scores, axis=0), lane, BLOCK - 1)
    return tl.min(found, axis=0)


@triton.jit
def _in_best_groups(
    ranked,
    lane,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """Replaces scores outside the best groups by minus infinity."""
    lowest = float("-inf")
    group = lane // (EXPERTS // GROUPS)
    group_lane = tl.arange(0, BLOCK_GROUPS)
    scores = tl.full([BLOCK_GROUPS], lowest, dtype=tl.float32)
    for index in tl.static_range(GROUPS):
        left = tl.where(group == index, ranked, lowest)
        score = tl.max(left, axis=0)
        if GROUP_BEST == 2:
            left = tl.where(lane == _best(left, lane, BLOCK), lowest, left)
            score += tl.max(left, axis=0)
        scores = tl.where(group_lane == index, score, scores)
    kept = lane < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = _best(scores, group_lane, BLOCK_GROUPS)
        scores = tl.where(group_lane == best, lowest, scores)
        kept = kept | (group == best)
    return tl.where(kept, ranked, lowest)


@triton.jit(do_not_specialize=["rows"])
def _choose(
    logits_pointer,
    squares_pointer,
    bias_pointer,
    correction_pointer,
    chosen_pointer,
    weights_pointer,
    sizes_pointer,
    rows,
    epsilon,
    scale,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    BIAS: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    NORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SHARED: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lowest = float("-inf")
    size = 1.0
    if PARTS > 0:
        part = tl.arange(0, BLOCK_PARTS)
        squares = tl.load(squares_pointer + part * rows + row, mask=part < PARTS, other=0.0)
        size = inverse_size(part_sums(squares, 0, BLOCK_PARTS), epsilon, K)
    tl.store(sizes_pointer + row, size)
    lane = tl.arange(0, BLOCK)
    inside = lane < EXPERTS
    logits = tl.load(logits_pointer + row * OUTPUTS + lane, mask=inside, other=0.0)
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_pointer + lane, mask=inside, other=0.0).to(tl.float32)
    logits = settle(logits, size, bias, True, BIAS)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        logits = tl.where(inside, logits, lowest)
        scores = tl.exp(logits - tl.max(logits, axis=0))
        scores = scores / part_sums(scores, 0, BLOCK)
    ranked = scores
    if CORRECTED:
        ranked += tl.load(correction_pointer + lane, mask=inside, other=0.0)
    if GROUPS > 1:
        ranked = tl.where(inside, ranked, lowest)
        ranked = _in_best_groups(
            ranked, lane, EXPERTS, GROUPS, TOP_GROUPS, GROUP_BEST, BLOCK, BLOCK_GROUPS
        )
    order = tl.where(inside, _ordered(ranked), LOWEST)
    rank = tl.full([BLOCK], TOP_K, dtype=tl.int32)
    for index in tl.static_range(TOP_K):
        best = _best(order, lane, BLOCK)
        rank = tl.where(lane == best, index, rank)
        order = tl.where(lane == best, LOWEST, order)
    mine = rank < TOP_K
    weights = scores
    if NORMALIZED:
        weights = weights / (part_sums(tl.where(mine, scores, 0.0), 0, BLOCK) + 1e-20)
    at = row * (TOP_K + SHARED)
    tl.store(chosen_pointer + at + rank, lane, mask=mine)
    tl.store(weights_pointer + at + rank, weights * scale, mask=mine)
    if SHARED > 0:
        share = 1.0
        if OUTPUTS > EXPERTS:
            gate = tl.load(logits_pointer + row * OUTPUTS + EXPERTS) * size
            share = 1.0 / (1.0 + tl.exp(-gate))
        shared = tl.arange(0, BLOCK_SHARED)
        at += TOP_K
        tl.store(chosen_pointer + at + shared, EXPERTS + shared, mask=shared < SHARED)
        weights = tl.zeros([BLOCK_SHARED], dtype=tl.float32) + share
        tl.store(weights_pointer + at + shared, weights, mask=shared < SHARED)


@triton.jit(do_not_specialize=["count"])
def _sort(
    chosen_pointer,
    pairs_pointer,
    starts_pointer,
    count,
    EVERY: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Writes one expert's pairs after those of all experts before it."""
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], dtype=tl.int32)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        chosen = tl.load(chosen_pointer + start + lane, mask=start + lane < count, other=EVERY)
        before += (chosen < expert).to(tl.int32)
    place = tl.sum(before, axis=0)
    tl.store(starts_pointer + expert, place)
    for start in tl.range(0, count, BLOCK, num_stages=STAGES):
        chosen = tl.load(chosen_pointer + start + lane, mask=start + lane < count, other=EVERY)
        mine = (chosen == expert).to(tl.int32)
        at = place + tl.cumsum(mine, axis=0) - 1
        tl.store(pairs_pointer + at, start + lane, mask=mine == 1)
        place += tl.sum(mine, axis=0)
    if expert == EVERY - 1:
        tl.store(starts_pointer + EVERY, place)
