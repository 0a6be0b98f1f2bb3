"""Compiled code that stores and reads keys and values as codes of four bits: see
kernels/half_bytes.py."""

from __future__ import annotations

from llvmlite import ir

from baton.kernels.cpu.ir_builder import Count, Function, Memory
from baton.kernels.cpu.vectors import (
    BFLOAT16,
    CODE,
    LANE,
    Floats,
    constant,
    floats_type,
    whole_numbers,
)
from baton.kernels.half_bytes import CENTER, LEAST_RANGE, STEP, STEPS
from baton.kernels.head_sizes import GROUP, PAIR_BYTES, groups_of


def put_half_bytes(
    code: Function, source: Memory, target: Memory, heads: Count, head_dim: Count
) -> None:
    """Stores each head's numbers as codes, with their scales and middles behind them."""
    half, groups = head_dim // 2, (head_dim + GROUP - 1) // GROUP
    with code.loop(0, heads) as head:
        numbers = source.from_(head * head_dim)
        codes = target.of(CODE).from_(head * (half + groups * PAIR_BYTES))
        pairs = codes.from_(half).of(BFLOAT16)
        with code.loop(0, groups) as group:
            _put_pair(code, numbers.from_(group * GROUP), head_dim - group * GROUP, pairs, group)
        with code.loop(0, half, step=code.lanes) as at:
            low = _code(numbers, pairs, at)
            both = low.plus_product(_code(numbers, pairs, at + half), 16.0)
            _put_bytes(codes, both, at)


def _put_pair(code: Function, numbers: Memory, rest: Count, pairs: Memory, group: Count) -> None:
    """Stores the scale and middle of a group of min(rest, GROUP) numbers."""
    least = code.zero() - 3e38
    with code.sum_loop(0, rest.at_most(GROUP), [least, least], step=code.lanes) as (at, peaks):
        some = numbers.vector(at)
        peaks[0] = peaks[0].or_greater(some)
        peaks[1] = peaks[1].or_greater(some * -1.0)
    highest, lowest = (each.greatest() for each in peaks)
    scale = (highest + lowest).at_least(LEAST_RANGE) * STEP
    middle = (highest - lowest) * 0.5 + 0.0  # never -0
    for place, each in enumerate((scale, middle)):
        pairs.in_lanes(1).put(each.arranged(each, [0]), group * 2 + place)


def _code(numbers: Memory, pairs: Memory, at: Count) -> Floats:
    """The codes of a vector of numbers, all of one group."""
    group = at // GROUP
    scale, middle = (pairs.repeated(group * 2 + place) for place in (0, 1))
    inverse = constant(scale.builder, 1.0, scale.lanes) / scale
    steps = (numbers.vector(at) - middle) * inverse + CENTER
    return steps.nearest().at_least(0.0).at_most(STEPS)


def _put_bytes(codes: Memory, both: Floats, at: Count) -> None:
    stored = both.builder.trunc(whole_numbers(both), ir.VectorType(CODE, both.lanes))
    both.builder.store(stored, codes.from_(at).value, align=1)


def take_numbers(code: Function, head: Memory, head_dim: int, target: Memory) -> None:
    """Decodes a head's codes into `target`."""
    half, head = head_dim // 2, head.of(CODE)
    pairs = head.from_(half).of(BFLOAT16)
    groups = [
        tuple(pairs.repeated(group * 2 + place) for place in (0, 1))
        for group in range(groups_of(head_dim))
    ]
    for at in range(0, half, code.lanes):
        for place, codes in zip((at, at + half), _halves(head, at), strict=True):
            scale, middle = groups[place // GROUP]
            target.put(middle.plus_product(codes - CENTER, scale), place)


def _halves(head: Memory, at: int) -> list[Floats]:
    """The codes in the lower and upper halves of bytes."""
    builder, lanes = head.builder, head.lanes
    kind, wide = ir.VectorType(CODE, lanes), ir.VectorType(LANE, lanes)
    loaded = builder.load(head.from_(at).value, typ=kind, align=1)
    low = builder.and_(loaded, ir.Constant(kind, [15] * lanes))
    high = builder.lshr(loaded, ir.Constant(kind, [4] * lanes))
    return [
        Floats(builder, builder.sitofp(builder.zext(each, wide), floats_type(lanes)))
        for each in (low, high)
    ]
