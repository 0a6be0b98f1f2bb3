"""Attention of one new token per sequence over its pages.

The kernel does everything between the projection of queries, keys and values and the output
projection: it norms and rotates the new token's query and key, stores key and value into their
page, and attends.

Query heads that share a key head are rows of one matrix, so each key and value is read once.
If a batch is too small to fill the chip, several programs share a context: each attends some
successive splits (kernels/gpu/fixed_order.py). The first merges its own splits, the others store
each of theirs, and a second kernel merges these in order. The program with the last split stores
the new token before it reads it: no other program reads it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu import hopper_codes
from baton.kernels.gpu.fixed_order import (
    SPLIT,
    TILE,
    attend,
    column_blocks,
    cut_columns,
    merge_blocks,
    tile_of,
    zero_sums,
)
from baton.kernels.gpu.head_codes import head_columns, is_coded
from baton.kernels.gpu.new_token import prepare_token
from baton.kernels.gpu.pages import load_pages, load_tile
from baton.kernels.gpu.rotary import HeadShape, Projected
from baton.kernels.gpu.splits import (
    WANTED_PROGRAMS,
    SplitWorkspace,
    merge_splits,
    programs_for,
)

WIDE_BYTES = 512
"""Heads of this size fill the registers of two warps; few of their tiles fit into shared memory."""

SMALL_BYTES = 192
"""Heads of up to this size leave room to load a tile while another one is attended. So half as many
programs, of four warps each, fill the chip."""

TINY_BYTES, MANY_PROGRAMS = 128, 1024
"""From MANY_PROGRAMS on, one warp per program fills the chip, for heads of up to TINY_BYTES."""

CODED_QUERIES = 64
"""Fewest rows of a product over codes. Products of fewer rows use other instructions, for which the
compiler reorders the numbers of a key decoded from bytes: the bits would differ from a chunk's."""

FEW_ROWS = 16
"""Below this many sequences latency counts: more warps."""


def decode_attention(
    projected: Projected,
    cos_sin: Tensor,
    rows: Tensor,
    positions: Tensor,
    page_table: Tensor,
    kv_layer: Tensor,
    shape: HeadShape,
    workspace: SplitWorkspace,
    out: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
) -> Tensor:
    """Queries, keys and values of B new tokens -> out [B, heads * dim].

    rows [B] are the sequences' rows of page_table [sequences, pages], positions [B] those of
    the new tokens; a row with a negative position is skipped. cos_sin [positions, dim] holds
    a position's cosines, then its sines. kv_layer [page, 2, token, kv_head, dim] is one
    layer of the pool.
    """
    coded = hopper_codes.supports(projected.qkv.dtype, kv_layer, shape)
    attend = hopper_codes.attend if coded else decode_anywhere
    return attend(
        projected, cos_sin, rows, positions, page_table, kv_layer, shape, workspace, out,
        query_norm, key_norm,
    )  # fmt: skip


def decode_anywhere(
    projected: Projected,
    cos_sin: Tensor,
    rows: Tensor,
    positions: Tensor,
    page_table: Tensor,
    kv_layer: Tensor,
    shape: HeadShape,
    workspace: SplitWorkspace,
    out: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
) -> Tensor:
    """As decode_attention, on any GPU."""
    qkv, squares, bias = projected.qkv, projected.squares, projected.bias
    batch, group = len(qkv), shape.heads // shape.kv_heads
    programs = programs_for(batch, shape.kv_heads, wanted_programs(shape.head_dim * qkv.itemsize))
    tile, coded = tile_of(qkv.dtype), is_coded(kv_layer.dtype)
    block_d, rest = head_columns(shape.head_dim, kv_layer.dtype)
    least = CODED_QUERIES if coded and tile == TILE else 16
    warps = 4 if coded else _warps_for(batch, shape.kv_heads, shape.head_dim * qkv.itemsize)
    # Heads are the first axis: programs that run at the same time read adjacent heads of a page.
    _decode[(shape.kv_heads, batch, programs)](
        qkv,
        qkv if squares is None else squares,
        qkv if bias is None else bias,
        cos_sin,
        rows,
        positions,
        page_table,
        kv_layer,
        query_norm if query_norm is not None else qkv,
        key_norm if key_norm is not None else qkv,
        qkv if shape.sinks is None else shape.sinks,
        workspace.sums,
        workspace.weights,
        out,
        *shape.score_factors,
        projected.source.epsilon if projected.source else 0.0,
        shape.epsilon,
        shape.window or 0,
        page_table.stride(0),
        kv_layer.stride(0),
        kv_layer.stride(1),
        workspace.splits,
        PAGE_SIZE=kv_layer.shape[2],
        HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        GROUP=group,
        BLOCK_G=max(least, triton.next_power_of_2(group)),
        DIM=shape.head_dim,
        HEAD=kv_layer.shape[4],
        BLOCK_D=block_d,
        REST=rest,
        CODED=coded,
        INPUTS=projected.source.x.shape[1] if projected.source else 1,
        TILE=tile,
        SPLIT=SPLIT,
        ALONE=programs == 1,
        SCALED=squares is not None,
        BIAS=bias is not None,
        NORMS=query_norm is not None,
        ROTATES=shape.rotates,
        CAPPED=shape.scoring.cap is not None,
        SINKS=shape.sinks is not None,
        num_warps=warps,
        enable_fp_fusion=False,
        num_stages=2 if warps == 1 else tiles_ahead(tile * shape.head_dim * qkv.itemsize),
    )
    if programs > 1:
        merging = programs if shape.sinks is not None else None
        merge_splits(positions, workspace, shape.heads, shape.window or 0, out, merging)
    return out


