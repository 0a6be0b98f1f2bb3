"""Products of codes on x86_64 with AVX-512's dot products of bytes (VPDPBUSD), and on tile
registers (AMX).

Four inputs of an output are adjacent, as on Arm. For each 64 inputs (32 in int4) a row has their
upper bytes, then their lower ones. A block has row after row: codes, the initial values of group
sums, the sums of codes, the scale. Instructions read weights as unsigned bytes, which are code +
128; so a group's sum starts at -128 times the sum of the row's codes. Vectors and tiles add up the
same integers, so they give the same bits:

    vectors   up to FEW_ROWS rows
    tiles     up to 16 rows of int8, if the inputs are a multiple of 64: one instruction multiplies
              16 rows and 16 outputs over 64 inputs. A group's sums of upper and of lower bytes go
              through memory to vectors, where they are joined and scaled
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
    group_count,
    load,
    parts_of_group,
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
from baton.kernels.integers import GROUPS, MOST_OF_ROW, Bits

LANES = 16
ROWS = 16
FEW_ROWS = 4
"""Rows that vectors multiply at once, so that all sums stay in registers."""

LANES_TOGETHER: dict[Bits, int] = {4: LANES_OF_PART, 8: 2 * LANES_OF_PART}
"""Lanes of a row's upper bytes that precede the lower ones."""

_SUMS = (0, 1)
_X, _WEIGHTS = (2, 3), 4
"""Tile registers: sums of upper and of lower bytes, upper and lower bytes of rows, and weights."""

INPUTS_OF_TILE = 64

SUMS_SIZE = 2 * ROWS * LANES
"""How many sums a group has, counting those of upper and of lower bytes."""

_INTEGERS = ir.VectorType(LANE, LANES)
_BYTES = ir.VectorType(CODE, LANES * INPUTS_OF_LANE)

_Size = TypeVar("_Size", int, Count)


def on_tiles(bits: Bits | None) -> bool:
    """True if products of codes of `bits` use tile registers."""
    return bits == 8 and compiler.has_integer_amx()


def block_depth(inputs: _Size, bits: Bits) -> _Size:
    """Lanes per row, rounded up to whole cache lines."""
    return (_scale_place(inputs, bits) + LANES) // LANES * LANES


def _scale_place(inputs: _Size, bits: Bits) -> _Size:
    return _sums_place(inputs, bits) + group_count(inputs, bits) * 2


