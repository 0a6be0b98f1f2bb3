"""Products of bfloat16 on x86_64's tile registers (AMX), also for attention.

A tile register has 16 rows of 64 bytes. One instruction adds to 16 x 16 float32 sums the
products of 16 rows of x and 16 outputs over 32 inputs: for each sum it adds up the products of
even inputs in order, those of odd inputs in order, and then both. So each sum runs over the inputs
in order, 32 at a time, for any number of rows.

Four registers hold the sums of 32 rows and 32 outputs, two hold x and two weights. A panel has 32
outputs: for each 32 inputs it has the pairs of inputs of its first 16 outputs, then those of the
other 16. A block has 32 rows: for each 32 inputs row after row, so that a register is loaded from
neighbouring lines.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import NamedTuple

from llvmlite import ir
from torch import Tensor

from baton.kernels.cpu.ir_builder import COUNT, POINTER, Count, Function, Memory
from baton.kernels.cpu.vectors import BFLOAT16, declare, floats_type

INPUTS = 32
ROWS = 32
OUTPUTS = 32
HALF = 16
REGISTERS = 8
ROW_BYTES = 64
LANES = 16

LINES = 32
"""Cache lines of a panel's 32 inputs."""

LINES_AHEAD = 8
"""Lines of the next panel that are fetched for each 32 inputs of 32 rows, so that 128 rows fetch
the whole panel. Up to 16 rows fetch all of them at once."""

