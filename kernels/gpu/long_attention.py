"""Attention of one long chunk on Hopper, from contiguous keys and values.

As kernels/gpu/hopper_chunks.py, with the same bits, but faster, since no pages are looked up: one
warp loads whole tiles with the copy engine (TMA), and each block has its own program.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.gpu import fixed_order
from baton.kernels.gpu.fixed_order import SPLIT, TILE
from baton.kernels.gpu.rotary import HeadShape

GROUP_QUERIES = gl.constexpr(64)
GROUPS = gl.constexpr(2)
GROUP_REGISTERS, LOADER_REGISTERS = 240, 24
ROOMS = 2
"""Splits of keys, and as many of values, in shared memory at a time."""

# Its name changed after Triton 3.6.
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
merge = gluon.jit(fixed_order.merge.fn)
thread_sums = gluon.jit(fixed_order.thread_sums.fn)


def supports(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return hopper and head_dim in (64, 128) and dtype in (torch.bfloat16, torch.float16)


def long_attention(
    qkv: Tensor, keys: Tensor, values: Tensor, start: int, shape: HeadShape, out: Tensor
) -> Tensor:
    """Rotated rows qkv [count, (heads + 2 * kv_heads) * dim] of one sequence from position `start`
    on, over keys and values [start + count or more, kv_heads, dim] -> out [count, heads * dim].
    A token's keys are contiguous, and so are its values."""
    count, dim = len(qkv), shape.head_dim
    layout = gl.NVMMASharedLayout.get_default_for([TILE, dim], ELEMENTS[qkv.dtype])
    tokens = [
        TensorDescriptor(
            each, [len(each), shape.kv_heads * dim], [each.stride(0), 1], [TILE, dim], layout
        )
        for each in (keys, values)
    ]
    _long[(shape.heads, triton.cdiv(count, GROUPS.value * GROUP_QUERIES.value))](
        qkv,
        *tokens,
        qkv if shape.sinks is None else shape.sinks,
        out,
        count,
        start,
        shape.score_factors[0],
        shape.window or 0,
        HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        DIM=dim,
        TILE=TILE,
        SPLIT=SPLIT,
        SINKS=shape.sinks is not None,
        ROOMS=ROOMS,
        GROUP_REGISTERS=GROUP_REGISTERS,
        LOADER_REGISTERS=LOADER_REGISTERS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit(do_not_specialize=["count", "start"])
def _long(
    qkv_pointer,
    keys,
    values,
    sinks_pointer,
    out_pointer,
    count,
    start,
    scale,
    window,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    TILE: gl.constexpr,
    SPLIT: gl.constexpr,
    SINKS: gl.constexpr,
    ROOMS: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):
    head = gl.program_id(0)
    # The last block goes first: it sees the most tokens.
    from_row = (gl.num_programs(1) - 1 - gl.program_id(1)) * (GROUPS * GROUP_QUERIES)
    end = start + gl.minimum(from_row + GROUPS * GROUP_QUERIES, count)
    # Splits of which all rows see all tokens, then one or more with a mask.
    first = 0
    masked = gl.minimum(start + from_row + 1, end - 1) // SPLIT * SPLIT
    if window > 0:
        first = gl.maximum(start + from_row - window + 1, 0) // SPLIT * SPLIT
        masked = first
    end = gl.cdiv(end, SPLIT) * SPLIT
    span = (first, masked, end)

    element: gl.constexpr = keys.dtype
    key_rooms = gl.allocate_shared_memory(element, [ROOMS * SPLIT // TILE, TILE, DIM], keys.layout)
    value_rooms = gl.allocate_shared_memory(
        element, [ROOMS * SPLIT // TILE, TILE, DIM], values.layout
    )
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([GROUP_QUERIES, DIM], element)
    query_rooms = gl.allocate_shared_memory(element, [GROUPS, GROUP_QUERIES, DIM], layout)
    keys_there = gl.allocate_shared_memory(gl.int64, [ROOMS, 1], mbarrier.MBarrierLayout())
    values_there = gl.allocate_shared_memory(gl.int64, [ROOMS, 1], mbarrier.MBarrierLayout())
    keys_done = gl.allocate_shared_memory(gl.int64, [ROOMS, 1], mbarrier.MBarrierLayout())
    values_done = gl.allocate_shared_memory(gl.int64, [ROOMS, 1], mbarrier.MBarrierLayout())
    for room in gl.static_range(ROOMS):
        mbarrier.init(keys_there.index(room), count=1)
        mbarrier.init(values_there.index(room), count=1)
        mbarrier.init(keys_done.index(room), count=GROUPS)
        mbarrier.init(values_done.index(room), count=GROUPS)
    fence_async_shared()
    rooms = (key_rooms, value_rooms, keys_there, values_there, keys_done, values_done)
    place = (count, start, from_row, head, scale, window)
    column = head // (HEADS // KV_HEADS) * DIM
    gl.warp_specialize(
        [
            (_attend, (0, qkv_pointer, sinks_pointer, out_pointer, query_rooms, rooms, span,
                       place, HEADS, KV_HEADS, DIM, TILE, SPLIT, SINKS, ROOMS)),
            (_attend, (1, qkv_pointer, sinks_pointer, out_pointer, query_rooms, rooms, span,
                       place, HEADS, KV_HEADS, DIM, TILE, SPLIT, SINKS, ROOMS)),
            (_load, (keys, values, column, rooms, span, TILE, SPLIT, ROOMS)),
        ],
        [4, 1],
        [GROUP_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _load(
    keys,
    values,
    column,
    rooms,
    span,
    TILE: gl.constexpr,
    SPLIT: gl.constexpr,
    ROOMS: gl.constexpr,
):
    """Loads all splits, each as soon as there is room for it."""
    key_rooms, value_rooms, keys_there, values_there, keys_done, values_done = rooms
    tiles: gl.constexpr = SPLIT // TILE
    for split in range(span[0], span[2], SPLIT):
        number = (split - span[0]) // SPLIT
        room, turn = number % ROOMS, (number // ROOMS + 1) & 1
        mbarrier.wait(keys_done.index(room), turn)
        there = keys_there.index(room)
        mbarrier.expect(there, tiles * keys.block_type.nbytes)
        for tile in gl.static_range(tiles):
            at = [split + tile * TILE, column]
            copy_tile(keys, at, there, key_rooms.index(room * tiles + tile))
        mbarrier.wait(values_done.index(room), turn)
        there = values_there.index(room)
        mbarrier.expect(there, tiles * values.block_type.nbytes)
        for tile in gl.static_range(tiles):
            at = [split + tile * TILE, column]
            copy_tile(values, at, there, value_rooms.index(room * tiles + tile))


@gluon.jit
def _attend(
    GROUP: gl.constexpr,
    qkv_pointer,
    sinks_pointer,
    out_pointer,
    query_rooms,
    rooms,
    span,
    place,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    TILE: gl.constexpr,
    SPLIT: gl.constexpr,
    SINKS: gl.constexpr,
    ROOMS: gl.constexpr,
):
    """Attends one group's queries to all tiles."""
    count, start, from_row, head, scale, window = place
    first, masked, end = span
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    my_row = from_row + GROUP * GROUP_QUERIES
    row = my_row + gl.arange(0, GROUP_QUERIES, gl.SliceLayout(1, load_layout))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, load_layout))
    at = row.to(gl.int64)[:, None] * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM + dim[None, :]
    query = query_rooms.index(GROUP)
    query.store(gl.load(qkv_pointer + at, mask=(row < count)[:, None], other=0.0))
    fence_async_shared()

    position = start + my_row + gl.arange(0, GROUP_QUERIES, gl.SliceLayout(1, scores_layout))
    rows: gl.constexpr = gl.SliceLayout(1, sums_layout)
    highest = gl.full([GROUP_QUERIES], float("-inf"), gl.float32, rows)
    total = gl.zeros([GROUP_QUERIES], gl.float32, rows)
    sums = gl.zeros([GROUP_QUERIES, DIM], gl.float32, sums_layout)
    if SINKS:
        highest = gl.zeros_like(total) + gl.load(sinks_pointer + head)
        total += 1.0
    state = (highest, total, sums)
    number = gl.to_tensor(0)
    mbarrier.wait(rooms[2].index(0), 0)
    scores = start_scores(query, rooms[0].index(0), scores_layout, TILE)
    scores = warpgroup_mma_wait(0, deps=[scores])
    for split in range(first, masked, SPLIT):
        scores, state = _merge_split(
            query, scores, state, number, split, position, scale, window, rooms,
            scores_layout, sums_layout, False, True, DIM, TILE, SPLIT, ROOMS,
        )  # fmt: skip
        number += 1
    for split in range(masked, end - SPLIT, SPLIT):
        scores, state = _merge_split(
            query, scores, state, number, split, position, scale, window, rooms,
            scores_layout, sums_layout, True, True, DIM, TILE, SPLIT, ROOMS,
        )  # fmt: skip
        number += 1
    scores, state = _merge_split(
        query, scores, state, number, end - SPLIT, position, scale, window, rooms,
        scores_layout, sums_layout, True, False, DIM, TILE, SPLIT, ROOMS,
    )  # fmt: skip
    highest, total, sums = state
    result = (sums * (1.0 / total)[:, None]).to(out_pointer.dtype.element_ty)
    row = my_row + gl.arange(0, GROUP_QUERIES, rows)
    dim = gl.arange(0, DIM, gl.SliceLayout(0, sums_layout))
    at = row.to(gl.int64)[:, None] * (HEADS * DIM) + head * DIM + dim[None, :]
    gl.store(out_pointer + at, result, mask=(row < count)[:, None])


@gluon.jit
def start_scores(query, keys, layout: gl.constexpr, TILE: gl.constexpr):
    """Starts the product of queries and a tile's keys."""
    nothing = gl.zeros([GROUP_QUERIES, TILE], gl.float32, layout)
    return warpgroup_mma(query, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _merge_split(
    query,
    scores,
    state,
    number,
    split,
    position,
    scale,
    window,
    rooms,
    scores_layout: gl.constexpr,
    sums_layout: gl.constexpr,
    MASKED: gl.constexpr,
    AHEAD: gl.constexpr,
    DIM: gl.constexpr,
    TILE: gl.constexpr,
    SPLIT: gl.constexpr,
    ROOMS: gl.constexpr,
):
    """Attends to a split whose first tile has its scores already. AHEAD: also computes the scores
    of the next split's first tile."""
    key_rooms, value_rooms, keys_there, values_there, keys_done, values_done = rooms
    highest, total, sums = state
    rows: gl.constexpr = gl.SliceLayout(1, sums_layout)
    tiles: gl.constexpr = SPLIT // TILE
    room, turn = number % ROOMS, (number // ROOMS) & 1
    split_highest = gl.full(
        [GROUP_QUERIES], float("-inf"), gl.float32, gl.SliceLayout(1, scores_layout)
    )
    split_total = gl.zeros_like(split_highest)
    split_sums = gl.zeros([GROUP_QUERIES, DIM], gl.float32, sums_layout)
    weights, fade, split_highest, split_total = tile_weights(
        scores, split_highest, split_total, split, position, scale, window,
        query.dtype, scores_layout, sums_layout, MASKED, TILE,
    )  # fmt: skip
    for tile in gl.static_range(tiles):
        if tile + 1 < tiles:
            keys = key_rooms.index(room * tiles + tile + 1)
            scores = start_scores(query, keys, scores_layout, TILE)
        elif AHEAD:
            following = (number + 1) % ROOMS
            mbarrier.wait(keys_there.index(following), ((number + 1) // ROOMS) & 1)
            keys = key_rooms.index(following * tiles)
            scores = start_scores(query, keys, scores_layout, TILE)
        if tile == 0:
            mbarrier.wait(values_there.index(room), turn)
        values = value_rooms.index(room * tiles + tile)
        found = warpgroup_mma(weights, values, split_sums, use_acc=tile > 0, is_async=True)
        if tile + 1 < tiles or AHEAD:
            scores = warpgroup_mma_wait(1, deps=[scores])
        if tile + 1 == tiles - 1:
            mbarrier.arrive(keys_done.index(room))
        if tile + 1 < tiles:
            # While the values are added up.
            more, fade, split_highest, split_total = tile_weights(
                scores, split_highest, split_total, split + (tile + 1) * TILE, position, scale,
                window, query.dtype, scores_layout, sums_layout, MASKED, TILE,
            )  # fmt: skip
            split_sums, weights = warpgroup_mma_wait(0, deps=[found, weights])
            split_sums = split_sums * fade[:, None]
            weights = more
        else:
            split_sums, weights = warpgroup_mma_wait(0, deps=[found, weights])
            mbarrier.arrive(values_done.index(room))
    split_highest = gl.convert_layout(split_highest, rows)
    split_total = gl.convert_layout(split_total, rows)
    return scores, merge(highest, total, sums, split_highest, split_total, split_sums)


@gluon.jit
def tile_weights(
    scores,
    highest,
    total,
    tile,
    position,
    scale,
    window,
    dtype: gl.constexpr,
    scores_layout: gl.constexpr,
    sums_layout: gl.constexpr,
    MASKED: gl.constexpr,
    TILE: gl.constexpr,
):
    """Returns a tile's weights as an operand, the factor for the sums so far, and the split's
    highest score and normalizer including the tile."""
    if MASKED:
        token = (tile + gl.arange(0, TILE, gl.SliceLayout(0, scores_layout)))[None, :]
        seen = token <= position[:, None]
        if window > 0:
            seen = seen & (token > position[:, None] - window)
        scores = gl.where(seen, scores, float("-inf"))
    higher = gl.maximum(highest, gl.max(scores, axis=1) * scale)
    base = gl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    weights = gl.exp2(gl.fma(scores, gl.to_tensor(scale), -base[:, None]))
    fade = gl.exp2(highest - base)
    sums = gl.convert_layout(row_sums(weights, TILE), gl.SliceLayout(1, scores_layout))
    total = gl.fma(total, fade, sums)
    operand = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, sums_layout, 2))
    return operand, gl.convert_layout(fade, gl.SliceLayout(1, sums_layout)), higher, total


@gluon.jit
def row_sums(x, COLUMNS: gl.constexpr):
    """As fixed_order._row_sums: adds up four threads' sums, neighbours first."""
    sums = thread_sums(x, GROUP_QUERIES, COLUMNS)
    thread = gl.arange(0, 4, gl.SliceLayout(0, sums.type.layout))[None, :]
    thread = thread + gl.full_like(sums, 0, dtype=gl.int32)
    sums += gl.gather(sums, thread ^ 1, axis=1)
    sums += gl.gather(sums, thread ^ 2, axis=1)
    return gl.max(sums, axis=1)  # of four equal sums
