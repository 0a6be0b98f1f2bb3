"""Rotates queries and keys by their positions and stores keys and values into their pages."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu.decode_attention import HeadShape

FEW_TOKENS = 32
"""Up to this many tokens each head is a program of its own."""


def rotate_and_store(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    kv_layer: Tensor,
    shape: HeadShape,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
) -> None:
    """Norms and rotates the queries and keys of qkv [T, (heads + 2 * kv_heads) * dim] in place,
    and stores keys and values in kv_layer [page, 2, token, kv_head, dim].

    A pair of neighbouring dimensions is one complex number. cos_sin [positions, dim], float32,
    holds a position's cosines, one per pair, then its sines. slots [T] are page * page_size +
    offset; a token with a negative slot is rotated but not stored; its position must still be
    in cos_sin. The norms' weights are [dim]; both or neither are given.
    """
    tokens, dim = len(qkv), kv_layer.shape[4]
    heads, kv_heads = shape.heads, shape.kv_heads
    page_stride, value_offset, token_stride, head_stride, _ = kv_layer.stride()
    block_heads = 1 if tokens <= FEW_TOKENS else 8
    block_dim = triton.next_power_of_2(dim)
    _rotate_and_store[(tokens, triton.cdiv(heads + 2 * kv_heads, block_heads))](
        qkv,
        cos_sin,
        positions,
        slots,
        kv_layer,
        query_norm if query_norm is not None else qkv,
        key_norm if key_norm is not None else qkv,
        shape.epsilon,
        page_stride,
        value_offset,
        token_stride,
        head_stride,
        PAGE_SIZE=kv_layer.shape[2],
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK_HEADS=block_heads,
        BLOCK_DIM=block_dim,
        NORMS=query_norm is not None,
        ROTATES=shape.rotates,
        num_warps=min(max(block_heads * block_dim // 256, 1), 8),
    )


@triton.jit(do_not_specialize_on_alignment=["positions_pointer", "slots_pointer"])
def _rotate_and_store(
    qkv_pointer,
    cos_sin_pointer,
    positions_pointer,
    slots_pointer,
    kv_pointer,
    query_norm_pointer,
    key_norm_pointer,
    epsilon,
    page_stride,
    value_offset,
    token_stride,
    head_stride,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    NORMS: tl.constexpr,
    ROTATES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_DIM)
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    in_dim = dim < DIM
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & in_dim[None, :]
    turns = (head < HEADS + KV_HEADS)[:, None] & in_dim[None, :]

    at = qkv_pointer + token * ((HEADS + 2 * KV_HEADS) * DIM) + head[:, None] * DIM + dim[None, :]
    raw = tl.load(at, mask=inside, other=0.0)  # [BLOCK_HEADS, BLOCK_DIM]
    x = raw.to(tl.float32)
    if NORMS:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + epsilon)
        query_norm = tl.load(query_norm_pointer + dim, mask=in_dim, other=0.0).to(tl.float32)
        key_norm = tl.load(key_norm_pointer + dim, mask=in_dim, other=0.0).to(tl.float32)
        norm = tl.where(is_query[:, None], query_norm[None, :], key_norm[None, :])
        x = (x * scale[:, None] * norm).to(raw.dtype).to(tl.float32)
    if ROTATES:
        pair = tl.arange(0, BLOCK_DIM // 2)
        in_pair = pair < DIM // 2
        turn_at = cos_sin_pointer + tl.load(positions_pointer + token).to(tl.int64) * DIM + pair
        cos = tl.load(turn_at, mask=in_pair, other=0.0)[None, :]
        sin = tl.load(turn_at + DIM // 2, mask=in_pair, other=0.0)[None, :]
        real, imaginary = tl.split(tl.reshape(x, (BLOCK_HEADS, BLOCK_DIM // 2, 2)))
        turned = tl.join(real * cos - imaginary * sin, real * sin + imaginary * cos)
        x = tl.reshape(turned, (BLOCK_HEADS, BLOCK_DIM))
    stored = tl.where(is_value[:, None], raw, x.to(raw.dtype))
    tl.store(at, stored, mask=turns)

    slot = tl.load(slots_pointer + token).to(tl.int64)
    if slot >= 0:
        spot = slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * token_stride
        kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS)
        # A product keeps the compiler's knowledge of alignment; tl.where would lose it.
        rows = spot + kv_head * head_stride + is_value.to(tl.int32) * value_offset
        keeps = inside & (head >= HEADS)[:, None]
        tl.store(kv_pointer + rows[:, None] + dim[None, :], stored, mask=keeps)
