"""Attention of one new token per sequence over pages of one-byte codes, on Hopper.

The same sums in the same order as kernels/gpu/decode_attention.py, so the same bits, but in Gluon,
where codes go from shared memory into the registers of an operand and become numbers there. Each
warp of a program decodes some keys of a tile and some columns of its values. In between, every
warp has all scores, and weighs them by itself.

Codes are loaded as pairs of neighbours, 16 bits. A thread has the pairs of an operand of 16-bit
numbers; their first codes, then their second ones, are the operands of two products. For keys,
whose pairs lie along the inner dimension, these are the halves of one product instead, and queries
are ordered alike: within 16 inputs, Hopper's tensor cores add in any order with the same bits.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from baton.kernels.gpu import fixed_order, new_token
from baton.kernels.gpu.rotary import HeadShape, Projected
from baton.kernels.gpu.splits import SplitWorkspace, merge_splits, programs_for

QUERIES = gl.constexpr(16)
"""Rows of a product: the heads that share a key head, padded."""

TILE, SPLIT = gl.constexpr(fixed_order.TILE), gl.constexpr(fixed_order.SPLIT)
ROOMS = gl.constexpr(2)
"""Tiles of keys, and of values, in turn in shared memory or in flight."""

WARPS, REGISTERS = gl.constexpr(4), 128
"""Of a program. So four programs share a multiprocessor, and all of 64 sequences with 8 key heads
run at once."""

# Their names changed after Triton 3.6.
load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

# Layouts of products, and of matrices that every warp has all of; of shared memory; of scales.
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, WARPS.value], [16, 8]))
EVERY = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [WARPS.value, 1], [16, 8]))
SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
OF_SCALES = gl.constexpr(gl.BlockedLayout([1], [32], [WARPS.value], [0]))

prepare = gluon.jit(new_token.prepare_token.fn)
merge = gluon.jit(fixed_order.merge_blocks.fn)
thread_sums = gluon.jit(fixed_order.thread_sums.fn)


def supports(dtype: torch.dtype, kv_layer: Tensor, shape: HeadShape) -> bool:
    """True if this kernel attends such pages with queries of `dtype`; see decode_attention for
    others."""
    types = dtype.itemsize == 2 and kv_layer.dtype in (torch.int8, torch.float8_e4m3fn)
    plain = shape.scoring.cap is None and shape.sinks is None
    sizes = shape.head_dim in (64, 128) and shape.heads // shape.kv_heads <= QUERIES.value
    return types and plain and sizes and _hopper(kv_layer.device)


@functools.cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def attend(
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
    """As decode_attention."""
    qkv, squares, bias = projected.qkv, projected.squares, projected.bias
    batch, group = len(qkv), shape.heads // shape.kv_heads
    programs = programs_for(batch, shape.kv_heads)
    _decode_codes[(shape.kv_heads, batch, programs)](
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
        workspace.sums,
        workspace.weights,
        out,
        shape.score_factors[0],
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
        DIM=shape.head_dim,
        HEAD=kv_layer.shape[4],
        INPUTS=projected.source.x.shape[1] if projected.source else 1,
        ROWS=8 if group <= 8 else QUERIES.value,
        ALONE=programs == 1,
        SCALED=squares is not None,
        BIAS=bias is not None,
        NORMS=query_norm is not None,
        ROTATES=shape.rotates,
        num_warps=WARPS.value,
        maxnreg=REGISTERS,
        enable_fp_fusion=False,
    )
    if programs > 1:
        merge_splits(positions, workspace, shape.heads, shape.window or 0, out, None)
    return out


@gluon.jit
def _rooms(DIM: gl.constexpr):
    """Shared memory for tiles' codes and scales."""
    return (
        gl.allocate_shared_memory(gl.int16, [ROOMS, TILE, DIM // 2], SHARED),
        gl.allocate_shared_memory(gl.float32, [ROOMS, TILE], PLAIN),
    )


@gluon.jit
def _tokens(tile, first, end, LAYOUT: gl.constexpr):
    """The tokens of a tile, and which of them are attended."""
    token = tile + gl.arange(0, TILE, LAYOUT)
    return token.to(gl.uint32), (token >= first) & (token < end)


@gluon.jit
def _pages(table, tile, first, end, OF_CODES: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """The pages of a tile's tokens, for those threads that load codes, and scales."""
    token, there = _tokens(tile, first, end, gl.SliceLayout(1, OF_CODES))
    lane, here = _tokens(tile, first, end, OF_SCALES)
    return (
        gl.load(table + token // PAGE_SIZE, mask=there, other=0),
        gl.load(table + lane // PAGE_SIZE, mask=here, other=0),
    )


@gluon.jit
def _words(size, BYTES: gl.constexpr):
    return gl.to_tensor(size // BYTES).to(gl.uint32).to(gl.int64)


@gluon.jit
def _places(
    pages, page_stride, tile, OF_CODES: gl.constexpr, PAGE_SIZE: gl.constexpr, TOKEN: gl.constexpr
):  # fmt: skip
    """Where a tile's codes and scales are, as words of either, from its pages."""
    token, _ = _tokens(tile, 0, 0, gl.SliceLayout(1, OF_CODES))
    lane, _ = _tokens(tile, 0, 0, OF_SCALES)
    codes = pages[0].to(gl.uint32).to(gl.int64) * _words(page_stride, 2)
    scales = pages[1].to(gl.uint32).to(gl.int64) * _words(page_stride, 4)
    return codes + token % PAGE_SIZE * (TOKEN // 2), scales + lane % PAGE_SIZE * (TOKEN // 4)


@gluon.jit
def _copy(
    rooms, room, pointer, places, tile, first, end, OF_CODES: gl.constexpr, DIM: gl.constexpr
):  # fmt: skip
    """Starts to load a tile of keys or values; tokens outside become zeros."""
    _, there = _tokens(tile, first, end, gl.SliceLayout(1, OF_CODES))
    _, here = _tokens(tile, first, end, OF_SCALES)
    pair = gl.arange(0, DIM // 2, gl.SliceLayout(0, OF_CODES))
    words = pointer.to(gl.pointer_type(gl.int16), bitcast=True)
    floats = (pointer + DIM).to(gl.pointer_type(gl.float32), bitcast=True)
    at = words + places[0][:, None] + pair[None, :]
    load(rooms[0].index(room), at, mask=there[:, None])
    load(rooms[1].index(room), floats + places[1], mask=here)
    async_copy.commit_group()


@gluon.jit
def _numbers(words, scales, CODE: gl.constexpr, DTYPE: gl.constexpr):
    """Decodes words of two codes: the first ones and the second ones."""
    if CODE.is_int():  # a byte is the end of a number from 2^23 on, until that is subtracted
        first, second = gl.inline_asm_elementwise(
            "{.reg .b32 bytes; xor.b32 bytes, $4, 0x80808080;"
            " prmt.b32 $0, bytes, 0x4B000000, 0x7540; prmt.b32 $2, bytes, 0x4B000000, 0x7541;"
            " prmt.b32 $1, bytes, 0x4B000000, 0x7542; prmt.b32 $3, bytes, 0x4B000000, 0x7543;"
            " sub.f32 $0, $0, 0f4B000080; sub.f32 $1, $1, 0f4B000080;"
            " sub.f32 $2, $2, 0f4B000080; sub.f32 $3, $3, 0f4B000080;}",
            "=&f,=&f,=&f,=&f,r", [words], dtype=(gl.float32, gl.float32), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        first, second = gl.inline_asm_elementwise(
            "{.reg .b16 a, b, c, d; .reg .b32 low, high; mov.b32 {a, b}, $4;"
            " cvt.rn.f16x2.e4m3x2 low, a; cvt.rn.f16x2.e4m3x2 high, b;"
            " mov.b32 {a, b}, low; mov.b32 {c, d}, high; cvt.f32.f16 $0, a;"
            " cvt.f32.f16 $1, c; cvt.f32.f16 $2, b; cvt.f32.f16 $3, d;}",
            "=f,=f,=f,=f,r", [words], dtype=(gl.float32, gl.float32), is_pure=True, pack=2,
        )  # fmt: skip
    return (first * scales).to(DTYPE), (second * scales).to(DTYPE)


@gluon.jit
def _scores(queries, rooms, room, CODE: gl.constexpr, DIM: gl.constexpr):
    """Scores [QUERIES, TILE] of the keys in a room."""
    of_words: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    words = rooms[0].index(room).permute((1, 0)).load(of_words)
    scales = rooms[1].index(room).load(gl.SliceLayout(0, of_words))[None, :]
    even, odd = _numbers(words, scales, CODE, queries.dtype)
    numbers = gl.reshape(gl.join(even, odd), (DIM // 16, 8, TILE, 2))
    keys = gl.reshape(gl.permute(numbers, (0, 3, 1, 2)), (DIM, TILE))
    keys = gl.convert_layout(keys, of_words, assert_trivial=True)
    query = queries.load(gl.DotOperandLayout(0, MMA, 2))
    return mma_v2(query, keys, gl.zeros([QUERIES, TILE], gl.float32, MMA))


@gluon.jit
def _add(weights, sums, rooms, room, CODE: gl.constexpr):
    """Adds the weighted values in a room to sums of even and of odd columns."""
    of_words: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    words = rooms[0].index(room).load(of_words)
    scales = rooms[1].index(room).load(gl.SliceLayout(1, of_words))[:, None]
    even, odd = _numbers(words, scales, CODE, weights.dtype)
    return mma_v2(weights, even, sums[0]), mma_v2(weights, odd, sums[1])


@gluon.jit
def _first_rows(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The first half of the rows, or all: those that may be heads."""
    if ROWS < QUERIES:
        x, _ = gl.split(gl.permute(gl.reshape(x, (2, ROWS, COLUMNS)), (1, 2, 0)))
    return x


@gluon.jit
def _all_rows(x, other):
    """x [rows, columns], and rows of `other`."""
    if x.shape[0] < QUERIES:
        both = gl.permute(gl.join(x, gl.full_like(x, other)), (2, 0, 1))
        x = gl.reshape(both, (QUERIES, x.shape[1]))
    return x


@gluon.jit
def _of_rows(x, other):
    """A number of each row: x [rows], and `other` for further ones."""
    if x.shape[0] < QUERIES:
        x = gl.reshape(gl.permute(gl.join(x, gl.full_like(x, other)), (1, 0)), (QUERIES,))
    return gl.convert_layout(x, gl.SliceLayout(1, MMA), assert_trivial=True)


@gluon.jit
def _row_sums(x, like):
    """As fixed_order._row_sums: adds up four threads' sums, neighbours first."""
    sums = thread_sums(x, x.shape[0], TILE)
    thread = gl.arange(0, 4, gl.SliceLayout(0, sums.type.layout))[None, :]
    thread = thread + gl.full_like(sums, 0, dtype=gl.int32)
    sums += gl.gather(sums, thread ^ 1, axis=1)
    sums += gl.gather(sums, thread ^ 2, axis=1)
    sums = gl.max(sums, axis=1)  # of four equal sums
    return gl.convert_layout(sums, like.type.layout, assert_trivial=True)


@gluon.jit
def _weigh(highest, total, scores, scale):
    """As fixed_order._weigh, of scores that are minus infinity where nothing is seen."""
    higher = gl.maximum(highest, gl.max(scores, axis=1) * scale)
    base = gl.where(higher == float("-inf"), 0.0, higher)
    weights = gl.exp2(gl.fma(scores, gl.to_tensor(scale), -base[:, None]))
    fade = gl.exp2(highest - base)
    total = gl.fma(total, fade, _row_sums(weights, total))
    return higher, total, fade, weights


@gluon.jit(
    do_not_specialize=["splits"],
    do_not_specialize_on_alignment=["squares_pointer", "rows_pointer", "positions_pointer"],
)
def _decode_codes(
    qkv_pointer, squares_pointer, bias_pointer, cos_sin_pointer, rows_pointer, positions_pointer,
    table_pointer, kv_pointer, query_norm_pointer, key_norm_pointer, sums_pointer, weights_pointer,
    out_pointer, scale, epsilon, head_epsilon, window, table_stride, page_stride, value_offset,
    splits, PAGE_SIZE: gl.constexpr, HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, DIM: gl.constexpr, HEAD: gl.constexpr, INPUTS: gl.constexpr,
    ROWS: gl.constexpr, ALONE: gl.constexpr, SCALED: gl.constexpr, BIAS: gl.constexpr,
    NORMS: gl.constexpr, ROTATES: gl.constexpr,
):  # fmt: skip
    head, sequence, program = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    position, slot = gl.load(positions_pointer + sequence), gl.load(rows_pointer + sequence)
    first = gl.to_tensor(0)
    if window > 0:
        first = gl.maximum(position - window + 1, 0)
    active = position // SPLIT - first // SPLIT + 1
    mine = active
    if not ALONE:
        mine = gl.cdiv(active, gl.num_programs(2))
    if (position >= 0) & (program * mine < active):
        table = table_pointer + slot.to(gl.int64) * table_stride
        before = first // SPLIT
        begin = (before + program * mine) * SPLIT
        end = gl.minimum((before + (program + 1) * mine) * SPLIT, position + 1)
        code: gl.constexpr = kv_pointer.dtype.element_ty
        token: gl.constexpr = KV_HEADS * HEAD
        of_query: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
        of_rows: gl.constexpr = gl.SliceLayout(1, of_query)
        query = prepare(
            gl.arange(0, DIM, gl.SliceLayout(0, of_query)), gl.arange(0, QUERIES, of_rows),
            gl.arange(0, 1, of_rows), qkv_pointer, squares_pointer, bias_pointer, cos_sin_pointer,
            table, kv_pointer, query_norm_pointer, key_norm_pointer, sequence, head, position,
            program == (active - 1) // mine, epsilon, head_epsilon, page_stride, value_offset,
            PAGE_SIZE, HEADS, KV_HEADS, GROUP, QUERIES, DIM, HEAD, DIM, True, INPUTS, SCALED, BIAS,
            NORMS, ROTATES,
        )  # fmt: skip
        query = gl.permute(gl.reshape(query, (QUERIES, DIM // 16, 8, 2)), (0, 1, 3, 2))
        # In shared memory: it would fill a quarter of the registers.
        queries = gl.allocate_shared_memory(
            query.dtype, [QUERIES, DIM], SHARED, gl.reshape(query, (QUERIES, DIM))
        )
        keys, values = kv_pointer + head * HEAD, kv_pointer + head * HEAD + value_offset
        lanes: gl.constexpr = DIM // 16
        of_codes: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [WARPS, 1], [1, 0])
        key_rooms, value_rooms = _rooms(DIM), _rooms(DIM)
        second = begin + TILE
        pages = _pages(table, begin, first, end, of_codes, PAGE_SIZE)
        further = _pages(table, second, first, end, of_codes, PAGE_SIZE)
        places = _places(pages, page_stride, begin, of_codes, PAGE_SIZE, token)
        _copy(key_rooms, 0, keys, places, begin, first, end, of_codes, DIM)
        _copy(value_rooms, 0, values, places, begin, first, end, of_codes, DIM)
        places = _places(further, page_stride, second, of_codes, PAGE_SIZE, token)
        _copy(key_rooms, 1, keys, places, second, first, end, of_codes, DIM)
        room = gl.to_tensor(0)
        none = _first_rows(gl.full([QUERIES, TILE], float("-inf"), gl.float32, EVERY), ROWS, TILE)
        highest = gl.max(none, axis=1)
        total = gl.zeros_like(highest)
        nothing = gl.zeros([QUERIES, DIM // 2], gl.float32, MMA)
        sums = (nothing, nothing)
        if ALONE:
            all_highest, all_total = _of_rows(highest, float("-inf")), _of_rows(total, 0.0)
            all_sums = sums
        member = gl.arange(0, QUERIES, gl.SliceLayout(1, MMA))
        in_rows = member < GROUP
        place = (sequence * HEADS + head * GROUP + member).to(gl.int64) * splits - before
        even = 2 * gl.arange(0, DIM // 2, gl.SliceLayout(0, MMA))
        for tile in range(begin, end, TILE):
            third = tile + 2 * TILE
            further = _pages(table, third, first, end, of_codes, PAGE_SIZE)
            async_copy.wait_group(2)
            barrier()  # all warps have the keys, and are done with the values before
            _copy(
                value_rooms, 1 - room, values, places, tile + TILE, first, end, of_codes, DIM
            )  # fmt: skip
            scores = gl.convert_layout(_scores(queries, key_rooms, room, code, DIM), EVERY)
            scores = _first_rows(scores, ROWS, TILE)
            if (tile < first) | (tile + TILE > end):
                at = tile + gl.arange(0, TILE, gl.SliceLayout(0, scores.type.layout))
                seen = ((at >= first) & (at < end))[None, :]
                scores = gl.where(seen, scores, float("-inf"))
            highest = gl.where(tile % SPLIT == 0, float("-inf"), highest)
            highest, total, fade, weights = _weigh(highest, total, scores, scale)
            operand = _all_rows(weights.to(queries.dtype), 0.0)
            operand = gl.convert_layout(
                operand, gl.DotOperandLayout(0, MMA, 2), assert_trivial=True
            )
            fade = _of_rows(fade, 1.0)[:, None]
            async_copy.wait_group(2)
            barrier()  # all warps have the values, and are done with the keys
            places = _places(further, page_stride, third, of_codes, PAGE_SIZE, token)
            _copy(key_rooms, room, keys, places, third, first, end, of_codes, DIM)
            sums = _add(operand, (sums[0] * fade, sums[1] * fade), value_rooms, room, code)
            room = 1 - room
            if ((tile + TILE) % SPLIT == 0) | (tile + TILE >= end):
                in_split, of_split = _of_rows(highest, float("-inf")), _of_rows(total, 0.0)
                if ALONE:
                    all_highest, all_total, all_sums = merge(
                        all_highest, all_total, all_sums, in_split, of_split, sums
                    )
                else:
                    to = place + tile // SPLIT
                    gl.store(weights_pointer + 2 * to, in_split, mask=in_rows)
                    gl.store(weights_pointer + 2 * to + 1, of_split, mask=in_rows)
                    for number in gl.static_range(2):
                        to_sums = sums_pointer + to[:, None] * DIM + even[None, :] + number
                        gl.store(to_sums, sums[number], mask=in_rows[:, None])
        if ALONE:
            inverse = (1.0 / all_total)[:, None]
            out = out_pointer + sequence.to(gl.int64) * (HEADS * DIM) + head * GROUP * DIM
            at = out + member[:, None] * DIM + even[None, :]
            for number in gl.static_range(2):
                result = (all_sums[number] * inverse).to(out_pointer.dtype.element_ty)
                gl.store(at + number, result, mask=in_rows[:, None])
        async_copy.wait_group(0)
