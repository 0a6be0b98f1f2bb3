"""Attention of chunks over pages on Hopper.

The same sums in the same order as kernels/gpu/chunk_attention.py, so the same bits, but in Gluon,
which assigns work to warps. Two warps load ahead with the copy engine (TMA), page by page: one
queries and keys, one values. Two groups of four warps attend 64 queries each to the same tiles:
while one computes exponentials, the other's products run. A group starts the scores of the next
tile before it adds up this one.

There are as many programs as fit on the chip. Each takes blocks in turn, so that the next block
is loaded while one ends, and a block without rows costs nothing.
"""

from __future__ import annotations

import functools

import torch
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

BLOCK_QUERIES: int = GROUPS.value * GROUP_QUERIES.value
"""Tokens of one entry of `blocks`."""
PART = gl.constexpr(64)
"""Columns per copy: 128 bytes, which the copy engine swizzles as products need them."""
REGISTERS = gl.constexpr([GROUP_REGISTERS, LOADER_REGISTERS, LOADER_REGISTERS])
"""Registers per thread of the second group and of each loader; the first group gets the rest."""
ROOMS = {64: 4, 128: 2}
"""Splits of keys, and as many of values, in shared memory at a time, by head size."""

# Its name changed after Triton 3.6.
_shared = gl.shared_memory_descriptor
reinterpret = getattr(_shared, "reinterpret", None) or _shared._reinterpret


def supports(kv_layer: Tensor, shape: HeadShape) -> bool:
    """See chunk_attention."""
    return shape.head_dim in ROOMS and shape.scoring.cap is None and copies_pages(kv_layer)


def copies_pages(kv_layer: Tensor) -> bool:
    """True if the GPU's copy engine can load these pages and its products support their type."""
    if kv_layer.device.type != "cuda" or kv_layer.dtype not in ELEMENTS:
        return False
    aligned = kv_layer.stride(0) % kv_layer.stride(2) == 0
    hopper = torch.cuda.get_device_capability(kv_layer.device)[0] == 9
    return hopper and aligned and kv_layer.shape[2] in (8, 16, 32, 64, 128, 256)


