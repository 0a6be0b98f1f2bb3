"""Samples tokens on the device: the best, or drawn as engine/sampler.py defines it.

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
CAPACITY = 2048
"""Weights within the searched range that fit into registers."""

WEIGHT_ONE = tl.constexpr(2.0**40)
COLDEST = tl.constexpr(1e-10)
LOG2_E = tl.constexpr(1.4426950408889634)
ONE_BITS = tl.constexpr(0x53800000)  # of WEIGHT_ONE as float32
ZERO_BITS = tl.constexpr(0x3F7FFFFF)  # just below the least weight but 0, which is 1.0

INFINITY_BITS = tl.constexpr(0x7F800000)
NOT_A_NUMBER = tl.constexpr(0x7FFFFFFF)
GOLDEN_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)


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
    chances: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """logits [B, V], whole rows -> [B], int32; -1 for rows like argmax's.

    All others [B]: temperatures float32 and top_k int32, where a row with temperature 0 or
    top_k 1 takes its best token and top_k 0 keeps all; top_p float32 or float64, 1 keeps all;
    min_p float32, 0 keeps all; chances float64, in [0, 1).
    """
    rows, size = logits.shape
    keys = _part_keys(logits)
    if out is None:
        out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    spare = torch.empty((rows, CAPACITY), dtype=torch.float32, device=logits.device)
    parts, block = keys.shape[1], min(DRAW_BLOCK, triton.next_power_of_2(size))
    _sample[(rows,)](
        logits,
        keys,
        temperatures,
        top_k,
        top_p,
        min_p,
        chances,
        spare,
        out,
        logits.stride(0),
        SIZE=size,
        PARTS=parts,
        BLOCK_PARTS=triton.next_power_of_2(parts),
        BLOCK=block,
        SPARE=CAPACITY,
        num_warps=max(block // 256, 4),
    )
    return out


def uniform(seeds: Tensor, positions: Tensor, out: Tensor | None = None) -> Tensor:
    """seeds and positions [B], int64 -> [B], float64 in [0, 1): engine/sampler.py's `uniform`.

    A seed beyond int64 is given as the int64 of the same bits.
    """
    if out is None:
        out = torch.empty(len(seeds), dtype=torch.float64, device=seeds.device)
    _uniform[(triton.cdiv(len(seeds), 128),)](
        seeds, positions, out, len(seeds), BLOCK=128, num_warps=4
    )
    return out


def _part_keys(logits: Tensor) -> Tensor:
    """[B, parts], int64: the key of each part's best token."""
    rows, size = logits.shape
    block = 1024 if rows <= FEW_ROWS else 4096
    parts = triton.cdiv(size, block)
    keys = torch.empty((rows, parts), dtype=torch.int64, device=logits.device)
    _best_of_logits[(rows, parts)](
        logits, keys, logits.stride(0), SIZE=size, PARTS=parts, BLOCK=block, num_warps=4
    )
    return keys


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
    lowest = -0x7FFFFFFFFFFFFFFF
    return tl.max(tl.load(keys_pointer + row * PARTS + part, mask=part < PARTS, other=lowest))


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
    spare,
    BY_SUM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE: tl.constexpr,
):
    """The greatest floor at or above `low` whose tokens are still enough, their number and sum.

    Enough is a sum of at least `needed`, or a number. At `low` they are taken to be enough.
    """
    high = tl.full([], ONE_BITS + 1, dtype=tl.int32)
    high_count = tl.full([], 0, dtype=tl.int32)
    high_sum = tl.full([], 0, dtype=tl.int64)
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


@triton.jit
def _walk(logits, best, scale, floor, target, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The first token, in order of id, with which the heavy weights' sum exceeds `target`."""
    start = tl.full([], 0, dtype=tl.int32)
    before = tl.full([], 0, dtype=tl.int64)
    heavy = _heavy(load_weights(logits, start, best, scale, SIZE, BLOCK), floor)
    inside = tl.sum(heavy, axis=0)
    while before + inside <= target:
        before += inside
        start += BLOCK
        heavy = _heavy(load_weights(logits, start, best, scale, SIZE, BLOCK), floor)
        inside = tl.sum(heavy, axis=0)
    reached = before + tl.cumsum(heavy, axis=0)
    return start + tl.sum((reached <= target).to(tl.int32), axis=0)


@triton.jit(
    do_not_specialize_on_alignment=[
        "temperatures_pointer",
        "top_k_pointer",
        "top_p_pointer",
        "min_p_pointer",
        "chances_pointer",
        "out_pointer",
    ]
)
def _sample(
    logits_pointer,
    keys_pointer,
    temperatures_pointer,
    top_k_pointer,
    top_p_pointer,
    min_p_pointer,
    chances_pointer,
    spare_pointer,
    out_pointer,
    row_stride,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = _token(_best_key(keys_pointer, row, PARTS, BLOCK_PARTS))
    temperature = tl.load(temperatures_pointer + row)
    top_k = tl.load(top_k_pointer + row)
    if (token >= 0) & (temperature > 0.0) & (top_k != 1):
        scale = LOG2_E / tl.maximum(temperature, COLDEST)
        logits = logits_pointer + row * row_stride
        spare = spare_pointer + row * SPARE
        best = tl.load(logits + token).to(tl.float32)
        floor = tl.full([], ZERO_BITS, dtype=tl.int32)
        count, total = _measure(logits, best, scale, floor, SIZE, BLOCK)
        if (top_k > 0) & (top_k < SIZE):
            floor, count, total = _raise_floor(
                logits, best, scale, top_k, floor, count, total, spare, False, SIZE, BLOCK, SPARE
            )
        top_p = tl.load(top_p_pointer + row).to(tl.float64)
        if top_p < 1.0:
            needed = tl.minimum((total.to(tl.float64) * top_p).to(tl.int64), total)
            floor, count, total = _raise_floor(
                logits, best, scale, needed, floor, count, total, spare, True, SIZE, BLOCK, SPARE
            )
        least = (tl.load(min_p_pointer + row) * WEIGHT_ONE).to(tl.int32, bitcast=True)
        if least > floor:
            floor = least
            count, total = _measure(logits, best, scale, floor, SIZE, BLOCK)
        chance = tl.load(chances_pointer + row)
        # Rounding may lift a chance just below 1 to the total itself, where no token is.
        target = tl.minimum((total.to(tl.float64) * chance).to(tl.int64), total - 1)
        token = _walk(logits, best, scale, floor, target, SIZE, BLOCK)
    tl.store(out_pointer + row, token)


@triton.jit
def _mix(word):
    """SplitMix64's finalizer, of uint64."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit(do_not_specialize=["count"])
def _uniform(seeds_pointer, positions_pointer, out_pointer, count, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    seed = tl.load(seeds_pointer + row, mask=inside, other=0).to(tl.uint64, bitcast=True)
    position = tl.load(positions_pointer + row, mask=inside, other=0).to(tl.uint64, bitcast=True)
    word = _mix(_mix(seed) + (position + 1) * GOLDEN_GAMMA)
    chance = (word >> 11).to(tl.int64).to(tl.float64) * (2.0**-53)
    tl.store(out_pointer + row, chance, mask=inside)
