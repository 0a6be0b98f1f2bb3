"""Products of int8 codes (kernels/int8.py) for product.py: four inputs are one lane of 32 bits.

After its lanes, a block has its rows' scales, group by group, and a panel its outputs'; both counts
together are the depth. One instruction adds to each lane's sum the products of its four inputs.
A tile has sums of a group and of all groups: half as many rows as one of float32.
"""

from __future__ import annotations

import torch
from llvmlite import ir
from torch import Tensor

from baton.kernels.cpu import compiler
from baton.kernels.cpu.ir_builder import COUNT, POINTER, Count, Function, Memory
from baton.kernels.cpu.norm import inverse_root
from baton.kernels.cpu.vectors import LANE, QUAD, Floats, declare, floats_type, rounded
from baton.kernels.int8 import GROUP, LEAST_PEAK, MOST, Int8Weight

ROWS = 4
"""Of a tile."""

INPUTS_OF_LANE = 4
LANES_OF_GROUP = GROUP // INPUTS_OF_LANE
INPUTS_PER_TURN = QUAD * INPUTS_OF_LANE
"""`inputs` is a multiple of it."""

_LANES = ir.VectorType(LANE, QUAD)
_CODES = ir.VectorType(ir.IntType(8), QUAD * INPUTS_OF_LANE)


def suits(weight: Int8Weight) -> bool:
    """Whether there is compiled code for such a weight on this CPU."""
    outputs, inputs = weight.codes.shape
    return bool(outputs and inputs) and inputs % INPUTS_PER_TURN == 0 and compiler.has_dot()


