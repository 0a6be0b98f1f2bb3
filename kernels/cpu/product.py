"""Compiled code for x [rows, inputs] @ weight [outputs, inputs].T in float32 or bfloat16.

Weights are in panels of some outputs, laid out input by input, so that a product streams them from
memory once and in order. Rows form blocks, also laid out input by input; a single row is a block as
it is. A tile is a block times a panel: all its sums stay in registers.

    Arm       32 registers of 4:   8 rows * 3 vectors of sums + 3 of weights + 2 of x
    AVX-512   32 registers of 16:  8 rows * 3 vectors of sums + 3 of weights + 1 of x
    AVX2      16 registers of 8:   4 rows * 3 vectors of sums + 3 of weights + 1 of x

Each sum runs over the inputs in order, in float32, whatever the tile: a row's result does not
depend on the other rows, nor on the number of threads. Weights in bfloat16 are widened when they
are loaded; weights kept as codes are computed, code * scale + offset. With x in bfloat16,
normalized rows and all results except logits are rounded to it.

The last panel ends with the last output and may overlap the one before it; both then write
the same numbers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from llvmlite import ir

from baton.kernels.cpu import amx, compiler, integer_product, integer_rows
from baton.kernels.cpu.compiler import AVX512, NEON, Library
from baton.kernels.cpu.exact_panels import decode_code, grid_of_group
from baton.kernels.cpu.gates import GATES, gate_code
from baton.kernels.cpu.ir_builder import (
    COUNT,
    LINE,
    POINTER,
    Arguments,
    Count,
    Function,
    Memory,
)
from baton.kernels.cpu.norm import normalized
from baton.kernels.cpu.tile import VECTORS, Tile
from baton.kernels.cpu.vectors import (
    CODE,
    FLOAT,
    QUAD,
    Floats,
    floats_type,
    rounded,
    size_of,
    transposed,
)

INPUTS_PER_TURN = QUAD
"""Inputs per iteration of a tile's loop; `inputs` is a multiple of it."""

OUTPUTS_PER_ITEM = 96
"""Most outputs that a thread claims at once: fewer interrupt the stream from memory, more leave a
thread idle at the end."""

GATED_ROWS = 128
"""Rows whose gates and ups stay in a cache until they are multiplied; a multiple of any block."""

DECODED_BLOCKS = 2
"""With more blocks of rows, a panel of codes is decoded once for all of them."""

MOST_DECODED = 4096
"""Inputs of the largest panel that is decoded, on the stack."""

ROWS_PER_ITEM = 64
"""Fewest rows that a thread claims at once if there are too few outputs for all threads."""

INPUTS_AHEAD = 24
"""How many inputs ahead AVX-512 prefetches a panel into the L1 cache. The hardware prefetches too
late while a tile multiplies, from memory and from L2."""


FETCHED_PER_INPUT = 16
"""Bytes of the panel that follows which a block prefetches into L2 for each input: four blocks of
rows prefetch it all, while they multiply a decoded panel and memory would be idle."""

INPUTS_OF_FETCHING = 2
"""Inputs per iteration of a tile's loop that does so. With INPUTS_PER_TURN, LLVM keeps some sums on
the stack."""