_BYTE = ir.IntType(8)
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@functools.cache
def permitted() -> bool:
    """Asks the system for permission to use the tile registers. True if it is granted."""
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def packed(weight: Tensor) -> Tensor:
    """[panels * OUTPUTS, inputs] -> [panels, inputs / 32, 2, 16 pairs, 16 outputs, 2]."""
    blocks = weight.view(-1, 2, HALF, weight.shape[1] // INPUTS, HALF, 2)
    return blocks.permute(0, 3, 1, 4, 2, 5).contiguous()


class TileCode:
    """Adds tile instructions to a function."""

    def __init__(self, code: Function) -> None:
        self._code = code

    def begin(self) -> None:
        """Configures all registers with their full size."""
        module = self._code.module
        widths, heights = [ROW_BYTES, 0] * REGISTERS, [HALF] * REGISTERS
        palette = [1, *[0] * 15, *widths, *[0] * 16, *heights, *[0] * 8]
        kind = ir.ArrayType(_BYTE, len(palette))
        name = "tile_shapes"
        if name not in module.globals:
            shared = ir.GlobalVariable(module, kind, name)
            shared.initializer, shared.global_constant = ir.Constant(kind, palette), True
            shared.linkage = "internal"
        self._call("ldtilecfg", [POINTER], module.globals[name])

    def end(self) -> None:
        self._call("tilerelease", [])

    def zero(self, register: int) -> None:
        self._call("tilezero", [_BYTE], self._number(register))

    def load(self, register: int, source: Memory, stride: Count | int) -> None:
        """Loads 16 rows, `stride` bytes apart."""
        self._move("tileloadd64", register, source, stride)

    def store(self, register: int, target: Memory, stride: Count | int) -> None:
        self._move("tilestored64", register, target, stride)

    def add_products(self, sums: int, x: int, weights: int) -> None:
        """Adds products of bfloat16."""
        self._multiply("tdpbf16ps", sums, x, weights)

    def add_byte_products(self, sums: int, x: int, weights: int) -> None:
        """Adds products of signed bytes of x and unsigned bytes of weights, four in each lane."""
        self._multiply("tdpbsud", sums, x, weights)

    def _multiply(self, name: str, *registers: int) -> None:
        self._call(name, [_BYTE] * 3, *map(self._number, registers))

    def _move(self, name: str, register: int, memory: Memory, stride: Count | int) -> None:
        bytes_apart = ir.Constant(COUNT, stride) if isinstance(stride, int) else stride.value
        kinds = [_BYTE, POINTER, COUNT]
        self._call(name, kinds, self._number(register), memory.value, bytes_apart)

    @staticmethod
    def _number(register: int) -> ir.Constant:
        return ir.Constant(_BYTE, register)

    def _call(self, name: str, kinds: list[ir.Type], *values: ir.Value) -> None:
        function = declare(self._code.module, f"llvm.x86.{name}", ir.VoidType(), kinds)
        self._code.builder.call(function, values)


@contextmanager
def tile_registers(code: Function, *, used: bool) -> Iterator[None]:
    """Makes tile registers usable within the context."""
    tiles = TileCode(code)
    if used:
        tiles.begin()
    yield
    if used:
        tiles.end()


class Ahead(NamedTuple):
    """The part of the next panel that is prefetched."""

    panel: Memory
    lines: int  # for each 32 inputs


def add_products(
    code: Function,
    tiles: TileCode,
    x: list[Memory],
    x_stride: Count | int,
    inputs: Count | int,
    weights: list[Memory],
    outputs: int,
    rows: int = 1,
    ahead: Ahead | None = None,
) -> None:
    """Adds to registers 0 to 3 the products of each 16 rows of x, `x_stride` bytes apart, and each
    16 outputs of weights. For one input x has `rows` and weights `outputs` numbers. Registers 4 and
    5 hold x, 6 and 7 weights. Prefetches `ahead`."""
    with code.loop(0, inputs, step=INPUTS) as first:
        for row, of_rows in enumerate(x):
            tiles.load(4 + row, of_rows.from_(first * rows), x_stride)
        if ahead:
            for line in range(ahead.lines):
                ahead.panel.prefetch(first * outputs + line * HALF * 2, keep=2)
        for column, of_outputs in enumerate(weights):
            register = 6 + column % 2
            tiles.load(register, of_outputs.from_(first * outputs), ROW_BYTES)
            for row in range(len(x)):
                tiles.add_products(len(weights) * row + column, 4 + row, register)


def panel_code(module: ir.Module, result: ir.Type) -> Function:
    """Multiplies some rows by one panel, within `tile_registers`: (rows of x, rows, inputs, panel,
    addend, its stride, out, its stride)"""
    types = [POINTER, COUNT, COUNT, POINTER, POINTER, COUNT, POINTER, COUNT]
    code = Function(module, f"panel_{result}", types, lanes=LANES)
    x, rows, inputs, panel, addend, addend_stride, out, out_stride = code.arguments
    x, panel, addend, out = x.of(BFLOAT16), panel.of(BFLOAT16), addend.of(BFLOAT16), out.of(result)
    space = code.builder.alloca(floats_type(LANES), size=ROWS * OUTPUTS // LANES)
    sums = Memory(code.builder, space, LANES)
    tiles = TileCode(code)
    with code.loop(0, rows, step=ROWS) as row:
        left = (rows - row).at_most(ROWS)
        block = x.from_(row * inputs)
        every = panel.from_(inputs * OUTPUTS)
        part = row // ROWS % (LINES // LINES_AHEAD) * (LINES_AHEAD * HALF * 2)
        shares = (Ahead(every, LINES), Ahead(every.from_(part), LINES_AHEAD))
        for halves, how, ahead in ((1, "<=", shares[0]), (2, ">", shares[1])):
            with code.when(left.compare(how, HALF)):
                _sums_of_block(code, tiles, block, inputs, panel, ahead, sums, halves)
        with code.loop(0, left) as index:
            added = addend.from_((row + index) * addend_stride)
            target = out.from_((row + index) * out_stride)
            for column in range(0, OUTPUTS, LANES):
                total = sums.vector(index * OUTPUTS + column)
                target.put(total + added.vector(column), column)
    code.end()
    return code


def _sums_of_block(
    code: Function,
    tiles: TileCode,
    x: Memory,
    inputs: Count,
    panel: Memory,
    ahead: Ahead,
    sums: Memory,
    halves: int,
) -> None:
    """Stores the sums of 16 or 32 rows of x."""
    places = list(product(range(halves), range(2)))
    for row, column in places:
        tiles.zero(2 * row + column)
    blocks = [x.from_(row * HALF * INPUTS) for row in range(halves)]
    weights = [panel.from_(column * (INPUTS * HALF)) for column in range(2)]
    layout = (ROW_BYTES, inputs, weights, OUTPUTS, ROWS)
    add_products(code, tiles, blocks, *layout, ahead=ahead)
    for row, column in places:
        target = sums.from_(row * HALF * OUTPUTS + column * HALF)
        tiles.store(2 * row + column, target, 4 * OUTPUTS)
