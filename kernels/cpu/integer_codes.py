"""What integer_product.py and integer_rows.py share: the layout and the making of codes, on all
CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from llvmlite import ir

from baton.kernels.cpu.ir_builder import Count, Function, Memory
from baton.kernels.cpu.vectors import QUAD, Floats, constant, floats_type, vector_of
from baton.kernels.integers import LEAST_PEAK, SCHEMES, Bits

INPUTS_OF_LANE = 4

PART = 32
"""Inputs of a part: groups and weights consist of whole parts."""

LANES_OF_PART = PART // INPUTS_OF_LANE

_Size = TypeVar("_Size", int, Count)
Numbers = Callable[[Count], Floats]
"""Returns the vector of a row's numbers from an index on."""


def code_lanes(inputs: _Size, bits: Bits) -> _Size:
    """Lanes that an output's codes take."""
    return inputs // (INPUTS_OF_LANE * 8 // bits)


def group_count(inputs: _Size, bits: Bits) -> _Size:
    return (inputs + (SCHEMES[bits].group - 1)) // SCHEMES[bits].group


def factor_count(inputs: _Size, bits: Bits) -> _Size:
    """Scales and offsets of an output, or scales and sums of a row."""
    return group_count(inputs, bits) * (1 + SCHEMES[bits].has_offsets)


def parts_of_group(inputs: Count, group: Count, bits: Bits) -> Count | int:
    """The number of parts in a group; the last group may have fewer."""
    size = SCHEMES[bits].group
    return 1 if size == PART else (inputs - group * size).at_most(size) // PART


def codes_of_half(builder: ir.IRBuilder, loaded: ir.Value, half: int, bits: Bits) -> ir.Value:
    """The codes in bytes; codes of four bits come from one half of each byte, times 16."""
    if bits == 8:
        return loaded
    if half:
        return builder.and_(loaded, ir.Constant(loaded.type, [-16] * loaded.type.count))
    return builder.shl(loaded, ir.Constant(loaded.type, [4] * loaded.type.count))


def load(memory: Memory, index: int, kind: ir.Type) -> ir.Value:
    return memory.builder.load(memory.from_(index).value, typ=kind, align=4)


def factor_and_scale(
    code: Function, numbers: Numbers, count: Count | int, most: float
) -> tuple[Floats, Floats]:
    """The factor that turns `count` numbers into codes up to `most`, and the scale that turns codes
    back into numbers."""
    with code.sum_loop(0, count, [code.zero()], step=code.lanes) as (at, peaks):
        peaks[0] = peaks[0].or_greater_magnitude(numbers(at).magnitude())
    # Four lanes take less time to divide than sixteen.
    peak = peaks[0].greatest_magnitude().or_greater_magnitude(LEAST_PEAK)
    peak = peak.arranged(peaks[0], [0] * QUAD)
    greatest = constant(code.builder, most, QUAD)
    return (greatest / peak).spread(code.lanes), (peak / greatest).spread(code.lanes)


def rotation_space(code: Function, bits: Bits) -> Memory:
    """Memory for the numbers of a rotated group; called where a function begins."""
    size = SCHEMES[bits].group // code.lanes
    return Memory(code.builder, code.builder.alloca(floats_type(code.lanes), size=size), code.lanes)


def numbers_of_group(
    code: Function,
    numbers: Numbers,
    balance: Memory,
    group: Count,
    inputs: Count,
    bits: Bits,
    space: Memory,
) -> Numbers:
    """The numbers of a row's group, which are balanced and rotated into `space` if `bits` asks for
    it."""
    first, most = group * SCHEMES[bits].group, SCHEMES[bits].rotated
    if most == 1:
        return lambda at: numbers(first + at)
    # Blocks of 32 where larger ones do not divide a row.
    for block, how in ((most, "=="), (PART, ">")):
        end = (inputs - first).at_most(SCHEMES[bits].group)
        fits = (inputs % most).compare(how, 0)
        with code.when(fits), code.loop(0, end, step=block) as start:
            places = range(0, block, code.lanes)
            starts = [first + start + at for at in places]
            found = rotated([numbers(at) * balance.vector(at) for at in starts])
            for at, vector in zip(places, found, strict=True):
                space.put(vector, start + at)
    return space.vector


def rotated(vectors: list[Floats]) -> list[Floats]:
    """The vectors of one block as kernels.integers.rotate returns them."""
    builder, lanes, distance = vectors[0].builder, vectors[0].lanes, 1
    while distance < lanes:
        partners = [lane ^ distance for lane in range(lanes)]
        signs = vector_of(builder, [-1.0 if lane & distance else 1.0 for lane in range(lanes)])
        vectors = [each.arranged(each, partners).plus_product(each, signs) for each in vectors]
        distance *= 2
    distance = 1
    while distance < len(vectors):
        pairs = [(vectors[at & ~distance], vectors[at | distance]) for at in range(len(vectors))]
        vectors = [
            low - high if at & distance else low + high for at, (low, high) in enumerate(pairs)
        ]
        distance *= 2
    return vectors
