"""Samples tokens on the device: the best, or drawn as engine/sampler.py defines it.

A draw takes the largest of logit / temperature + noise (kernels/noise.py) among the tokens
that the filters leave, so a row can be cut into parts like any search for a maximum.

Nothing is sorted. Every filter needs the greatest weight at which the tokens at least as
heavy are enough, by number or by sum. The bits of floats that are not negative order as the
floats do, so that weight is found by bisecting a range of bits: with passes over the row
while many weights are within the range, then among those few in registers. All sums are
integers, so their order does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW_ROWS = 8
"""Up to this many rows a row is cut into more parts, to fill the chip."""

DRAW_BLOCK = 8192
NOISE_BLOCK = tl.constexpr(1024)
CAPACITY = 2048
"""Weights within the searched range that fit into registers."""

WEIGHT_ONE = tl.constexpr(2.0**40)
COLDEST = tl.constexpr(1e-10)
LOG2_E = tl.constexpr(1.4426950408889634)
ONE_BITS = tl.constexpr(0x53800000)  # of WEIGHT_ONE as float32
ZERO_BITS = tl.constexpr(0x3F7FFFFF)  # just below the least weight but 0, which is 1.0

INFINITY_BITS = tl.constexpr(0x7F800000)
NOT_A_NUMBER = tl.constexpr(0x7FFFFFFF)
LOWEST_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)


def argmax(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """logits [B, V], whole rows -> [B], int32: the best tokens, of equals the lowest.

    -1 for a row with a NaN, or whose best is not finite.
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
    """logits [B, V], whole rows -> [B], int32; -1 for rows like argmax's.

    All others [B]: temperatures float32 and top_k int32, where a row with temperature 0 or
    top_k 1 takes its best token and top_k 0 keeps all; top_p float32 or float64, 1 keeps all;
    min_p float32, 0 keeps all; draw_keys int64, of kernels/noise.py.
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
        num_warps=max(block // 256, 4),
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


@triton.jit
def load_weights(logits, start, best, scale, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The weights of BLOCK tokens of a row, whole numbers in float32; 0 beyond the row.

    scale is the logarithm of e to base 2, over the temperature.
    """
    token = start + tl.arange(0, BLOCK)
    logit = tl.load(logits + token, mask=token < SIZE, other=float("-inf")).to(tl.float32)
    return tl.floor(tl.exp2((logit - best) * scale) * WEIGHT_ONE)


@triton.jit
def _heavy(weights, floor):
    """The weights whose bits are at least `floor`, as int64; 0 for the others."""
    return tl.where(weights.to(tl.int32, bitcast=True) >= floor, weights, 0.0).to(tl.int64)


