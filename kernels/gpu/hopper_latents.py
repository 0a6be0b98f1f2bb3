"""Attention of chunks over latents on Hopper.

The same sums in the same order as kernels/gpu/latent_attention.py, so the same bits, but in Gluon,
which assigns work to warps. A program has 64 rows, each a head of a token, since all heads attend
to the same latents. Shared memory holds one split of 128 tokens, in parts of 64 columns, for scores
and for values. There is room for no more: one warp per tile of the split refills a part with the
copy engine (TMA), page by page, as soon as its values are added up.

Each of two groups of four warps computes the scores of one of the split's two tiles, writes its
weights for both groups (in place of the tile's rotated part, which is not needed any more), and
adds up every second part of the values. So no score is computed twice, and registers, which could
not hold a split's sums beside those of all splits, hold only two parts of them at a time.
"""

from __future__ import annotations

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
from baton.kernels.gpu.hopper_chunks import (
    BLOCK_QUERIES,
    PART,
    REGISTERS,
    copies_pages,
    reinterpret,
)
from baton.kernels.gpu.hopper_splits import ELEMENTS, copy_tile, row_sums
from baton.kernels.gpu.latent_projection import LatentSizes
from baton.kernels.gpu.rotary import LOG2_E

TILE, SPLIT = gl.constexpr(fixed_order.TILE), gl.constexpr(fixed_order.SPLIT)
RANK, ROTATED = gl.constexpr(512), gl.constexpr(64)
ROWS = gl.constexpr(64)
PARTS = gl.constexpr((RANK.value + ROTATED.value) // PART.value)
# The layout of scores and of parts of sums in a group's registers, and of numbers per row.
LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART.value, 16]))
BY_ROW = gl.constexpr(gl.SliceLayout(1, LAYOUT.value))

fades = gluon.jit(fixed_order.fades.fn)


def supports(kv_layer: Tensor, sizes: LatentSizes) -> bool:
    """See chunk_latents."""
    sized = (sizes.rank, sizes.rotated) == (RANK.value, ROTATED.value)
    return sized and copies_pages(kv_layer)


