"""Products of codes on x86_64 with AVX-512's dot products of bytes (VPDPBUSD), and on tile
registers (AMX).

Four inputs of an output are adjacent, as on Arm. A row with codes of two bytes has, for each 32
inputs, their upper bytes, then their lower ones. A block has row after row: codes, the initial
values of group sums, the scales, the scaled sums of codes if outputs have offsets. Instructions
read weights of int8 as unsigned bytes, which are code + 128; so a group's sum starts at -128 times
the sum of the row's codes. Vectors and tiles add up the same integers, so they give the same bits:

    vectors   up to FEW_ROWS rows
    tiles     up to 16 rows of int8, if the inputs are a multiple of 64: one instruction multiplies
              16 rows and 16 outputs over 64 inputs. A group's sums go through memory to vectors,
              which scale them
"""

from __future__ import annotations

from itertools import product
from typing import TypeVar

from llvmlite import ir

from baton.kernels.cpu import amx, compiler
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
    ROUNDING,
    Floats,
    Integers,
    declare,
    floats_type,
    lane_numbers,
    whole_numbers,
)
from baton.kernels.integers import SCHEMES, Bits

LANES = 16
ROWS = 16
FEW_ROWS = 5
"""Rows that vectors multiply at once, so that all sums stay in registers."""

_WEIGHTS, _X = 3, 6
"""Tile registers of weights, one for each 16 outputs of a panel, and of rows. Those before them
hold sums."""

INPUTS_OF_TILE = 64

_INTEGERS = ir.VectorType(LANE, LANES)
_BYTES = ir.VectorType(CODE, LANES * INPUTS_OF_LANE)

_Size = TypeVar("_Size", int, Count)


def on_tiles(bits: Bits | None) -> bool:
    """True if products of codes of `bits` use tile registers."""
    return bits == 8 and compiler.has_integer_amx()


def block_depth(inputs: _Size, bits: Bits) -> _Size:
    """Lanes per row, rounded up to whole cache lines."""
    lanes = _scales_place(inputs, bits) + factor_count(inputs, bits)
    return (lanes + (LANES - 1)) // LANES * LANES


def _begins_place(inputs: _Size, bits: Bits) -> _Size:
    """The lane behind a row's codes, where the initial values of sums begin."""
    return inputs // INPUTS_OF_LANE * SCHEMES[bits].row_bytes


def _scales_place(inputs: _Size, bits: Bits) -> _Size:
    return _begins_place(inputs, bits) + group_count(inputs, bits)


def _code_place(lane: Count, bits: Bits) -> Count:
    """The lane of a row's codes, or of their upper bytes."""
    return lane if SCHEMES[bits].row_bytes == 1 else lane + lane // LANES_OF_PART * LANES_OF_PART


