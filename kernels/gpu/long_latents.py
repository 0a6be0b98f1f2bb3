"""Attention of one long chunk over latents on Hopper, from contiguous latents.

The same sums in the same order as kernels/gpu/latent_attention.py, so the same bits. A program
has 64 rows, each a token's head, as all heads attend to the same latents; a split of 128 tokens
lies on the chip once, in parts of 64 columns, for scores and for values. There is room for no
more: the loading warp refills a part as soon as its values are added up.

Two groups of four warps each compute the scores of one of the split's two tiles, write their
weights for both to read (in place of the tile's rotated part, which nobody needs any more), and
add up every second part of the values. So no score is computed twice, and of the split's sums,
which registers could not hold beside those of all splits, only two parts are there at a time.
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
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from baton.kernels.gpu import fixed_order
from baton.kernels.gpu.fixed_order import SPLIT, TILE
from baton.kernels.gpu.latent_projection import LatentSizes
from baton.kernels.gpu.long_attention import (
    ELEMENTS,
    GROUP_REGISTERS,
    LOADER_REGISTERS,
    copy_tile,
    row_sums,
)
from baton.kernels.gpu.rotary import LOG2_E

ROWS = gl.constexpr(64)
PART = gl.constexpr(64)
"""Columns: 128 bytes, which the copy engine lays out as products want them."""

fades = gluon.jit(fixed_order.fades.fn)


def supports(sizes: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """sizes: of a latent's normed and rotated part."""
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return hopper and sizes == (512, 64) and dtype in ELEMENTS