class ProductArguments(ctypes.Structure):
    """Arguments of the compiled functions."""

    _fields_ = (
        ("x", ctypes.c_void_p),  # [rows, inputs]
        ("rows", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("norm", ctypes.c_void_p),  # float32 [inputs], the weight of an RMS norm of x; or null
        ("epsilon", ctypes.c_float),  # the norm's
        ("balance", ctypes.c_void_p),  # float32 [inputs], powers of two that multiply x; or null
        ("blocks", ctypes.c_void_p),  # float32 [rows up to a multiple of a block, inputs], scratch
        ("panels", ctypes.c_void_p),  # [panels, inputs, panel]
        ("outputs", ctypes.c_int64),
        ("addend", ctypes.c_void_p),  # added to the product: one row for all, or one per row
        ("addend_stride", ctypes.c_int64),  # 0, or outputs
        ("out", ctypes.c_void_p),  # [rows, outputs]
        ("up_panels", ctypes.c_void_p),  # gated products only: as panels and addend
        ("up_addend", ctypes.c_void_p),
        ("panels_per_item", ctypes.c_int64),
        ("rows_per_item", ctypes.c_int64),  # a multiple of a block
        ("panels_between", ctypes.c_int64),  # of other threads, between two items of a thread
        ("blocks_claimed", ctypes.c_int64),  # 0 at first
        ("items_claimed", ctypes.c_int64),  # 0 at first
    )


@functools.cache
def library(tile: Tile) -> Library:
    """Compiles the functions `lay_out` (x as blocks), to be followed by `product` (x @ weight.T +
    addend), `unrounded` (the same in float32) or one named after an activation (activation(product)
    * the product with up_panels)."""
    return Library(_module, tile)


def _module(tile: Tile) -> ir.Module:
    module = ir.Module("products")
    _lay_out(module, tile)
    panel = (_panel_of_codes if tile.group else _panel)(module, tile, tile.element)
    _product(module, tile, panel, "product", tile.element)
    # Logits, gates and ups are not rounded.
    unrounded = panel if tile.element == FLOAT else _panel(module, tile, FLOAT)
    _product(module, tile, unrounded, "unrounded", FLOAT)
    for name in GATES:
        gate = gate_code(module, name, tile.panel, tile.lanes, tile.element)
        _gated_product(module, tile, unrounded, gate, name)
    return module


def _panel_of_codes(module: ir.Module, tile: Tile, result: ir.Type) -> Function:
    """As _panel, with the address of the panel that follows. Many rows multiply a decoded copy of
    the panel, and on AVX-512 prefetch the one that follows; few rows decode as they go."""
    few = _panel(module, tile, result)
    following = tile if tile.lanes == AVX512.lanes else None
    many = _panel(module, replace(tile, group=0), result, "decoded_", following)
    decode = decode_code(module, tile)
    types = [POINTER, COUNT, COUNT, POINTER, POINTER, COUNT, POINTER, COUNT, POINTER]
    code = Function(module, f"panel_of_codes_{result}", types, lanes=tile.lanes)
    blocks, rows, inputs, panel, *rest, after = code.arguments
    builder = code.builder
    fits = builder.and_(
        rows.compare(">", DECODED_BLOCKS * tile.rows), inputs.compare("<=", MOST_DECODED)
    )
    with code.when(fits):
        size = (inputs * (tile.panel // tile.lanes)).value
        space = builder.alloca(floats_type(tile.lanes), size=size)
        copy = Memory(builder, space, tile.lanes)
        code.call(decode, panel, inputs, copy)
        code.call(many, blocks, rows, inputs, copy, *rest, *([after] if following else []))
    with code.when(builder.not_(fits)):
        code.call(few, blocks, rows, inputs, panel, *rest)
    code.end()
    return code


def _panel(
    module: ir.Module, tile: Tile, result: ir.Type, name: str = "", following: Tile | None = None
) -> Function:
    """Multiplies some rows by one panel: (blocks, rows, inputs, panel, addend, its stride, out, its
    stride). If there is a tile of another panel, prefetches that panel: (…, its address)"""
    if tile.amx:
        return amx.panel_code(module, result)
    if tile.bits and compiler.has_byte_dot():
        kind = (VECTORS, tile.element, result, tile.bits)
        return integer_rows.panel_code(module, *kind)
    fetches, every = following is not None, range(1, tile.rows + 1)
    parts = [_part(module, tile, rows, result, name, fetches) for rows in every]
    types = [POINTER, COUNT, COUNT, POINTER, POINTER, COUNT, POINTER, COUNT]
    code = Function(module, f"{name}panel_{result}", types + [POINTER] * fetches)
    blocks, rows, inputs, panel, addend, addend_stride, out, out_stride, *ahead = code.arguments
    addend, out = addend.of(tile.element), out.of(result)
    with code.loop(0, rows, step=tile.rows) as row:
        left = (rows - row).at_most(tile.rows)
        block = blocks.from_(row * tile.block_depth(inputs))
        target, added = out.from_(row * out_stride), addend.from_(row * addend_stride)
        if following:  # each block prefetches a share of it
            share = inputs * FETCHED_PER_INPUT
            last = following.panel_depth(inputs) * following.panel - share
            ahead = [code.arguments[-1].of(CODE).from_((row // tile.rows * share).at_most(last))]
        for count, part in enumerate(parts, start=1):
            with code.when(left.compare("==", count)):
                at = (block, inputs, panel, added, addend_stride, target, out_stride)
                code.call(part, *at, *ahead)
    code.end()
    return code


def _part(
    module: ir.Module, tile: Tile, rows: int, result: ir.Type, name: str, fetches: bool
) -> Function:
    """Multiplies the first `rows` of a tile: (block, inputs, panel, addend, its stride, out, its
    stride). If it fetches, prefetches a share of another panel: (…, the share's address)"""
    if tile.bits:
        return integer_product.part_code(module, rows, VECTORS, tile.element, result, tile.bits)
    types = [POINTER, COUNT, POINTER, POINTER, COUNT, POINTER, COUNT, *[POINTER] * fetches]
    code = Function(module, f"{name}tile_{result}_{rows}", types, lanes=tile.lanes)
    block, inputs, panel, addend, addend_stride, out, out_stride, *ahead = code.arguments
    panel, addend, out = panel.of(tile.weight_element), addend.of(tile.element), out.of(result)
    zeros = [code.zero()] * (rows * VECTORS)
    turns = INPUTS_OF_FETCHING if fetches else INPUTS_PER_TURN
    with code.sum_loop(0, inputs, zeros, step=turns) as (first, sums):
        grid = grid_of_group(panel, tile, first, inputs) if tile.group else []
        for turn in range(turns):
            start = (first + turn) * tile.panel
            if tile.lanes == AVX512.lanes:
                _fetch_ahead(panel, tile, start, turn)
            weights = [panel.vector(start + tile.lanes * vector) for vector in range(VECTORS)]
            for vector, (scale, offset) in enumerate(grid):
                weights[vector] = offset.plus_product(weights[vector], scale)
            for row, x in enumerate(_inputs_of_rows(block, tile, rows, first, turn)):
                for vector, weight in enumerate(weights):
                    at = row * VECTORS + vector
                    sums[at] = sums[at].plus_product(weight, x)
        for share in ahead:
            share.of(CODE).prefetch(first * FETCHED_PER_INPUT, keep=2)
    for row in range(rows):
        for vector in range(VECTORS):
            column = vector * tile.lanes
            added = addend.vector(addend_stride * row + column)
            out.put(sums[row * VECTORS + vector] + added, out_stride * row + column)
    code.end()
    return code


def _fetch_ahead(panel: Memory, tile: Tile, start: Count, turn: int) -> None:
    """Prefetches one input's share of the cache lines of INPUTS_PER_TURN."""
    per_line = LINE // size_of(tile.weight_element)
    first, end = (-(-each * tile.panel // per_line) for each in (turn, turn + 1))
    ahead = INPUTS_AHEAD * tile.panel - turn * tile.panel
    for line in range(first, end):
        panel.prefetch(start + (ahead + line * per_line))


def _inputs_of_rows(block: Memory, tile: Tile, rows: int, first: Count, turn: int) -> list[Floats]:
    """One input of each row, in all lanes: on Arm an operand may be any lane of a register, on
    x86_64 a number in memory."""
    if tile.lanes > NEON.lanes:
        at = [first + turn] if rows == 1 else [(first + turn) * tile.rows + r for r in range(rows)]
        return [block.repeated(index) for index in at]
    if rows == 1:
        return [block.vector(first).lane(turn)]
    found = [block.vector((first + turn) * tile.rows + start) for start in range(0, rows, QUAD)]
    return [found[row // QUAD].lane(row % QUAD) for row in range(rows)]


def _lay_out(module: ir.Module, tile: Tile) -> None:
    """Lays out x as blocks, normalized if a norm is given."""
    code = Function(module, "lay_out", [POINTER], exported=True)
    given = Arguments(code.arguments[0], ProductArguments)
    make = _rows if tile.amx else _block
    makers = {
        (single, normed): make(module, tile, single=single, normed=normed)
        for single in ((True,) if tile.few_rows == tile.rows else (True, False))
        for normed in (True, False)
    }
    x, norm, balance = (given.memory(name) for name in ("x", "norm", "balance"))
    blocks, epsilon = given.memory("blocks", tile.block_element), given.field("epsilon")
    rows, inputs = given.count("rows"), given.count("inputs")
    blocks_of_rows = (rows + tile.rows - 1) // tile.rows
    with code.claim(given.field("blocks_claimed"), blocks_of_rows) as index:
        row = index * tile.rows
        left = (rows - row).at_most(tile.rows)
        block = blocks.from_(row * tile.block_depth(inputs))
        first = x.of(tile.element).from_(row * inputs)
        at = (first, left, inputs, norm, epsilon, balance, block)
        for (single, normed), maker in makers.items():
            is_single = left.compare("<=" if single else ">", tile.few_rows)
            is_normed = norm.is_null("!=" if normed else "==")
            with code.when(code.builder.and_(is_single, is_normed)):
                code.call(maker, *at)
    code.end()


def _block(module: ir.Module, tile: Tile, *, single: bool, normed: bool) -> Function:
    """Lays out one block of x: (its first row, rows left, inputs, norm, epsilon, balance,
    block)"""
    if tile.bits:
        kind = (tile.element, tile.bits)
        if compiler.has_byte_dot():
            return integer_rows.block_code(module, *kind, normed=normed)
        return integer_product.block_code(module, *kind, single=single, normed=normed)
    name = f"block{'_of_one' * single}{'_normed' * normed}"
    code = Function(module, name, [POINTER, COUNT, COUNT, *[POINTER] * 4])
    x, left, inputs, norm, epsilon, _, block = code.arguments
    x = x.of(tile.element)
    # Lanes beyond the last row repeat it; no tile reads them.
    count = 1 if single else tile.rows
    rows = [x.from_((left - 1).at_most(row) * inputs) for row in range(count)]
    scales = _scales(code, rows, inputs, epsilon) if normed else []
    with code.loop(0, inputs, step=QUAD) as first:
        numbers = [row.vector(first) for row in rows]
        if normed:
            weight = norm.vector(first)
            scaled = [each * scale * weight for each, scale in zip(numbers, scales, strict=True)]
            numbers = [rounded(each, tile.element) for each in scaled]
        if single:
            block.put(numbers[0], first)
        else:
            for start in range(0, tile.rows, QUAD):
                for turn, column in enumerate(transposed(numbers[start : start + QUAD])):
                    block.put(column, (first + turn) * tile.rows + start)
    code.end()
    return code


def _rows(module: ir.Module, tile: Tile, *, single: bool, normed: bool) -> Function:
    """As _block, in the layout that tile registers load."""
    name = f"rows{'_of_one' * single}{'_normed' * normed}"
    types = [POINTER, COUNT, COUNT, *[POINTER] * 4]
    code = Function(module, name, types, lanes=tile.lanes)
    x, left, inputs, norm, epsilon, _, block = code.arguments
    x, block = x.of(tile.element), block.of(tile.element)
    with code.loop(0, 1 if single else left.at_most(tile.rows)) as row:
        source, target = x.from_(row * inputs), block.from_(row * amx.INPUTS)
        numbers = normalized(code, source, inputs, (norm, epsilon) if normed else None)
        with code.loop(0, inputs, step=amx.INPUTS) as first:
            for start in range(0, amx.INPUTS, tile.lanes):
                target.put(numbers(first + start), first * tile.rows + start)
    code.end()
    return code


def _scales(code: Function, rows: list[Memory], inputs: Count, epsilon: Memory) -> list[Floats]:
    """1 / sqrt(mean of squares + epsilon) of each row."""
    with code.sum_loop(0, inputs, [code.zero()] * len(rows), step=QUAD) as (first, squares):
        for index, row in enumerate(rows):
            numbers = row.vector(first)
            squares[index] = squares[index].plus_product(numbers, numbers)
    size, one = inputs.as_floats(QUAD), code.zero() + 1.0
    return [one / (each.total() / size + epsilon.repeated()).root() for each in squares]


def _product(module: ir.Module, tile: Tile, panel: Function, name: str, result: ir.Type) -> None:
    code = Function(module, name, [POINTER], exported=True)
    given = Arguments(code.arguments[0], ProductArguments)
    with _panels(code, given, tile) as at:
        outputs = given.count("outputs")
        out = given.memory("out", result).from_(at.row * outputs + at.column)
        _call_panel(code, given, tile, panel, at, "", ("", at.following), out, outputs)
    code.end()


def _gated_product(
    module: ir.Module, tile: Tile, panel: Function, gate: Function, name: str
) -> None:
    code = Function(module, name, [POINTER], exported=True)
    given = Arguments(code.arguments[0], ProductArguments)
    size = GATED_ROWS * tile.panel
    space = code.builder.alloca(floats_type(tile.lanes), size=2 * size // tile.lanes)
    both = [Memory(code.builder, space, tile.lanes).from_(start) for start in (0, size)]
    with _panels(code, given, tile) as at, code.loop(0, at.rows, step=GATED_ROWS) as first:
        rows = (at.rows - first).at_most(GATED_ROWS)
        some = replace(at, row=at.row + first, rows=rows)
        of_gates, of_ups = ("", ("up_", some.panel)), ("up_", ("", some.following))
        for (prefix, then), unrounded in zip((of_gates, of_ups), both, strict=True):
            _call_panel(code, given, tile, panel, some, prefix, then, unrounded, tile.panel)
        outputs = given.count("outputs")
        gated = given.memory("out", tile.element).from_(some.row * outputs + at.column)
        code.call(gate, *both, gated, rows, outputs)
    code.end()


@dataclass(frozen=True)
class _Place:
    """Some rows of one panel."""

    panel: Count
    following: Count  # the panel that the thread probably multiplies next
    column: Count  # the panel's first
    row: Count
    rows: Count


@contextmanager
def _panels(code: Function, given: Arguments, tile: Tile) -> Iterator[_Place]:
    """Loops over the panels that this thread claims."""
    outputs, every_row = given.count("outputs"), given.count("rows")
    a_item, rows_per_item = given.count("panels_per_item"), given.count("rows_per_item")
    panels = (outputs + tile.panel - 1) // tile.panel
    parts = (every_row + rows_per_item - 1) // rows_per_item
    items = (panels + a_item - 1) // a_item * parts
    on_tiles = integer_rows.on_tiles(tile.bits)
    registers = amx.tile_registers(code, used=tile.amx or on_tiles)
    with registers, code.claim(given.field("items_claimed"), items) as item:
        first, row = item // parts * a_item, item % parts * rows_per_item
        rows = (every_row - row).at_most(rows_per_item)
        end = (first + a_item).at_most(panels)
        with code.loop(first, end) as index:
            ends = Count(code.builder, code.builder.zext((index + 1).compare("==", end), COUNT))
            following = index + 1 + ends * given.count("panels_between")
            column = (index * tile.panel).at_most(outputs - tile.panel)
            yield _Place(index, following, column, row, rows)


def _call_panel(
    code: Function,
    given: Arguments,
    tile: Tile,
    panel: Function,
    at: _Place,
    prefix: str,
    then: tuple[str, Count],
    out: Memory,
    out_stride: Count | int,
) -> None:
    """`then` are the prefix and the index of the panel that is probably multiplied next."""
    inputs, stride = given.count("inputs"), given.count("addend_stride")
    weights = given.memory(prefix + "panels", tile.weight_element)
    size = tile.panel_depth(inputs) * tile.panel
    following = []
    if tile.group:
        name, index = then
        following = [given.memory(name + "panels", tile.weight_element).from_(index * size)]
    code.call(
        panel,
        given.memory("blocks", tile.block_element).from_(at.row * tile.block_depth(inputs)),
        at.rows,
        inputs,
        weights.from_(at.panel * size),
        given.memory(prefix + "addend", tile.element).from_(at.row * stride + at.column),
        stride,
        out,
        out_stride,
        *following,
    )
