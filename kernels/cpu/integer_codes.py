"""What integer_product.py and integer_rows.py share: the layout of codes, on all CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from llvmlite import ir

from baton.kernels.cpu.ir_builder import Count, Function, Memory
from baton.kernels.cpu.vectors import Floats
from baton.kernels.integers import GROUPS, LEAST_PEAK, Bits

INPUTS_OF_LANE = 4

PART = 32
"""Inputs of a part: groups and weights consist of whole parts."""

LANES_OF_PART = PART // INPUTS_OF_LANE

_Size = TypeVar("_Size", int, Count)


def code_lanes(inputs: _Size, bits: Bits) -> _Size:
    """Lanes that an output's codes take."""
    return inputs // (INPUTS_OF_LANE * 8 // bits)


def group_count(inputs: _Size, bits: Bits) -> _Size:
    return (inputs + (GROUPS[bits] - 1)) // GROUPS[bits]


def parts_of_group(inputs: Count, group: Count, bits: Bits) -> Count | int:
    """The number of parts in a group; the last group may have fewer."""
    size = GROUPS[bits]
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
    code: Function, numbers: Callable[[Count], Floats], count: Count, most: float
) -> tuple[Floats, Floats]:
    """The factor that turns `count` numbers into codes up to `most`, and the scale that turns codes
    back into numbers."""
    with code.sum_loop(0, count, [code.zero()], step=code.lanes) as (at, peaks):
        peaks[0] = peaks[0].or_greater(numbers(at).magnitude())
    peak, greatest = peaks[0].greatest().at_least(LEAST_PEAK), code.zero() + most
    return greatest / peak, peak / greatest