@triton.jit
def _measure(logits, best, scale, floor, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """How many of a row's weights have bits of at least `floor`, and their sum."""
    counts = tl.zeros([BLOCK], dtype=tl.int32)
    sums = tl.zeros([BLOCK], dtype=tl.int64)
    for start in tl.range(0, SIZE, BLOCK, num_stages=3):
        heavy = _heavy(load_weights(logits, start, best, scale, SIZE, BLOCK), floor)
        counts += (heavy > 0).to(tl.int32)
        sums += heavy
    return tl.sum(counts, axis=0), tl.sum(sums, axis=0)


@triton.jit
def _measure_both(logits, best, scale, low, high, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The same for two floors, in one pass."""
    low_counts = tl.zeros([BLOCK], dtype=tl.int32)
    low_sums = tl.zeros([BLOCK], dtype=tl.int64)
    high_counts, high_sums = low_counts, low_sums
    for start in tl.range(0, SIZE, BLOCK, num_stages=3):
        weights = load_weights(logits, start, best, scale, SIZE, BLOCK)
        heavy = _heavy(weights, low)
        low_counts += (heavy > 0).to(tl.int32)
        low_sums += heavy
        heavy = _heavy(weights, high)
        high_counts += (heavy > 0).to(tl.int32)
        high_sums += heavy
    return (
        tl.sum(low_counts, axis=0),
        tl.sum(low_sums, axis=0),
        tl.sum(high_counts, axis=0),
        tl.sum(high_sums, axis=0),
    )


@triton.jit
def _pick(logits, best, scale, low, high, spare, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the weights with bits in [low, high) to spare."""
    filled = tl.full([], 0, dtype=tl.int32)
    for start in tl.range(0, SIZE, BLOCK, num_stages=3):
        weights = load_weights(logits, start, best, scale, SIZE, BLOCK)
        bits = weights.to(tl.int32, bitcast=True)
        within = ((bits >= low) & (bits < high)).to(tl.int32)
        tl.store(spare + filled + tl.cumsum(within, axis=0) - 1, weights, mask=within > 0)
        filled += tl.sum(within, axis=0)


@triton.jit
def _either(first, a, b, c, d, e, f):
    return tl.where(first, a, d), tl.where(first, b, e), tl.where(first, c, f)


@triton.jit
def _raise_floor(
    logits,
    best,
    scale,
    needed,
    low,
    low_count,
    low_sum,
    middle,
    count,
    total,
    spare,
    BY_SUM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE: tl.constexpr,
):
    """The greatest floor at or above `low` whose tokens are still enough, their number and sum.

    Enough is a sum of at least `needed`, or a number. At `low` they are taken to be enough;
    `middle`, at or above it, is already measured.
    """
    high = tl.full([], ONE_BITS + 1, dtype=tl.int32)
    high_count = tl.full([], 0, dtype=tl.int32)
    high_sum = tl.full([], 0, dtype=tl.int64)
    enough = (total if BY_SUM else count) >= needed
    low, low_count, low_sum = _either(enough, middle, count, total, low, low_count, low_sum)
    high, high_count, high_sum = _either(enough, high, high_count, high_sum, middle, count, total)
    while (low_count - high_count > SPARE) & (high - low > 1):
        middle = low + (high - low) // 2
        count, total = _measure(logits, best, scale, middle, SIZE, BLOCK)
        enough = (total if BY_SUM else count) >= needed
        low, low_count, low_sum = _either(enough, middle, count, total, low, low_count, low_sum)
        high, high_count, high_sum = _either(
            enough, high, high_count, high_sum, middle, count, total
        )
    if high - low > 1:
        # Threads read what others of this program wrote, here and in an earlier call.
        tl.debug_barrier()
        _pick(logits, best, scale, low, high, spare, SIZE, BLOCK)
        tl.debug_barrier()
        lane = tl.arange(0, SPARE)
        picked = tl.load(spare + lane, mask=lane < low_count - high_count, other=0.0)
        above_count, above_sum = high_count, high_sum
        # A single weight left within the range is the result.
        while (low_count - high_count > 1) & (high - low > 1):
            middle = low + (high - low) // 2
            heavy = _heavy(picked, middle)
            count = above_count + tl.sum((heavy > 0).to(tl.int32), axis=0)
            total = above_sum + tl.sum(heavy, axis=0)
            enough = (total if BY_SUM else count) >= needed
            low, low_count, low_sum = _either(enough, middle, count, total, low, low_count, low_sum)
            high, high_count, high_sum = _either(
                enough, high, high_count, high_sum, middle, count, total
            )
    return low, low_count, low_sum


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
    """Leaves each row's best token, and the bits of the least weight that may be drawn: 0 where
    all may, -1 where the best token is taken without a draw."""
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
        middle = tl.full([], ZERO_BITS + (ONE_BITS - ZERO_BITS) // 2, dtype=tl.int32)
        count, total, middle_count, middle_sum = _measure_both(
            logits, best, scale, floor, middle, SIZE, BLOCK
        )
        if (top_k > 0) & (top_k < SIZE):
            floor, count, total = _raise_floor(
                logits, best, scale, top_k, floor, count, total, middle, middle_count, middle_sum,
                spare, False, SIZE, BLOCK, SPARE,
            )  # fmt: skip
            middle, middle_count, middle_sum = floor, count, total
        if top_p < 1.0:
            needed = tl.minimum((total.to(tl.float64) * top_p).to(tl.int64), total)
            floor, count, total = _raise_floor(
                logits, best, scale, needed, floor, count, total, middle, middle_count, middle_sum,
                spare, True, SIZE, BLOCK, SPARE,
            )  # fmt: skip
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
    """-log(1 - share), exact where that difference rounds: the winner's is small."""
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
    """Replaces a part's key by that of its best token with noise, in rows that draw."""
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
            # A token that beats the row's best has an exponential, and so a share, below this.
            # Few have, so most blocks need no logarithm. 1.001: rounding loses none.
            possible = share <= odds * limit
            possible &= tl.floor(odds * WEIGHT_ONE).to(tl.int32, bitcast=True) >= floor
            if tl.max(possible.to(tl.int32), axis=0) > 0:
                score = (logit - best) / temperature - tl.log(_exponential(share))
                found = tl.max(tl.where(possible, _key(score, token), LOWEST_KEY), axis=0)
                key = tl.maximum(key, found)
        tl.store(keys_pointer + row * PARTS + part, key)
