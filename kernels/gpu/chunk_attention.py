"""Attention of many new tokens per sequence over its context, which already holds them.

A program handles a block of one chunk's queries for one head and walks over the keys that any
of them sees, in the tiles of kernels/gpu/fixed_order.py. One launch serves the chunks of many
sequences. kernels/gpu/hopper_chunks.py is faster on Hopper.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu import hopper_chunks
from baton.kernels.gpu.decode_attention import WIDE_BYTES, tiles_ahead
from baton.kernels.gpu.fixed_order import (
    SPLIT,
    TILE,
    attend,
    column_blocks,
    merge_blocks,
    tile_of,
    zero_sums,
)
from baton.kernels.gpu.head_codes import head_columns, is_coded
from baton.kernels.gpu.pages import load_pages, load_tile
from baton.kernels.gpu.rotary import HeadShape

BLOCK_QUERIES = hopper_chunks.BLOCK_QUERIES
"""Tokens of one entry of `blocks`."""

PROGRAM_QUERIES, FLOAT32_QUERIES = 64, 16
"""Queries per program; fewer in float32: see fixed_order.FLOAT32_TILE."""


def chunk_attention(
    qkv: Tensor,
    blocks: Tensor,
    page_table: Tensor,
    kv_layer: Tensor,
    shape: HeadShape,
    out: Tensor,
) -> Tensor:
    """qkv [T, (heads + 2 * kv_heads) * dim], rotated and stored -> out [T, heads * dim].

    blocks [n, 4], int32, lists up to BLOCK_QUERIES neighbouring rows of one sequence each:
    first row, position of that row, count (0: nothing), the sequence's row of page_table.
    kv_layer [page, 2, token, kv_head, dim] is one layer of the pool.
    """
    if hopper_chunks.supports(kv_layer, shape):
        return hopper_chunks.attend(qkv, blocks, page_table, kv_layer, shape, out)
    return attend_anywhere(qkv, blocks, page_table, kv_layer, shape, out)


def attend_anywhere(
    qkv: Tensor,
    blocks: Tensor,
    page_table: Tensor,
    kv_layer: Tensor,
    shape: HeadShape,
    out: Tensor,
) -> Tensor:
    """chunk_attention on any device."""
    block_d, rest = head_columns(shape.head_dim, kv_layer.dtype)
    coded = is_coded(kv_layer.dtype)
    tile = tile_of(qkv.dtype)
    queries = PROGRAM_QUERIES if tile == TILE else FLOAT32_QUERIES
    # One split per iteration if shared memory has room to load the next ones ahead.
    by_split = tile == TILE and block_d * qkv.itemsize < WIDE_BYTES
    _chunk[(shape.heads, len(blocks) * (BLOCK_QUERIES // queries))](
        qkv,
        blocks,
        page_table,
        kv_layer,
        qkv if shape.sinks is None else shape.sinks,
        out,
        *shape.score_factors,
        shape.window or 0,
        page_table.stride(0),
        kv_layer.stride(0),
        kv_layer.stride(1),
        PAGE_SIZE=kv_layer.shape[2],
        HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        DIM=shape.head_dim,
        HEAD=kv_layer.shape[4],
        BLOCK_D=block_d,
        REST=rest if coded else 0,
        CODED=coded,
        PARTS=BLOCK_QUERIES // queries,
        BLOCK_M=queries,
        TILE=tile,
        SPLIT=SPLIT,
        BY_SPLIT=by_split,
        CAPPED=shape.scoring.cap is not None,
        SINKS=shape.sinks is not None,
        num_warps=4 if block_d <= 128 else 8,
        enable_fp_fusion=False,
        num_stages=3 if by_split else min(2, tiles_ahead(tile * block_d * qkv.itemsize)),
    )
    return out


@triton.jit
def _attend_tile(
    highest, total, sums, query, position, kv_pointer, table, value_offset, page_stride, tile,
    first, end, columns, scale, bend, window, ROWS: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr, PAGE_SIZE: tl.constexpr, TOKEN: tl.constexpr, CAPPED: tl.constexpr,
    CODED: tl.constexpr,
):  # fmt: skip
    """Adds the tile of tokens that begins at `tile` to its split: see fixed_order.attend."""
    keys, values, token = load_tile(
        kv_pointer, load_pages(table, tile, first, end, TILE, PAGE_SIZE), value_offset,
        page_stride, tile, first, end, columns, DIM, TILE, PAGE_SIZE, TOKEN, CODED,
        query[0].dtype,
    )  # fmt: skip
    seen = token[None, :] <= position
    if window > 0:
        seen &= token[None, :] > position - window
    return attend(highest, total, sums, query, keys, values, seen, scale, bend, ROWS, TILE, CAPPED)


@triton.jit(do_not_specialize_on_alignment=["blocks_pointer"])
def _chunk(
    qkv_pointer,
    blocks_pointer,
    table_pointer,
    kv_pointer,
    sinks_pointer,
    out_pointer,
    scale,
    bend,
    window,
    table_stride,
    page_stride,
    value_offset,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    CODED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    BY_SPLIT: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):
    head, block = tl.program_id(0), tl.program_id(1) // PARTS
    entry = blocks_pointer + block * 4
    earlier = tl.program_id(1) % PARTS * BLOCK_M  # queries of the entry
    count = tl.minimum(tl.load(entry + 2) - earlier, BLOCK_M)
    if count > 0:
        first_row, start = tl.load(entry).to(tl.int64) + earlier, tl.load(entry + 1) + earlier
        table = table_pointer + tl.load(entry + 3).to(tl.int64) * table_stride
        columns = column_blocks(BLOCK_D, REST)
        member = tl.arange(0, BLOCK_M)
        mine = (member < count)[:, None]
        at = (first_row + member)[:, None] * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM
        query = ()
        for number in tl.static_range(len(columns)):
            column = columns[number][None, :]
            mask = mine & (column < DIM)
            query += (tl.load(qkv_pointer + at + column, mask=mask, other=0.0),)  # type: ignore[assignment]
        position = (start + member)[:, None]
        end = start + count
        first = tl.maximum(start - window + 1, 0) if window > 0 else 0
        kv_pointer += (head // (HEADS // KV_HEADS)) * HEAD

        highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_M], dtype=tl.float32)
        sums = zero_sums(BLOCK_M, BLOCK_D, REST)
        if SINKS:
            highest = tl.zeros_like(total) + tl.load(sinks_pointer + head)
            total += 1.0
        split_highest, split_total, split_sums = highest, total, sums
        if BY_SPLIT:
            for split in range(first // SPLIT * SPLIT, end, SPLIT):
                split_highest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
                split_total = tl.zeros([BLOCK_M], dtype=tl.float32)
                split_sums = zero_sums(BLOCK_M, BLOCK_D, REST)
                for tile in tl.static_range(SPLIT // TILE):
                    split_highest, split_total, split_sums = _attend_tile(
                        split_highest, split_total, split_sums, query, position, kv_pointer, table,
                        value_offset, page_stride, split + tile * TILE, first, end, columns, scale,
                        bend, window, BLOCK_M, DIM, TILE, PAGE_SIZE, KV_HEADS * HEAD, CAPPED,
                        CODED,
                    )  # fmt: skip
                highest, total, sums = merge_blocks(
                    highest, total, sums, split_highest, split_total, split_sums
                )
        else:
            for tile in range(first // SPLIT * SPLIT, end, TILE):
                split_highest = tl.where(tile % SPLIT == 0, float("-inf"), split_highest)
                split_highest, split_total, split_sums = _attend_tile(
                    split_highest, split_total, split_sums, query, position, kv_pointer, table,
                    value_offset, page_stride, tile, first, end, columns, scale, bend, window,
                    BLOCK_M, DIM, TILE, PAGE_SIZE, KV_HEADS * HEAD, CAPPED, CODED,
                )  # fmt: skip
                if ((tile + TILE) % SPLIT == 0) | (tile + TILE >= end):
                    highest, total, sums = merge_blocks(
                        highest, total, sums, split_highest, split_total, split_sums
                    )
        out_at = (first_row + member)[:, None] * (HEADS * DIM) + head * DIM
        for number in tl.static_range(len(columns)):
            column = columns[number][None, :]
            result = (sums[number] * (1.0 / total)[:, None]).to(out_pointer.dtype.element_ty)
            tl.store(out_pointer + out_at + column, result, mask=mine & (column < DIM))


BLOCK_TOKENS = 16


def merge_attended(
    attended: Tensor, weight: Tensor, earlier: Tensor, earlier_weight: Tensor
) -> None:
    """Merges attention over `earlier` keys into `attended`, in place.

    attended and earlier [1, heads, T, dim]; weight and earlier_weight [1, heads, T, 1],
    float32, are the logarithms of their normalizers. weight becomes the merged one.
    """
    _, heads, tokens, dim = attended.shape
    _merge_attended[(triton.cdiv(tokens, BLOCK_TOKENS), heads)](
        attended,
        weight,
        earlier,
        earlier_weight,
        tokens,
        attended.stride(1),
        attended.stride(2),
        earlier.stride(1),
        earlier.stride(2),
        DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        BLOCK_T=BLOCK_TOKENS,
        num_warps=2,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize=["tokens"])
def _merge_attended(
    attended_pointer,
    weight_pointer,
    earlier_pointer,
    earlier_weight_pointer,
    tokens,
    head_stride,
    token_stride,
    earlier_head_stride,
    earlier_token_stride,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head, dim = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_D)
    seen = token < tokens
    inside = seen[:, None] & (dim < DIM)[None, :]
    wide = token.to(tl.int64)
    at = head * head_stride + (wide * token_stride)[:, None] + dim[None, :]
    earlier_at = head * earlier_head_stride + (wide * earlier_token_stride)[:, None] + dim[None, :]
    mine = tl.load(attended_pointer + at, mask=inside).to(tl.float32)
    earlier = tl.load(earlier_pointer + earlier_at, mask=inside).to(tl.float32)
    row = head * tokens + wide
    weight = tl.load(weight_pointer + row, mask=seen, other=0.0)
    earlier_weight = tl.load(earlier_weight_pointer + row, mask=seen, other=0.0)
    higher = tl.maximum(weight, earlier_weight)
    own, other = tl.exp(weight - higher), tl.exp(earlier_weight - higher)
    both = own + other
    merged = mine * (own / both)[:, None] + earlier * (other / both)[:, None]
    tl.store(attended_pointer + at, merged.to(attended_pointer.dtype.element_ty), mask=inside)
    tl.store(weight_pointer + row, higher + tl.log(both), mask=seen)