def _sums_place(inputs: _Size, bits: Bits) -> _Size:
    """The lane behind a row's codes, where its sums begin."""
    together = LANES_TOGETHER[bits]
    return (inputs // INPUTS_OF_LANE + (together - 1)) // together * (2 * together)


def _code_place(lane: Count, bits: Bits) -> Count:
    """The lane of the upper bytes of a row's inputs."""
    return lane + lane // LANES_TOGETHER[bits] * LANES_TOGETHER[bits]


def block_code(module: ir.Module, element: ir.Type, bits: Bits, *, normed: bool) -> Function:
    """Encodes one block of x: (its first row, rows left, inputs, norm, epsilon, block)"""
    types = [POINTER, COUNT, COUNT, POINTER, POINTER, POINTER]
    code = Function(module, f"codes{'_normed' * normed}", types, lanes=LANES)
    x, left, inputs, norm, epsilon, block = code.arguments
    with code.loop(0, left.at_most(ROWS)) as row:
        source = x.of(element).from_(row * inputs)
        numbers = normalized(code, source, inputs, (norm, epsilon) if normed else None)
        factor, scale = factor_and_scale(code, numbers, inputs, MOST_OF_ROW)
        target = block.from_(row * block_depth(inputs, bits))
        _put_one(target, scale, _scale_place(inputs, bits))
        with code.loop(0, group_count(inputs, bits)) as group:
            parts = parts_of_group(inputs, group, bits)
            with code.sum_loop(0, parts, [code.zero()]) as (part, totals):
                first = group * GROUPS[bits] + part * PART
                for start in range(0, PART, LANES):
                    shifted = numbers(first + start) * factor + ROUNDING
                    place = _code_place((first + start) // INPUTS_OF_LANE, bits)
                    _put_codes(target.from_(place), shifted, bits)
                    totals[0] = totals[0] + (shifted - ROUNDING)
            _put_sums_of_codes(target, totals[0].total(), inputs, group, bits)
    code.end()
    return code


def _put_sums_of_codes(
    target: Memory, total: Floats, inputs: Count, group: Count, bits: Bits
) -> None:
    builder, place = target.builder, _sums_place(inputs, bits) + group
    begin = builder.bitcast(whole_numbers(total * -128.0), floats_type(LANES))
    _put_one(target, Floats(builder, begin), place)
    _put_one(target, total, place + group_count(inputs, bits))


def _put_one(target: Memory, numbers: Floats, index: Count) -> None:
    """Stores the first lane."""
    target.in_lanes(1).put(numbers.arranged(numbers, [0]), index)


def _put_codes(target: Memory, shifted: Floats, bits: Bits) -> None:
    """Stores codes, which are the last bits of numbers plus ROUNDING. A lower byte is signed, so
    the upper byte is that of the code + 128."""
    builder = shifted.builder
    whole = builder.bitcast(shifted.value, _INTEGERS)
    upper = builder.lshr(builder.add(whole, lane_numbers([128] * LANES)), lane_numbers([8] * LANES))
    for codes, place in ((upper, 0), (whole, LANES_TOGETHER[bits])):
        stored = builder.trunc(codes, ir.VectorType(CODE, LANES))
        builder.store(stored, target.from_(place).value, align=4)


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
                    code.call(tiles, block, left, *rest)

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
    offsets = scales.from_(groups * width)
    places = list(product(range(rows), range(vectors)))
    with code.sum_loop(0, groups, [code.zero()] * len(places)) as (group, totals):
        weights = panel.from_(group * (code_lanes(GROUPS[bits], bits) * width))
        begins = [_repeated(row, _sums_place(inputs, bits) + group) for row in of_rows]
        codes = [row.from_(group * (2 * GROUPS[bits] // INPUTS_OF_LANE)) for row in of_rows]
        parts = parts_of_group(inputs, group, bits)
        sums = _sums_of_group(code, codes, begins, weights, parts, vectors, bits)
        for at, (row, vector) in enumerate(places):
            place = group * width + vector * LANES
            sum_of_row = of_rows[row].repeated(_sums_place(inputs, bits) + groups + group)
            totals[at] = totals[at] + sums[at] * scales.vector(place)
            totals[at] = totals[at] + sum_of_row * offsets.vector(place)
    for at, (row, vector) in enumerate(places):
        scale = of_rows[row].repeated(_scale_place(inputs, bits))
        added = addend.vector(addend_stride * row + vector * LANES)
        out.put(totals[at] * scale + added, out_stride * row + vector * LANES)
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
    first = [each for begin in begins for each in ([zero] * vectors + [begin] * vectors)]
    # Not unrolled: the compiler would load all weights of a group before the first product.
    with code.sum_loop(0, parts * LANES_OF_PART, first, step=2) as (lane, sums):
        for turn in range(2):
            at, half = divmod(turn, share)
            start = weights.from_(lane // share * (vectors * LANES))
            loaded = [load(start, (at * vectors + v) * LANES, _BYTES) for v in range(vectors)]
            unsigned = [codes_of_half(builder, each, half, bits) for each in loaded]
            for index, (row, byte) in enumerate(product(codes, (0, LANES_TOGETHER[bits]))):
                x = _repeated(row, _code_place(lane, bits) + (turn + byte))
                for vector, weight in enumerate(unsigned, start=index * vectors):
                    sums[vector] = plus_byte_dot(sums[vector], weight, x)
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
    """Up to 16 rows, within `amx.tile_registers`:
    (block, rows, inputs, panel, addend, its stride, out, its stride)"""
    types = [POINTER, COUNT, COUNT, POINTER, POINTER, COUNT, POINTER, COUNT]
    code = Function(module, f"tiles_{result}", types, lanes=LANES)
    block, rows, inputs, panel, addend, addend_stride, out, out_stride = code.arguments
    addend, out, width = addend.of(element), out.of(result), vectors * LANES
    groups, depth = group_count(inputs, 8), block_depth(inputs, 8)
    space = code.builder.alloca(floats_type(LANES), size=2 * SUMS_SIZE // LANES)
    passed, tiles = Memory(code.builder, space, LANES), amx.TileCode(code)
    scales = panel.from_(code_lanes(inputs, 8) * width)
    offsets = scales.from_(groups * width)
    ahead = offsets.from_(groups * width)

    def multiply(group: Count, column: Count, target: Count | int) -> None:
        out = passed.from_(target)
        _put_sums(code, tiles, block, panel.from_(column), width, inputs, group, out)

    with code.loop(0, width, step=LANES) as column:
        multiply(column * 0, column, 0)
        with code.sum_loop(0, groups, [code.zero()] * ROWS) as (group, totals):
            # Tiles multiply the next group while vectors add up this one.
            with code.when((group + 1).compare("<", groups)):
                multiply(group + 1, column, (group + 1) % 2 * SUMS_SIZE)
            _fetch(code, ahead.from_(column), group, inputs, width)
            factor = scales.vector(group * width + column)
            offset = offsets.vector(group * width + column)
            sums = passed.from_(group % 2 * SUMS_SIZE)
            for at in range(ROWS):
                upper, lower = (_integers(sums, place + at * LANES) for place in (0, ROWS * LANES))
                place = depth * at + _sums_place(inputs, 8) + group
                joined = _joined(upper, lower + _repeated(block, place))
                totals[at] = totals[at] + joined * factor + block.repeated(place + groups) * offset
        for at, total in enumerate(totals):
            passed.put(total, at * LANES)
        with code.loop(0, rows) as row:
            scale = block.repeated(row * depth + _scale_place(inputs, 8))
            added = addend.vector(row * addend_stride + column)
            out.put(passed.vector(row * LANES) * scale + added, row * out_stride + column)
    code.end()
    return code


def _fetch(code: Function, panel: Memory, group: Count, inputs: Count, width: int) -> None:
    """Prefetches a group's weights, scales and offsets of the next panel."""
    first = group * (GROUPS[8] // INPUTS_OF_LANE)
    with code.loop(0, parts_of_group(inputs, group, 8)) as part:
        for lane in range(LANES_OF_PART):
            panel.prefetch((first + part * LANES_OF_PART + lane) * width, keep=2)
    for place in (group, group_count(inputs, 8) + group):
        panel.prefetch((inputs // INPUTS_OF_LANE + place) * width, keep=2)


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
    """Stores a group's sums of upper bytes [rows, outputs], then those of lower bytes."""
    depth = block_depth(inputs, 8)

    for sums in _SUMS:
        tiles.zero(sums)
    first = group * GROUPS[8]
    with code.loop(first, (first + GROUPS[8]).at_most(inputs), step=INPUTS_OF_TILE) as start:
        lane = start // INPUTS_OF_LANE
        codes = block.from_(_code_place(lane, 8))
        tiles.load(_WEIGHTS, panel.from_(lane * width), 4 * width)
        for sums, register, byte in zip(_SUMS, _X, (0, LANES_TOGETHER[8]), strict=True):
            tiles.load(register, codes.from_(byte), depth * 4)
            tiles.add_byte_products(sums, register, _WEIGHTS)
    for index, sums in enumerate(_SUMS):
        tiles.store(sums, out.from_(index * (ROWS * LANES)), amx.ROW_BYTES)


def _integers(memory: Memory, index: int) -> Integers:
    loaded = memory.vector(index)
    return Integers(memory.builder, memory.builder.bitcast(loaded.value, _INTEGERS))
