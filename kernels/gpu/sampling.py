"""Samples tokens on the device: the best one, or a draw as engine/sampler.py defines it.

A draw takes the token with the largest logit / temperature + noise (kernels/noise.py) among those
that the filters keep, so a row can be cut into parts as in any search for a maximum.

Nothing is sorted: a filter is a smallest weight (kernels/gpu/floors.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu.floors import WEIGHT_ONE, ZERO_BITS, filtered_floor

FEW_ROWS = 8
"""Up to this many rows a row is cut into more parts, to fill the chip."""

DRAW_BLOCK = 8192
NOISE_BLOCK = tl.constexpr(1024)
CAPACITY = 2048
"""How many weights of the searched range fit into registers."""

COLDEST = tl.constexpr(1e-10)
LOG2_E = tl.constexpr(1.4426950408889634)
INFINITY_BITS = tl.constexpr(0x7F800000)
NOT_A_NUMBER = tl.constexpr(0x7FFFFFFF)
LOWEST_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


def argmax(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """logits [B, V], whole rows -> [B], int32: the best tokens, the lowest among equal ones.

    -1 for a row with a NaN, or whose best logit is not finite.
    """
    keys = _part_keys(logits)
    if out is None:
        out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    parts = keys.shape[1]
    _best_of_parts[(len(logits),)](
        keys, out, PARTS=parts, BLOCK=triton.next_power_of_2(parts), num_warps=1
    )
    return out


def sample(
    logits: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    draw_keys: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """logits [B, V], whole rows -> [B], int32; -1 for the same rows as argmax.

    The other arguments are [B]. temperatures, float32, and top_k, int32: a row with temperature 0
    or top_k 1 takes its best token; top_k 0 keeps all. top_p, float32 or float64: 1 keeps all.
    min_p, float32: 0 keeps all. draw_keys, int64: see kernels/noise.py.
    """
    rows, size = logits.shape
    keys = _part_keys(logits)
    if out is None:
        out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    device = logits.device
    spare = torch.empty((rows, CAPACITY), dtype=torch.float32, device=device)
    floors = torch.empty(rows, dtype=torch.int32, device=device)
    best = torch.empty(rows, dtype=torch.int32, device=device)
    parts, block = keys.shape[1], min(DRAW_BLOCK, triton.next_power_of_2(size))
    block_parts = triton.next_power_of_2(parts)
    _find_floors[(rows,)](
        logits,
        keys,
        temperatures,
        top_k,
        top_p,
        min_p,
        spare,
        best,
        floors,
        logits.stride(0),
        SIZE=size,
        PARTS=parts,
        BLOCK_PARTS=block_parts,
        BLOCK=block,
        SPARE=CAPACITY,
        num_warps=max(block // 512, 4),
    )
    _best_with_noise[(rows, parts)](
        logits,
        best,
        temperatures,
        floors,
        draw_keys,
        keys,
        logits.stride(0),
        SIZE=size,
        PARTS=parts,
        BLOCK=_part_block(rows),
        num_warps=4,
    )
    _best_of_parts[(rows,)](keys, out, PARTS=parts, BLOCK=block_parts, num_warps=1)
    return out


def _part_keys(logits: Tensor) -> Tensor:
    """[B, parts], int64: the key of each part's best token."""
    rows, size = logits.shape
    block = _part_block(rows)
    parts = triton.cdiv(size, block)
    keys = torch.empty((rows, parts), dtype=torch.int64, device=logits.device)
    _best_of_logits[(rows, parts)](
        logits, keys, logits.stride(0), SIZE=size, PARTS=parts, BLOCK=block, num_warps=4
    )
    return keys


def _part_block(rows: int) -> int:
    return 1024 if rows <= FEW_ROWS else 4096


