"""Attention over latents (kernels/latent.py): one key head for all query heads, whose first `rank`
numbers are the value. So a tile is loaded once for both products.

As in kernels/gpu/decode_attention.py and chunk_attention.py, with the same sums in the same order
(kernels/gpu/fixed_order.py), but queries are prepared and tokens stored before. A chunk's sums over
all of `rank` would not fit into registers: two programs compute a half each, and both compute the
scores. kernels/gpu/hopper_latents.py is faster on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu import hopper_latents
from baton.kernels.gpu.chunk_attention import BLOCK_QUERIES, PROGRAM_QUERIES
from baton.kernels.gpu.fixed_order import SPLIT, TILE, add_tile, merge
from baton.kernels.gpu.latent_projection import LatentSizes
from baton.kernels.gpu.rotary import LOG2_E
from baton.kernels.gpu.splits import SplitWorkspace, merge_splits, programs_for

GROUP = 16
"""Heads per program when decoding."""

STAGES = 5
"""Stages of the decode loop: page ids are loaded two iterations ahead of latents, of which shared
memory holds two tiles."""

MOST_BYTES = 1536
"""Largest supported latent: a chunk's queries and a tile must fit into shared memory."""


def filling_heads(heads: int) -> int:
    """The number of key heads whose programs fill the chip as much: one program of these takes half
    of a multiprocessor."""
    return 2 * triton.cdiv(heads, GROUP)


def decode_latents(
    query: Tensor,
    rows: Tensor,
    positions: Tensor,
    page_table: Tensor,
    kv_layer: Tensor,
    sizes: LatentSizes,
    workspace: SplitWorkspace,
    out: Tensor,
) -> Tensor:
    """query [B, heads, rank + rotated] of one new token per sequence -> out [B, heads, rank].

    rows [B] are the sequences' rows of page_table [sequences, pages], positions [B] those of
    the new tokens; a row with a negative position is skipped. kv_layer [page, 1, token, 1,
    rank + rotated] is one layer of the pool.
    """
    batch = len(query)
    programs = programs_for(batch, filling_heads(sizes.heads))
    _decode[(batch, triton.cdiv(sizes.heads, GROUP), programs)](
        query,
        rows,
        positions,
        page_table,
        kv_layer,
        workspace.sums,
        workspace.weights,
        out,
        sizes.scale * LOG2_E,
        query.stride(0),
        page_table.stride(0),
        kv_layer.stride(0),
        workspace.splits,
        PAGE_SIZE=kv_layer.shape[2],
        HEADS=sizes.heads,
        GROUP=GROUP,
        RANK=sizes.rank,
        ROTATED=sizes.rotated,
        BLOCK_RANK=max(16, triton.next_power_of_2(sizes.rank)),
        BLOCK_ROTATED=max(16, triton.next_power_of_2(sizes.rotated)),
        TILE=TILE,
        SPLIT=SPLIT,
        PROGRAMS=programs,
        num_warps=8,
        num_stages=STAGES if query.element_size() == 2 else 2,
        enable_fp_fusion=False,
    )
    if programs > 1:
        merge_splits(positions, workspace, sizes.heads, 0, out, programs)
    return out