def attend(
    query: Tensor,
    blocks: Tensor,
    page_table: Tensor,
    kv_layer: Tensor,
    sizes: LatentSizes,
    out: Tensor,
) -> Tensor:
    """As chunk_latents."""
    page_size, latent = kv_layer.shape[2], sizes.latent
    rows, stride = query.view(-1, latent), kv_layer.stride(0) // latent
    tokens = kv_layer.as_strided(((len(kv_layer) - 1) * stride + page_size, latent), (latent, 1))
    layout = gl.NVMMASharedLayout.get_default_for([TILE.value, PART.value], ELEMENTS[query.dtype])
    queries, latents = (
        TensorDescriptor(each, list(each.shape), [latent, 1], [tall, PART.value], layout)
        for each, tall in ((rows, ROWS.value), (tokens, min(page_size, TILE.value)))
    )
    _chunk[(sizes.heads * BLOCK_QUERIES // ROWS.value, len(blocks))](
        queries,
        latents,
        blocks,
        page_table,
        out,
        sizes.scale * LOG2_E,
        page_table.stride(0),
        stride,
        len(tokens),
        PAGE_SIZE=page_size,
        HEADS=sizes.heads,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


@gluon.jit(
    do_not_specialize=["page_stride", "nowhere"], do_not_specialize_on_alignment=["blocks_pointer"]
)
def _chunk(
    queries,
    latents,
    blocks_pointer,
    table_pointer,
    out_pointer,
    scale,
    table_stride,
    page_stride,
    nowhere,
    PAGE_SIZE: gl.constexpr,
    HEADS: gl.constexpr,
):
    entry = blocks_pointer + gl.program_id(1) * 4
    first_row, start, count = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
    table = table_pointer + gl.load(entry + 3).to(gl.int64) * table_stride
    from_row = gl.program_id(0) * ROWS
    rows = count * HEADS
    # Splits of which all rows see all tokens, then one or more with a mask; none without rows.
    masked = (start + from_row // HEADS + 1) // SPLIT * SPLIT
    end = start + (gl.minimum(from_row + ROWS, rows) - 1) // HEADS + 1
    if from_row >= rows:
        masked = 0
        end = 0
    span = (masked, end)

    element: gl.constexpr = latents.dtype
    height: gl.constexpr = latents.block_type.shape[0]
    boxes: gl.constexpr = TILE // height
    query_parts = gl.allocate_shared_memory(element, [PARTS, ROWS, PART], latents.layout)
    part_boxes = gl.allocate_shared_memory(
        element, [2 * PARTS * boxes, height, PART], latents.layout
    )
    parts = reinterpret(part_boxes, element, [2 * PARTS, TILE, PART], latents.layout)
    notes = gl.allocate_shared_memory(
        gl.float32, [4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    )
    there = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [PARTS, 1], mbarrier.MBarrierLayout())
    # Barriers for queries, for the first tile's highest scores, and for each tile's weights.
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(PARTS):
        mbarrier.init(there.index(part), count=2)
        mbarrier.init(done.index(part), count=1 if part * PART < RANK else 2)
    for each in gl.static_range(4):
        mbarrier.init(ready.index(each), count=1)
    fence_async_shared()
    rooms = (query_parts, parts, notes, there, done, ready)
    first_row = first_row.to(gl.int64) * HEADS
    place = (first_row, rows, start, from_row, scale)
    source = (latents, table, page_stride, nowhere)
    gl.warp_specialize(
        [
            (_attend, (0, out_pointer, rooms, span, place, HEADS)),
            (_attend, (1, out_pointer, rooms, span, place, HEADS)),
            (_load, (0, queries, first_row + from_row, source, part_boxes, rooms, span,
                     PAGE_SIZE)),
            (_load, (1, queries, first_row + from_row, source, part_boxes, rooms, span,
                     PAGE_SIZE)),
        ],
        [4, 1, 1],
        REGISTERS,
    )  # fmt: skip


@gluon.jit
def _load(
    GROUP: gl.constexpr,
    queries,
    from_row,
    source,
    part_boxes,
    rooms,
    span,
    PAGE_SIZE: gl.constexpr,
):
    """Loads a group's tiles, each part as soon as there is room for it. A box is a page or a part
    of one; boxes after the last token are read at `nowhere`, as zeros. The first group's loader
    also loads the queries of both groups."""
    query_parts, _, _, there, done, ready = rooms
    latents, table, page_stride, nowhere = source
    end = span[1]
    height: gl.constexpr = latents.block_type.shape[0]
    boxes: gl.constexpr = TILE // height
    if GROUP == 0 and end > 0:
        mbarrier.expect(ready.index(0), PARTS * queries.block_type.nbytes)
        for part in gl.static_range(PARTS):
            at = [from_row.to(gl.int32), part * PART]
            copy_tile(queries, at, ready.index(0), query_parts.index(part))
    for split in range(0, end, SPLIT):
        spots = ()
        for box in gl.static_range(boxes):
            token = split + GROUP * TILE + box * height
            page = gl.load(table + token // PAGE_SIZE, mask=token < end, other=0)
            spot = page * page_stride + token % PAGE_SIZE
            spots += (gl.where(token < end, spot, nowhere),)  # type: ignore[assignment]
        turn = (split // SPLIT + 1) & 1
        for part in gl.static_range(PARTS):
            mbarrier.wait(done.index(part), turn)
            arriving = there.index(part)
            mbarrier.expect(arriving, boxes * latents.block_type.nbytes)
            for box in gl.static_range(boxes):
                room = part_boxes.index((GROUP * PARTS + part) * boxes + box)
                copy_tile(latents, [spots[box], part * PART], arriving, room)


@gluon.jit
def _attend(GROUP: gl.constexpr, out_pointer, rooms, span, place, HEADS: gl.constexpr):
    """Attends one group's tiles and parts of all splits."""
    first_row, rows, start, from_row, scale = place
    masked, end = span
    row = from_row + gl.arange(0, ROWS, BY_ROW)
    position = start + row // HEADS
    highest = gl.full([ROWS], float("-inf"), gl.float32, BY_ROW)
    nothing = gl.zeros([ROWS, PART], gl.float32, LAYOUT)
    state = (highest, gl.zeros_like(highest), nothing, nothing, nothing, nothing)
    if end > 0:
        mbarrier.wait(rooms[5].index(0), 0)
    for split in range(0, masked, SPLIT):
        state = _merge_split(GROUP, state, split, (end, position, scale), rooms, False)
    for split in range(masked, end, SPLIT):
        state = _merge_split(GROUP, state, split, (end, position, scale), rooms, True)
    share = (1.0 / state[1])[:, None]
    column = GROUP * PART + gl.arange(0, PART, gl.SliceLayout(0, LAYOUT))
    at = out_pointer + (first_row + row)[:, None] * RANK + column[None, :]
    for each in gl.static_range(4):
        result = (state[2 + each] * share).to(out_pointer.dtype.element_ty)
        gl.store(at + 2 * each * PART, result, mask=(row < rows)[:, None])


@gluon.jit
def _merge_split(GROUP: gl.constexpr, state, split, place, rooms, MASKED: gl.constexpr):
    """Adds a split to those before it."""
    end, position, scale = place
    done, turn = rooms[4], (split // SPLIT) & 1
    highest, total, sums0, sums1, sums2, sums3 = state
    # Zero. Without it the addresses of all parts would be computed before the loop, and spilled.
    here = split >> 30
    scores = _scores(GROUP, rooms, here, turn)
    if MASKED:
        token = split + GROUP * TILE + gl.arange(0, TILE, gl.SliceLayout(0, LAYOUT))
        scores = gl.where(token[None, :] <= position[:, None], scores, float("-inf"))
        if split + SPLIT > end:
            _clear(GROUP, rooms[1], end - split - GROUP * TILE)
    found = _weigh(GROUP, scores, scale, rooms, turn, MASKED)
    # The first tile's products run while the groups wait for each other's weights.
    parts = (rooms[1], here)
    first = _first_tile(GROUP, parts)
    second = _first_tile(2 + GROUP, parts)
    fade, split_highest, split_total = _exchange(GROUP, found, rooms, turn, MASKED)
    highest, kept, share = fades(highest, split_highest)
    total = gl.fma(total, kept, split_total * share)
    factors = (fade[:, None], kept[:, None], share[:, None])

    first = _second_tile(GROUP, first, factors, parts)
    second = _second_tile(2 + GROUP, second, factors, parts)
    sums0 = _merge_part(GROUP, sums0, first, factors, done, 1)
    first = _first_tile(4 + GROUP, parts)
    sums1 = _merge_part(2 + GROUP, sums1, second, factors, done, 1)
    second = _first_tile(6 + GROUP, parts)
    first = _second_tile(4 + GROUP, first, factors, parts)
    second = _second_tile(6 + GROUP, second, factors, parts)
    sums2 = _merge_part(4 + GROUP, sums2, first, factors, done, 1)
    sums3 = _merge_part(6 + GROUP, sums3, second, factors, done, 0)
    mbarrier.arrive(done.index(PARTS - 1))  # No weight is read any more.
    return highest, total, sums0, sums1, sums2, sums3


@gluon.jit
def _scores(GROUP: gl.constexpr, rooms, here, turn):
    """Multiplies queries and the group's tile, part by part as they arrive."""
    query_parts, parts, there = rooms[0], rooms[1], rooms[3]
    scores = gl.zeros([ROWS, PART], gl.float32, LAYOUT)
    for part in gl.static_range(PARTS):
        mbarrier.wait(there.index(part), turn)
        keys = parts.index(here + GROUP * PARTS + part).permute((1, 0))
        scores = warpgroup_mma(
            query_parts.index(here + part), keys, scores, use_acc=part > 0, is_async=True
        )
    return warpgroup_mma_wait(0, deps=[scores])


@gluon.jit
def _clear(GROUP: gl.constexpr, parts, count):
    """Zeroes the tile's values from token `count` on: pages may hold anything there."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    there = (gl.arange(0, TILE, gl.SliceLayout(1, layout)) < count)[:, None]
    for part in gl.static_range(PARTS - 1):
        values = parts.index(GROUP * PARTS + part)
        values.store(gl.where(there, values.load(layout), 0.0))


@gluon.jit
def _weigh(GROUP: gl.constexpr, scores, scale, rooms, turn, MASKED: gl.constexpr):
    """Writes the group's weights and waits for the first tile's. Returns the highest scores of the
    first tile, the highest up to the group's tile, and the weights' sums."""
    parts, notes, ready = rooms[1], rooms[2], rooms[5]
    higher = gl.max(scores, axis=1) * scale
    if GROUP == 0:
        first_highest = higher
        notes.index(0).store(higher)
        mbarrier.arrive(ready.index(1))
    else:
        mbarrier.wait(ready.index(1), turn)
        first_highest = notes.index(0).load(BY_ROW)
        higher = gl.maximum(first_highest, higher)
    weights = gl.exp2(gl.fma(scores, gl.to_tensor(scale), -_base(higher, MASKED)[:, None]))
    mine = parts.index(GROUP * PARTS + PARTS - 1)
    mine.store(weights.to(mine.dtype))
    sums = gl.convert_layout(row_sums(weights, PART), BY_ROW)
    if GROUP == 0:
        notes.index(1).store(sums)
        fence_async_shared()
        mbarrier.arrive(ready.index(2))
    else:
        fence_async_shared()
        mbarrier.wait(ready.index(2), turn)
    return first_highest, higher, sums


@gluon.jit
def _exchange(GROUP: gl.constexpr, found, rooms, turn, MASKED: gl.constexpr):
    """Waits for the second tile's weights. Returns the factor for the first tile's sums, and the
    split's highest scores and normalizers."""
    notes, ready = rooms[2], rooms[5]
    first_highest, higher, sums = found
    if GROUP == 0:
        mbarrier.wait(ready.index(3), turn)
        higher, total = notes.index(2).load(BY_ROW), notes.index(3).load(BY_ROW)
        fade = gl.exp2(first_highest - _base(higher, MASKED))
    else:
        fade = gl.exp2(first_highest - _base(higher, MASKED))
        total = gl.fma(notes.index(1).load(BY_ROW), fade, sums)
        notes.index(2).store(higher)
        notes.index(3).store(total)
        mbarrier.arrive(ready.index(3))
    return fade, higher, total


@gluon.jit
def _base(highest, MASKED: gl.constexpr):
    """What is subtracted from scores."""
    return gl.where(highest == float("-inf"), 0.0, highest) if MASKED else highest


@gluon.jit
def _first_tile(part: gl.constexpr, parts):
    """Starts a part's sums with the first tile."""
    nothing = gl.zeros([ROWS, PART], gl.float32, LAYOUT)
    rooms, here = parts
    weights, values = rooms.index(here + PARTS - 1), rooms.index(here + part)
    return warpgroup_mma(weights, values, nothing, use_acc=False, is_async=True)


@gluon.jit
def _second_tile(part: gl.constexpr, sums, factors, parts):
    """Waits for the first tile's sums, then starts adding the second tile."""
    sums = warpgroup_mma_wait(1, deps=[sums]) * factors[0]
    rooms, here = parts
    weights, values = rooms.index(here + 2 * PARTS - 1), rooms.index(here + PARTS + part)
    return warpgroup_mma(weights, values, sums, is_async=True)


@gluon.jit
def _merge_part(part: gl.constexpr, sums, found, factors, done, after: gl.constexpr):
    """Waits for a split's sums, after which `after` products were started, and merges them."""
    found = warpgroup_mma_wait(after, deps=[found])
    mbarrier.arrive(done.index(part))
    return gl.fma(sums, factors[1], found * factors[2])
