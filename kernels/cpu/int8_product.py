"""Products of codes (kernels/int8.py) for product.py. A panel has its weights and then its outputs'
scales, group by group; a block has its rows' codes and then their scales. What one instruction
adds to a sum decides how codes lie:

    Arm's SDOT           four products of bytes: four inputs of an output together; of a row's codes
                         the upper bytes of four inputs, then the lower. The sum of a group is 256
                         times that of the upper bytes and that of the lower ones
    x86_64's VPMADDWD,   two products of 16 bits: two inputs of an output together, widened on their
    and other CPUs       way to a register; of a row's codes two inputs after two
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from llvmlite import ir
from torch import Tensor

from baton.kernels.cpu import compiler
from baton.kernels.cpu.ir_builder import COUNT, POINTER, Count, Function, Memory
from baton.kernels.cpu.norm import inverse_root
from baton.kernels.cpu.vectors import (
    CODE,
    LANE,
    QUAD,
    Floats,
    Integers,
    declare,
    lane_numbers,
    rounded,
    whole_numbers,
)
from baton.kernels.int8 import GROUP, LEAST_PEAK, MOST_OF_ROW, Int8Weight

INPUTS_OF_LANE = 4
LANES_OF_GROUP = GROUP // INPUTS_OF_LANE
BYTES = 2
"""Of a row's code."""

_SHORT = ir.IntType(16)
_LANES = ir.VectorType(LANE, QUAD)
_CODES = ir.VectorType(CODE, QUAD * INPUTS_OF_LANE)

_Size = TypeVar("_Size", int, Count)


def tile_sizes() -> tuple[int, int]:
    """Lanes of a vector and rows of a block, so that all sums stay in this CPU's registers."""
    if compiler.has_dot():
        return QUAD, 2
    lanes, number = compiler.registers()
    return lanes, 2 if number == compiler.AVX2.number else 4


def panel_depth(inputs: _Size) -> _Size:
    """Lanes of each output, scales included."""
    return inputs // INPUTS_OF_LANE + inputs // GROUP


def block_depth(inputs: _Size) -> _Size:
    """Lanes of each row, its scale included."""
    return inputs // INPUTS_OF_LANE * BYTES + 1


def suits(weight: Int8Weight) -> bool:
    """Whether there is compiled code for such a weight."""
    outputs, inputs = weight.codes.shape
    return bool(outputs and inputs) and inputs % GROUP == 0


def packed(weight: Int8Weight, panel: int) -> Tensor:
    """[panels, depth, panel], of 32 bits; the last panel holds the last outputs."""
    together = torch.int32 if compiler.has_dot() else torch.int16
    panels = [_in_panels(each, panel) for each in (weight.codes.view(together), weight.scales)]
    lanes = [each.flatten(1).view(torch.int32).view(len(each), -1, panel) for each in panels]
    return torch.cat(lanes, dim=1)


