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

from baton.kernels.cpu import amx, compiler, paged_attention, product
from baton.kernels.cpu.amx import HALF, TileCode
from baton.kernels.cpu.compiler import AVX512
from baton.kernels.cpu.ir_builder import Count, Function, Memory, number
from baton.kernels.cpu.vectors import BFLOAT16, Floats, floats_type

BYTE = ir.IntType(8)
LINE = 16
"""Float32 numbers of a register's row."""


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

    def _row(self, register: int, row: Count | int) -> Memory:
        return self._registers.from_(register * HALF * LINE).from_(row * LINE)

    @staticmethod
    def _place(memory: Memory, row: int, stride: Count | int) -> Memory:
        moved = memory.builder.gep(memory.value, [number(stride * row)], source_etype=BYTE)
        return Memory(memory.builder, moved, LINE)


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
def emulated_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within, what is compiled takes this CPU for one with AMX, and emulates it."""
    caches = (product.library, paged_attention._compiled)
    with monkeypatch.context() as patched:
        patched.setattr(compiler, "registers", lambda: AVX512)
        patched.setattr(compiler, "has_amx", lambda: True)
        patched.setattr(amx, "TileCode", EmulatedTiles)
        patched.setattr(compiler, "source_digest", lambda: "emulated")
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()
