"""Attention of one long chunk over keys and values that are expanded from latents.

It needs fewer products than attention over latents (kernels/gpu/latent_attention.py) but gives
other bits, so it is for numerics that allow this. A program handles some queries of one head:
first the tokens that all of them see, then the rest with a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu.latent_projection import LatentSizes
from baton.kernels.gpu.rotary import LOG2_E

QUERIES, TOKENS = 128, 64
"""Queries per program and tokens per tile."""


def expanded_attention(
    plain: Tensor,
    turned: Tensor,
    keys: Tensor,
    turned_keys: Tensor,
    values: Tensor,
    start: int,
    sizes: LatentSizes,
    out: Tensor,
) -> Tensor:
    """Queries of one sequence from position `start` on -> out [count, heads, value].

    A query is plain [count, heads, plain] and turned [count, heads, rotated]; a key is keys
    [heads, tokens, plain] and turned_keys [tokens, rotated]. values [heads, tokens, value]. There
    are start + count tokens; heads are contiguous.
    """
    count, heads, _ = plain.shape
    _expanded[(triton.cdiv(count, QUERIES), heads)](
        plain,
        turned,
        keys,
        turned_keys,
        values,
        out,
        sizes.scale * LOG2_E,
        count,
        start,
        plain.stride(0),
        plain.stride(1),
        turned.stride(0),
        turned.stride(1),
        turned_keys.stride(0),
        HEADS=heads,
        PLAIN=sizes.plain,
        ROTATED=sizes.rotated,
        VALUE=sizes.value,
        BLOCK_PLAIN=max(16, triton.next_power_of_2(sizes.plain)),
        BLOCK_ROTATED=max(16, triton.next_power_of_2(sizes.rotated)),
        BLOCK_VALUE=max(16, triton.next_power_of_2(sizes.value)),
        QUERIES=QUERIES,
        TOKENS=TOKENS,
        num_warps=8,
        num_stages=3,
    )
    return out


@triton.jit
def _load(pointer, row, stride, in_rows, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Loads rows [rows, SIZE] of a matrix, padded with zeros to BLOCK columns."""
    column = tl.arange(0, BLOCK)[None, :]
    mask = in_rows[:, None] & (column < SIZE)
    return tl.load(pointer + row.to(tl.int64)[:, None] * stride + column, mask=mask, other=0.0)


@triton.jit
def _tiles(
    highest,
    total,
    sums,
    query,
    turned_query,
    keys,
    turned_keys,
    values,
    position,
    begin,
    end,
    scale,
    turned_keys_stride,
    PLAIN: tl.constexpr,
    ROTATED: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_PLAIN: tl.constexpr,
    BLOCK_ROTATED: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds the tokens [begin, end) to each query's highest score, normalizer and sums."""
    for tile in range(begin, end, TOKENS):
        token = tile + tl.arange(0, TOKENS)
        there = token < end
        tile_keys = _load(keys, token, PLAIN, there, PLAIN, BLOCK_PLAIN)
        turned = _load(turned_keys, token, turned_keys_stride, there, ROTATED, BLOCK_ROTATED)
        scores = tl.dot(query, tl.trans(tile_keys), input_precision="ieee")
        scores = tl.dot(turned_query, tl.trans(turned), scores, input_precision="ieee")
        if MASKED:
            scores = tl.where(token[None, :] <= position[:, None], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        fade = tl.exp2(highest - higher)
        total = total * fade + tl.sum(weights, axis=1)
        tile_values = _load(values, token, VALUE, there, VALUE, BLOCK_VALUE)
        sums = tl.dot(
            weights.to(tile_values.dtype),
            tile_values,
            sums * fade[:, None],
            input_precision="ieee",
        )
        highest = higher
    return highest, total, sums


@triton.jit(do_not_specialize=["count", "start"])
def _expanded(
    plain_pointer,
    turned_pointer,
    keys_pointer,
    turned_keys_pointer,
    values_pointer,
    out_pointer,
    scale,
    count,
    start,
    plain_stride,
    plain_head,
    turned_stride,
    turned_head,
    turned_keys_stride,
    HEADS: tl.constexpr,
    PLAIN: tl.constexpr,
    ROTATED: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_PLAIN: tl.constexpr,
    BLOCK_ROTATED: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES  # The longest context first.
    row = first + tl.arange(0, QUERIES)
    mine = row < count
    query = _load(plain_pointer + head * plain_head, row, plain_stride, mine, PLAIN, BLOCK_PLAIN)
    turned_query = _load(
        turned_pointer + head * turned_head, row, turned_stride, mine, ROTATED, BLOCK_ROTATED
    )
    tokens = (start + count).to(tl.int64)
    keys = keys_pointer + head * tokens * PLAIN
    values = values_pointer + head * tokens * VALUE
    highest = tl.full([QUERIES], float("-inf"), dtype=tl.float32)
    total = tl.zeros([QUERIES], dtype=tl.float32)
    sums = tl.zeros([QUERIES, BLOCK_VALUE], dtype=tl.float32)
    whole = (start + first + 1) // TOKENS * TOKENS  # Tokens that all queries see.
    end = tl.minimum(start + first + QUERIES, start + count)
    highest, total, sums = _tiles(
        highest, total, sums, query, turned_query, keys, turned_keys_pointer, values,
        start + row, 0, whole, scale, turned_keys_stride, PLAIN, ROTATED, VALUE, BLOCK_PLAIN,
        BLOCK_ROTATED, BLOCK_VALUE, TOKENS, False,
    )  # fmt: skip
    highest, total, sums = _tiles(
        highest, total, sums, query, turned_query, keys, turned_keys_pointer, values,
        start + row, whole, end, scale, turned_keys_stride, PLAIN, ROTATED, VALUE, BLOCK_PLAIN,
        BLOCK_ROTATED, BLOCK_VALUE, TOKENS, True,
    )  # fmt: skip
    column = tl.arange(0, BLOCK_VALUE)[None, :]
    to = out_pointer + (row.to(tl.int64)[:, None] * HEADS + head) * VALUE + column
    result = (sums / total[:, None]).to(out_pointer.dtype.element_ty)
    tl.store(to, result, mask=mine[:, None] & (column < VALUE))
