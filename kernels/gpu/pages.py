"""Copies pages or parts of their rows between two memories, gathers the tokens of pages, digests
pages, and loads tiles of tokens for attention.

Pages span many layers, so each is cut into blocks, one per program: a few pages already fill the
chip.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu.head_codes import (
    decode,
    head_columns,
    in_halves,
    is_coded,
    load_halves,
    scales_at,
)

COPY_BLOCK = 4096
"""4-byte words per program: 16 KiB, eight 16-byte loads per thread."""

GATHER_BLOCK = 4096
"""Elements per program, or those of one token if they are more."""


def copy_pages(
    source: int, target: int, page_bytes: int, source_pages: Tensor, target_pages: Tensor
) -> None:
    """Copies page source_pages[i] of one memory to page target_pages[i] of another, for all i.

    source and target are addresses that the ids' device can reach, such as another process's
    mapped memory. They and page_bytes are multiples of 4. Both ids are [n], integers of any type.
    No page is a target twice, or both source and target.
    """
    copy_rows(source, target, page_bytes, (page_bytes, page_bytes), source_pages, target_pages)


def copy_rows(
    source: int,
    target: int,
    row_bytes: int,
    strides: tuple[int, int],
    source_rows: Tensor,
    target_rows: Tensor,
) -> None:
    """As copy_pages, for rows `strides` bytes apart in source and target, multiples of 4."""
    words = row_bytes // 4
    aligned = (source | target | row_bytes | strides[0] | strides[1]) % 16 == 0
    block = min(COPY_BLOCK, max(triton.next_power_of_2(words), 128))
    _copy_rows[(len(source_rows), triton.cdiv(words, block))](
        source,
        target,
        source_rows,
        target_rows,
        WORDS=words,
        SOURCE_STRIDE=strides[0] // 4,
        TARGET_STRIDE=strides[1] // 4,
        ALIGNMENT=16 if aligned else 4,
        BLOCK=block,
        num_warps=max(block // 1024, 1),
    )


def gather_tokens(
    kv_layer: Tensor, pages: Tensor, length: int, out_keys: Tensor, out_values: Tensor | None = None
) -> None:
    """Gathers the first `length` tokens of pages [n] as rows; codes are decoded.

    kv_layer [page, k/v, token, kv_head, dim], with a token's heads contiguous; out_keys and
    out_values [length or more, kv_head, dim]. Latents have only keys.
    """
    out = out_keys if out_values is None else out_values
    if is_coded(kv_layer.dtype):
        _gather_decoded(kv_layer, pages, length, out_keys, out)
        return
    size = kv_layer.shape[3] * kv_layer.shape[4]
    block = triton.next_power_of_2(size)
    tokens = max(GATHER_BLOCK // block, 1)
    _gather_tokens[(triton.cdiv(length, tokens), kv_layer.shape[1])](
        kv_layer,
        pages,
        out_keys,
        out,
        length,
        kv_layer.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        out_keys.stride(0),
        out.stride(0),
        PAGE_SIZE=kv_layer.shape[2],
        SIZE=size,
        TOKENS=tokens,
        BLOCK=block,
        num_warps=4,
    )


def _gather_decoded(
    kv_layer: Tensor, pages: Tensor, length: int, out_keys: Tensor, out_values: Tensor
) -> None:
    heads, dim = out_keys.shape[1:]
    block, _ = head_columns(dim, kv_layer.dtype)
    tokens = max(GATHER_BLOCK // block, 1)
    _gather_codes[(triton.cdiv(length, tokens), heads, kv_layer.shape[1])](
        kv_layer,
        pages,
        out_keys,
        out_values,
        length,
        kv_layer.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        kv_layer.stride(3),
        out_keys.stride(0),
        out_values.stride(0),
        PAGE_SIZE=kv_layer.shape[2],
        DIM=dim,
        TOKENS=tokens,
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize_on_alignment=["source_rows_pointer", "target_rows_pointer"])
def _copy_rows(
    source,
    target,
    source_rows_pointer,
    target_rows_pointer,
    WORDS: tl.constexpr,
    SOURCE_STRIDE: tl.constexpr,
    TARGET_STRIDE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = word < WORDS
    source_row = tl.load(source_rows_pointer + row).to(tl.int64)
    target_row = tl.load(target_rows_pointer + row).to(tl.int64)
    source_words = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), ALIGNMENT)
    target_words = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), ALIGNMENT)
    found = tl.load(source_words + source_row * SOURCE_STRIDE + word, mask=inside, other=0)
    tl.store(target_words + target_row * TARGET_STRIDE + word, found, mask=inside)


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["pages_pointer"])
def _gather_tokens(
    kv_pointer,
    pages_pointer,
    keys_pointer,
    values_pointer,
    length,
    page_stride,
    value_offset,
    token_stride,
    keys_stride,
    values_stride,
    PAGE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK)
    inside = (token < length)[:, None] & (column < SIZE)[None, :]
    page = tl.load(pages_pointer + token // PAGE_SIZE, mask=token < length, other=0).to(tl.int64)
    rows = kv_pointer + page * page_stride + token % PAGE_SIZE * token_stride
    wide = token.to(tl.int64)
    if tl.program_id(1) == 0:
        found = tl.load(rows[:, None] + column[None, :], mask=inside)
        tl.store(keys_pointer + (wide * keys_stride)[:, None] + column[None, :], found, mask=inside)
    else:
        found = tl.load(rows[:, None] + value_offset + column[None, :], mask=inside)
        out_rows = (wide * values_stride)[:, None]
        tl.store(values_pointer + out_rows + column[None, :], found, mask=inside)


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["pages_pointer"])
def _gather_codes(
    kv_pointer,
    pages_pointer,
    keys_pointer,
    values_pointer,
    length,
    page_stride,
    value_offset,
    token_stride,
    head_stride,
    keys_stride,
    values_stride,
    PAGE_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head, part = tl.program_id(1), tl.program_id(2)
    there = token < length
    page = tl.load(pages_pointer + token // PAGE_SIZE, mask=there, other=0).to(tl.int64)
    rows = kv_pointer + page * page_stride + token % PAGE_SIZE * token_stride
    rows += head * head_stride + part * value_offset
    dtype: tl.constexpr = keys_pointer.dtype.element_ty
    if in_halves(kv_pointer.dtype):
        blocks = load_halves(rows, there, BLOCK // 2, DIM, dtype)
    else:
        dim = tl.arange(0, BLOCK)
        inside = there[:, None] & (dim < DIM)[None, :]
        codes = tl.load(rows[:, None] + dim[None, :], mask=inside, other=0.0)
        scales = tl.load(scales_at(rows + DIM), mask=there, other=0.0)
        blocks = (decode(codes, scales[:, None], dtype),)
    wide = token.to(tl.int64)[:, None]
    for number in tl.static_range(len(blocks)):
        dim = number * (BLOCK // 2) + tl.arange(0, BLOCK // len(blocks))
        inside = there[:, None] & (dim < DIM)[None, :]
        at = head * DIM + dim[None, :]
        if part == 0:
            tl.store(keys_pointer + wide * keys_stride + at, blocks[number], mask=inside)
        else:
            tl.store(values_pointer + wide * values_stride + at, blocks[number], mask=inside)


DIGEST_BLOCK = 4096
"""4-byte words per program."""

PLACE = tl.constexpr(0x9E3779B1)
FIRST = tl.constexpr(0x7FEB352D)
SECOND = tl.constexpr(0x846CA68B)


def digest_pages(source: int, page_bytes: int, pages: Tensor, out: Tensor) -> None:
    """Adds to out [n], int32, the digest of each of pages [n] of a memory.

    Each word is mixed with its index by a bijection, and all are added up. So one changed word
    always changes the digest, and swapped words do, except for collisions. source is an address
    that the ids' device can reach; it and page_bytes are multiples of 4.
    """
    words = page_bytes // 4
    aligned = (source | page_bytes) % 16 == 0
    _digest_pages[(len(pages), triton.cdiv(words, DIGEST_BLOCK))](
        source,
        pages,
        out,
        WORDS=words,
        ALIGNMENT=16 if aligned else 4,
        BLOCK=DIGEST_BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize_on_alignment=["pages_pointer", "out_pointer"])
def _digest_pages(
    source,
    pages_pointer,
    out_pointer,
    WORDS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < WORDS
    page = tl.load(pages_pointer + index).to(tl.int64)
    words = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), ALIGNMENT)
    word = tl.load(words + page * WORDS + place, mask=inside, other=0).to(tl.uint32, bitcast=True)
    mixed = word ^ (place.to(tl.uint32) * PLACE)
    mixed = (mixed ^ (mixed >> 16)) * FIRST
    mixed = (mixed ^ (mixed >> 15)) * SECOND
    mixed = tl.where(inside, mixed ^ (mixed >> 16), 0).to(tl.int32, bitcast=True)
    tl.atomic_add(out_pointer + index, tl.sum(mixed, axis=0))


@triton.jit
def load_pages(table, block, first, end, TILE: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """The pages [TILE] of the tokens from `block` on that lie between `first` and `end`.

    A loop should load them one tile ahead. Its tiles are then loaded further ahead, since the
    compiler counts a load that depends on another one twice.
    """
    token = block + tl.arange(0, TILE)
    there = (token >= first) & (token < end)
    return tl.load(table + token // PAGE_SIZE, mask=there, other=0)


@triton.jit
def load_tile(
    kv_pointer, pages, value_offset, page_stride, block, first, end, columns, DIM: tl.constexpr,
    TILE: tl.constexpr, PAGE_SIZE: tl.constexpr, ROW: tl.constexpr, CODED: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Loads keys [columns, TILE] and values [TILE, columns], one per block of a head's columns, and
    the tokens [TILE] from `block` on, which are in `pages` [TILE].

    kv_pointer points to the head in page 0. Tokens before `first` are not read: their pages may
    have been freed. Codes are decoded; int4 gives two blocks of columns.
    """
    token = block + tl.arange(0, TILE)
    there = (token >= first) & (token < end)
    spots = kv_pointer + (pages.to(tl.int64) * page_stride + (token % PAGE_SIZE) * ROW)
    if in_halves(kv_pointer.dtype):
        half: tl.constexpr = columns[0].shape[0]
        low, high = load_halves(spots, there, half, DIM, DTYPE)
        values = load_halves(spots + value_offset, there, half, DIM, DTYPE)
        return (tl.trans(low), tl.trans(high)), values, token
    keys, values = (), ()
    for number in tl.static_range(len(columns)):
        column = columns[number]
        in_dim = column < DIM
        key = tl.load(
            spots[None, :] + column[:, None], mask=there[None, :] & in_dim[:, None], other=0.0
        )
        value = tl.load(
            spots[:, None] + value_offset + column[None, :],
            mask=there[:, None] & in_dim[None, :],
            other=0.0,
        )
        if CODED:
            at = scales_at(spots + DIM)
            key = decode(key, tl.load(at, mask=there, other=0.0)[None, :], DTYPE)
            at = scales_at(spots + value_offset + DIM)
            value = decode(value, tl.load(at, mask=there, other=0.0)[:, None], DTYPE)
        keys += (key,)  # type: ignore[assignment]
        values += (value,)
    return keys, values, token