def block_code(module: ir.Module, element: ir.Type, bits: Bits, *, normed: bool) -> Function:
    """Encodes one block of x: (its first row, rows left, inputs, norm, epsilon, balance, block)"""
    types = [POINTER, COUNT, COUNT, *[POINTER] * 4]
    code = Function(module, f"codes{'_normed' * normed}", types, lanes=LANES)
    x, left, inputs, norm, epsilon, balance, block = code.arguments
    space, scheme = rotation_space(code, bits), SCHEMES[bits]
    with code.loop(0, left.at_most(ROWS)) as row:
        source = x.of(element).from_(row * inputs)
        normed_numbers = normalized(code, source, inputs, (norm, epsilon) if normed else None)
        target = block.from_(row * block_depth(inputs, bits))
        with code.loop(0, group_count(inputs, bits)) as group:
            numbers = numbers_of_group(code, normed_numbers, balance, group, inputs, bits, space)
            parts = parts_of_group(inputs, group, bits)
            factor, scale = factor_and_scale(code, numbers, parts * PART, scheme.most_of_row)
            with code.sum_loop(0, parts, [code.zero()]) as (part, totals):
                for start in range(0, PART, LANES):
                    shifted = numbers(part * PART + start) * factor + ROUNDING
                    first = group * scheme.group + part * PART + start
                    place = _code_place(first // INPUTS_OF_LANE, bits)
                    _put_codes(target.from_(place), shifted, bits)
                    totals[0] = totals[0] + (shifted - ROUNDING)
            _put_factors(target, totals[0].total(), scale, inputs, group, bits)
    code.end()
    return code


def _put_factors(
    target: Memory, total: Floats, scale: Floats, inputs: Count, group: Count, bits: Bits
) -> None:
    """Stores what a row has once for each group."""
    builder, place = target.builder, _scales_place(inputs, bits) + group
    begin = builder.bitcast(whole_numbers(total * -128.0), floats_type(LANES))
    _put_one(target, Floats(builder, begin), _begins_place(inputs, bits) + group)
    _put_one(target, scale, place)
    if SCHEMES[bits].has_offsets:
        _put_one(target, total * scale, place + group_count(inputs, bits))


def _put_one(target: Memory, numbers: Floats, index: Count) -> None:
    """Stores the first lane."""
    target.in_lanes(1).put(numbers.arranged(numbers, [0]), index)


def _put_codes(target: Memory, shifted: Floats, bits: Bits) -> None:
    """Stores codes, which are the last bits of numbers plus ROUNDING. A lower byte is signed, so
    the upper byte is that of the code + 128."""
    builder = shifted.builder
    whole = builder.bitcast(shifted.value, _INTEGERS)
    stored = [(whole, 0)]
    if SCHEMES[bits].row_bytes == 2:
        rounded = builder.add(whole, lane_numbers([128] * LANES))
        upper = builder.lshr(rounded, lane_numbers([8] * LANES))
        stored = [(upper, 0), (whole, LANES_OF_PART)]
    for codes, place in stored:
        bytes_of_codes = builder.trunc(codes, ir.VectorType(CODE, LANES))
        builder.store(bytes_of_codes, target.from_(place).value, align=4)


def panel_code(
    module: ir.Module, vectors: int, element: ir.Type, result: ir.Type, bits: Bits
) -> Function:
    """Multiplies some rows by one panel: (blocks, rows, inputs, panel, addend, its stride, out, its
    stride)"""
    counts = range(1, FEW_ROWS + 1)
    parts = [_vector_code(module, count, vectors, element, result, bits) for count in counts]
    tiles = _tile_code(module, vectors, element, result) if on_tiles(bits) else None
    types = [POINTER, COUNT, COUNT, POINTER, POINTER, COUNT, POINTER, COUNT]
    code = Function(module, f"panel_{result}", types)
    blocks, rows, inputs, panel, addend, addend_stride, out, out_stride = code.arguments
    addend, out = addend.of(element), out.of(result)

    def multiply(step: int) -> None:
        with code.loop(0, rows, step=step) as row:
            left = (rows - row).at_most(step)
            block = blocks.from_(row * block_depth(inputs, bits))
            target, added = out.from_(row * out_stride), addend.from_(row * addend_stride)
            rest = (inputs, panel, added, addend_stride, target, out_stride)
            for count, part in enumerate(parts, start=1):
                with code.when(left.compare("==", count)):
                    code.call(part, block, *rest)
            if tiles and step > FEW_ROWS:
                with code.when(left.compare(">", FEW_ROWS)):
                    code.call(tiles, row, block, left, *rest)

    if tiles:
        left_of_tiles = inputs % INPUTS_OF_TILE
        with code.when(left_of_tiles.compare("==", 0)):
            multiply(ROWS)
        with code.when(left_of_tiles.compare(">", 0)):
            multiply(FEW_ROWS)
    else:
        multiply(FEW_ROWS)
    code.end()
    return code


def _vector_code(
    module: ir.Module, rows: int, vectors: int, element: ir.Type, result: ir.Type, bits: Bits
) -> Function:
    """Multiplies a few rows with vectors: (block, inputs, panel, addend, its stride, out, its
    stride)"""
    types = [POINTER, COUNT, POINTER, POINTER, COUNT, POINTER, COUNT]
    code = Function(module, f"vectors_{result}_{rows}", types, lanes=LANES)
    block, inputs, panel, addend, addend_stride, out, out_stride = code.arguments
    addend, out, groups, width = (
        addend.of(element),
        out.of(result),
        group_count(inputs, bits),
        vectors * LANES,
    )
    of_rows = [block.from_(block_depth(inputs, bits) * row) for row in range(rows)]
    scales = panel.from_(code_lanes(inputs, bits) * width)
    offsets, scheme = scales.from_(groups * width), SCHEMES[bits]
    lanes_of_group = scheme.group // INPUTS_OF_LANE * scheme.row_bytes
    row_scales = [row.from_(_scales_place(inputs, bits)) for row in of_rows]
    places = list(product(range(rows), range(vectors)))
    with code.sum_loop(0, groups, [code.zero()] * len(places)) as (group, totals):
        weights = panel.from_(group * (code_lanes(scheme.group, bits) * width))
        begins = [_repeated(row, _begins_place(inputs, bits) + group) for row in of_rows]
        codes = [row.from_(group * lanes_of_group) for row in of_rows]
        parts = parts_of_group(inputs, group, bits)
        sums = _sums_of_group(code, codes, begins, weights, parts, vectors, bits)
        for at, (row, vector) in enumerate(places):
            place = group * width + vector * LANES
            scale = row_scales[row].repeated(group)
            totals[at] = totals[at] + sums[at] * scales.vector(place) * scale
            if scheme.has_offsets:
                scaled_sum = row_scales[row].repeated(groups + group)
                totals[at] = totals[at] + scaled_sum * offsets.vector(place)
    for at, (row, vector) in enumerate(places):
        added = addend.vector(addend_stride * row + vector * LANES)
        out.put(totals[at] + added, out_stride * row + vector * LANES)
    code.end()
    return code


def _sums_of_group(
    code: Function,
    codes: list[Memory],
    begins: list[Integers],
    weights: Memory,
    parts: Count | int,
    vectors: int,
    bits: Bits,
) -> list[Floats]:
    """The sums of one group, for each row and vector."""
    builder, share = code.builder, 8 // bits
    zero = Integers(builder, ir.Constant(_INTEGERS, None))
    places_of_bytes = (0, LANES_OF_PART)[: SCHEMES[bits].row_bytes]
    upper = [zero] * (vectors * (len(places_of_bytes) - 1))
    first = [each for begin in begins for each in (*upper, *[begin] * vectors)]
    # Not unrolled: the compiler would load all weights of a group before the first product.
    with code.sum_loop(0, parts * LANES_OF_PART, first, step=2) as (lane, sums):
        for turn in range(2):
            at, half = divmod(turn, share)
            start = weights.from_(lane // share * (vectors * LANES))
            loaded = [load(start, (at * vectors + v) * LANES, _BYTES) for v in range(vectors)]
            unsigned = [codes_of_half(builder, each, half, bits) for each in loaded]
            for index, (row, byte) in enumerate(product(codes, places_of_bytes)):
                x = _repeated(row, _code_place(lane, bits) + (turn + byte))
                for vector, weight in enumerate(unsigned, start=index * vectors):
                    sums[vector] = plus_byte_dot(sums[vector], weight, x)
    if len(places_of_bytes) == 1:
        return [each.as_floats() for each in sums]
    rows = [sums[start : start + 2 * vectors] for start in range(0, len(sums), 2 * vectors)]
    pairs = [pair for row in rows for pair in zip(row[:vectors], row[vectors:], strict=True)]
    return [_joined(upper, lower) for upper, lower in pairs]


def plus_byte_dot(total: Integers, unsigned: ir.Value, signed: Integers) -> Integers:
    """Adds the products of each lane's four bytes."""
    builder = total.builder
    name = "llvm.x86.avx512.vpdpbusd.512"
    dot = declare(builder.module, name, _INTEGERS, [_INTEGERS] * 3)
    weights = builder.bitcast(unsigned, _INTEGERS)
    return Integers(builder, builder.call(dot, [total.value, weights, signed.value]))


def _repeated(memory: Memory, index: Count) -> Integers:
    """One integer, in all lanes."""
    bits = memory.in_lanes(LANES).repeated(index)
    return Integers(memory.builder, memory.builder.bitcast(bits.value, _INTEGERS))


def _joined(upper: Integers, lower: Integers) -> Floats:
    builder = upper.builder
    shifted = builder.shl(upper.value, lane_numbers([8] * LANES))
    return (Integers(builder, shifted) + lower).as_floats()


def _tile_code(module: ir.Module, vectors: int, element: ir.Type, result: ir.Type) -> Function:
    """Up to 16 rows of int8, within `amx.tile_registers`; the first block of rows prefetches the
    next panel: (the first of these rows, block, rows, inputs, panel, addend, its stride, out, its
    stride)"""
    types = [COUNT, POINTER, COUNT, COUNT, POINTER, POINTER, COUNT, POINTER, COUNT]
    code = Function(module, f"tiles_{result}", types, lanes=LANES)
    first_row, block, rows, inputs, panel, addend, addend_stride, out, out_stride = code.arguments
    addend, out, width = addend.of(element), out.of(result), vectors * LANES
    groups, depth, size = group_count(inputs, 8), block_depth(inputs, 8), ROWS * width
    space = code.builder.alloca(floats_type(LANES), size=3 * size // LANES)
    totals, passed = (Memory(code.builder, space, LANES).from_(first * size) for first in (0, 1))
    tiles, columns = amx.TileCode(code), range(0, width, LANES)
    scales = panel.from_(code_lanes(inputs, 8) * width)
    ahead = scales.from_(groups * width)

    def multiply(group: Count) -> None:
        target = passed.from_(group % 2 * size)
        _put_sums(code, tiles, block, panel, width, inputs, group, target)

    def scale(group: Count, *, first: bool = False, last: bool = False) -> None:
        """Adds a group's sums to the totals, which begin with the first group's and leave memory
        with the last one's."""
        with code.when(first_row.compare("==", 0)):
            _fetch(code, ahead, group, inputs, width)
        factors = [scales.vector(group * width + column) for column in columns]
        sums = passed.from_(group % 2 * size)
        with code.loop(0, rows) as row:
            of_row, place = block.from_(row * depth), row * width
            begin = _repeated(of_row, _begins_place(inputs, 8) + group)
            of_group = of_row.repeated(_scales_place(inputs, 8) + group)
            for column, factor in zip(columns, factors, strict=True):
                found = (_integers(sums, place + column) + begin).as_floats()
                total = code.zero() if first else totals.vector(place + column)
                total = total + found * factor * of_group
                if last:
                    added = addend.vector(row * addend_stride + column)
                    out.put(total + added, row * out_stride + column)
                else:
                    totals.put(total, place + column)

    only, end = groups * 0, groups - 1
    multiply(only)
    with code.when(groups.compare("==", 1)):
        scale(only, first=True, last=True)
    with code.when(groups.compare(">", 1)):
        # Tiles multiply the next group while vectors scale this one.
        multiply(only + 1)
        scale(only, first=True)
        with code.loop(1, end) as group:
            multiply(group + 1)
            scale(group)
        scale(end, last=True)
    code.end()
    return code


def _fetch(code: Function, panel: Memory, group: Count, inputs: Count, width: int) -> None:
    """Prefetches a group's weights and scales of the next panel."""
    first = group * (SCHEMES[8].group // INPUTS_OF_LANE)
    with code.loop(0, parts_of_group(inputs, group, 8)) as part:
        for lane in range(LANES_OF_PART):
            for column in range(0, width, LANES):
                panel.prefetch((first + part * LANES_OF_PART + lane) * width + column, keep=2)
    for column in range(0, width, LANES):
        panel.prefetch((inputs // INPUTS_OF_LANE + group) * width + column, keep=2)


def _put_sums(
    code: Function,
    tiles: amx.TileCode,
    block: Memory,
    panel: Memory,
    width: int,
    inputs: Count,
    group: Count,
    out: Memory,
) -> None:
    """Stores a group's sums [rows, outputs]. Registers of sums take turns, since a product waits
    for the one before it in its register."""
    columns, size = list(enumerate(range(0, width, LANES))), SCHEMES[8].group
    for sums, _ in columns:
        tiles.zero(sums)
    first = group * size
    with code.loop(first, (first + size).at_most(inputs), step=INPUTS_OF_TILE) as start:
        lane = start // INPUTS_OF_LANE
        tiles.load(_X, block.from_(lane), block_depth(inputs, 8) * 4)
        for sums, column in columns:
            tiles.load(_WEIGHTS + sums, panel.from_(lane * width + column), 4 * width)
            tiles.add_byte_products(sums, _X, _WEIGHTS + sums)
    for sums, column in columns:
        tiles.store(sums, out.from_(column), 4 * width)


def _integers(memory: Memory, index: Count) -> Integers:
    loaded = memory.vector(index)
    return Integers(memory.builder, memory.builder.bitcast(loaded.value, _INTEGERS))