@functools.cache
def _chip_programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def attend(
    qkv: Tensor,
    blocks: Tensor,
    page_table: Tensor,
    kv_layer: Tensor,
    shape: HeadShape,
    out: Tensor,
) -> Tensor:
    """As chunk_attention."""
    (pages, _, page_size, _, dim), token = kv_layer.shape, kv_layer.stride(2)
    stride = kv_layer.stride(0) // token
    # All tokens of the pool; values are page_size rows after their keys.
    tokens = kv_layer.as_strided(((pages - 1) * stride + 2 * page_size, token), (token, 1))
    layout = gl.NVMMASharedLayout.get_default_for([TILE.value, PART.value], ELEMENTS[qkv.dtype])
    boxes = ((qkv, GROUP_QUERIES.value), (tokens, min(page_size, TILE.value)))
    sources = [
        TensorDescriptor(each, list(each.shape), [each.stride(0), 1], [tall, PART.value], layout)
        for each, tall in boxes
    ]
    items = shape.heads * len(blocks)
    _chunks[(min(items, _chip_programs(qkv.device)),)](
        *sources,
        blocks,
        page_table,
        qkv if shape.sinks is None else shape.sinks,
        out,
        items,
        shape.score_factors[0],
        shape.window or 0,
        page_table.stride(0),
        stride,
        len(tokens),
        PAGE_SIZE=page_size,
        HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        DIM=dim,
        SINKS=shape.sinks is not None,
        ROOMS=ROOMS[dim],
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


@gluon.jit(
    do_not_specialize=["items", "page_stride", "nowhere"],
    do_not_specialize_on_alignment=["blocks_pointer"],
)
def _chunks(
    queries, tokens, blocks_pointer, table_pointer, sinks_pointer, out_pointer, items, scale,
    window, table_stride, page_stride, nowhere, PAGE_SIZE: gl.constexpr, HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr, DIM: gl.constexpr, SINKS: gl.constexpr, ROOMS: gl.constexpr,
):  # fmt: skip
    element: gl.constexpr = tokens.dtype
    height: gl.constexpr = tokens.block_type.shape[0]
    count: gl.constexpr = ROOMS * TILES  # tiles
    boxes: gl.constexpr = count * TILE // height * DIM // PART
    query_parts = gl.allocate_shared_memory(
        element, [GROUPS * DIM // PART, GROUP_QUERIES, PART], queries.layout
    )
    key_boxes = gl.allocate_shared_memory(element, [boxes, height, PART], tokens.layout)
    value_boxes = gl.allocate_shared_memory(element, [boxes, height, PART], tokens.layout)
    query_rooms = reinterpret(query_parts, element, [GROUPS, GROUP_QUERIES, DIM], queries.layout)
    key_rooms = reinterpret(key_boxes, element, [count, TILE, DIM], tokens.layout)
    value_rooms = reinterpret(value_boxes, element, [count, TILE, DIM], tokens.layout)
    # Barriers for splits of keys, then of values, then for queries.
    there = gl.allocate_shared_memory(gl.int64, [2 * ROOMS + 1, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [2 * ROOMS + 1, 1], mbarrier.MBarrierLayout())
    for room in gl.static_range(2 * ROOMS + 1):
        mbarrier.init(there.index(room), count=1)
        mbarrier.init(done.index(room), count=GROUPS)
    fence_async_shared()
    work = (gl.program_id(0), gl.num_programs(0), items, blocks_pointer, window)
    rooms = (query_rooms, key_rooms, value_rooms, value_boxes, there, done)
    source = (tokens, table_pointer, table_stride, page_stride, nowhere)
    gl.warp_specialize(
        [
            (_attend, (0, sinks_pointer, out_pointer, rooms, work, scale,
                       HEADS, DIM, SINKS, ROOMS)),
            (_attend, (1, sinks_pointer, out_pointer, rooms, work, scale,
                       HEADS, DIM, SINKS, ROOMS)),
            (_load, (0, queries, source, query_parts, key_boxes, there, done, work,
                     PAGE_SIZE, HEADS, KV_HEADS, DIM, ROOMS)),
            (_load, (1, queries, source, query_parts, value_boxes, there, done, work,
                     PAGE_SIZE, HEADS, KV_HEADS, DIM, ROOMS)),
        ],
        [4, 1, 1],
        REGISTERS,
    )  # fmt: skip


@gluon.jit
def _item(turn, work, HEADS: gl.constexpr):
    """A head, and a block's first row, position of that row, count and sequence. Programs take
    blocks back and forth, since the first blocks see the most tokens."""
    program, programs, items, blocks_pointer, _ = work
    place = gl.where(turn % 2 == 0, program, programs - 1 - program)
    item = turn * programs + place
    mine = item < items
    entry = blocks_pointer + gl.where(mine, item // HEADS, 0) * 4
    count = gl.where(mine, gl.load(entry + 2), 0)
    return item % HEADS, gl.load(entry), gl.load(entry + 1), count, gl.load(entry + 3)


@gluon.jit
def _span(start, count, window):
    """The first token that a block sees, its first split, the first masked split, and the end of
    the last. All rows see all tokens of splits before the masked ones."""
    end = start + count
    seen = gl.to_tensor(0)
    masked = gl.minimum(start + 1, end - 1) // SPLIT * SPLIT
    if window > 0:
        seen = gl.maximum(start - window + 1, 0)
        masked = seen // SPLIT * SPLIT
    return seen, seen // SPLIT * SPLIT, masked, gl.cdiv(end, SPLIT) * SPLIT


@gluon.jit
def _load(
    VALUES: gl.constexpr, queries, source, query_parts, boxes, there, done, work,
    PAGE_SIZE: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr,
    ROOMS: gl.constexpr,
):  # fmt: skip
    """Loads the keys or the values of all blocks, each split as soon as there is room for it. A box
    is a page or a part of one; boxes that no row sees are read at `nowhere`, as zeros. The loader
    of keys also loads queries."""
    tokens, table_pointer, table_stride, page_stride, nowhere = source
    parts: gl.constexpr = DIM // PART
    height: gl.constexpr = tokens.block_type.shape[0]
    of_tile: gl.constexpr = TILE // height
    of_split: gl.constexpr = SPLIT // height
    number, block = gl.to_tensor(0), gl.to_tensor(0)
    for turn in range(gl.cdiv(work[2], work[1])):
        head, first_row, start, count, slot = _item(turn, work, HEADS)
        if count > 0:
            seen, first, _, end = _span(start, count, work[4])
            table = table_pointer + slot.to(gl.int64) * table_stride
            column = head // (HEADS // KV_HEADS) * DIM
            if not VALUES:
                mbarrier.wait(done.index(2 * ROOMS), (block + 1) & 1)
                ready = there.index(2 * ROOMS)
                mbarrier.expect(ready, GROUPS * parts * queries.block_type.nbytes)
                for each in gl.static_range(GROUPS * parts):
                    at = [first_row + each // parts * GROUP_QUERIES,
                          head * DIM + each % parts * PART]  # fmt: skip
                    copy_tile(queries, at, ready, query_parts.index(each))
                block += 1
            for split in range(first, end, SPLIT):
                spots = ()
                for box in gl.static_range(of_split):
                    token = split + box * height
                    inside = (token < start + count) & (token + height > seen)
                    page = gl.load(table + token // PAGE_SIZE, mask=inside, other=0)
                    spot = page * page_stride + token % PAGE_SIZE + VALUES * PAGE_SIZE
                    spots += (gl.where(inside, spot, nowhere),)  # type: ignore[assignment]
                room = number % ROOMS
                mbarrier.wait(done.index(VALUES * ROOMS + room), (number // ROOMS + 1) & 1)
                ready = there.index(VALUES * ROOMS + room)
                mbarrier.expect(ready, of_split * parts * tokens.block_type.nbytes)
                for box in gl.static_range(of_split):
                    for part in gl.static_range(parts):
                        tile = room * TILES + box // of_tile
                        to = boxes.index((tile * parts + part) * of_tile + box % of_tile)
                        copy_tile(tokens, [spots[box], column + part * PART], ready, to)
                number += 1


@gluon.jit
def _attend(
    GROUP: gl.constexpr, sinks_pointer, out_pointer, rooms, work, scale, HEADS: gl.constexpr,
    DIM: gl.constexpr, SINKS: gl.constexpr, ROOMS: gl.constexpr,
):  # fmt: skip
    """Attends one group's queries of all blocks."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    number, block = gl.to_tensor(0), gl.to_tensor(0)
    for turn in range(gl.cdiv(work[2], work[1])):
        head, first_row, start, count, _ = _item(turn, work, HEADS)
        if count > 0:
            span = _span(start, count, work[4])
            mbarrier.wait(rooms[4].index(2 * ROOMS), block & 1)
            if count > GROUP * GROUP_QUERIES:
                highest = float("-inf")
                if SINKS:
                    highest = gl.load(sinks_pointer + head)
                my_row = GROUP * GROUP_QUERIES
                sums = _attend_block(
                    rooms[0].index(GROUP), highest, number, start + my_row, start + count, span,
                    scale, work[4], rooms, layout, DIM, SINKS, ROOMS,
                )  # fmt: skip
                row = my_row + gl.arange(0, GROUP_QUERIES, gl.SliceLayout(1, layout))
                dim = head * DIM + gl.arange(0, DIM, gl.SliceLayout(0, layout))
                at = (first_row + row).to(gl.int64)[:, None] * (HEADS * DIM) + dim[None, :]
                result = sums.to(out_pointer.dtype.element_ty)
                gl.store(out_pointer + at, result, mask=(row < count)[:, None])
            else:
                _skip_block(number, span, rooms[4], rooms[5], ROOMS)
            block += 1
            number += (span[3] - span[1]) // SPLIT


@gluon.jit
def _skip_block(number, span, there, done, ROOMS: gl.constexpr):
    """Releases a block's loads without using them: the block has no rows for this group."""
    mbarrier.arrive(done.index(2 * ROOMS))
    for _ in range(span[1], span[3], SPLIT):
        for kind in gl.static_range(2):
            room = kind * ROOMS + number % ROOMS
            mbarrier.wait(there.index(room), (number // ROOMS) & 1)
            mbarrier.arrive(done.index(room))
        number += 1


@gluon.jit
def _attend_block(
    query, sink, number, start, last, span, scale, window, rooms, layout: gl.constexpr,
    DIM: gl.constexpr, SINKS: gl.constexpr, ROOMS: gl.constexpr,
):  # fmt: skip
    """Attends queries from position `start` on to all splits. `number` counts the program's splits;
    tokens end at `last`."""
    _, first, masked, end = span
    tiles = (rooms[1], rooms[2], rooms[4], rooms[5])
    ready, state, number, place = attend_splits(
        query, sink, number, start, (first, masked, end), scale, window, tiles, layout, SINKS, DIM,
        ROOMS,
    )  # fmt: skip
    _clear(number, last - (end - SPLIT), rooms, DIM, ROOMS)
    return attend_last(query, ready, state, number, end - SPLIT, place, tiles, layout, DIM, ROOMS)


@gluon.jit
def _clear(number, count, rooms, DIM: gl.constexpr, ROOMS: gl.constexpr):
    """Zeroes a split's values from token `count` on: pages may hold anything there. Later boxes are
    zeros already. Both groups write the same."""
    boxes, there = rooms[3], rooms[4]
    room = number % ROOMS
    height: gl.constexpr = boxes.shape[1]
    parts: gl.constexpr = DIM // PART
    of_tile: gl.constexpr = TILE // height
    rest = count % height
    mbarrier.wait(there.index(ROOMS + room), (number // ROOMS) & 1)
    if rest > 0:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        kept = (gl.arange(0, height, gl.SliceLayout(1, layout)) < rest)[:, None]
        box = count // height
        tile = room * TILES + box // of_tile
        for part in gl.static_range(parts):
            values = boxes.index((tile * parts + part) * of_tile + box % of_tile)
            values.store(gl.where(kept, values.load(layout), 0.0))
        fence_async_shared()
