"""Compiled code for x [rows, inputs] @ weight [outputs, inputs].T in float32.

Weights are in panels of PANEL outputs, input by input, so that a product streams them from
memory once and in order. Rows form blocks of BLOCK, also laid out input by input; a block of
one row stays as it is. A tile is a block times a panel: all its sums stay in registers.

    registers of a tile:  8 rows * 3 vectors of sums + 3 of weights + 2 of x = 29 of 32

Each sum runs over the inputs in order, whatever the tile: a row's result does not depend on
the other rows, nor on the number of threads.

The last panel ends with the last output and may overlap the one before it; both then write
the same numbers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager

from llvmlite import ir
from torch import Tensor

from baton.kernels.cpu import compiler
from baton.kernels.cpu.compiler import Library
from baton.kernels.cpu.ir_builder import (
    COUNT,
    LANES,
    POINTER,
    Arguments,
    Count,
    Floats,
    Function,
    Memory,
    exp,
    transposed,
)
from baton.kernels.norm import RMSNorm

VECTORS = 3
PANEL = VECTORS * LANES
BLOCK = 2 * LANES
INPUTS_PER_TURN = LANES
"""Inputs per iteration of a tile's loop; `inputs` is a multiple of it."""

PANELS_PER_ITEM = 8
"""Panels that a thread claims at once: fewer interrupt the stream from memory, more leave a
thread idle at the end."""