def _in_panels(numbers: Tensor, panel: int) -> Tensor:
    """[outputs, columns] -> [panels, columns, panel]"""
    (outputs, columns), whole = numbers.shape, len(numbers) // panel
    found = numbers.new_empty(-(-outputs // panel), columns, panel)
    found[:whole] = numbers[: whole * panel].view(whole, panel, columns).transpose(1, 2)
    found[-1] = numbers[-panel:].t()
    return found


def part_code(
    module: ir.Module, rows: int, vectors: int, element: ir.Type, result: ir.Type
) -> Function:
    """The first rows of a tile: (block, inputs, panel, addend, its stride, out, its stride)"""
    size, rows_of_block = tile_sizes()
    types = [POINTER, COUNT, POINTER, POINTER, COUNT, POINTER, COUNT]
    code = Function(module, f"tile_{result}_{rows}", types, lanes=size)
    block, inputs, panel, addend, addend_stride, out, out_stride = code.arguments
    addend, out = addend.of(element), out.of(result)
    lanes, width = inputs // INPUTS_OF_LANE, vectors * size
    scales = panel.from_(lanes * width)
    places = [(row, vector) for row in range(rows) for vector in range(vectors)]
    group_sums = _sums_of_bytes if compiler.has_dot() else _sums_of_pairs
    with code.sum_loop(0, inputs // GROUP, [code.zero()] * len(places)) as (group, totals):
        first = group * LANES_OF_GROUP
        codes = block.from_(first * (rows_of_block * BYTES))
        sums = group_sums(code, codes, panel.from_(first * width), rows, vectors)
        factors = [scales.vector(group * width + size * vector) for vector in range(vectors)]
        for at, (_, vector) in enumerate(places):
            totals[at] = totals[at] + sums[at] * factors[vector]
    for at, (row, vector) in enumerate(places):
        added = addend.vector(addend_stride * row + vector * size)
        scale = block.repeated(lanes * (rows_of_block * BYTES) + row)
        out.put(totals[at] * scale + added, out_stride * row + vector * size)
    code.end()
    return code


def _sums_of_bytes(
    code: Function, block: Memory, panel: Memory, rows: int, vectors: int
) -> list[Floats]:
    """Of the group that begins there, for each row and vector."""
    builder = code.builder
    sums = [[ir.Constant(_LANES, None)] * vectors for _ in range(rows * BYTES)]
    for lane in range(LANES_OF_GROUP):
        weights = [_load(panel, (lane * vectors + at) * QUAD, _LANES) for at in range(vectors)]
        inputs = _load(block, lane * QUAD, _LANES)
        for byte, found in enumerate(sums):
            x = builder.shuffle_vector(inputs, inputs, lane_numbers([byte] * QUAD))
            for vector, weight in enumerate(weights):
                found[vector] = _plus_dot(builder, found[vector], weight, x)
    pairs = zip(sums[::BYTES], sums[1::BYTES], strict=True)
    joined = [
        builder.add(builder.shl(upper, lane_numbers([8] * QUAD)), lower)
        for pair in pairs
        for upper, lower in zip(*pair, strict=True)
    ]
    return [Integers(builder, each).as_floats() for each in joined]


def _plus_dot(builder: ir.IRBuilder, total: ir.Value, one: ir.Value, other: ir.Value) -> ir.Value:
    """Adds the products of each lane's four codes."""
    codes = [builder.bitcast(each, _CODES) for each in (one, other)]
    kinds = [_LANES, _CODES, _CODES]
    dot = declare(builder.module, "llvm.aarch64.neon.sdot.v4i32.v16i8", _LANES, kinds)
    return builder.call(dot, [total, *codes])


def _sums_of_pairs(
    code: Function, block: Memory, panel: Memory, rows: int, vectors: int
) -> list[Floats]:
    """As _sums_of_bytes."""
    builder, (size, rows_of_block) = code.builder, tile_sizes()
    codes, pairs = (ir.VectorType(each, 2 * size) for each in (CODE, _SHORT))
    zero = Integers(builder, ir.Constant(ir.VectorType(LANE, size), None))
    # A loop: unrolled, all weights of a group are widened before the first product.
    with code.sum_loop(0, LANES_OF_GROUP, [zero] * (rows * vectors)) as (lane, sums):
        x, weights = block.from_(lane * (rows_of_block * BYTES)), panel.from_(lane * vectors * size)
        for pair in range(INPUTS_OF_LANE // 2):
            starts = [(pair * vectors + vector) * size // 2 for vector in range(vectors)]
            wide = [builder.sext(_load(weights, start, codes), pairs) for start in starts]
            for row in range(rows):
                both = builder.bitcast(x.repeated(row * BYTES + pair).value, pairs)
                for at, weight in enumerate(wide, start=row * vectors):
                    sums[at] = sums[at].plus_pairs(weight, both)
    return [each.as_floats() for each in sums]


def _load(memory: Memory, index: int, kind: ir.Type) -> ir.Value:
    return memory.builder.load(memory.from_(index).value, typ=kind, align=4)


def block_code(module: ir.Module, element: ir.Type, *, single: bool, normed: bool) -> Function:
    """One block of x: (its first row, rows left, inputs, norm, epsilon, block)"""
    name = f"codes{'_of_one' * single}{'_normed' * normed}"
    code = Function(module, name, [POINTER, COUNT, COUNT, POINTER, POINTER, POINTER])
    x, left, inputs, norm, epsilon, block = code.arguments
    _, rows = tile_sizes()
    with code.loop(0, 1 if single else left.at_most(rows)) as row:
        source = x.of(element).from_(row * inputs)
        size = inverse_root(code, source, epsilon, inputs) if normed else None

        def numbers(at: Count, source: Memory = source, size: Floats | None = size) -> Floats:
            found = source.vector(at)
            return found if size is None else rounded(found * size * norm.vector(at), element)

        factor, scale = factor_and_scale(code, numbers, inputs, MOST_OF_ROW)
        with code.loop(0, inputs, step=QUAD) as at:
            target = block.from_(at // INPUTS_OF_LANE * (rows * BYTES) + row * BYTES)
            code.builder.store(_codes(numbers(at) * factor), target.value, align=4)
        scales = block.in_lanes(1).from_(inputs // INPUTS_OF_LANE * (rows * BYTES))
        scales.put(scale.arranged(scale, [0]), row)
    code.end()
    return code


def factor_and_scale(
    code: Function, numbers: Callable[[Count], Floats], count: Count, most: float
) -> tuple[Floats, Floats]:
    """What turns `count` numbers into codes of at most `most`, and these into the numbers."""
    with code.sum_loop(0, count, [code.zero()], step=code.lanes) as (at, peaks):
        peaks[0] = peaks[0].or_greater(numbers(at).magnitude())
    peak, greatest = peaks[0].greatest().at_least(LEAST_PEAK), code.zero() + most
    return greatest / peak, peak / greatest


def _codes(numbers: Floats) -> ir.Value:
    """Rounded, of two to the even one: four codes, or their upper bytes and then their lower. A
    lower byte is signed, so the upper one is that of the number and 128."""
    builder = numbers.builder
    whole = whole_numbers(numbers)
    if not compiler.has_dot():
        return builder.trunc(whole, ir.VectorType(_SHORT, QUAD))
    upper = builder.ashr(builder.add(whole, lane_numbers([128] * QUAD)), lane_numbers([8] * QUAD))
    both = builder.shuffle_vector(upper, whole, lane_numbers(list(range(2 * QUAD))))
    return builder.trunc(both, ir.VectorType(CODE, 2 * QUAD))
