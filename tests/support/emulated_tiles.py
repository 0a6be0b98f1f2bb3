"""Tile registers of x86_64 (AMX) as memory, so that their code runs on any CPU.

A sum runs as the instruction documents it: the products of even inputs one after another, those
of odd inputs likewise, and then both. Only numbers too small for a normal float32 differ, which
the instruction takes for 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from llvmlite import ir

from baton.kernels.cpu import (
    amx,
    compiler,
    integer_product,
    integer_rows,
    paged_attention,
    product,
    vectors,
)
from baton.kernels.cpu.amx import HALF, TileCode
from baton.kernels.cpu.compiler import AVX512, NEON
from baton.kernels.cpu.ir_builder import Count, Function, Memory, number
from baton.kernels.cpu.vectors import BFLOAT16, Floats, Integers, floats_type, lane_numbers

BYTE = ir.IntType(8)
LINE = 16
"""Float32 numbers of a register's row."""

INTEGERS = ir.VectorType(ir.IntType(32), LINE)


class EmulatedTiles(TileCode):
    """A function's registers: none are kept for another function."""

    def __init__(self, code: Function) -> None:
        super().__init__(code)
        space = code.builder.alloca(floats_type(LINE), size=8 * HALF)
        self._registers = Memory(code.builder, space, LINE)

    def begin(self) -> None:
        """Nothing is shared."""

    def end(self) -> None:
        """Nothing is shared."""

    def zero(self, register: int) -> None:
        for row in range(HALF):
            self._row(register, row).put(self._code.zero())

    def load(self, register: int, source: Memory, stride: Count | int) -> None:
        for row in range(HALF):
            self._row(register, row).put(self._place(source, row, stride).vector())

    def store(self, register: int, target: Memory, stride: Count | int) -> None:
        for row in range(HALF):
            self._place(target, row, stride).put(self._row(register, row).vector())

    def add_products(self, sums: int, x: int, weights: int) -> None:
        with self._code.loop(0, HALF) as row:
            zeros = [self._code.zero()] * 2
            with self._code.sum_loop(0, HALF, zeros) as (pair, parity):
                numbers = self._row(x, row).of(BFLOAT16)
                words = self._row(weights, pair).vector()
                for odd in range(2):
                    factor = numbers.repeated(pair * 2 + odd)
                    parity[odd] = parity[odd].plus_product(factor, _number_of_pair(words, odd))
            place = self._row(sums, row)
            place.put(place.vector() + (parity[0] + parity[1]))

    def add_byte_products(self, sums: int, x: int, weights: int) -> None:
        with self._code.loop(0, HALF) as row:
            place = self._row(sums, row)
            total = Integers(self._code.builder, _bits(place.vector()))
            with self._code.sum_loop(0, HALF, [total]) as (quad, totals):
                words = _bits(self._row(weights, quad).vector())
                codes = _bits(self._row(x, row).repeated(quad))
                totals[0] = plus_dot(totals[0], words, codes, is_signed=False)
            place.put(_floats(totals[0]))

    def _row(self, register: int, row: Count | int) -> Memory:
        return self._registers.from_(register * HALF * LINE).from_(row * LINE)

    @staticmethod
    def _place(memory: Memory, row: int, stride: Count | int) -> Memory:
        moved = memory.builder.gep(memory.value, [number(stride * row)], source_etype=BYTE)
        return Memory(memory.builder, moved, LINE)


def _bits(numbers: Floats) -> ir.Value:
    return numbers.builder.bitcast(numbers.value, INTEGERS)


def _floats(numbers: Integers) -> Floats:
    return Floats(numbers.builder, numbers.builder.bitcast(numbers.value, floats_type(LINE)))


def plus_dot(
    total: Integers, one: ir.Value, other: ir.Value, *, is_signed: bool = True
) -> Integers:
    """Adds the products of each lane's four bytes; those of `one` may be unsigned."""
    builder, found, lanes = total.builder, total.value, total.value.type.count
    of_one, down = builder.ashr if is_signed else builder.lshr, lane_numbers([24] * lanes)
    for shift in (24, 16, 8, 0):
        left, right = (builder.shl(each, lane_numbers([shift] * lanes)) for each in (one, other))
        found = builder.add(found, builder.mul(of_one(left, down), builder.ashr(right, down)))
    return Integers(builder, found)


def _plus_byte_dot(total: Integers, unsigned: ir.Value, signed: Integers) -> Integers:
    words = total.builder.bitcast(unsigned, INTEGERS)
    return plus_dot(total, words, signed.value, is_signed=False)


def _floor(x: Floats) -> Floats:
    return x.at_least(-200.0)._call("floor", x.at_least(-200.0))


def _above_floor(x: Floats) -> Floats:
    return x.at_least(-200.0) - _floor(x)


def _times_power(numbers: Floats, x: Floats) -> Floats:
    whole = _floor(x)
    power = vectors._times_power(numbers, whole.at_least(-126.0) + vectors.ROUNDING)
    return power.where(whole.above(-127.0), whole - whole)


def _number_of_pair(words: Floats, odd: int) -> Floats:
    """The even or the odd of each lane's two bfloat16 numbers."""
    builder, kind = words.builder, ir.VectorType(ir.IntType(32), LINE)
    bits = builder.bitcast(words.value, kind)
    if odd:
        bits = builder.and_(bits, ir.Constant(kind, [0xFFFF0000] * LINE))
    else:
        bits = builder.shl(bits, ir.Constant(kind, [16] * LINE))
    return Floats(builder, builder.bitcast(bits, words.value.type))


@contextmanager
def emulated_tiles(monkeypatch: pytest.MonkeyPatch, *, of_bytes: bool = True) -> Iterator[None]:
    """Within, what is compiled takes this CPU for one with AMX, and emulates it, also for bytes or
    for them only the dot products of vectors."""
    caches = (product.library, paged_attention._compiled)
    digest = compiler.source_digest()
    with monkeypatch.context() as patched:
        patched.setattr(compiler, "registers", lambda: AVX512)
        patched.setattr(compiler, "has_dot", lambda: False)
        patched.setattr(compiler, "has_amx", lambda: True)
        patched.setattr(compiler, "has_byte_dot", lambda: True)
        patched.setattr(compiler, "has_integer_amx", lambda: of_bytes)
        patched.setattr(amx, "TileCode", EmulatedTiles)
        patched.setattr(integer_rows, "plus_byte_dot", _plus_byte_dot)
        patched.setattr(vectors, "above_floor", _above_floor)
        patched.setattr(vectors, "times_power", _times_power)
        patched.setattr(vectors, "reciprocal", lambda x: (x - x + 1.0) / x)
        patched.setattr(compiler, "source_digest", lambda: f"emulated {of_bytes} {digest}")
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()


@contextmanager
def emulated_dot(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, products of codes are compiled for Arm's dot products of bytes, and emulate them."""
    digest = compiler.source_digest()
    with monkeypatch.context() as patched:
        patched.setattr(compiler, "registers", lambda: NEON)
        patched.setattr(compiler, "has_dot", lambda: True)
        for name in ("has_amx", "has_byte_dot", "has_integer_amx"):
            patched.setattr(compiler, name, lambda: False)
        patched.setattr(integer_product, "_plus_dot", _plus_dot_of_codes)
        patched.setattr(compiler, "source_digest", lambda: f"emulated dot {digest}")
        product.library.cache_clear()
        yield
    product.library.cache_clear()


def _plus_dot_of_codes(total: Integers, one: ir.Value, other: ir.Value) -> Integers:
    lanes = [total.builder.bitcast(each, total.value.type) for each in (one, other)]
    return plus_dot(total, *lanes)
