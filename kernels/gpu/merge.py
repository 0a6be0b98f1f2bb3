"""Joins attention over two parts of a context into attention over both."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK_TOKENS = 16


def merge_attended(
    attended: Tensor, weight: Tensor, earlier: Tensor, earlier_weight: Tensor
) -> None:
    """Adds what `earlier` keys gave to `attended`, in place.

    attended and earlier [1, heads, T, dim]; weight and earlier_weight [1, heads, T, 1],
    float32, are the logarithms of their normalizers. weight becomes that of both together.
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
