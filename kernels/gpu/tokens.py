"""A step's input tokens and sampled tokens on the device."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


def begin(
    staged: Tensor, rows: Tensor, last_tokens: Tensor, tokens: Tensor, table: Tensor, pages: Tensor
) -> None:
    """Writes the tokens of a step, and enters new pages into the page table.

    staged [T], int32: a token, or -1 for the one that the previous step sampled for the same row
    of the table; rows [T] are these rows. tokens [T] is written. pages [n, 2]: indices into the
    flattened table, and their new pages.
    """
    most = max(len(staged), len(pages))
    _begin[(triton.cdiv(most, BLOCK),)](
        staged, rows, last_tokens, tokens, table, pages, len(staged), len(pages), BLOCK=BLOCK
    )


@triton.jit(
    do_not_specialize=["token_count", "page_count"],
    do_not_specialize_on_alignment=[
        "staged_pointer",
        "rows_pointer",
        "tokens_pointer",
        "pages_pointer",
    ],
)
def _begin(
    staged_pointer,
    rows_pointer,
    last_pointer,
    tokens_pointer,
    table_pointer,
    pages_pointer,
    token_count,
    page_count,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = index < token_count
    token = tl.load(staged_pointer + index, mask=mine, other=0)
    row = tl.load(rows_pointer + index, mask=mine, other=0)
    last = tl.load(last_pointer + row, mask=mine & (token < 0), other=0)
    # A row whose logits were not finite has no token; its results are dropped.
    token = tl.maximum(tl.where(token < 0, last, token), 0)
    tl.store(tokens_pointer + index, token, mask=mine)
    mine = index < page_count
    place = tl.load(pages_pointer + 2 * index, mask=mine, other=0)
    page = tl.load(pages_pointer + 2 * index + 1, mask=mine, other=0)
    tl.store(table_pointer + place, page, mask=mine)


def remember(sampled: Tensor, rows: Tensor, last_tokens: Tensor) -> None:
    """last_tokens[rows] = sampled: tokens [n], rows [n] of the page table."""
    count = len(sampled)
    _remember[(triton.cdiv(count, BLOCK),)](sampled, rows, last_tokens, count, BLOCK=BLOCK)


@triton.jit(
    do_not_specialize=["count"],
    do_not_specialize_on_alignment=["sampled_pointer", "rows_pointer"],
)
def _remember(sampled_pointer, rows_pointer, last_pointer, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = index < count
    row = tl.load(rows_pointer + index, mask=mine, other=0)
    tl.store(last_pointer + row, tl.load(sampled_pointer + index, mask=mine), mask=mine)
