"""A number for each page that says whether its bytes are those of another.

Every word is mixed with its place, one to one, and all are added up: a word that
changes changes the sum, and so, as good as always, do words that change places.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Words of 4 bytes that a program reads."""

PLACE = tl.constexpr(0x9E3779B1)
FIRST = tl.constexpr(0x7FEB352D)
SECOND = tl.constexpr(0x846CA68B)


def digest_pages(source: int, page_bytes: int, pages: Tensor, out: Tensor) -> None:
    """Adds to out [n], int32, the digest of each of pages [n] of a memory.

    source is an address that the ids' device can reach; a multiple of 4, as page_bytes is.
    """
    words = page_bytes // 4
    aligned = (source | page_bytes) % 16 == 0
    _digest_pages[(len(pages), triton.cdiv(words, BLOCK))](
        source,
        pages,
        out,
        WORDS=words,
        ALIGNMENT=16 if aligned else 4,
        BLOCK=BLOCK,
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
