"""Products of codes (kernels/int8.py) for product.py: four inputs are one lane of 32 bits, and the
products of each lane's four inputs are added to its sum, by one instruction where the CPU has it
(Arm's SDOT).

A panel has its weights, lane by lane, and then its outputs' scales, group by group. A block has two
rows: of each lane the upper and the lower bytes of one row and of the other; then their scales. The
sum of a group is 256 times that of the upper bytes and that of the lower ones.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from llvmlite import ir
from torch import Tensor

from baton.kernels.cpu import compiler
from baton.kernels.cpu.ir_builder import COUNT, POINTER, Count, Function, Memory
from baton.kernels.cpu.norm import inverse_root
from baton.kernels.cpu.vectors import (
    LANE,
    QUAD,
    Floats,
    declare,
    floats_type,
    lane_numbers,
    rounded,
)
from baton.kernels.int8 import GROUP, LEAST_PEAK, MOST_OF_ROW, Int8Weight

ROWS = 2
"""Of a tile."""

INPUTS_OF_LANE = 4
LANES_OF_GROUP = GROUP // INPUTS_OF_LANE
BYTES = 2
"""Of a row's code."""

_LANES = ir.VectorType(LANE, QUAD)
_CODES = ir.VectorType(ir.IntType(8), QUAD * INPUTS_OF_LANE)

_Size = TypeVar("_Size", int, Count)


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
    outputs, whole = len(weight.codes), len(weight.codes) // panel
    lanes = weight.codes.view(torch.int32)  # [outputs, inputs / 4]
    rows = torch.cat((lanes, weight.scales.view(torch.int32)), dim=1)
    found = rows.new_empty(-(-outputs // panel), rows.shape[1], panel)
    found[:whole] = rows[: whole * panel].view(whole, panel, -1).transpose(1, 2)
    found[-1] = rows[-panel:].t()
    return found


def part_code(
    module: ir.Module, rows: int, vectors: int, element: ir.Type, result: ir.Type
) -> Function:
    """The first rows of a tile: (block, inputs, panel, addend, its stride, out, its stride)"""
    types = [POINTER, COUNT, POINTER, POINTER, COUNT, POINTER, COUNT]
    code = Function(module, f"tile_{result}_{rows}", types, lanes=QUAD)
    block, inputs, panel, addend, addend_stride, out, out_stride = code.arguments
    addend, out = addend.of(element), out.of(result)
    lanes, width = inputs // INPUTS_OF_LANE, vectors * QUAD
    scales = panel.from_(lanes * width)
    places = [(row, vector) for row in range(rows) for vector in range(vectors)]
    with code.sum_loop(0, inputs // GROUP, [code.zero()] * len(places)) as (group, totals):
        first = group * LANES_OF_GROUP
        sums = _group_sums(block.from_(first * QUAD), panel.from_(first * width), rows, vectors)
        factors = [scales.vector(group * width + QUAD * vector) for vector in range(vectors)]
        for at, (_, vector) in enumerate(places):
            totals[at] = totals[at] + sums[at] * factors[vector]
    for at, (row, vector) in enumerate(places):
        added = addend.vector(addend_stride * row + vector * QUAD)
        scale = block.repeated(lanes * QUAD + row)
        out.put(totals[at] * scale + added, out_stride * row + vector * QUAD)
    code.end()
    return code


def _group_sums(block: Memory, panel: Memory, rows: int, vectors: int) -> list[Floats]:
    """Of the group that begins there, for each row and vector."""
    builder = block.builder
    sums = [[ir.Constant(_LANES, None)] * vectors for _ in range(rows * BYTES)]
    for lane in range(LANES_OF_GROUP):
        weights = [_load(panel, (lane * vectors + vector) * QUAD) for vector in range(vectors)]
        inputs = _load(block, lane * QUAD)
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
    return [Floats(builder, builder.sitofp(each, floats_type(QUAD))) for each in joined]


def _load(memory: Memory, index: int) -> ir.Value:
    return memory.builder.load(memory.from_(index).value, typ=_LANES, align=4)


def _plus_dot(builder: ir.IRBuilder, total: ir.Value, one: ir.Value, other: ir.Value) -> ir.Value:
    """Adds the products of each lane's four codes."""
    codes = [builder.bitcast(each, _CODES) for each in (one, other)]
    if compiler.has_dot():
        kinds = [_LANES, _CODES, _CODES]
        dot = declare(builder.module, "llvm.aarch64.neon.sdot.v4i32.v16i8", _LANES, kinds)
        return builder.call(dot, [total, *codes])
    whole = ir.VectorType(LANE, _CODES.count)
    products = builder.mul(*(builder.sext(each, whole) for each in codes))
    # On x86_64 the products and their first sums are one instruction, VPMADDWD.
    return builder.add(total, _pair_sums(builder, _pair_sums(builder, products)))


def _pair_sums(builder: ir.IRBuilder, numbers: ir.Value) -> ir.Value:
    count = numbers.type.count
    places = (lane_numbers(list(range(first, count, 2))) for first in (0, 1))
    return builder.add(*(builder.shuffle_vector(numbers, numbers, each) for each in places))


def block_code(module: ir.Module, element: ir.Type, *, single: bool, normed: bool) -> Function:
    """One block of x: (its first row, rows left, inputs, norm, epsilon, block)"""
    name = f"codes{'_of_one' * single}{'_normed' * normed}"
    code = Function(module, name, [POINTER, COUNT, COUNT, POINTER, POINTER, POINTER])
    x, left, inputs, norm, epsilon, block = code.arguments
    with code.loop(0, 1 if single else left.at_most(ROWS)) as row:
        source = x.of(element).from_(row * inputs)
        size = inverse_root(code, source, epsilon, inputs) if normed else None

        def numbers(at: Count, source: Memory = source, size: Floats | None = size) -> Floats:
            found = source.vector(at)
            return found if size is None else rounded(found * size * norm.vector(at), element)

        with code.sum_loop(0, inputs, [code.zero()], step=QUAD) as (at, peaks):
            peaks[0] = peaks[0].or_greater(numbers(at).magnitude())
        peak, most = peaks[0].greatest().at_least(LEAST_PEAK), code.zero() + MOST_OF_ROW
        factor, scale = most / peak, peak / most
        with code.loop(0, inputs, step=QUAD) as at:
            target = block.from_(at + row * BYTES)  # a lane of 4 inputs is 4 numbers of a block
            for index, codes in enumerate(_bytes(numbers(at) * factor)):
                code.builder.store(codes, target.from_(index).value, align=4)
        block.in_lanes(1).put(scale.arranged(scale, [0]), inputs + row)
    code.end()
    return code


def _bytes(numbers: Floats) -> list[ir.Value]:
    """Rounded, of two to the even one: the upper bytes and the lower, four of each as 32 bits. A
    lower byte is signed, so the upper one is that of the number and 128."""
    builder = numbers.builder
    convert = declare(builder.module, "llvm.fptosi.sat.v4i32.v4f32", _LANES, [floats_type(QUAD)])
    whole = builder.call(convert, [numbers.nearest().value])
    upper = builder.ashr(builder.add(whole, lane_numbers([128] * QUAD)), lane_numbers([8] * QUAD))
    codes = [builder.trunc(each, ir.VectorType(ir.IntType(8), QUAD)) for each in (upper, whole)]
    return [builder.bitcast(each, LANE) for each in codes]
