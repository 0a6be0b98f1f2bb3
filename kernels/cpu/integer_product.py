"""Products of codes (kernels/integers.py) for product.py.

A panel has its weights, then its outputs' scales, group by group, then their offsets. A block has
its rows' codes, then their scales, group by group, then their scaled sums of codes if outputs have
offsets. A group is summed part by part (integer_codes.py). The layout of codes follows from what
one instruction adds to a sum:

    Arm's SDOT           four products of bytes. Four inputs of an output are adjacent; a row with
                         codes of two bytes has the upper bytes of four inputs, then the lower ones.
                         A group's sum is 256 times the sum of the upper bytes plus that of the
                         lower ones
    x86_64's VPDPBUSD    the same with signed bytes of a row and unsigned bytes of weights: code +
                         128, or code + 8 for int4; also on tile registers (integer_rows.py)
    x86_64's VPMADDWD,   two products of 16 bits. Two inputs of an output are adjacent and are
    and other CPUs       widened when loaded; a row has two inputs after two

Two codes of int4 share a byte: the lower half is of some adjacent inputs, the upper half of the
next ones. Either half is moved to the top of its byte, which multiplies it by 16; scales are
divided by 16, which is exact.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from llvmlite import ir
from torch import Tensor

from baton.kernels.cpu import compiler, integer_rows
from baton.kernels.cpu.integer_codes import (
    INPUTS_OF_LANE,
    LANES_OF_PART,
    PART,
    code_lanes,
    codes_of_half,
    factor_and_scale,
    factor_count,
    group_count,
    load,
    numbers_of_group,
    parts_of_group,
    rotation_space,
)
from baton.kernels.cpu.ir_builder import COUNT, POINTER, Count, Function, Memory
from baton.kernels.cpu.norm import normalized
from baton.kernels.cpu.vectors import (
    CODE,
    LANE,
    QUAD,
    Floats,
    Integers,
    declare,
    lane_numbers,
    whole_numbers,
)
from baton.kernels.integers import SCHEMES, Bits, IntegerWeight

_SHORT = ir.IntType(16)
_LANES = ir.VectorType(LANE, QUAD)
_CODES = ir.VectorType(CODE, QUAD * INPUTS_OF_LANE)

_Size = TypeVar("_Size", int, Count)


def tile_sizes(bits: Bits) -> tuple[int, int]:
    """Lanes of a vector and rows of a block: as many as keep all sums in this CPU's registers."""
    if compiler.has_dot():
        return QUAD, QUAD // _row_bytes(bits)
    if compiler.has_byte_dot():
        return integer_rows.LANES, integer_rows.ROWS
    lanes, number = compiler.registers()
    return lanes, 2 if number == compiler.AVX2.number else 4


def panel_depth(inputs: _Size, bits: Bits) -> _Size:
    """Lanes per output, scales and offsets included."""
    return code_lanes(inputs, bits) + factor_count(inputs, bits)


def block_depth(inputs: _Size, bits: Bits) -> _Size:
    """Lanes per row, its scales and sums included."""
    if compiler.has_byte_dot():
        return integer_rows.block_depth(inputs, bits)
    return inputs // INPUTS_OF_LANE * _row_bytes(bits) + factor_count(inputs, bits)


def _row_bytes(bits: Bits) -> int:
    """Bytes that a row's code takes."""
    return SCHEMES[bits].row_bytes if compiler.has_dot() else 2


def suits(weight: IntegerWeight) -> bool:
    """True if there is compiled code for this weight's shape."""
    outputs, inputs = weight.codes.shape
    return bool(outputs and inputs) and inputs % PART == 0


def packed(weight: IntegerWeight, panel: int) -> Tensor:
    """The weight's panels [panels, depth, panel], int32; the last panel has the last outputs."""
    quads = compiler.has_dot() or compiler.has_byte_dot()
    together = torch.int32 if quads else torch.int16
    codes, scales = weight.codes, weight.scales
    if compiler.has_byte_dot():
        codes = codes.bitwise_xor(-128 if weight.bits == 8 else 8)
    if weight.bits == 4:
        codes, scales = _halves_of_bytes(codes, together.itemsize), scales / 16
    parts = (codes.view(together), scales, weight.offsets)
    panels = [in_panels(each, panel) for each in parts]
    lanes = [each.flatten(1).view(torch.int32).view(len(each), -1, panel) for each in panels]
    return torch.cat(lanes, dim=1)


def _halves_of_bytes(codes: Tensor, together: int) -> Tensor:
    """[outputs, inputs] -> [outputs, inputs / 2]"""
    lower, upper = codes.view(len(codes), -1, 2, together).unbind(2)
    return (lower.bitwise_and(15) | upper.bitwise_left_shift(4)).flatten(1)


