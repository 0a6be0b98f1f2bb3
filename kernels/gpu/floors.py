"""Finds the smallest weight that filters keep, by bisecting the bits of weights.

Every filter needs the largest weight such that the tokens at least as heavy are enough, by number
or by sum. Floats that are not negative have the same order as their bits, so this weight is found
by bisecting a range of bits: with passes over the row while many weights are within the range, then
among the remaining few in registers. All sums are integers, so their order does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl

WEIGHT_ONE = tl.constexpr(2.0**40)
ONE_BITS = tl.constexpr(0x53800000)  # bits of WEIGHT_ONE as float32
ZERO_BITS = tl.constexpr(0x3F7FFFFF)  # just below 1.0, the smallest weight that is not 0


@triton.jit
def load_weights(logits, start, best, scale, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The weights of BLOCK tokens of a row, whole numbers in float32; 0 beyond the row.

    scale is log2(e) / temperature.
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
    """Counts and sums a row's weights whose bits are at least `floor`."""
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
def _pick(logits, best, scale, low, high, spare, picked, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Writes the weights with bits in [low, high) to spare, in any order; counts them in picked."""
    tl.store(picked, 0)
    # Threads read what other threads wrote, here and in an earlier call.
    tl.debug_barrier()
    for start in tl.range(0, SIZE, BLOCK, num_stages=3):
        weights = load_weights(logits, start, best, scale, SIZE, BLOCK)
        bits = weights.to(tl.int32, bitcast=True)
        within = (bits >= low) & (bits < high)
        ones = within.to(tl.int32)
        slot = tl.atomic_add(picked + tl.zeros_like(ones), ones, mask=within, sem="relaxed")
        tl.store(spare + slot, weights, mask=within)
    tl.debug_barrier()


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
    picked,
    BY_SUM: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE: tl.constexpr,
):
    """The highest floor from `low` on whose tokens are enough, with their number and sum.

    They are enough if their sum (BY_SUM) or number is at least `needed`. Those at `low` are assumed
    to be; `middle`, at or above it, is measured already.
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
        _pick(logits, best, scale, low, high, spare, picked, SIZE, BLOCK)
        lane = tl.arange(0, SPARE)
        weights = tl.load(spare + lane, mask=lane < low_count - high_count, other=0.0)
        above_count, above_sum = high_count, high_sum
        # The last weight left within the range is the result.
        while (low_count - high_count > 1) & (high - low > 1):
            middle = low + (high - low) // 2
            heavy = _heavy(weights, middle)
            count = above_count + tl.sum((heavy > 0).to(tl.int32), axis=0)
            total = above_sum + tl.sum(heavy, axis=0)
            enough = (total if BY_SUM else count) >= needed
            low, low_count, low_sum = _either(enough, middle, count, total, low, low_count, low_sum)
            high, high_count, high_sum = _either(
                enough, high, high_count, high_sum, middle, count, total
            )
    return low, low_count, low_sum


@triton.jit
def filtered_floor(
    logits,
    best,
    scale,
    top_k,
    top_p,
    spare,
    picked,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPARE: tl.constexpr,
):
    """The bits of the smallest weight that top_k and then top_p keep.

    spare has room for SPARE weights, picked for an int32.
    """
    floor = tl.full([], ZERO_BITS, dtype=tl.int32)
    # A quarter of the range below the best: filters rarely keep weights under 2^-10 of it.
    middle = tl.full([], ZERO_BITS + (ONE_BITS - ZERO_BITS) // 4 * 3, dtype=tl.int32)
    count, total, middle_count, middle_sum = _measure_both(
        logits, best, scale, floor, middle, SIZE, BLOCK
    )
    if (top_k > 0) & (top_k < SIZE):
        floor, count, total = _raise_floor(
            logits, best, scale, top_k, floor, count, total, middle, middle_count, middle_sum,
            spare, picked, False, SIZE, BLOCK, SPARE,
        )  # fmt: skip
        middle, middle_count, middle_sum = floor, count, total
    if top_p < 1.0:
        needed = tl.minimum((total.to(tl.float64) * top_p).to(tl.int64), total)
        floor, count, total = _raise_floor(
            logits, best, scale, needed, floor, count, total, middle, middle_count, middle_sum,
            spare, picked, True, SIZE, BLOCK, SPARE,
        )  # fmt: skip
    return floor