def wanted_programs(head_bytes: int) -> int:
    """How many programs fill the chip."""
    return WANTED_PROGRAMS // 2 if head_bytes <= SMALL_BYTES else WANTED_PROGRAMS


def _warps_for(batch: int, kv_heads: int, head_bytes: int) -> int:
    if head_bytes <= TINY_BYTES and batch * kv_heads >= MANY_PROGRAMS:
        return 1
    return 4 if batch < FEW_ROWS or head_bytes <= SMALL_BYTES or head_bytes >= WIDE_BYTES else 2


def tiles_ahead(tile_bytes: int) -> int:
    """Stages of the loop over tiles. With 3, a tile is loaded while another one is attended; with
    2, other programs use that time; 1 means that no more fits."""
    if tile_bytes > 32 << 10:
        return 1
    return 3 if tile_bytes <= SMALL_BYTES * TILE else 2


@triton.jit
def attend_program(
    query, earliest, position, first, begin, end, program, mine, place, at_split, in_rows, out,
    sinks_at, kv_pointer, table, pages, value_offset, page_stride, sums_pointer, weights_pointer,
    columns, scale, bend, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, REST: tl.constexpr,
    DIM: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TOKEN: tl.constexpr, CODED: tl.constexpr, ALONE: tl.constexpr, CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Attends whole splits of tokens, from `begin` to `end`, and stores the result at `out`
    [BLOCK_G] or in the workspace.

    query [BLOCK_G, columns], one per block of columns; only the rows `in_rows` [BLOCK_G] count. A
    row sees the tokens from `earliest` to `position`, both [BLOCK_G, 1] or one number for all. No
    row sees a token before `first`. `place` [BLOCK_G] is the workspace index of a row's first
    split, `at_split` that of split 0.
    """
    dtype: tl.constexpr = query[0].dtype
    highest = tl.full([BLOCK_G], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_G], dtype=tl.float32)
    sums = zero_sums(BLOCK_G, BLOCK_D, REST)
    merges = False
    if ALONE or SINKS:  # without sinks, all splits are left to the merging kernel: fewer registers
        merges = program == 0
    # Two loops: with a branch in one loop, its loads would not be pipelined.
    if merges:
        all_highest, all_total, all_sums = highest, total, sums
        if SINKS:
            all_highest = tl.load(sinks_at, mask=in_rows, other=0.0)
            all_total += 1.0
        for tile in range(begin, end, TILE):
            keys, values, token = load_tile(
                kv_pointer, pages, value_offset, page_stride, tile, first, end, columns, DIM,
                TILE, PAGE_SIZE, TOKEN, CODED, dtype,
            )  # fmt: skip
            pages = load_pages(table, tile + TILE, first, end, TILE, PAGE_SIZE)
            seen = (token[None, :] >= earliest) & (token[None, :] <= position)
            highest = tl.where(tile % SPLIT == 0, float("-inf"), highest)
            highest, total, sums = attend(
                highest, total, sums, query, keys, values, seen, scale, bend,
                BLOCK_G, TILE, CAPPED)  # fmt: skip
            if ((tile + TILE) % SPLIT == 0) | (tile + TILE >= end):
                all_highest, all_total, all_sums = merge_blocks(
                    all_highest, all_total, all_sums, highest, total, sums
                )
        if ALONE:
            inverse = (1.0 / all_total)[:, None]
            for block in tl.static_range(len(columns)):
                mask = in_rows[:, None] & (columns[block] < DIM)[None, :]
                result = (all_sums[block] * inverse).to(dtype)
                tl.store(out[:, None] + columns[block][None, :], result, mask=mask)
        else:
            # The merged splits take the place of the last one.
            _store_split(
                sums_pointer, weights_pointer, place + mine - 1, all_highest, all_total, all_sums,
                in_rows, columns, DIM)  # fmt: skip
    else:
        for tile in range(begin, end, TILE):
            keys, values, token = load_tile(
                kv_pointer, pages, value_offset, page_stride, tile, first, end, columns, DIM,
                TILE, PAGE_SIZE, TOKEN, CODED, dtype,
            )  # fmt: skip
            pages = load_pages(table, tile + TILE, first, end, TILE, PAGE_SIZE)
            seen = (token[None, :] >= earliest) & (token[None, :] <= position)
            highest = tl.where(tile % SPLIT == 0, float("-inf"), highest)
            highest, total, sums = attend(
                highest, total, sums, query, keys, values, seen, scale, bend,
                BLOCK_G, TILE, CAPPED)  # fmt: skip
            if ((tile + TILE) % SPLIT == 0) | (tile + TILE >= end):
                _store_split(
                    sums_pointer, weights_pointer, at_split + tile // SPLIT, highest, total, sums,
                    in_rows, columns, DIM)  # fmt: skip


@triton.jit
def _store_split(
    sums_pointer, weights_pointer, place, highest, total, sums, in_rows, columns, DIM: tl.constexpr
):
    """Stores a split's results at `place` [BLOCK_G] of the workspace."""
    for block in tl.static_range(len(columns)):
        mask = in_rows[:, None] & (columns[block] < DIM)[None, :]
        at = sums_pointer + place[:, None] * DIM + columns[block][None, :]
        tl.store(at, sums[block], mask=mask)
    tl.store(weights_pointer + 2 * place, highest, mask=in_rows)
    tl.store(weights_pointer + 2 * place + 1, total, mask=in_rows)


@triton.jit(
    do_not_specialize=["splits"],
    do_not_specialize_on_alignment=["squares_pointer", "rows_pointer", "positions_pointer"],
)
def _decode(
    qkv_pointer,
    squares_pointer,
    bias_pointer,
    cos_sin_pointer,
    rows_pointer,
    positions_pointer,
    table_pointer,
    kv_pointer,
    query_norm_pointer,
    key_norm_pointer,
    sinks_pointer,
    sums_pointer,
    weights_pointer,
    out_pointer,
    scale,
    bend,
    epsilon,
    head_epsilon,
    window,
    table_stride,
    page_stride,
    value_offset,
    splits,
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
    INPUTS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    ALONE: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    NORMS: tl.constexpr,
    ROTATES: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
):
    head, sequence, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position, row = tl.load(positions_pointer + sequence), tl.load(rows_pointer + sequence)
    first = tl.maximum(position - window + 1, 0) if window > 0 else 0
    active = position // SPLIT - first // SPLIT + 1
    mine = active if ALONE else tl.cdiv(active, tl.num_programs(2))
    if (position >= 0) & (program * mine < active):
        table = table_pointer + row.to(tl.int64) * table_stride
        before = first // SPLIT
        begin = (before + program * mine) * SPLIT
        end = tl.minimum((before + (program + 1) * mine) * SPLIT, position + 1)
        pages = load_pages(table, begin, first, end, TILE, PAGE_SIZE)
        member = tl.arange(0, BLOCK_G)
        query = prepare_token(
            tl.arange(0, BLOCK_D), member, tl.arange(0, 1), qkv_pointer, squares_pointer,
            bias_pointer, cos_sin_pointer, table, kv_pointer, query_norm_pointer, key_norm_pointer,
            sequence, head, position, program == (active - 1) // mine, epsilon, head_epsilon,
            page_stride, value_offset, PAGE_SIZE, HEADS, KV_HEADS, GROUP, BLOCK_G, DIM, HEAD,
            BLOCK_D, CODED, INPUTS, SCALED, BIAS, NORMS, ROTATES,
        )  # fmt: skip
        out = out_pointer + sequence.to(tl.int64) * (HEADS * DIM) + (head * GROUP + member) * DIM
        place = (sequence * HEADS + head * GROUP + member).to(tl.int64) * splits - before
        attend_program(
            cut_columns(query, BLOCK_G, BLOCK_D, REST), first, position, first, begin, end, program,
            mine, place + before, place, member < GROUP, out,
            sinks_pointer + head * GROUP + member, kv_pointer + head * HEAD, table, pages,
            value_offset, page_stride, sums_pointer, weights_pointer, column_blocks(BLOCK_D, REST),
            scale, bend, BLOCK_G, BLOCK_D, REST, DIM, TILE, SPLIT, PAGE_SIZE, KV_HEADS * HEAD,
            CODED, ALONE, CAPPED, SINKS,
        )  # fmt: skip
