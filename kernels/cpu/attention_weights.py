"""Compiled code for the second pass of attention_tile.py: scores become weights."""

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
    row's part with the greatest score and the sum of the weights. The operations of several rows
    need not wait for each other: (scores, tokens, bounds, parts, scales)"""
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
    """Of scores as they are in memory."""
    return shape.scale if shape.cap is None else 1.0


def _finish_scores(
    code: Function, shape: Heads, scores: Memory, vectors: Count, scales: Memory
) -> None:
    """With the scales of codes, and capped."""
    if shape.scaled:
        with code.loop(0, vectors, step=shape.lanes) as token:
            scores.put(scores.vector(token) * scales.vector(token), token)
    if shape.cap is not None:
        with code.loop(0, vectors, step=shape.lanes) as token:
            share = scores.vector(token) * (shape.scale / shape.cap)
            scores.put(tanh(share) * shape.cap, token)


def _greatest(code: Function, shape: Heads, of_rows: list[Memory], vectors: Count) -> list[Floats]:
    """Of each row, in all lanes."""
    # Those of several vectors at once need not wait for each other.
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
    """Replaces scores by weights; each row's sum of them, by lanes."""
    # Weights of tile registers are rounded to bfloat16: a short polynomial will do.
    power, unit = (power_of_2, LOG2_E) if shape.amx else (exp_of_negative, 1.0)
    zero, scale = code.zero(), _scale(shape)
    below = [zero - (each * scale * unit).where(each.above(LEAST / 2), zero) for each in highest]
    with code.sum_loop(0, vectors, [zero] * len(of_rows), step=shape.lanes) as (token, sums):
        for row, scores in enumerate(of_rows):
            score = scores.vector(token)
            weight = power(below[row].plus_product(score, scale * unit))
            seen = score.above(LEAST / 2)
            if not shape.amx:  # where 2 to so small a power is 0
                weight = weight.where(seen, zero)
            share = weight
            if shape.scaled:
                share = (weight * scales.vector(token + SPLIT)).where(seen, zero)
            # What is narrower than a score is not written past the scores that were read.
            scores.of(shape.operand).put(share, token)
            sums[row] = sums[row] + weight
    return sums
