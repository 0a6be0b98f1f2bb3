"""Compiled code for the second pass of attention_tile.py, which turns scores into weights."""

from __future__ import annotations

import functools

from llvmlite import ir

from baton.kernels.cpu.attention_shape import SPLIT, WEIGHTS_STRIDE, Heads
from baton.kernels.cpu.ir_builder import COUNT, POINTER, Count, Function, Memory
from baton.kernels.cpu.vectors import (
    LOG2_E,
    Floats,
    constant,
    exp_of_negative,
    power_of_2,
    tanh,
)

LEAST = -3e38
"""Less than any score."""


def weights_code(module: ir.Module, shape: Heads, rows: int) -> Function:
    """Turns the scores of rows into weights, 0 for tokens that a row does not see, and begins each
    row's part with the highest score and the sum of the weights: (scores, tokens, bounds, parts,
    scales). Operations of different rows are independent, so several rows run in parallel."""
    types = [POINTER, COUNT, POINTER, POINTER, POINTER]
    code = Function(module, f"weights_{rows}", types, lanes=shape.lanes)
    scores, tokens, bounds, parts, scales = code.arguments
    of_rows = [scores.from_(row * WEIGHTS_STRIDE) for row in range(rows)]
    vectors = (tokens + shape.aligned - 1) // shape.aligned * shape.aligned
    for row, of_row in enumerate(of_rows):
        first, end = (bounds.of(COUNT).count(row * 2 + place) for place in (0, 1))
        _finish_scores(code, shape, of_row, vectors, scales)
        for start, stop in ((0, first), (end, vectors)):
            with code.loop(start, stop) as token:
                of_row.in_lanes(1).put(constant(code.builder, LEAST, 1), token)
    highest = _greatest(code, shape, of_rows, vectors)
    tops = [each * _scale(shape) for each in highest]
    sums = _weigh(code, shape, of_rows, vectors, highest, scales)
    for row, (top, total) in enumerate(zip(tops, sums, strict=True)):
        part = parts.from_(row * shape.part_numbers)
        with code.loop(0, shape.value_dim, step=shape.lanes) as at:
            part.put(code.zero(), at)
        notes = part.from_(shape.value_dim)
        notes.put(top)
        notes.put(total.total(), shape.lanes)
    code.end()
    return code


def _scale(shape: Heads) -> float:
    """The factor of scores in memory; capped scores already include it."""
    return shape.scale if shape.cap is None else 1.0


def _finish_scores(
    code: Function, shape: Heads, scores: Memory, vectors: Count, scales: Memory
) -> None:
    """Applies the scales of keys and the cap, if there are any."""
    if shape.scaled:
        with code.loop(0, vectors, step=shape.lanes) as token:
            scores.put(scores.vector(token) * scales.vector(token), token)
    if shape.cap is not None:
        with code.loop(0, vectors, step=shape.lanes) as token:
            share = scores.vector(token) * (shape.scale / shape.cap)
            scores.put(tanh(share) * shape.cap, token)


def _greatest(code: Function, shape: Heads, of_rows: list[Memory], vectors: Count) -> list[Floats]:
    """Each row's highest score, in all lanes."""
    # Several independent maxima at once: they need not wait for each other.
    starts = range(0, shape.aligned, shape.lanes)
    least = [code.zero() + LEAST] * (len(of_rows) * len(starts))
    with code.sum_loop(0, vectors, least, step=shape.aligned) as (token, greatest):
        for row, scores in enumerate(of_rows):
            for place, start in enumerate(starts, start=row * len(starts)):
                greatest[place] = greatest[place].or_greater(scores.vector(token + start))
    return [
        functools.reduce(Floats.or_greater, greatest[place : place + len(starts)]).greatest()
        for place in range(0, len(greatest), len(starts))
    ]


def _weigh(
    code: Function,
    shape: Heads,
    of_rows: list[Memory],
    vectors: Count,
    highest: list[Floats],
    scales: Memory,
) -> list[Floats]:
    """Replaces scores by weights. Returns each row's sum of weights, by lanes."""
    # Tile registers read weights in bfloat16: a short polynomial is exact enough.
    power, unit = (power_of_2, LOG2_E) if shape.amx else (exp_of_negative, 1.0)
    zero, scale = code.zero(), _scale(shape)
    below = [zero - (each * scale * unit).where(each.above(LEAST / 2), zero) for each in highest]
    with code.sum_loop(0, vectors, [zero] * len(of_rows), step=shape.lanes) as (token, sums):
        for row, scores in enumerate(of_rows):
            score = scores.vector(token)
            weight = power(below[row].plus_product(score, scale * unit))
            seen = score.above(LEAST / 2)
            if not shape.amx:  # with AMX, power_of_2 of such a score is 0 already
                weight = weight.where(seen, zero)
            share = weight
            if shape.scaled:
                share = (weight * scales.vector(token + SPLIT)).where(seen, zero)
            # Weights narrower than scores only overwrite scores that were read already.
            scores.of(shape.operand).put(share, token)
            sums[row] = sums[row] + weight
    return sums
