"""Attention of a sequence's last token and its guesses over its pages.

As kernels/gpu/decode_attention.py, but for several rows per sequence, which see each other. So they
are rotated and stored before. Rows of a sequence, with their query heads, are rows of one matrix,
so each key and value is read once for all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu.decode_attention import CODED_QUERIES, attend_program, tiles_ahead
from baton.kernels.gpu.fixed_order import SPLIT, TILE, column_blocks, tile_of
from baton.kernels.gpu.head_codes import head_columns, is_coded
from baton.kernels.gpu.pages import load_pages
from baton.kernels.gpu.rotary import HeadShape
from baton.kernels.gpu.splits import SplitWorkspace, merge_splits, programs_for

QUERIES = 32
"""Query heads per program, over all of its rows; more would not save reads."""

FLOAT32_QUERIES = 16

ROWS_OF_SEQUENCE = 4
"""Approximate rows per sequence in a step with guesses."""


def rows_together(heads: int, kv_heads: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> int:
    """How many rows of a sequence one program attends."""
    return max(1, _queries(dtype, kv_dtype) // (heads // kv_heads))


def _queries(dtype: torch.dtype, kv_dtype: torch.dtype) -> int:
    if tile_of(dtype) != TILE:
        return FLOAT32_QUERIES
    return CODED_QUERIES if is_coded(kv_dtype) else QUERIES


def guess_attention(
    qkv: Tensor,
    blocks: Tensor,
    page_table: Tensor,
    kv_layer: Tensor,
    shape: HeadShape,
    workspace: SplitWorkspace,
    out: Tensor,
) -> Tensor:
    """qkv [T, (heads + 2 * kv_heads) * dim], rotated and stored -> out [T, heads * dim].

    blocks [n, 4], int32, lists up to `rows_together` neighbouring rows of one sequence each, as in
    kernels/gpu/chunk_attention.py; the other arguments are as in decode_attention.
    """
    rows, group = len(qkv), shape.heads // shape.kv_heads
    together = rows_together(shape.heads, shape.kv_heads, qkv.dtype, kv_layer.dtype)
    # Blocks may be as many as rows, but most are then empty: programs take some in turn.
    sequences = triton.cdiv(rows, ROWS_OF_SEQUENCE)
    programs = programs_for(rows, shape.kv_heads)
    if programs > 1:
        programs = programs_for(sequences, shape.kv_heads)
    tile, coded = tile_of(qkv.dtype), is_coded(kv_layer.dtype)
    block_d, rest = head_columns(shape.head_dim, kv_layer.dtype)
    _guess[(shape.kv_heads, min(sequences, len(blocks)), programs)](
        qkv,
        blocks,
        page_table,
        kv_layer,
        qkv if shape.sinks is None else shape.sinks,
        workspace.sums,
        workspace.weights,
        out,
        *shape.score_factors,
        shape.window or 0,
        page_table.stride(0),
        kv_layer.stride(0),
        kv_layer.stride(1),
        workspace.splits,
        len(blocks),
        PAGE_SIZE=kv_layer.shape[2],
        HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        GROUP=group,
        BLOCK_G=max(_queries(qkv.dtype, kv_layer.dtype), triton.next_power_of_2(group * together)),
        DIM=shape.head_dim,
        HEAD=kv_layer.shape[4],
        BLOCK_D=block_d,
        REST=rest,
        CODED=coded,
        TILE=tile,
        SPLIT=SPLIT,
        ALONE=programs == 1,
        CAPPED=shape.scoring.cap is not None,
        SINKS=shape.sinks is not None,
        num_warps=4,
        enable_fp_fusion=False,
        num_stages=tiles_ahead(tile * shape.head_dim * qkv.itemsize),
    )
    if programs > 1:
        merging = programs if shape.sinks is not None else None
        merge_splits(blocks, workspace, shape.heads, shape.window or 0, out, merging)
    return out


@triton.jit(
    do_not_specialize=["splits", "blocks"], do_not_specialize_on_alignment=["blocks_pointer"]
)
def _guess(
    qkv_pointer,
    blocks_pointer,
    table_pointer,
    kv_pointer,
    sinks_pointer,
    sums_pointer,
    weights_pointer,
    out_pointer,
    scale,
    bend,
    window,
    table_stride,
    page_stride,
    value_offset,
    splits,
    blocks,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    DIM: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    CODED: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    ALONE: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):
    head, block, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(blocks_pointer + 4 * block + 2)
    while count > 0:  # empty blocks are last
        entry = blocks_pointer + 4 * block
        start = tl.load(entry + 1)
        last = start + count - 1
        first = tl.maximum(start - window + 1, 0) if window > 0 else 0
        active = last // SPLIT - first // SPLIT + 1
        mine = active if ALONE else tl.cdiv(active, tl.num_programs(2))
        if program * mine < active:
            first_row = tl.load(entry).to(tl.int64)
            table = table_pointer + tl.load(entry + 3).to(tl.int64) * table_stride
            columns = column_blocks(BLOCK_D, REST)
            member = tl.arange(0, BLOCK_G)
            row, query_head = member // GROUP, head * GROUP + member % GROUP
            in_rows = row < count
            at = (first_row + row) * ((HEADS + 2 * KV_HEADS) * DIM) + query_head * DIM
            query = ()
            for number in tl.static_range(len(columns)):
                column = columns[number]
                mask = in_rows[:, None] & (column < DIM)[None, :]
                queries = qkv_pointer + at[:, None] + column[None, :]
                query += (tl.load(queries, mask=mask, other=0.0),)  # type: ignore[assignment]
            position = (start + row)[:, None]
            earliest = tl.where(window > 0, tl.maximum(position - window + 1, 0), 0)
            before = first // SPLIT
            begin = (before + program * mine) * SPLIT
            end = tl.minimum((before + (program + 1) * mine) * SPLIT, last + 1)
            place = ((first_row + row) * HEADS + query_head) * splits
            out = out_pointer + (first_row + row) * (HEADS * DIM) + query_head * DIM
            attend_program(
                query, earliest, position, first, begin, end, program, mine, place, place - before,
                in_rows, out, sinks_pointer + query_head, kv_pointer + head * HEAD, table,
                load_pages(table, begin, first, end, TILE, PAGE_SIZE), value_offset,
                page_stride, sums_pointer, weights_pointer, columns, scale, bend, BLOCK_G, BLOCK_D,
                REST, DIM, TILE, SPLIT, PAGE_SIZE, KV_HEADS * HEAD, CODED, ALONE, CAPPED, SINKS,
            )  # fmt: skip
        block += tl.num_programs(1)
        count = tl.load(blocks_pointer + 4 * block + 2, mask=block < blocks, other=0)