class ProductArguments(ctypes.Structure):
    """Arguments of the compiled functions."""

    _fields_ = (
        ("x", ctypes.c_void_p),  # [rows, inputs]
        ("rows", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("norm", ctypes.c_void_p),  # [inputs], the weight of an RMS norm of x; or null
        ("epsilon", ctypes.c_float),  # the norm's
        ("blocks", ctypes.c_void_p),  # [rows up to a multiple of BLOCK, inputs], scratch
        ("panels", ctypes.c_void_p),  # [panels, inputs, PANEL]
        ("outputs", ctypes.c_int64),
        ("addend", ctypes.c_void_p),  # added to the product: a row for all, or one each
        ("addend_stride", ctypes.c_int64),  # 0, or outputs
        ("out", ctypes.c_void_p),  # [rows, outputs]
        ("up_panels", ctypes.c_void_p),  # gated products only: as panels, addend and out
        ("up_addend", ctypes.c_void_p),
        ("up_out", ctypes.c_void_p),
        ("gated", ctypes.c_void_p),  # [rows, outputs], silu(out) * up_out
        ("blocks_claimed", ctypes.c_int64),  # 0 at first
        ("items_claimed", ctypes.c_int64),  # 0 at first
    )


@functools.cache
def library() -> Library:
    """Functions `lay_out` (x as blocks), then `product` (x @ weight.T + addend) or
    `gated_product` (silu of that, times the same of up_panels)."""
    module = ir.Module("products")
    _lay_out(module)
    panel = _panel(module, [_tile(module, rows) for rows in range(1, BLOCK + 1)])
    _product(module, panel)
    _gated_product(module, panel, _gate(module))
    return Library(module)


def _tile(module: ir.Module, rows: int) -> Function:
    """(block, inputs, panel, addend, its stride, out, its stride)"""
    code = Function(
        module, f"tile_{rows}", [POINTER, COUNT, POINTER, POINTER, COUNT, POINTER, COUNT]
    )
    block, inputs, panel, addend, addend_stride, out, out_stride = code.arguments
    zeros = [code.zero()] * (rows * VECTORS)
    with code.sum_loop(0, inputs, zeros, step=INPUTS_PER_TURN) as (first, sums):
        for turn in range(INPUTS_PER_TURN):
            weights = [
                panel.vector((first + turn) * PANEL + LANES * vector) for vector in range(VECTORS)
            ]
            for row, x in enumerate(_inputs_of_rows(block, rows, first, turn)):
                for vector, weight in enumerate(weights):
                    at = row * VECTORS + vector
                    sums[at] = sums[at].plus_product(weight, x)
    for row in range(rows):
        for vector in range(VECTORS):
            column = vector * LANES
            added = addend.vector(addend_stride * row + column)
            out.put(sums[row * VECTORS + vector] + added, out_stride * row + column)
    code.end()
    return code


def _inputs_of_rows(block: Memory, rows: int, first: Count, turn: int) -> list[Floats]:
    """One input of each row, in all lanes."""
    if rows == 1:
        return [block.vector(first).lane(turn)]
    found = [block.vector((first + turn) * BLOCK + start) for start in range(0, rows, LANES)]
    return [found[row // LANES].lane(row % LANES) for row in range(rows)]


def _panel(module: ir.Module, tiles: list[Function]) -> Function:
    """All rows of one panel: (blocks, rows, inputs, panel, addend, its stride, out, its stride)"""
    types = [POINTER, COUNT, COUNT, POINTER, POINTER, COUNT, POINTER, COUNT]
    code = Function(module, "panel", types)
    blocks, rows, inputs, panel, addend, addend_stride, out, out_stride = code.arguments
    with code.loop(0, rows, step=BLOCK) as row:
        block, left = blocks.from_(row * inputs), (rows - row).at_most(BLOCK)
        target, added = out.from_(row * out_stride), addend.from_(row * addend_stride)
        for count, tile in enumerate(tiles, start=1):
            with code.when(left.compare("==", count)):
                code.call(tile, block, inputs, panel, added, addend_stride, target, out_stride)
    code.end()
    return code


def _lay_out(module: ir.Module) -> None:
    """x as blocks, normalized if a norm is given."""
    code = Function(module, "lay_out", [POINTER], exported=True)
    given = Arguments(code.arguments[0], ProductArguments)
    makers = {
        (single, normed): _block(module, single=single, normed=normed)
        for single in (True, False)
        for normed in (True, False)
    }
    x, blocks, norm = (given.floats(name) for name in ("x", "blocks", "norm"))
    epsilon = given.number("epsilon")
    rows, inputs = given.count("rows"), given.count("inputs")
    with code.claim(given.counter("blocks_claimed"), (rows + BLOCK - 1) // BLOCK) as index:
        row = index * BLOCK
        left = rows - row
        at = (x.from_(row * inputs), left, inputs, norm, epsilon, blocks.from_(row * inputs))
        for (single, normed), maker in makers.items():
            is_single = left.compare("==" if single else ">", 1)
            is_normed = norm.is_null("!=" if normed else "==")
            with code.when(code.builder.and_(is_single, is_normed)):
                code.call(maker, *at)
    code.end()


def _block(module: ir.Module, *, single: bool, normed: bool) -> Function:
    """One block of x: (its first row, rows left, inputs, norm, epsilon, block)"""
    name = f"block{'_of_one' * single}{'_normed' * normed}"
    code = Function(module, name, [POINTER, COUNT, COUNT, POINTER, POINTER, POINTER])
    x, left, inputs, norm, epsilon, block = code.arguments
    # Lanes beyond the last row repeat it; no tile reads them.
    count = 1 if single else BLOCK
    rows = [x.from_((left - 1).at_most(row) * inputs) for row in range(count)]
    scales = _scales(code, rows, inputs, epsilon) if normed else []
    with code.loop(0, inputs, step=LANES) as first:
        numbers = [row.vector(first) for row in rows]
        if normed:
            weight = norm.vector(first)
            numbers = [each * scale * weight for each, scale in zip(numbers, scales, strict=True)]
        if single:
            block.put(numbers[0], first)
        else:
            for start in range(0, BLOCK, LANES):
                for turn, column in enumerate(transposed(numbers[start : start + LANES])):
                    block.put(column, (first + turn) * BLOCK + start)
    code.end()
    return code


def _scales(code: Function, rows: list[Memory], inputs: Count, epsilon: Memory) -> list[Floats]:
    """1 / sqrt(mean of squares + epsilon) of each row."""
    with code.sum_loop(0, inputs, [code.zero()] * len(rows), step=LANES) as (first, squares):
        for index, row in enumerate(rows):
            numbers = row.vector(first)
            squares[index] = squares[index].plus_product(numbers, numbers)
    size, one = inputs.as_floats(), code.zero() + 1.0
    return [one / (each.total() / size + epsilon.repeated()).root() for each in squares]


def _product(module: ir.Module, panel: Function) -> None:
    code = Function(module, "product", [POINTER], exported=True)
    given = Arguments(code.arguments[0], ProductArguments)
    with _panels(code, given) as (index, column):
        _call_panel(code, given, panel, index, column, "")
    code.end()


def _gated_product(module: ir.Module, panel: Function, gate: Function) -> None:
    code = Function(module, "gated_product", [POINTER], exported=True)
    given = Arguments(code.arguments[0], ProductArguments)
    with _panels(code, given) as (index, column):
        for prefix in ("", "up_"):
            _call_panel(code, given, panel, index, column, prefix)
        numbers = [given.floats(name).from_(column) for name in ("out", "up_out", "gated")]
        code.call(gate, *numbers, given.count("rows"), given.count("outputs"))
    code.end()


@contextmanager
def _panels(code: Function, given: Arguments) -> Iterator[tuple[Count, Count]]:
    """For each panel that this thread claims: its index and first column."""
    outputs = given.count("outputs")
    panels = (outputs + PANEL - 1) // PANEL
    items = (panels + PANELS_PER_ITEM - 1) // PANELS_PER_ITEM
    with code.claim(given.counter("items_claimed"), items) as item:
        first = item * PANELS_PER_ITEM
        with code.loop(first, (first + PANELS_PER_ITEM).at_most(panels)) as index:
            yield index, (index * PANEL).at_most(outputs - PANEL)


def _call_panel(
    code: Function, given: Arguments, panel: Function, index: Count, column: Count, prefix: str
) -> None:
    inputs, outputs = given.count("inputs"), given.count("outputs")
    code.call(
        panel,
        given.floats("blocks"),
        given.count("rows"),
        inputs,
        given.floats(prefix + "panels").from_(index * inputs * PANEL),
        given.floats(prefix + "addend").from_(column),
        given.count("addend_stride"),
        given.floats(prefix + "out").from_(column),
        outputs,
    )


def _gate(module: ir.Module) -> Function:
    """gated = silu(gate) * up in one panel's columns: (gate, up, gated, rows, outputs)"""
    code = Function(module, "gate", [POINTER, POINTER, POINTER, COUNT, COUNT])
    gate, up, gated, rows, outputs = code.arguments
    one = code.zero() + 1.0
    with code.loop(0, rows) as row:
        for column in range(0, PANEL, LANES):
            at = row * outputs + column
            x = gate.vector(at)
            gated.put(x / (one + exp(code.zero() - x)) * up.vector(at), at)
    code.end()
    return code


FEW_ROWS = 2 * BLOCK
"""Rows that one thread lays out before a second could start."""


class Panels:
    """A weight [outputs, inputs] and its bias [outputs], laid out for compiled code."""

    __slots__ = ("_addend", "_bias", "_inputs", "_outputs", "_panels")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._outputs, self._inputs = weight.shape
        self._panels = _packed(weight)
        self._bias = bias
        self._addend = weight.new_zeros(self._outputs) if bias is None else bias
        _address("product")  # compiled when a model is loaded, not at its first step

    def product(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """x [rows, inputs], normalized if a norm is given -> [rows, outputs]."""
        return self._product(x, norm, self._addend, 0)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [rows, outputs] + the product of x."""
        addend = residual if self._bias is None else residual + self._bias
        return self._product(x, None, addend, self._outputs)

    def gated(self, up: Panels, x: Tensor, norm: RMSNorm) -> Tensor:
        """silu(self's product) * up's."""
        x = x.contiguous()
        gated = x.new_empty(x.shape[0], self._outputs)
        size = gated.numel()
        blocks, gate, raised = compiler.scratch(self._block_numbers(x), size, size)
        arguments = self._arguments(x, norm, blocks, self._addend, 0, gate)
        arguments.up_panels, arguments.up_addend = up._panels.data_ptr(), up._addend.data_ptr()
        arguments.up_out, arguments.gated = raised, gated.data_ptr()
        _run("gated_product", arguments)
        return gated

    def _product(self, x: Tensor, norm: RMSNorm | None, addend: Tensor, stride: int) -> Tensor:
        x, addend = x.contiguous(), addend.contiguous()
        out = x.new_empty(x.shape[0], self._outputs)
        (blocks,) = compiler.scratch(self._block_numbers(x))
        arguments = self._arguments(x, norm, blocks, addend, stride, out.data_ptr())
        _run("product", arguments)
        return out

    def _block_numbers(self, x: Tensor) -> int:
        return -(-x.shape[0] // BLOCK) * BLOCK * self._inputs

    def _arguments(
        self,
        x: Tensor,
        norm: RMSNorm | None,
        blocks: int,
        addend: Tensor,
        addend_stride: int,
        out: int,
    ) -> ProductArguments:
        return ProductArguments(
            x.data_ptr(),
            x.shape[0],
            self._inputs,
            norm.weight.data_ptr() if norm else None,
            norm.epsilon if norm else 0.0,
            blocks,
            self._panels.data_ptr(),
            self._outputs,
            addend.data_ptr(),
            addend_stride,
            out,
        )


def suits(weight: Tensor) -> bool:
    """Whether compiled code supports weights of this shape."""
    outputs, inputs = weight.shape
    return outputs >= PANEL and inputs % INPUTS_PER_TURN == 0


def _packed(weight: Tensor) -> Tensor:
    """[outputs, inputs] -> [panels, inputs, PANEL]; the last panel holds the last outputs."""
    outputs, inputs = weight.shape
    whole = outputs // PANEL
    packed = weight.new_empty(-(-outputs // PANEL), inputs, PANEL)
    packed[:whole] = weight[: whole * PANEL].view(whole, PANEL, inputs).transpose(1, 2)
    packed[-1] = weight[-PANEL:].t()
    return packed


def _run(name: str, arguments: ProductArguments) -> None:
    compiler.run(_address("lay_out"), arguments, alone=arguments.rows <= FEW_ROWS)
    compiler.run(_address(name), arguments)


@functools.cache
def _address(name: str) -> int:
    return library().address(name)