def in_panels(numbers: Tensor, panel: int) -> Tensor:
    """[outputs, columns] -> [panels, columns, panel]"""
    (outputs, columns), whole = numbers.shape, len(numbers) // panel
    found = numbers.new_empty(-(-outputs // panel), columns, panel)
    found[:whole] = numbers[: whole * panel].view(whole, panel, columns).transpose(1, 2)
    found[-1] = numbers[-panel:].t()
    return found


def part_code(
    module: ir.Module, rows: int, vectors: int, element: ir.Type, result: ir.Type, bits: Bits
) -> Function:
    """Multiplies the first `rows` of a tile: (block, inputs, panel, addend, its stride, out, its
    stride)"""
    (size, rows_of_block), row_bytes = tile_sizes(bits), _row_bytes(bits)
    types = [POINTER, COUNT, POINTER, POINTER, COUNT, POINTER, COUNT]
    code = Function(module, f"tile_{result}_{rows}", types, lanes=size)
    block, inputs, panel, addend, addend_stride, out, out_stride = code.arguments
    addend, out = addend.of(element), out.of(result)
    lanes, width = inputs // INPUTS_OF_LANE, vectors * size
    scales = panel.from_(code_lanes(inputs, bits) * width)
    groups, scheme = group_count(inputs, bits), SCHEMES[bits]
    offsets = scales.from_(groups * width)
    row_scales = block.from_(lanes * (rows_of_block * row_bytes))
    row_sums = row_scales.from_(groups * rows_of_block)
    places = [(row, vector) for row in range(rows) for vector in range(vectors)]
    group_sums = _sums_of_bytes if compiler.has_dot() else _sums_of_pairs
    with code.sum_loop(0, groups, [code.zero()] * len(places)) as (group, totals):
        first = group * (scheme.group // INPUTS_OF_LANE)
        codes = block.from_(first * (rows_of_block * row_bytes))
        weights = panel.from_(group * (code_lanes(scheme.group, bits) * width))
        parts = parts_of_group(inputs, group, bits)
        sums = group_sums(code, codes, weights, parts, rows, vectors, bits)
        factors = [scales.vector(group * width + size * vector) for vector in range(vectors)]
        for at, (row, vector) in enumerate(places):
            place = group * rows_of_block + row
            totals[at] = totals[at] + sums[at] * factors[vector] * row_scales.repeated(place)
            if scheme.has_offsets:
                offset = offsets.vector(group * width + size * vector)
                totals[at] = totals[at] + row_sums.repeated(place) * offset
    for at, (row, vector) in enumerate(places):
        added = addend.vector(addend_stride * row + vector * size)
        out.put(totals[at] + added, out_stride * row + vector * size)
    code.end()
    return code


def _sums_of_bytes(
    code: Function,
    block: Memory,
    panel: Memory,
    parts: Count | int,
    rows: int,
    vectors: int,
    bits: Bits,
) -> list[Floats]:
    """The sums of one group, for each row and vector, with dot products of bytes."""
    builder, row_bytes = code.builder, _row_bytes(bits)
    zeros = [Integers(builder, ir.Constant(_LANES, None))] * (rows * row_bytes * vectors)
    with code.sum_loop(0, parts, zeros) as (part, sums):
        codes = block.from_(part * (LANES_OF_PART * QUAD))
        weights = panel.from_(part * (code_lanes(PART, bits) * vectors * QUAD))
        for lane in range(LANES_OF_PART):
            at, half = divmod(lane, 8 // bits)
            loaded = [
                load(weights, (at * vectors + each) * QUAD, _CODES) for each in range(vectors)
            ]
            halves = [codes_of_half(builder, each, half, bits) for each in loaded]
            inputs = load(codes, lane * QUAD, _LANES)
            for byte in range(rows * row_bytes):
                x = builder.shuffle_vector(inputs, inputs, lane_numbers([byte] * QUAD))
                for at, weight in enumerate(halves, start=byte * vectors):
                    sums[at] = _plus_dot(sums[at], weight, x)
    if row_bytes == 1:
        return [each.as_floats() for each in sums]
    by_byte = [sums[start : start + vectors] for start in range(0, len(sums), vectors)]
    joined = [
        builder.add(builder.shl(upper.value, lane_numbers([8] * QUAD)), lower.value)
        for pair in zip(by_byte[::2], by_byte[1::2], strict=True)
        for upper, lower in zip(*pair, strict=True)
    ]
    return [Integers(builder, each).as_floats() for each in joined]


def _plus_dot(total: Integers, one: ir.Value, other: ir.Value) -> Integers:
    """Adds the products of each lane's four codes."""
    builder, kinds = total.builder, [_LANES, _CODES, _CODES]
    dot = declare(builder.module, "llvm.aarch64.neon.sdot.v4i32.v16i8", _LANES, kinds)
    return Integers(builder, builder.call(dot, [total.value, one, builder.bitcast(other, _CODES)]))


def _sums_of_pairs(
    code: Function,
    block: Memory,
    panel: Memory,
    parts: Count | int,
    rows: int,
    vectors: int,
    bits: Bits,
) -> list[Floats]:
    """The same as _sums_of_bytes, with products of 16 bits."""
    builder, (size, rows_of_block) = code.builder, tile_sizes(bits)
    codes, pairs = (ir.VectorType(each, 2 * size) for each in (CODE, _SHORT))
    pairs_of_lane = INPUTS_OF_LANE // 2
    zero = Integers(builder, ir.Constant(ir.VectorType(LANE, size), None))
    # Not unrolled: the compiler would widen all weights of a group before the first product.
    with code.sum_loop(0, parts * LANES_OF_PART, [zero] * (rows * vectors)) as (lane, sums):
        x = block.from_(lane * (rows_of_block * pairs_of_lane))
        weights = panel.from_(lane * (vectors * size * bits // 8))
        for pair in range(pairs_of_lane):
            at, half = divmod(pair, 8 // bits)
            starts = [(at * vectors + vector) * size // 2 for vector in range(vectors)]
            loaded = [load(weights, start, codes) for start in starts]
            wide = [
                builder.sext(codes_of_half(builder, each, half, bits), pairs) for each in loaded
            ]
            for row in range(rows):
                both = builder.bitcast(x.repeated(row * pairs_of_lane + pair).value, pairs)
                for at, weight in enumerate(wide, start=row * vectors):
                    sums[at] = sums[at].plus_pairs(weight, both)
    return [each.as_floats() for each in sums]


def block_code(
    module: ir.Module, element: ir.Type, bits: Bits, *, single: bool, normed: bool
) -> Function:
    """Encodes one block of x: (its first row, rows left, inputs, norm, epsilon, balance, block)"""
    name = f"codes{'_of_one' * single}{'_normed' * normed}"
    code = Function(module, name, [POINTER, COUNT, COUNT, *[POINTER] * 4])
    x, left, inputs, norm, epsilon, balance, block = code.arguments
    (_, rows), row_bytes, scheme = tile_sizes(bits), _row_bytes(bits), SCHEMES[bits]
    space, groups = rotation_space(code, bits), group_count(inputs, bits)
    factors = block.in_lanes(1).from_(inputs // INPUTS_OF_LANE * (rows * row_bytes))
    with code.loop(0, 1 if single else left.at_most(rows)) as row:
        source = x.of(element).from_(row * inputs)
        normed_numbers = normalized(code, source, inputs, (norm, epsilon) if normed else None)
        with code.loop(0, groups) as group:
            numbers = numbers_of_group(code, normed_numbers, balance, group, inputs, bits, space)
            parts = parts_of_group(inputs, group, bits)
            factor, scale = factor_and_scale(code, numbers, parts * PART, scheme.most_of_row)
            factors.put(scale.arranged(scale, [0]), group * rows + row)
            with code.sum_loop(0, parts, [code.zero()]) as (part, totals):
                for start in range(0, PART, QUAD):
                    scaled = numbers(part * PART + start) * factor
                    at = (group * scheme.group + part * PART + start) // INPUTS_OF_LANE
                    target = block.from_(at * (rows * row_bytes) + row * row_bytes)
                    code.builder.store(_codes(scaled, bits), target.value, align=4)
                    totals[0] = totals[0] + scaled.nearest()
            if scheme.has_offsets:
                summed = totals[0].total() * scale
                factors.put(summed.arranged(summed, [0]), (groups + group) * rows + row)
    code.end()
    return code


def _codes(numbers: Floats, bits: Bits) -> ir.Value:
    """Rounds to nearest even and returns four codes; of two bytes for dot products the upper bytes,
    then the lower ones. A lower byte is signed, so the upper byte is that of the code + 128."""
    builder = numbers.builder
    whole = whole_numbers(numbers)
    if not compiler.has_dot():
        return builder.trunc(whole, ir.VectorType(_SHORT, QUAD))
    if _row_bytes(bits) == 1:
        return builder.trunc(whole, ir.VectorType(CODE, QUAD))
    upper = builder.ashr(builder.add(whole, lane_numbers([128] * QUAD)), lane_numbers([8] * QUAD))
    both = builder.shuffle_vector(upper, whole, lane_numbers(list(range(2 * QUAD))))
    return builder.trunc(both, ir.VectorType(CODE, 2 * QUAD))