def long_latents(
    query: Tensor, latents: Tensor, start: int, sizes: LatentSizes, out: Tensor
) -> Tensor:
    """Rows query [count, heads, rank + rotated] of one sequence from position `start` on, over
    latents [start + count, rank + rotated] -> out [count, heads, rank]."""
    rows = len(query) * sizes.heads
    layout = gl.NVMMASharedLayout.get_default_for([TILE, PART.value], ELEMENTS[query.dtype])
    queries, tokens = (
        TensorDescriptor(each, list(each.shape), [sizes.latent, 1], [TILE, PART.value], layout)
        for each in (query.view(rows, sizes.latent), latents)
    )
    _long[(triton.cdiv(rows, ROWS.value),)](
        queries,
        tokens,
        out,
        rows,
        start,
        sizes.scale * LOG2_E,
        HEADS=sizes.heads,
        RANK=sizes.rank,
        PARTS=sizes.latent // PART.value,
        TILE=TILE,
        SPLIT=SPLIT,
        GROUP_REGISTERS=GROUP_REGISTERS,
        LOADER_REGISTERS=LOADER_REGISTERS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


@gluon.jit(do_not_specialize=["rows", "start"])
def _long(
    queries,
    latents,
    out_pointer,
    rows,
    start,
    scale,
    HEADS: gl.constexpr,
    RANK: gl.constexpr,
    PARTS: gl.constexpr,
    TILE: gl.constexpr,
    SPLIT: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):
    # The last block first: it sees the most.
    from_row = (gl.num_programs(0) - 1 - gl.program_id(0)) * ROWS
    # Splits that all rows see wholly, then one or more with a mask.
    masked = (start + from_row // HEADS + 1) // SPLIT * SPLIT
    end = start + (gl.minimum(from_row + ROWS, rows) - 1) // HEADS + 1
    span = (masked, end)

    element: gl.constexpr = latents.dtype
    query_parts = gl.allocate_shared_memory(element, [PARTS, ROWS, PART], latents.layout)
    parts = gl.allocate_shared_memory(element, [2 * PARTS, TILE, PART], latents.layout)
    notes = gl.allocate_shared_memory(
        gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    there = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    # Of queries, of the first tile's highest scores, and of either tile's weights.
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(PARTS):
        mbarrier.init(there.index(part), count=1)
        mbarrier.init(done.index(part), count=1 if part * PART < RANK else 2)
    for each in gl.static_range(4):
        mbarrier.init(ready.index(each), count=1)
    fence_async_shared()
    rooms = (query_parts, parts, notes, there, done, ready)
    place = (rows, start, from_row, scale)
    gl.warp_specialize(
        [
            (_attend, (0, out_pointer, rooms, span, place, HEADS, RANK, PARTS, TILE, SPLIT)),
            (_attend, (1, out_pointer, rooms, span, place, HEADS, RANK, PARTS, TILE, SPLIT)),
            (_load, (queries, latents, from_row, rooms, span, PARTS, TILE, SPLIT)),
        ],
        [4, 1],
        [GROUP_REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def _load(
    queries,
    latents,
    from_row,
    rooms,
    span,
    PARTS: gl.constexpr,
    TILE: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Loads the queries, and all splits, each part as soon as there is room for it."""
    query_parts, parts, notes, there, done, ready = rooms
    mbarrier.expect(ready.index(0), PARTS * queries.block_type.nbytes)
    for part in gl.static_range(PARTS):
        copy_tile(queries, [from_row, part * PART], ready.index(0), query_parts.index(part))
    for split in range(0, span[1], SPLIT):
        turn = (split // SPLIT + 1) & 1
        for part in gl.static_range(PARTS):
            mbarrier.wait(done.index(part), turn)
            arriving = there.index(part)
            mbarrier.expect(arriving, 2 * latents.block_type.nbytes)
            copy_tile(latents, [split, part * PART], arriving, parts.index(part))
            copy_tile(latents, [split + TILE, part * PART], arriving, parts.index(PARTS + part))


@gluon.jit
def _attend(
    GROUP: gl.constexpr,
    out_pointer,
    rooms,
    span,
    place,
    HEADS: gl.constexpr,
    RANK: gl.constexpr,
    PARTS: gl.constexpr,
    TILE: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """One group's tiles and parts, over all splits."""
    rows, start, from_row, scale = place
    masked, end = span
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    row = from_row + gl.arange(0, ROWS, by_row)
    position = start + row // HEADS
    highest = gl.full([ROWS], float("-inf"), gl.float32, by_row)
    total = gl.zeros([ROWS], gl.float32, by_row)
    nothing = gl.zeros([ROWS, PART], gl.float32, layout)
    state = (highest, total, nothing, nothing, nothing, nothing)
    mbarrier.wait(rooms[5].index(0), 0)
    for split in range(0, masked, SPLIT):
        state = _merge_split(
            GROUP, state, split, position, scale, rooms, layout, False, PARTS, TILE, SPLIT
        )
    for split in range(masked, end, SPLIT):
        state = _merge_split(
            GROUP, state, split, position, scale, rooms, layout, True, PARTS, TILE, SPLIT
        )
    share = (1.0 / state[1])[:, None]
    column = GROUP * PART + gl.arange(0, PART, gl.SliceLayout(0, layout))
    at = out_pointer + row.to(gl.int64)[:, None] * RANK + column[None, :]
    for each in gl.static_range(4):
        result = (state[2 + each] * share).to(out_pointer.dtype.element_ty)
        gl.store(at + 2 * each * PART, result, mask=(row < rows)[:, None])


@gluon.jit
def _merge_split(
    GROUP: gl.constexpr,
    state,
    split,
    position,
    scale,
    rooms,
    layout: gl.constexpr,
    MASKED: gl.constexpr,
    PARTS: gl.constexpr,
    TILE: gl.constexpr,
    SPLIT: gl.constexpr,
):
    """Adds a split to those before it."""
    done, turn = rooms[4], (split // SPLIT) & 1
    highest, total, sums0, sums1, sums2, sums3 = state
    # Zero. Without it the places of all parts would be computed before the loop, and spilled.
    here = split >> 30
    scores = _scores(GROUP, rooms, here, turn, layout, PARTS)
    if MASKED:
        token = split + GROUP * TILE + gl.arange(0, TILE, gl.SliceLayout(0, layout))
        scores = gl.where(token[None, :] <= position[:, None], scores, float("-inf"))
    found = _weigh(GROUP, scores, scale, rooms, turn, layout, MASKED, PARTS)
    # The first tile's products run while the groups await each other's weights.
    parts = (rooms[1], here)
    first = _first_tile(GROUP, parts, layout, PARTS)
    second = _first_tile(2 + GROUP, parts, layout, PARTS)
    fade, split_highest, split_total = _exchange(GROUP, found, rooms, turn, layout, MASKED)
    highest, kept, share = fades(highest, split_highest)
    total = gl.fma(total, kept, split_total * share)
    factors = (fade[:, None], kept[:, None], share[:, None])

    first = _second_tile(GROUP, first, factors, parts, PARTS)
    second = _second_tile(2 + GROUP, second, factors, parts, PARTS)
    sums0 = _merge_part(GROUP, sums0, first, factors, done, 1)
    first = _first_tile(4 + GROUP, parts, layout, PARTS)
    sums1 = _merge_part(2 + GROUP, sums1, second, factors, done, 1)
    second = _first_tile(6 + GROUP, parts, layout, PARTS)
    first = _second_tile(4 + GROUP, first, factors, parts, PARTS)
    second = _second_tile(6 + GROUP, second, factors, parts, PARTS)
    sums2 = _merge_part(4 + GROUP, sums2, first, factors, done, 1)
    sums3 = _merge_part(6 + GROUP, sums3, second, factors, done, 0)
    mbarrier.arrive(done.index(PARTS - 1))  # No weight is read any more.
    return highest, total, sums0, sums1, sums2, sums3


@gluon.jit
def _scores(GROUP: gl.constexpr, rooms, here, turn, layout: gl.constexpr, PARTS: gl.constexpr):
    """Products of the queries and the group's tile, part by part as they come."""
    query_parts, parts, there = rooms[0], rooms[1], rooms[3]
    scores = gl.zeros([ROWS, PART], gl.float32, layout)
    for part in gl.static_range(PARTS):
        mbarrier.wait(there.index(part), turn)
        keys = parts.index(here + GROUP * PARTS + part).permute((1, 0))
        scores = warpgroup_mma(
            query_parts.index(here + part), keys, scores, use_acc=part > 0, is_async=True
        )
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def _weigh(
    GROUP: gl.constexpr,
    scores,
    scale,
    rooms,
    turn,
    layout: gl.constexpr,
    MASKED: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Writes the group's weights and awaits the first tile's. Finds the highest scores of the
    first tile and up to the group's, and the weights' sums."""
    parts, notes, ready = rooms[1], rooms[2], rooms[5]
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    higher = gl.max(scores, axis=1) * scale
    if GROUP == 0:
        first_highest = higher
        notes.index(0).store(higher)
        mbarrier.arrive(ready.index(1))
    else:
        mbarrier.wait(ready.index(1), turn)
        first_highest = notes.index(0).load(by_row)
        higher = gl.maximum(first_highest, higher)
    weights = gl.exp2(gl.fma(scores, gl.to_tensor(scale), -_base(higher, MASKED)[:, None]))
    mine = parts.index(GROUP * PARTS + PARTS - 1)
    mine.store(weights.to(mine.dtype))
    sums = gl.convert_layout(row_sums(weights, PART), by_row)
    if GROUP == 0:
        notes.index(1).store(sums)
        fence_async_shared()
        mbarrier.arrive(ready.index(2))
    else:
        fence_async_shared()
        mbarrier.wait(ready.index(2), turn)
    return first_highest, higher, sums


@gluon.jit
def _exchange(
    GROUP: gl.constexpr, found, rooms, turn, layout: gl.constexpr, MASKED: gl.constexpr
):
    """Has the second tile's weights there; what the first tile's sums are multiplied by; the
    split's highest scores and normalizers."""
    notes, ready = rooms[2], rooms[5]
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    first_highest, higher, sums = found
    if GROUP == 0:
        mbarrier.wait(ready.index(3), turn)
        higher, total = notes.index(2).load(by_row), notes.index(3).load(by_row)
        fade = gl.exp2(first_highest - _base(higher, MASKED))
    else:
        fade = gl.exp2(first_highest - _base(higher, MASKED))
        total = gl.fma(notes.index(1).load(by_row), fade, sums)
        notes.index(2).store(higher)
        notes.index(3).store(total)
        mbarrier.arrive(ready.index(3))
    return fade, higher, total


@gluon.jit
def _base(highest, MASKED: gl.constexpr):
    """What scores are compared to."""
    return gl.where(highest == float("-inf"), 0.0, highest) if MASKED else highest


@gluon.jit
def _first_tile(part: gl.constexpr, parts, layout: gl.constexpr, PARTS: gl.constexpr):
    """Starts the sums of a part's columns."""
    nothing = gl.zeros([ROWS, PART], gl.float32, layout)
    rooms, here = parts
    weights, values = rooms.index(here + PARTS - 1), rooms.index(here + part)
    return warpgroup_mma(weights, values, nothing, use_acc=False, is_async=True)


@gluon.jit
def _second_tile(part: gl.constexpr, sums, factors, parts, PARTS: gl.constexpr):
    """Awaits the sums of the first tile, then starts adding the second's."""
    sums = warpgroup_mma_wait(1, deps=[sums]) * factors[0]
    rooms, here = parts
    weights, values = rooms.index(here + 2 * PARTS - 1), rooms.index(here + PARTS + part)
    return warpgroup_mma(weights, values, sums, is_async=True)


@gluon.jit
def _merge_part(part: gl.constexpr, sums, found, factors, done, after: gl.constexpr):
    """Awaits a split's sums, after which this many products were started, and merges them."""
    found = warpgroup_mma_wait(after, deps=[found])
    mbarrier.arrive(done.index(part))
    return gl.fma(sums, factors[1], found * factors[2])