@triton.jit
def _spots(
    table, page_stride, tile, end, TILE: tl.constexpr, PAGE_SIZE: tl.constexpr, ROW: tl.constexpr
):
    """The tokens [TILE] from `tile` on, and their offsets in the pool."""
    token = tile + tl.arange(0, TILE)
    page = tl.load(table + token // PAGE_SIZE, mask=token < end, other=0).to(tl.int64)
    return token, page * page_stride + token % PAGE_SIZE * ROW


@triton.jit
def _load(pointer, spots, there, column, SIZE: tl.constexpr):
    """Loads columns of the tokens at `spots`: [TILE, columns]."""
    mask = there[:, None] & (column < SIZE)[None, :]
    return tl.load(pointer + spots[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _attend(
    highest,
    total,
    sums,
    query,
    turned_query,
    kv_pointer,
    table,
    page_stride,
    tile,
    position,
    scale,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROTATED: tl.constexpr,
    TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Adds a tile of tokens, up to `position`, for some heads of one query."""
    token, at = _spots(table, page_stride, tile, position + 1, TILE, PAGE_SIZE, RANK + ROTATED)
    there = token <= position
    normed = _load(kv_pointer, at, there, tl.arange(0, BLOCK_RANK), RANK)
    turned = _load(kv_pointer + RANK, at, there, tl.arange(0, BLOCK_ROTATED), ROTATED)
    scores = tl.dot(query, tl.trans(normed), input_precision="ieee")
    scores = tl.dot(turned_query, tl.trans(turned), scores, input_precision="ieee")
    return add_tile(highest, total, sums, scores, normed, there[None, :], scale, GROUP, TILE)


@triton.jit(
    do_not_specialize=["splits"],
    do_not_specialize_on_alignment=["rows_pointer", "positions_pointer"],
)
def _decode(
    query_pointer,
    rows_pointer,
    positions_pointer,
    table_pointer,
    kv_pointer,
    sums_pointer,
    weights_pointer,
    out_pointer,
    scale,
    query_stride,
    table_stride,
    page_stride,
    splits,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROTATED: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    sequence, program = tl.program_id(0), tl.program_id(2)
    position = tl.load(positions_pointer + sequence)
    active = position // SPLIT + 1
    mine = tl.cdiv(active, PROGRAMS)
    if (position >= 0) & (program * mine < active):
        table = table_pointer + tl.load(rows_pointer + sequence).to(tl.int64) * table_stride
        head = tl.program_id(1) * GROUP + tl.arange(0, GROUP)
        in_heads = head < HEADS
        column = tl.arange(0, BLOCK_RANK)
        in_group = in_heads[:, None] & (column < RANK)[None, :]
        spots = sequence.to(tl.int64) * query_stride + head * (RANK + ROTATED)
        query = _load(query_pointer, spots, in_heads, column, RANK)
        rotated = tl.arange(0, BLOCK_ROTATED)
        turned_query = _load(query_pointer + RANK, spots, in_heads, rotated, ROTATED)
        highest = tl.full([GROUP], float("-inf"), dtype=tl.float32)
        total = tl.zeros([GROUP], dtype=tl.float32)
        sums = tl.zeros([GROUP, BLOCK_RANK], dtype=tl.float32)
        begin = program * mine * SPLIT
        end = tl.minimum((program + 1) * mine * SPLIT, position + 1)
        place = (sequence * HEADS + head).to(tl.int64) * splits
        # Two loops: with a branch in one loop, its loads would not be pipelined.
        if program == 0:
            all_highest, all_total, all_sums = highest, total, sums
            for tile in range(begin, end, TILE):
                highest = tl.where(tile % SPLIT == 0, float("-inf"), highest)
                highest, total, sums = _attend(
                    highest, total, sums, query, turned_query, kv_pointer, table, page_stride,
                    tile, position, scale, GROUP, RANK, ROTATED, BLOCK_RANK, BLOCK_ROTATED, TILE,
                    PAGE_SIZE,
                )  # fmt: skip
                if ((tile + TILE) % SPLIT == 0) | (tile + TILE >= end):
                    all_highest, all_total, all_sums = merge(
                        all_highest, all_total, all_sums, highest, total, sums
                    )
            if PROGRAMS == 1:
                result = all_sums * (1.0 / all_total)[:, None]
                to = (sequence.to(tl.int64) * HEADS + head)[:, None] * RANK + column[None, :]
                tl.store(out_pointer + to, result.to(query.dtype), mask=in_group)
            else:
                # The merged splits take the place of the last one.
                last = place + mine - 1
                sums_at = sums_pointer + last[:, None] * RANK + column[None, :]
                tl.store(sums_at, all_sums, mask=in_group)
                tl.store(weights_pointer + 2 * last, all_highest, mask=in_heads)
                tl.store(weights_pointer + 2 * last + 1, all_total, mask=in_heads)
        else:
            for tile in range(begin, end, TILE):
                highest = tl.where(tile % SPLIT == 0, float("-inf"), highest)
                highest, total, sums = _attend(
                    highest, total, sums, query, turned_query, kv_pointer, table, page_stride,
                    tile, position, scale, GROUP, RANK, ROTATED, BLOCK_RANK, BLOCK_ROTATED, TILE,
                    PAGE_SIZE,
                )  # fmt: skip
                if ((tile + TILE) % SPLIT == 0) | (tile + TILE >= end):
                    at_split = place + tile // SPLIT
                    sums_at = sums_pointer + at_split[:, None] * RANK + column[None, :]
                    tl.store(sums_at, sums, mask=in_group)
                    tl.store(weights_pointer + 2 * at_split, highest, mask=in_heads)
                    tl.store(weights_pointer + 2 * at_split + 1, total, mask=in_heads)


def chunk_latents(
    query: Tensor,
    blocks: Tensor,
    page_table: Tensor,
    kv_layer: Tensor,
    sizes: LatentSizes,
    out: Tensor,
) -> Tensor:
    """query [T, heads, rank + rotated], whose tokens are stored -> out [T, heads, rank].

    blocks [n, 4] and kv_layer: see kernels/gpu/chunk_attention.py and decode_latents.
    """
    if hopper_latents.supports(kv_layer, sizes):
        return hopper_latents.attend(query, blocks, page_table, kv_layer, sizes, out)
    return attend_halves(query, blocks, page_table, kv_layer, sizes, out)


def attend_halves(
    query: Tensor,
    blocks: Tensor,
    page_table: Tensor,
    kv_layer: Tensor,
    sizes: LatentSizes,
    out: Tensor,
) -> Tensor:
    """chunk_latents on any device."""
    for upper in (False, True):
        _chunk[(sizes.heads, len(blocks) * (BLOCK_QUERIES // PROGRAM_QUERIES))](
            query,
            blocks,
            page_table,
            kv_layer,
            out,
            sizes.scale * LOG2_E,
            page_table.stride(0),
            kv_layer.stride(0),
            PAGE_SIZE=kv_layer.shape[2],
            HEADS=sizes.heads,
            RANK=sizes.rank,
            ROTATED=sizes.rotated,
            HALF=max(16, triton.next_power_of_2(sizes.rank) // 2),
            BLOCK_ROTATED=max(16, triton.next_power_of_2(sizes.rotated)),
            PARTS=BLOCK_QUERIES // PROGRAM_QUERIES,
            BLOCK_M=PROGRAM_QUERIES,
            TILE=TILE,
            SPLIT=SPLIT,
            UPPER=upper,
            num_warps=8,
            num_stages=2,
            enable_fp_fusion=False,
        )
    return out


@triton.jit(do_not_specialize_on_alignment=["blocks_pointer"])
def _chunk(
    query_pointer,
    blocks_pointer,
    table_pointer,
    kv_pointer,
    out_pointer,
    scale,
    table_stride,
    page_stride,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_ROTATED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    UPPER: tl.constexpr,
):
    """Computes the sums of the lower or the upper half of `rank`."""
    entry = blocks_pointer + tl.program_id(1) // PARTS * 4
    earlier = tl.program_id(1) % PARTS * BLOCK_M  # queries of the entry
    count = tl.minimum(tl.load(entry + 2) - earlier, BLOCK_M)
    if count > 0:
        first_row, start = tl.load(entry).to(tl.int64) + earlier, tl.load(entry + 1) + earlier
        table = table_pointer + tl.load(entry + 3).to(tl.int64) * table_stride
        member = tl.arange(0, BLOCK_M)
        lower, rotated = tl.arange(0, HALF), tl.arange(0, BLOCK_ROTATED)
        upper = HALF + lower
        row = (first_row + member) * HEADS + tl.program_id(0)
        mine = member < count
        spots = row * (RANK + ROTATED)
        lower_query = _load(query_pointer, spots, mine, lower, RANK)
        upper_query = _load(query_pointer, spots, mine, upper, RANK)
        turned_query = _load(query_pointer + RANK, spots, mine, rotated, ROTATED)
        position = (start + member)[:, None]
        end = start + count

        all_highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        all_total = tl.zeros([BLOCK_M], dtype=tl.float32)
        all_sums = tl.zeros([BLOCK_M, HALF], dtype=tl.float32)
        highest, total, sums = all_highest, all_total, all_sums
        for tile in range(0, end, TILE):
            token, at = _spots(table, page_stride, tile, end, TILE, PAGE_SIZE, RANK + ROTATED)
            there = token < end
            lower_rows = _load(kv_pointer, at, there, lower, RANK)
            upper_rows = _load(kv_pointer, at, there, upper, RANK)
            turned = _load(kv_pointer + RANK, at, there, rotated, ROTATED)
            scores = tl.dot(lower_query, tl.trans(lower_rows), input_precision="ieee")
            scores = tl.dot(upper_query, tl.trans(upper_rows), scores, input_precision="ieee")
            scores = tl.dot(turned_query, tl.trans(turned), scores, input_precision="ieee")
            highest = tl.where(tile % SPLIT == 0, float("-inf"), highest)
            values = upper_rows if UPPER else lower_rows
            seen = token[None, :] <= position
            highest, total, sums = add_tile(
                highest, total, sums, scores, values, seen, scale, BLOCK_M, TILE
            )
            if ((tile + TILE) % SPLIT == 0) | (tile + TILE >= end):
                all_highest, all_total, all_sums = merge(
                    all_highest, all_total, all_sums, highest, total, sums
                )
        result = all_sums * (1.0 / all_total)[:, None]
        column = upper if UPPER else lower
        to = out_pointer + row[:, None] * RANK + column[None, :]
        mask = mine[:, None] & (column < RANK)[None, :]
        tl.store(to, result.to(out_pointer.dtype.element_ty), mask=mask)
