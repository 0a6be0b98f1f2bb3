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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.gpu.hopper_splits import (
    ELEMENTS,
    GROUP_QUERIES,
    GROUP_REGISTERS,
    GROUPS,
    LOADER_REGISTERS,
    SPLIT,
    TILE,
    TILES,
    attend_last,
    attend_splits,
    copy_tile,
)
from baton.kernels.gpu.rotary import HeadShape

ROOMS = 2
"""Splits of keys, and as many of values, in shared memory at a time."""


def supports(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return hopper and head_dim in (64, 128) and dtype in ELEMENTS


def long_attention(
    qkv: Tensor, keys: Tensor, values: Tensor, start: int, shape: HeadShape, out: Tensor
) -> Tensor:
    """Rotated rows qkv [count, (heads + 2 * kv_heads) * dim] of one sequence from position `start`
    on, over keys and values [start + count or more, kv_heads, dim] -> out [count, heads * dim].
    A token's keys are contiguous, and so are its values."""
    count, dim = len(qkv), shape.head_dim
    layout = gl.NVMMASharedLayout.get_default_for([TILE.value, dim], ELEMENTS[qkv.dtype])
    tokens = [
        TensorDescriptor(
            each, [len(each), shape.kv_heads * dim], [each.stride(0), 1], [TILE.value, dim], layout
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
        SINKS=shape.sinks is not None,
        ROOMS=ROOMS,
        GROUP_REGISTERS=GROUP_REGISTERS,
        LOADER_REGISTERS=LOADER_REGISTERS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


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
    key_rooms = gl.allocate_shared_memory(element, [ROOMS * TILES, TILE, DIM], keys.layout)
    value_rooms = gl.allocate_shared_memory(element, [ROOMS * TILES, TILE, DIM], values.layout)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([GROUP_QUERIES, DIM], element)
    query_rooms = gl.allocate_shared_memory(element, [GROUPS, GROUP_QUERIES, DIM], layout)
    there = gl.allocate_shared_memory(gl.int64, [2 * ROOMS, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [2 * ROOMS + 1, 1], mbarrier.MBarrierLayout())
    for room in gl.static_range(2 * ROOMS):
        mbarrier.init(there.index(room), count=1)
    for room in gl.static_range(2 * ROOMS + 1):
        mbarrier.init(done.index(room), count=GROUPS)
    fence_async_shared()
    rooms = (key_rooms, value_rooms, there, done)
    place = (count, start, from_row, head, scale, window)
    column = head // (HEADS // KV_HEADS) * DIM
    gl.warp_specialize(
        [
            (_attend, (0, qkv_pointer, sinks_pointer, out_pointer, query_rooms, rooms, span,
                       place, HEADS, KV_HEADS, DIM, SINKS, ROOMS)),
            (_attend, (1, qkv_pointer, sinks_pointer, out_pointer, query_rooms, rooms, span,
                       place, HEADS, KV_HEADS, DIM, SINKS, ROOMS)),
            (_load, (keys, values, column, rooms, span, ROOMS)),
        ],
        [4, 1],
        [GROUP_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _load(keys, values, column, rooms, span, ROOMS: gl.constexpr):
    """Loads all splits, each as soon as there is room for it."""
    key_rooms, value_rooms, there, done = rooms
    for split in range(span[0], span[2], SPLIT):
        number = (split - span[0]) // SPLIT
        room, turn = number % ROOMS, (number // ROOMS + 1) & 1
        _load_split(keys, key_rooms, there, done, room, room, turn, split, column)
        _load_split(values, value_rooms, there, done, room, ROOMS + room, turn, split, column)


@gluon.jit
def _load_split(source, tiles, there, done, room, barrier, turn, split, column):
    mbarrier.wait(done.index(barrier), turn)
    mbarrier.expect(there.index(barrier), TILES * source.block_type.nbytes)
    for tile in gl.static_range(TILES):
        at = [split + tile * TILE, column]
        copy_tile(source, at, there.index(barrier), tiles.index(room * TILES + tile))


@gluon.jit
def _attend(
    GROUP: gl.constexpr, qkv_pointer, sinks_pointer, out_pointer, query_rooms, rooms, span, place,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, SINKS: gl.constexpr,
    ROOMS: gl.constexpr,
):  # fmt: skip
    """Attends one group's queries to all splits."""
    count, start, from_row, head, scale, window = place
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    my_row = from_row + GROUP * GROUP_QUERIES
    row = my_row + gl.arange(0, GROUP_QUERIES, gl.SliceLayout(1, load_layout))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, load_layout))
    at = row.to(gl.int64)[:, None] * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM + dim[None, :]
    query = query_rooms.index(GROUP)
    query.store(gl.load(qkv_pointer + at, mask=(row < count)[:, None], other=0.0))
    fence_async_shared()

    sink = float("-inf")
    if SINKS:
        sink = gl.load(sinks_pointer + head)
    ready, state, number, seen = attend_splits(
        query, sink, gl.to_tensor(0), start + my_row, span, scale, window, rooms, layout, SINKS,
        DIM, ROOMS,
    )  # fmt: skip
    last = span[2] - SPLIT
    sums = attend_last(query, ready, state, number, last, seen, rooms, layout, DIM, ROOMS)
    row = my_row + gl.arange(0, GROUP_QUERIES, gl.SliceLayout(1, layout))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    at = row.to(gl.int64)[:, None] * (HEADS * DIM) + head * DIM + dim[None, :]
    gl.store(out_pointer + at, sums.to(out_pointer.dtype.element_ty), mask=(row < count)[:, None])