@triton.jit
def _key(logit, token):
    """A number that orders as (logit, -token) does, with NaN above all."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ NOT_A_NUMBER, bits)
    ordered = tl.where(logit == logit, ordered, NOT_A_NUMBER)
    return (ordered.to(tl.int64) << 32) + (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def _token(key):
    """The token of a key, or -1 when its logit is not finite."""
    ordered = (key >> 32).to(tl.int32)
    finite = (ordered < INFINITY_BITS) & (ordered > -INFINITY_BITS - 1)
    return tl.where(finite, 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32), -1)


@triton.jit
def _best_of_logits(
    logits_pointer,
    keys_pointer,
    row_stride,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    logit_at = logits_pointer + row * row_stride + token
    logit = tl.load(logit_at, mask=token < SIZE, other=float("-inf")).to(tl.float32)
    tl.store(keys_pointer + row * PARTS + part, tl.max(_key(logit, token), axis=0))


@triton.jit
def _best_key(keys_pointer, row, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.arange(0, BLOCK)
    return tl.max(tl.load(keys_pointer + row * PARTS + part, mask=part < PARTS, other=LOWEST_KEY))


@triton.jit(do_not_specialize_on_alignment=["out_pointer"])
def _best_of_parts(keys_pointer, out_pointer, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    tl.store(out_pointer + row, _token(_best_key(keys_pointer, row, PARTS, BLOCK)))


@triton.jit(
    do_not_specialize_on_alignment=[
        "temperatures_pointer",
        "top_k_pointer",
        "top_p_pointer",
        "min_p_pointer",
    ]
)
def _find_floors(
    logits_pointer,
    keys_pointer,
    temperatures_pointer,
    top_k_pointer,
    top_p_pointer,
    min_p_pointer,
    spare_pointer,
    best_pointer,
    floors_pointer,
    row_stride,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE: tl.constexpr,
):
    """Stores each row's best token, and the bits of the smallest weight that may be drawn: 0 if all
    may, -1 if the best token is taken without a draw."""
    row = tl.program_id(0).to(tl.int64)
    token = _token(_best_key(keys_pointer, row, PARTS, BLOCK_PARTS))
    tl.store(best_pointer + row, token)
    temperature = tl.load(temperatures_pointer + row)
    top_k = tl.load(top_k_pointer + row)
    top_p = tl.load(top_p_pointer + row).to(tl.float64)
    min_p = tl.load(min_p_pointer + row)
    draws = (token >= 0) & (temperature > 0.0) & (top_k != 1)
    floor = tl.where(draws, 0, -1)
    if draws & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)):
        scale = LOG2_E / tl.maximum(temperature, COLDEST)
        logits = logits_pointer + row * row_stride
        spare = spare_pointer + row * SPARE
        best = tl.load(logits + token).to(tl.float32)
        floor = tl.full([], ZERO_BITS, dtype=tl.int32)
        if (top_k > 0) | (top_p < 1.0):
            # The row's entry in `floors` serves as a counter meanwhile.
            floor = filtered_floor(
                logits, best, scale, top_k, top_p, spare, floors_pointer + row, SIZE, BLOCK, SPARE
            )
        floor = tl.maximum(floor, (min_p * WEIGHT_ONE).to(tl.int32, bitcast=True))
    tl.store(floors_pointer + row, floor)


@triton.jit
def _share(token, draw_key):
    """kernels/noise.py's number in (0, 1) for token ids and one row's key."""
    word = token.to(tl.uint32) * 0x9E3779B9 + draw_key.to(tl.uint32)
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word ^= (draw_key >> 32).to(tl.uint32)
    word = (word ^ (word >> 15)) * 0x846CA68B
    word ^= word >> 16
    share = (word >> 1).to(tl.int32).to(tl.float32) * (2.0**-31) + 2.0**-32
    return tl.minimum(share, 1.0 - 2.0**-24)


@triton.jit
def _exponential(share):
    """-log(1 - share), accurate where 1 - share rounds: the winner's share is small."""
    rest = 1.0 - share
    lost = 1.0 - rest
    return tl.where(lost == 0.0, share, -tl.log(rest) * (share / lost))


@triton.jit(do_not_specialize_on_alignment=["temperatures_pointer", "draw_keys_pointer"])
def _best_with_noise(
    logits_pointer,
    best_pointer,
    temperatures_pointer,
    floors_pointer,
    draw_keys_pointer,
    keys_pointer,
    row_stride,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replaces a part's key by that of its best token with noise, in rows that are drawn."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    floor = tl.load(floors_pointer + row)
    if floor >= 0:
        logits = logits_pointer + row * row_stride
        temperature = tl.maximum(tl.load(temperatures_pointer + row), COLDEST)
        best_token = tl.load(best_pointer + row)
        best = tl.load(logits + best_token).to(tl.float32)
        draw_key = tl.load(draw_keys_pointer + row)
        limit = _exponential(_share(best_token, draw_key)) * 1.001
        key = tl.full([], LOWEST_KEY, dtype=tl.int64)
        for start in range(0, BLOCK, NOISE_BLOCK):
            token = part * BLOCK + start + tl.arange(0, NOISE_BLOCK)
            logit = tl.load(logits + token, mask=token < SIZE, other=float("-inf")).to(tl.float32)
            share = _share(token, draw_key)
            odds = tl.exp2((logit - best) * (LOG2_E / temperature))
            # A token that beats the row's best has an exponential, and so a share, below this
            # limit. Few have, so most blocks need no logarithm. The factor 1.001 covers rounding.
            possible = share <= odds * limit
            possible &= tl.floor(odds * WEIGHT_ONE).to(tl.int32, bitcast=True) >= floor
            if tl.max(possible.to(tl.int32), axis=0) > 0:
                score = (logit - best) / temperature - tl.log(_exponential(share))
                found = tl.max(tl.where(possible, _key(score, token), LOWEST_KEY), axis=0)
                key = tl.maximum(key, found)
        tl.store(keys_pointer + row * PARTS + part, key)
