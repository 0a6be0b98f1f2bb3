"""Rotates queries and keys by their positions and stores keys and values into their pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.attention import Scoring
from baton.kernels.gpu.fixed_order import inverse_size, settle, square_sums, squares_of_row
from baton.kernels.gpu.head_codes import encode_heads, head_columns, is_coded, store_codes
from baton.kernels.gpu.latent_low_rank import LatentAdapters
from baton.kernels.gpu.norm import Scaled

LOG2_E = 1.4426950408889634

FEW_TOKENS = 32
"""Up to this many tokens in a step, each head has its own program."""


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The shape of a layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    rotates: bool
    epsilon: float
    scoring: Scoring
    sinks: Tensor | None = None  # [heads], float32, in powers of two

    @property
    def score_factors(self) -> tuple[float, float]:
        """`scale` and `bend` of fixed_order.attend, for powers of two."""
        scale, cap = self.scoring
        return (scale * LOG2_E, 0.0) if cap is None else (cap * LOG2_E, scale / cap * 2 * LOG2_E)


@dataclass(frozen=True, slots=True)
class Projected:
    """Queries, keys and values [T, (heads + 2 * kv_heads) * dim] as a product leaves them.

    They are not rotated yet, and still lack the bias and the sizes of `source`'s rows, if given.
    For latents see kernels/gpu/latent_projection.py.
    """

    qkv: Tensor
    source: Scaled | None = None
    bias: Tensor | None = None
    queries: Tensor | None = None  # replace those in `qkv`, from which they were computed
    adapters: LatentAdapters | None = None  # of products between latents and heads

    def rows(self, chosen: slice | Tensor) -> Projected:
        source = self.source and self.source.rows(chosen)
        queries = None if self.queries is None else self.queries[chosen]
        return Projected(self.qkv[chosen], source, self.bias, queries)

    @property
    def squares(self) -> Tensor | None:
        """[1, T]"""
        return self.source.squares if self.source else None


def rotate_and_store(
    projected: Projected,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    kv_layer: Tensor,
    shape: HeadShape,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
) -> None:
    """Settles, norms and rotates queries and keys in place, settles values in place, and stores
    keys and values in kv_layer [page, 2, token, kv_head, dim]. If it holds codes, keys and values
    in place become the decoded ones.

    A pair of neighbouring dimensions is one complex number. cos_sin [positions, dim], float32,
    holds a position's cosines, one per pair, then its sines. slots [T] are page * page_size +
    offset; a token with a negative slot is not stored, and may have a negative position. The norms'
    weights are [dim]; both or neither are given.
    """
    qkv, squares, bias = projected.qkv, projected.squares, projected.bias
    tokens, dim = len(qkv), shape.head_dim
    heads, kv_heads = shape.heads, shape.kv_heads
    page_stride, value_offset, token_stride, head_stride, _ = kv_layer.stride()
    # Rows whose size is still to be applied belong to a larger step.
    block_heads = 1 if tokens <= FEW_TOKENS and squares is None else 8
    block_dim = triton.next_power_of_2(dim)
    if kv_layer.dtype == torch.uint8:
        block_dim, _ = head_columns(dim, kv_layer.dtype)
    _rotate_and_store[(tokens, triton.cdiv(heads + 2 * kv_heads, block_heads))](
        qkv,
        qkv if squares is None else squares,
        qkv if bias is None else bias,
        cos_sin,
        positions,
        slots,
        kv_layer,
        query_norm if query_norm is not None else qkv,
        key_norm if key_norm is not None else qkv,
        projected.source.epsilon if projected.source else 0.0,
        shape.epsilon,
        page_stride,
        value_offset,
        token_stride,
        head_stride,
        PAGE_SIZE=kv_layer.shape[2],
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        INPUTS=projected.source.x.shape[1] if projected.source else 1,
        BLOCK_HEADS=block_heads,
        BLOCK_DIM=block_dim,
        SCALED=squares is not None,
        BIAS=bias is not None,
        NORMS=query_norm is not None,
        ROTATES=shape.rotates,
        CODED=is_coded(kv_layer.dtype),
        num_warps=min(max(block_heads * block_dim // 256, 1), 8),
        enable_fp_fusion=False,
    )


def norm_projections(
    projected: Projected,
    query_norm: Tensor,
    key_norm: Tensor,
    epsilon: float,
    ranks: int = 1,
    sum_ranks: Callable[[Tensor], Tensor] | None = None,
) -> Projected:
    """Settles rows in place and norms all queries of a row together, and all its keys. The norms'
    weights are as long as these. If `ranks` share the heads, `sum_ranks` adds up their squares."""
    norms = query_norm, key_norm
    if sum_ranks is None:
        _norm_step("all", projected, norms, epsilon, ranks, projected.qkv)
        return Projected(projected.qkv)
    sums = torch.empty(len(projected.qkv), 2, dtype=torch.float32, device=projected.qkv.device)
    _norm_step("squares", projected, norms, epsilon, ranks, sums)
    settled = Projected(projected.qkv)
    _norm_step("norm", settled, norms, epsilon, ranks, sum_ranks(sums))
    return settled


def _norm_step(
    step: str,
    projected: Projected,
    norms: tuple[Tensor, Tensor],
    epsilon: float,
    ranks: int,
    sums: Tensor,
) -> None:
    """Runs "squares" (which also settles) or "norm", or both as "all". sums [T, 2] passes the sums
    of squares of queries and of keys from the first to the second."""
    qkv, squares, bias = projected.qkv, projected.squares, projected.bias
    queries, keys = map(len, norms)
    _norm_projections[(len(qkv),)](
        qkv,
        qkv if squares is None else squares,
        qkv if bias is None else bias,
        *norms,
        sums,
        projected.source.epsilon if projected.source else 0.0,
        epsilon,
        STEP=step,
        RANKS=ranks,
        QUERIES=queries,
        KEYS=keys,
        QUERY_BLOCK=triton.next_power_of_2(queries),
        KEY_BLOCK=triton.next_power_of_2(keys),
        INPUTS=projected.source.x.shape[1] if projected.source else 1,
        SCALED=squares is not None,
        BIAS=bias is not None,
        num_warps=8,
        enable_fp_fusion=False,
    )


@triton.jit(do_not_specialize_on_alignment=["squares_pointer"])
def _norm_projections(
    qkv_pointer,
    squares_pointer,
    bias_pointer,
    query_norm_pointer,
    key_norm_pointer,
    sums_pointer,
    epsilon,
    norm_epsilon,
    STEP: tl.constexpr,
    RANKS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    INPUTS: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    new = qkv_pointer + row * (QUERIES + 2 * KEYS)
    size = 1.0
    if SCALED:
        size = inverse_size(tl.load(squares_pointer + row), epsilon, INPUTS)
    _norm_part(
        new, bias_pointer, query_norm_pointer, sums_pointer + 2 * row, size, norm_epsilon,
        STEP, RANKS, QUERIES, QUERY_BLOCK, SCALED, BIAS,
    )  # fmt: skip
    _norm_part(
        new + QUERIES, bias_pointer + QUERIES, key_norm_pointer, sums_pointer + 2 * row + 1, size,
        norm_epsilon, STEP, RANKS, KEYS, KEY_BLOCK, SCALED, BIAS,
    )  # fmt: skip
    if SCALED or BIAS:
        _norm_part(
            new + QUERIES + KEYS, bias_pointer + QUERIES + KEYS, key_norm_pointer, sums_pointer,
            size, norm_epsilon, "none", RANKS, KEYS, KEY_BLOCK, SCALED, BIAS,
        )  # fmt: skip


@triton.jit
def _norm_part(
    pointer,
    bias_pointer,
    norm_pointer,
    sum_pointer,
    size,
    epsilon,
    STEP: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    raw, bias = tl.load(pointer + column, mask=inside, other=0.0), 0.0
    if BIAS:
        bias = tl.load(bias_pointer + column, mask=inside, other=0.0)
    x = _settle(raw, size, bias, SCALED, BIAS).to(tl.float32)
    if STEP == "squares":
        tl.store(sum_pointer, squares_of_row(x, SIZE, BLOCK))
    elif STEP != "none":
        norm = tl.load(norm_pointer + column, mask=inside, other=0.0).to(tl.float32)
        squares = tl.load(sum_pointer) if STEP == "norm" else squares_of_row(x, SIZE, BLOCK)
        x = x * inverse_size(squares, epsilon, RANKS * SIZE) * norm
    tl.store(pointer + column, x.to(raw.dtype), mask=inside)


@triton.jit
def load_pairs(pointer, at, mask):
    """Loads the numbers at offsets `at`, and each one's partner in a rotation.

    Partners are loaded too, because the compiler reorders a product's inputs if they come from
    tl.join, and compiles tl.gather slowly.
    """
    return tl.load(pointer + at, mask=mask, other=0.0), tl.load(
        pointer + (at ^ 1), mask=mask, other=0.0
    )


@triton.jit
def load_turn(cos_sin_pointer, position, dim, DIM: tl.constexpr):
    """The factors of an element and of its partner in a rotation: [1, BLOCK_DIM] each."""
    at = cos_sin_pointer + position.to(tl.int64) * DIM + dim // 2
    cos = tl.load(at, mask=dim < DIM, other=0.0)
    sin = tl.load(at + DIM // 2, mask=dim < DIM, other=0.0)
    return cos[None, :], tl.where(dim % 2 == 0, -sin, sin)[None, :]


@triton.jit
def prepare_heads(
    raw,
    size,
    bias,
    norm,
    turn,
    epsilon,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    NORMS: tl.constexpr,
    ROTATES: tl.constexpr,
):
    """raw [heads, BLOCK_DIM], heads of one token as a product left them -> the same settled, normed
    and rotated, and settled only; both rounded. raw, bias and norm are pairs with partners."""
    dtype: tl.constexpr = raw[0].dtype
    settled, x, inverse = _norm_heads(
        raw[0], size, bias[0], norm[0], epsilon, DIM, BLOCK_DIM, SCALED, BIAS, NORMS
    )
    if ROTATES:
        partner = _settle(raw[1], size, bias[1], SCALED, BIAS).to(tl.float32)
        if NORMS:
            partner = (partner * inverse * norm[1].to(tl.float32)).to(dtype).to(tl.float32)
        x = tl.fma(x, turn[0], partner * turn[1])
    return x.to(dtype), settled


@triton.jit
def _norm_heads(
    raw,
    size,
    bias,
    norm,
    epsilon,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    NORMS: tl.constexpr,
):
    """Returns heads settled, the same normed, both rounded, and each head's inverse size."""
    settled = _settle(raw, size, bias, SCALED, BIAS)
    x = settled.to(tl.float32)
    inverse = 1.0
    if NORMS:
        inverse = inverse_size(square_sums(x, 1, BLOCK_DIM), epsilon, DIM)[:, None]
        x = (x * inverse * norm.to(tl.float32)).to(raw.dtype).to(tl.float32)
    return settled, x, inverse


