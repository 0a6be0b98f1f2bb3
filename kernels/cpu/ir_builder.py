"""Builds LLVM IR with Python's operators.

    with function.loop(0, rows) as row:
        total = total + numbers.vector(row * 4) * weight

A `Count` is a 64-bit integer, `Floats` (vectors.py) a vector of float32, `Memory` an address of
float32, bfloat16, int8 or counts. They are values of the compiled code; what Python computes is a
constant there. bfloat16 and int8 exist only in memory: loads widen them, stores round to them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from llvmlite import ir

from baton.kernels.cpu.vectors import (
    CODE,
    FLOAT,
    LANE,
    QUAD,
    Floats,
    Integers,
    codes_of,
    constant,
    declare,
    narrowed,
    repeat,
    size_of,
    widened,
)

COUNT, POINTER = ir.IntType(64), ir.PointerType()

LINE = 64
"""Bytes of a cache line."""

Sum = TypeVar("Sum", Floats, Integers)


def _count_operator(operation: str) -> Callable[[Count, Count | int], Count]:
    return lambda self, other: Count(
        self.builder, getattr(self.builder, operation)(self.value, number(other))
    )


class Count:
    """A 64-bit integer. Only numbers from 0 on may be divided."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder, self.value = builder, value

    __add__ = _count_operator("add")
    __sub__ = _count_operator("sub")
    __mul__ = _count_operator("mul")
    __floordiv__ = _count_operator("udiv")
    __mod__ = _count_operator("urem")

    def compare(self, how: str, other: Count | int) -> ir.Value:
        return self.builder.icmp_signed(how, self.value, number(other))

    def as_floats(self, lanes: int) -> Floats:
        """The number in all lanes."""
        return repeat(self.builder, self.builder.sitofp(self.value, FLOAT), lanes)

    def at_most(self, other: Count | int) -> Count:
        return self._chosen("<", other)

    def at_least(self, other: Count | int) -> Count:
        return self._chosen(">", other)

    def _chosen(self, how: str, other: Count | int) -> Count:
        chosen = self.builder.select(self.compare(how, other), self.value, number(other))
        return Count(self.builder, chosen)


def number(value: Count | int) -> ir.Value:
    return ir.Constant(COUNT, value) if isinstance(value, int) else value.value


class Memory:
    """An address; indices count its elements: float32, bfloat16, int8 or counts."""

    def __init__(
        self, builder: ir.IRBuilder, value: ir.Value, lanes: int, element: ir.Type = FLOAT
    ) -> None:
        self.builder, self.value, self.lanes, self.element = builder, value, lanes, element

    def from_(self, index: Count | int) -> Memory:
        """The same memory, `index` elements further on."""
        moved = self.builder.gep(self.value, [number(index)], source_etype=self.element)
        return Memory(self.builder, moved, self.lanes, self.element)

    def of(self, element: ir.Type) -> Memory:
        """The same address, with another element type."""
        return Memory(self.builder, self.value, self.lanes, element)

    def in_lanes(self, lanes: int) -> Memory:
        """The same address, read and written in vectors of `lanes`."""
        return Memory(self.builder, self.value, lanes, self.element)

    def vector(self, index: Count | int = 0) -> Floats:
        kind = ir.VectorType(self.element, self.lanes)
        at, size = self.from_(index).value, size_of(self.element)
        loaded = self.builder.load(at, typ=kind, align=size)
        if self.element == FLOAT:
            return Floats(self.builder, loaded)
        return widened(self.builder, loaded)

    def repeated(self, index: Count | int = 0) -> Floats:
        """One number, in all lanes."""
        if self.element == FLOAT:
            scalar = self.builder.load(self.from_(index).value, typ=FLOAT, align=4)
            return repeat(self.builder, scalar, self.lanes)
        return self.in_lanes(1).vector(index).spread(self.lanes)

    def prefetch(self, index: Count | int = 0, keep: int = 3) -> None:
        """Fetches the cache line ahead of its use: with `keep` 3 into L1, with 2 into L2."""
        kinds = [POINTER, LANE, LANE, LANE]
        intrinsic = declare(self.builder.module, "llvm.prefetch.p0", ir.VoidType(), kinds)
        how = [ir.Constant(LANE, value) for value in (0, keep, 1)]  # a read, of data
        self.builder.call(intrinsic, [self.from_(index).value, *how])

    def put(self, numbers: Floats, index: Count | int = 0) -> None:
        if self.element == FLOAT:
            stored = numbers.value
        else:
            stored = codes_of(numbers) if self.element == CODE else narrowed(numbers)
        self.builder.store(stored, self.from_(index).value, align=size_of(self.element))

    def count(self, index: Count | int = 0) -> Count:
        return Count(self.builder, self.builder.load(self.from_(index).value, typ=COUNT, align=8))

    def put_count(self, value: Count, index: Count | int = 0) -> None:
        self.builder.store(value.value, self.from_(index).value, align=8)

    def is_null(self, how: str) -> ir.Value:
        """`how` is "==", or "!=" for the opposite."""
        return self.builder.icmp_unsigned(how, self.value, ir.Constant(POINTER, None))


