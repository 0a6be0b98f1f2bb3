"""A new token of a decoding sequence, before it is attended: its key and value are stored, its
queries returned."""

from __future__ import annotations

import triton
import triton.language as tl

from baton.kernels.gpu.fixed_order import inverse_size
from baton.kernels.gpu.head_codes import encode_heads, store_codes
from baton.kernels.gpu.rotary import load_pairs, load_turn, prepare_heads


@triton.jit
def prepare_token(
    dim, member, one, qkv_pointer, squares_pointer, bias_pointer, cos_sin_pointer, table,
    kv_pointer, query_norm_pointer, key_norm_pointer, sequence, head, position, stores, epsilon,
    head_epsilon, page_stride, value_offset, PAGE_SIZE: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, DIM: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_D: tl.constexpr, CODED: tl.constexpr, INPUTS: tl.constexpr, SCALED: tl.constexpr,
    BIAS: tl.constexpr, NORMS: tl.constexpr, ROTATES: tl.constexpr,
):  # fmt: skip
    """Returns the queries [BLOCK_G, BLOCK_D] of a token that share a key head, normed and rotated.
    `stores`: also stores the token's key and value, for all threads to read.

    dim [BLOCK_D], member [BLOCK_G] and one [1] are ranges, whose layouts Gluon chooses.
    """
    in_dim = dim < DIM
    in_group = (member < GROUP)[:, None] & in_dim[None, :]
    size, turn, norm, key_norm = 1.0, (1.0, 0.0), (1.0, 1.0), (1.0, 1.0)
    bias, key_bias, value_bias = (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)
    new = qkv_pointer + sequence.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM)
    at = (head * GROUP + member)[:, None] * DIM + dim[None, :]
    key_at = (HEADS + head) * DIM + dim[None, :]
    value_at = (HEADS + KV_HEADS + head) * DIM + dim[None, :]
    here = in_dim[None, :]
    if SCALED:
        size = inverse_size(tl.load(squares_pointer + sequence), epsilon, INPUTS)
    if BIAS:
        bias = load_pairs(bias_pointer, at, in_group)
        key_bias = load_pairs(bias_pointer, key_at, here)
        value_bias = load_pairs(bias_pointer, value_at, here)
    if NORMS:
        norm = load_pairs(query_norm_pointer, dim[None, :], here)
        key_norm = load_pairs(key_norm_pointer, dim[None, :], here)
    if ROTATES:
        turn = load_turn(cos_sin_pointer, position, dim, DIM)

    if stores:
        key, _ = prepare_heads(
            load_pairs(new, key_at, here), size, key_bias, key_norm, turn, head_epsilon,
            DIM, BLOCK_D, SCALED, BIAS, NORMS, ROTATES,
        )  # fmt: skip
        _, value = prepare_heads(
            load_pairs(new, value_at, here), size, value_bias, key_norm, turn, head_epsilon,
            DIM, BLOCK_D, SCALED, BIAS, False, False,
        )  # fmt: skip
        page = tl.load(table + position // PAGE_SIZE).to(tl.int64)
        spot = kv_pointer + page * page_stride + (position % PAGE_SIZE) * (KV_HEADS * HEAD)
        _store(spot + head * HEAD, key, dim, one, DIM, CODED)
        _store(spot + head * HEAD + value_offset, value, dim, one, DIM, CODED)
        tl.debug_barrier()
    # The queries of the heads that share this key head: [BLOCK_G, BLOCK_D].
    query, _ = prepare_heads(
        load_pairs(new, at, in_group), size, bias, norm, turn, head_epsilon,
        DIM, BLOCK_D, SCALED, BIAS, NORMS, ROTATES,
    )  # fmt: skip
    return query


@triton.jit
def _store(pointer, head, dim, one, DIM: tl.constexpr, CODED: tl.constexpr):
    """Stores head [1, BLOCK_D], as numbers or as codes with their scales."""
    inside = (dim < DIM)[None, :]
    if CODED:
        wide = tl.where(inside, head.to(tl.float32), 0.0)
        codes, scales, _ = encode_heads(wide, dim, DIM, pointer.dtype.element_ty)
        store_codes(pointer + one, codes, scales, dim, one == 0, DIM)
    else:
        tl.store(pointer + dim[None, :], head, mask=inside)