def packed(weight: Int8Weight, panel: int) -> Tensor:
    """[panels, depth, panel], of 32 bits; the last panel holds the last outputs."""
    outputs, whole = len(weight.codes), len(weight.codes) // panel
    lanes = weight.codes.view(torch.int32)  # [outputs, inputs / 4]
    rows = torch.cat((lanes, weight.scales.view(torch.int32)), dim=1)
    found = rows.new_empty(-(-outputs // panel), rows.shape[1], panel)
    found[:whole] = rows[: whole * panel].view(whole, panel, -1).transpose(1, 2)
    found[-1] = rows[-panel:].t()
    return found


def lanes_of(depth: Count) -> Count:
    """Of a depth of lanes and groups."""
    each = LANES_OF_GROUP + 1
    return depth - (depth + (each - 1)) // each


class Integers(Floats):
    """The 32-bit integers of one vector: four codes each, or a sum."""

    def plus_product(self, one: Floats, other: Floats | float) -> Integers:
        """Adds the products of each lane's four codes."""
        assert isinstance(other, Integers)
        codes = [self.builder.bitcast(each.value, _CODES) for each in (one, other)]
        kinds = [_LANES, _CODES, _CODES]
        dot = declare(self.builder.module, "llvm.aarch64.neon.sdot.v4i32.v16i8", _LANES, kinds)
        return Integers(self.builder, self.builder.call(dot, [self.value, *codes]))

    def as_floats(self) -> Floats:
        return Floats(self.builder, self.builder.sitofp(self.value, floats_type(QUAD)))


def _load(memory: Memory, index: Count | int) -> Integers:
    address = memory.from_(index).value
    return Integers(memory.builder, memory.builder.load(address, typ=_LANES, align=4))


def part_code(
    module: ir.Module, rows: int, vectors: int, element: ir.Type, result: ir.Type
) -> Function:
    """The first rows of a tile: (block, depth, panel, addend, its stride, out, its stride)"""
    types = [POINTER, COUNT, POINTER, POINTER, COUNT, POINTER, COUNT]
    code = Function(module, f"tile_{result}_{rows}", types, lanes=QUAD)
    block, depth, panel, addend, addend_stride, out, out_stride = code.arguments
    addend, out, lanes = addend.of(element), out.of(result), lanes_of(depth)
    width, stride = vectors * QUAD, 1 if rows == 1 else ROWS
    places = [(row, vector) for row in range(rows) for vector in range(vectors)]
    with code.sum_loop(0, depth - lanes, [code.zero()] * len(places)) as (group, totals):
        first = group * LANES_OF_GROUP
        sums = _group_sums(code, block, panel, first, lanes, rows, vectors)
        weights = [panel.vector((lanes + group) * width + QUAD * at) for at in range(vectors)]
        scales = [block.repeated((lanes + group) * stride + row) for row in range(rows)]
        for at, (row, vector) in enumerate(places):
            totals[at] = totals[at] + sums[at].as_floats() * (weights[vector] * scales[row])
    for at, (row, vector) in enumerate(places):
        added = addend.vector(addend_stride * row + vector * QUAD)
        out.put(totals[at] + added, out_stride * row + vector * QUAD)
    code.end()
    return code


def _group_sums(
    code: Function,
    block: Memory,
    panel: Memory,
    start: Count,
    lanes: Count,
    rows: int,
    vectors: int,
) -> list[Integers]:
    """Of the group that begins with the lane `start`, for each row and vector."""
    zero = Integers(code.builder, ir.Constant(_LANES, None))
    sums: list[Floats] = [zero] * (rows * vectors)
    end = (start + LANES_OF_GROUP).at_most(lanes)
    with code.sum_loop(start, end, sums, step=QUAD) as (first, sums):
        for turn in range(QUAD):
            at = (first + turn) * (vectors * QUAD)
            weights = [_load(panel, at + QUAD * vector) for vector in range(vectors)]
            for row, x in enumerate(_inputs_of_rows(block, rows, first, turn)):
                for vector, weight in enumerate(weights):
                    place = row * vectors + vector
                    sums[place] = sums[place].plus_product(weight, x)
    return [Integers(code.builder, each.value) for each in sums]


def _inputs_of_rows(block: Memory, rows: int, first: Count, turn: int) -> list[Integers]:
    """Four inputs of each row, in all lanes."""
    if rows == 1:
        return [_lane(_load(block, first), turn)]
    found = _load(block, (first + turn) * ROWS)
    return [_lane(found, row) for row in range(rows)]


def _lane(lanes: Integers, index: int) -> Integers:
    return Integers(lanes.builder, lanes.lane(index).value)


def block_code(module: ir.Module, element: ir.Type, *, single: bool, normed: bool) -> Function:
    """One block of x: (its first row, rows left, depth, norm, epsilon, block)"""
    name = f"codes{'_of_one' * single}{'_normed' * normed}"
    code = Function(module, name, [POINTER, COUNT, COUNT, POINTER, POINTER, POINTER])
    x, left, depth, norm, epsilon, block = code.arguments
    lanes, stride = lanes_of(depth), 1 if single else ROWS
    inputs = lanes * INPUTS_OF_LANE
    with code.loop(0, 1 if single else left.at_most(ROWS)) as row:
        source = x.of(element).from_(row * inputs)
        size = inverse_root(code, source, epsilon, inputs) if normed else None

        def numbers(lane: Count, source: Memory = source, size: Floats | None = size) -> Floats:
            at = lane * INPUTS_OF_LANE
            found = source.vector(at)
            return found if size is None else rounded(found * size * norm.vector(at), element)

        with code.loop(0, depth - lanes) as group:
            start = group * LANES_OF_GROUP
            end = (start + LANES_OF_GROUP).at_most(lanes)
            with code.sum_loop(start, end, [code.zero()]) as (lane, peaks):
                peaks[0] = peaks[0].or_greater(numbers(lane).magnitude())
            peak, most = peaks[0].greatest().at_least(LEAST_PEAK), code.zero() + MOST
            factor, scale = most / peak, peak / most
            with code.loop(start, end) as lane:
                codes = _four_codes(numbers(lane) * factor)
                code.builder.store(codes, block.from_(lane * stride + row).value, align=4)
            one = Floats(code.builder, _first(scale))
            block.in_lanes(1).put(one, (lanes + group) * stride + row)
    code.end()
    return code


def _first(numbers: Floats) -> ir.Value:
    """A vector of one."""
    return numbers.arranged(numbers, [0]).value


def _four_codes(numbers: Floats) -> ir.Value:
    """Rounded, of two to the even one, as 32 bits."""
    builder = numbers.builder
    kind = ir.VectorType(LANE, QUAD)
    convert = declare(builder.module, "llvm.fptosi.sat.v4i32.v4f32", kind, [floats_type(QUAD)])
    integers = builder.call(convert, [numbers.nearest().value])
    codes = builder.trunc(integers, ir.VectorType(ir.IntType(8), QUAD))
    return builder.bitcast(codes, LANE)