class Function:
    """One function under construction, which returns nothing. Its vectors have `lanes`."""

    def __init__(
        self,
        module: ir.Module,
        name: str,
        arguments: list[ir.Type],
        *,
        lanes: int = QUAD,
        exported: bool = False,
    ) -> None:
        self.module, self.lanes = module, lanes
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
        if not exported:
            self.function.linkage = "internal"
            self.function.attributes.add("noinline")
        self.builder = ir.IRBuilder(self.function.append_basic_block())

    @property
    def arguments(self) -> list[Any]:
        """A Memory or a Count for each."""
        return [
            Memory(self.builder, value, self.lanes)
            if value.type == POINTER
            else Count(self.builder, value)
            for value in self.function.args
        ]

    def zero(self) -> Floats:
        return constant(self.builder, 0.0, self.lanes)

    def call(self, other: Function, *arguments: Memory | Count | int) -> None:
        values = [each.value if isinstance(each, Memory) else number(each) for each in arguments]
        self.builder.call(other.function, values)

    def end(self) -> None:
        self.builder.ret_void()

    @contextmanager
    def loop(self, start: Count | int, stop: Count | int, step: int = 1) -> Iterator[Count]:
        """for index in range(start, stop, step)."""
        with self.sum_loop(start, stop, [], step) as (index, _):
            yield index

    @contextmanager
    def sum_loop(
        self, start: Count | int, stop: Count | int, sums: list[Sum], step: int = 1
    ) -> Iterator[tuple[Count, list[Sum]]]:
        """A loop that keeps `sums` in registers. Its body replaces the values in the yielded list,
        which holds the last ones after the loop."""
        builder, before = self.builder, self.builder.block
        head, body, after = (builder.append_basic_block() for _ in range(3))
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(COUNT)
        index.add_incoming(number(start), before)
        carried = [builder.phi(first.value.type) for first in sums]
        for phi, first in zip(carried, sums, strict=True):
            phi.add_incoming(first.value, before)
        count = Count(builder, index)
        builder.cbranch(count.compare("<", stop), body, after)
        builder.position_at_end(body)
        running = [type(first)(builder, phi) for phi, first in zip(carried, sums, strict=True)]
        yield count, running
        index.add_incoming((count + step).value, builder.block)
        for phi, now in zip(carried, running, strict=True):
            phi.add_incoming(now.value, builder.block)
        builder.branch(head)
        builder.position_at_end(after)
        running[:] = [type(now)(builder, phi) for phi, now in zip(carried, running, strict=True)]

    @contextmanager
    def claim(self, counter: Memory, items: Count) -> Iterator[Count]:
        """Loops over the items that this thread claims; `counter` starts at 0."""
        builder = self.builder
        head, body, after = (builder.append_basic_block() for _ in range(3))
        builder.branch(head)
        builder.position_at_end(head)
        claimed = Count(builder, builder.atomic_rmw("add", counter.value, number(1), "monotonic"))
        builder.cbranch(claimed.compare("<", items), body, after)
        builder.position_at_end(body)
        yield claimed
        builder.branch(head)
        builder.position_at_end(after)

    @contextmanager
    def when(self, condition: ir.Value) -> Iterator[None]:
        with self.builder.if_then(condition):
            yield


class Arguments:
    """The 8-byte fields of the ctypes structure `kind` at `structure`."""

    def __init__(self, structure: Memory, kind: type[ctypes.Structure]) -> None:
        slots = structure.of(COUNT)
        names = [field[0] for field in kind._fields_]
        self._slots = {name: slots.from_(slot) for slot, name in enumerate(names)}

    def count(self, name: str) -> Count:
        return self._slots[name].count()

    def memory(self, name: str, element: ir.Type = FLOAT) -> Memory:
        """The memory that the field points to."""
        slot = self._slots[name]
        address = slot.builder.load(slot.value, typ=POINTER, align=8)
        return Memory(slot.builder, address, slot.lanes, element)

    def field(self, name: str, element: ir.Type = COUNT) -> Memory:
        """The field itself: one integer, or one float32."""
        return self._slots[name].of(element)