@triton.jit
def _swap_pairs(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Swaps neighbouring columns of x [ROWS, COLUMNS]."""
    even, odd = tl.split(tl.reshape(x, (ROWS, COLUMNS // 2, 2)))
    return tl.reshape(tl.join(odd, even), (ROWS, COLUMNS))


@triton.jit
def _settle(raw, size, bias, SCALED: tl.constexpr, BIAS: tl.constexpr):
    wide = bias.to(tl.float32) if BIAS else bias
    return settle(raw.to(tl.float32), size, wide, SCALED, BIAS).to(raw.dtype)


@triton.jit(
    do_not_specialize_on_alignment=["squares_pointer", "positions_pointer", "slots_pointer"]
)
def _rotate_and_store(
    qkv_pointer,
    squares_pointer,
    bias_pointer,
    cos_sin_pointer,
    positions_pointer,
    slots_pointer,
    kv_pointer,
    query_norm_pointer,
    key_norm_pointer,
    epsilon,
    head_epsilon,
    page_stride,
    value_offset,
    token_stride,
    head_stride,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    NORMS: tl.constexpr,
    ROTATES: tl.constexpr,
    CODED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_DIM)
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    in_dim = dim < DIM
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & in_dim[None, :]
    within = head[:, None] * DIM + dim[None, :]
    new = qkv_pointer + token * ((HEADS + 2 * KV_HEADS) * DIM)
    raw = tl.load(new + within, mask=inside, other=0.0)  # [BLOCK_HEADS, BLOCK_DIM]
    size, bias = 1.0, 0.0
    if SCALED:
        size = inverse_size(tl.load(squares_pointer + token), epsilon, INPUTS)
    if BIAS:
        bias = tl.load(bias_pointer + within, mask=inside, other=0.0)
    norm = 1.0
    if NORMS:
        query_norm = tl.load(query_norm_pointer + dim, mask=in_dim, other=0.0)
        key_norm = tl.load(key_norm_pointer + dim, mask=in_dim, other=0.0)
        norm = tl.where(is_query[:, None], query_norm[None, :], key_norm[None, :])
    settled, x, _ = _norm_heads(
        raw, size, bias, norm, head_epsilon, DIM, BLOCK_DIM, SCALED, BIAS, NORMS
    )
    if ROTATES:
        position = tl.maximum(tl.load(positions_pointer + token), 0)
        turn = load_turn(cos_sin_pointer, position, dim, DIM)
        x = tl.fma(x, turn[0], _swap_pairs(x, BLOCK_HEADS, BLOCK_DIM) * turn[1])
    turned = x.to(raw.dtype)
    stored = tl.where(is_value[:, None], settled, turned)
    changed = inside if SCALED or BIAS or CODED else inside & ~is_value[:, None]
    if CODED:
        wide = tl.where(inside, stored.to(tl.float32), 0.0)
        codes, scales, decoded = encode_heads(wide, dim, DIM, kv_pointer.dtype.element_ty)
        # Long chunks are attended without their pages, so they need the decoded numbers.
        stored = tl.where(is_query[:, None], stored, decoded.to(stored.dtype))
    tl.store(new + within, stored, mask=changed)

    slot = tl.load(slots_pointer + token).to(tl.int64)
    if slot >= 0:
        spot = slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * token_stride
        kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS)
        # A product keeps the compiler's knowledge of alignment; tl.where would lose it.
        rows = spot + kv_head * head_stride + is_value.to(tl.int32) * value_offset
        if CODED:
            kept = (head >= HEADS) & (head < HEADS + 2 * KV_HEADS)
            store_codes(kv_pointer + rows, codes, scales, dim, kept, DIM)
        else:
            keeps = inside & (head >= HEADS)[:, None]
            tl.store(kv_pointer + rows[:, None] + dim[None, :], stored, mask=keeps)
