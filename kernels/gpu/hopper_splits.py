"""How a group of warps attends its queries to splits in shared memory, on Hopper.

Used by kernels/gpu/hopper_chunks.py and kernels/gpu/long_attention.py; the order of sums is that of
kernels/gpu/fixed_order.py. While tensor cores multiply a tile's weights and values, the group turns
the scores of the next tile into weights, also across the end of a split.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from baton.kernels.gpu import fixed_order

GROUP_QUERIES = gl.constexpr(64)
GROUPS = gl.constexpr(2)
GROUP_REGISTERS, LOADER_REGISTERS = 240, 24
TILE, SPLIT = gl.constexpr(fixed_order.TILE), gl.constexpr(fixed_order.SPLIT)
TILES = gl.constexpr(SPLIT.value // TILE.value)
assert TILES.value == 2
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE.value, 16]))
"""How scores lie in a group's registers."""
ELEMENTS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}

# Its name changed after Triton 3.6.
copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
merge = gluon.jit(fixed_order.merge.fn)
thread_sums = gluon.jit(fixed_order.thread_sums.fn)


@gluon.jit
def attend_splits(
    query, sink, number, start, span, scale, window, rooms, layout: gl.constexpr,
    SINKS: gl.constexpr, DIM: gl.constexpr, ROOMS: gl.constexpr,
):  # fmt: skip
    """Attends queries from position `start` on to all splits of a span but the last one, for
    attend_last. `number` counts the program's splits.

    `span` has the first split, the first masked one and the end of the last one. `rooms` has the
    tiles of keys and those of values; barriers for loaded and for used splits, of keys, then of
    values; the last barrier of used ones is for queries.
    """
    first, masked, end = span
    place = (start + gl.arange(0, GROUP_QUERIES, gl.SliceLayout(1, LAYOUT)), scale, window)
    total = gl.zeros([GROUP_QUERIES], gl.float32, gl.SliceLayout(1, layout))
    sums = gl.zeros([GROUP_QUERIES, DIM], gl.float32, layout)
    highest = gl.zeros_like(total) + sink
    if SINKS:
        total += 1.0
    state = (highest, total, sums)
    room = number % ROOMS
    mbarrier.wait(rooms[2].index(room), (number // ROOMS) & 1)
    scores = _start_scores(query, rooms[0].index(room * TILES))
    scores = warpgroup_mma_wait(0, deps=[scores])
    ready = _first_weights(scores, first, place, query.dtype, layout, True)
    for split in range(first, masked - SPLIT, SPLIT):
        ready, state = _attend_split(
            query, ready, state, number, split, place, rooms, layout, False, True, DIM, ROOMS
        )
        number += 1
    for split in range(gl.maximum(masked - SPLIT, first), end - SPLIT, SPLIT):
        ready, state = _attend_split(
            query, ready, state, number, split, place, rooms, layout, True, True, DIM, ROOMS
        )
        number += 1
    return ready, state, number, place


@gluon.jit
def attend_last(
    query, ready, state, number, split, place, rooms, layout: gl.constexpr, DIM: gl.constexpr,
    ROOMS: gl.constexpr,
):  # fmt: skip
    """Attends to the last split. Returns the attended values."""
    _, state = _attend_split(
        query, ready, state, number, split, place, rooms, layout, True, False, DIM, ROOMS
    )
    return state[2] * (1.0 / state[1])[:, None]


@gluon.jit
def _attend_split(
    query, ready, state, number, split, place, rooms, layout: gl.constexpr,
    MASKED: gl.constexpr, AHEAD: gl.constexpr, DIM: gl.constexpr, ROOMS: gl.constexpr,
):  # fmt: skip
    """Attends to a split whose first tile has its weights. AHEAD: also computes the weights of the
    next split's first tile. No product is left running: a loop whose products run on would not be
    compiled to asynchronous ones."""
    key_rooms, value_rooms, there, done = rooms
    weights, split_highest, split_total = ready
    room, turn = number % ROOMS, (number // ROOMS) & 1
    scores = _start_scores(query, key_rooms.index(room * TILES + 1))
    mbarrier.wait(there.index(ROOMS + room), turn)
    nothing = gl.zeros([GROUP_QUERIES, DIM], gl.float32, layout)
    values = value_rooms.index(room * TILES)
    found = warpgroup_mma(weights, values, nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(done.index(room))
    more, fade, split_highest, split_total = _tile_weights(
        scores, split_highest, split_total, split + TILE, place, query.dtype, layout, MASKED
    )
    # What is computed meanwhile is among `deps`, or it would be computed after the wait.
    if AHEAD:
        following = (number + 1) % ROOMS
        mbarrier.wait(there.index(following), ((number + 1) // ROOMS) & 1)
        scores = _start_scores(query, key_rooms.index(following * TILES))
        found, weights, more, fade = warpgroup_mma_wait(1, deps=[found, weights, more, fade])
    else:
        mbarrier.arrive(done.index(2 * ROOMS))
        found, weights, more, fade = warpgroup_mma_wait(0, deps=[found, weights, more, fade])
    values = value_rooms.index(room * TILES + 1)
    found = warpgroup_mma(more, values, found * fade[:, None], is_async=True)
    if AHEAD:
        scores = warpgroup_mma_wait(1, deps=[scores])
        ready = _first_weights(scores, split + SPLIT, place, query.dtype, layout, MASKED)
        found, more, weights = warpgroup_mma_wait(0, deps=[found, more, ready[0]])
        ready = (weights, ready[1], ready[2])
    else:
        found, more = warpgroup_mma_wait(0, deps=[found, more])
    mbarrier.arrive(done.index(ROOMS + room))
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    split_highest = gl.convert_layout(split_highest, rows)
    split_total = gl.convert_layout(split_total, rows)
    return ready, merge(state[0], state[1], state[2], split_highest, split_total, found)


@gluon.jit
def _start_scores(query, keys):
    """Starts the product of queries and a tile's keys."""
    nothing = gl.zeros([GROUP_QUERIES, TILE], gl.float32, LAYOUT)
    return warpgroup_mma(query, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _first_weights(
    scores, split, place, dtype: gl.constexpr, layout: gl.constexpr, MASKED: gl.constexpr
):
    """Returns the weights of a split's first tile, the highest score and the normalizer."""
    highest = gl.full([GROUP_QUERIES], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
    total = gl.zeros_like(highest)
    weights, _, highest, total = _tile_weights(
        scores, highest, total, split, place, dtype, layout, MASKED
    )
    return weights, highest, total


@gluon.jit
def _tile_weights(
    scores, highest, total, tile, place, dtype: gl.constexpr, layout: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Returns a tile's weights as an operand, the factor for the sums so far, and the split's
    highest score and normalizer including the tile."""
    position, scale, window = place
    if MASKED:
        token = (tile + gl.arange(0, TILE, gl.SliceLayout(0, LAYOUT)))[None, :]
        seen = token <= position[:, None]
        if window > 0:
            seen = seen & (token > position[:, None] - window)
        scores = gl.where(seen, scores, float("-inf"))
    higher = gl.maximum(highest, gl.max(scores, axis=1) * scale)
    base = gl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
    weights = gl.exp2(gl.fma(scores, gl.to_tensor(scale), -base[:, None]))
    fade = gl.exp2(highest - base)
    sums = gl.convert_layout(row_sums(weights, TILE), gl.SliceLayout(1, LAYOUT))
    total = gl.fma(total, fade, sums)
    operand = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, layout, 2))
    return operand, gl.convert_layout(fade, gl.SliceLayout(1, layout)), higher, total


@gluon.jit
def row_sums(x, COLUMNS: gl.constexpr):
    """As fixed_order._row_sums: adds up four threads' sums, neighbours first."""
    sums = thread_sums(x, GROUP_QUERIES, COLUMNS)
    thread = gl.arange(0, 4, gl.SliceLayout(0, sums.type.layout))[None, :]
    thread = thread + gl.full_like(sums, 0, dtype=gl.int32)
    sums += gl.gather(sums, thread ^ 1, axis=1)
    sums += gl.gather(sums, thread ^ 2, axis=1)
    return gl.max(sums, axis=1)  # of four equal sums
