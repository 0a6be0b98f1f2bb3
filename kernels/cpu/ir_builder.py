"""Builds LLVM IR with Python's operators.

    with function.loop(0, rows) as row:
        total = total + numbers.vector(row * 4) * weight

A `Count` is a 64-bit integer, `Floats` four float32 in one register, `Memory` an address of
float32 or of counts. They are values of the compiled code; what Python computes is a constant
there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

LANES = 4
FLOAT, COUNT, POINTER = ir.FloatType(), ir.IntType(64), ir.PointerType()
LANE = ir.IntType(32)
FLOATS = ir.VectorType(FLOAT, LANES)
LANE_NUMBERS = ir.VectorType(LANE, LANES)


def _count_operator(operation: str) -> Callable[[Count, Count | int], Count]:
    return lambda self, other: Count(
        self.builder, getattr(self.builder, operation)(self.value, number(other))
    )


class Count:
    """A 64-bit integer; not negative where it is divided."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder, self.value = builder, value

    __add__ = _count_operator("add")
    __sub__ = _count_operator("sub")
    __mul__ = _count_operator("mul")
    __floordiv__ = _count_operator("udiv")
    __mod__ = _count_operator("urem")

    def compare(self, how: str, other: Count | int) -> ir.Value:
        return self.builder.icmp_signed(how, self.value, number(other))

    def as_floats(self) -> Floats:
        """The number four times."""
        scalar = self.builder.sitofp(self.value, FLOAT)
        return _repeat(self.builder, scalar)

    def at_most(self, other: Count | int) -> Count:
        return self._chosen("<", other)

    def at_least(self, other: Count | int) -> Count:
        return self._chosen(">", other)

    def _chosen(self, how: str, other: Count | int) -> Count:
        chosen = self.builder.select(self.compare(how, other), self.value, number(other))
        return Count(self.builder, chosen)


def number(value: Count | int) -> ir.Value:
    return ir.Constant(COUNT, value) if isinstance(value, int) else value.value


def _floats_operator(operation: str) -> Callable[[Floats, Floats | float], Floats]:
    return lambda self, other: Floats(
        self.builder, getattr(self.builder, operation)(self.value, self._same(other).value)
    )


class Floats:
    """Four float32 in one register."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder, self.value = builder, value

    def _same(self, other: Floats | float) -> Floats:
        return other if isinstance(other, Floats) else constant(self.builder, other)

    __add__ = _floats_operator("fadd")
    __sub__ = _floats_operator("fsub")
    __mul__ = _floats_operator("fmul")
    __truediv__ = _floats_operator("fdiv")

    def plus_product(self, one: Floats, other: Floats | float) -> Floats:
        """self + one * other, rounded once."""
        return self._call("fma", one, self._same(other), self)

    def at_least(self, other: Floats | float) -> Floats:
        return self._call("maxnum", self, self._same(other))

    def at_most(self, other: Floats | float) -> Floats:
        return self._call("minnum", self, self._same(other))

    def root(self) -> Floats:
        return self._call("sqrt", self)

    def nearest(self) -> Floats:
        """Each rounded to a whole number."""
        return self._call("rint", self)

    def lane(self, index: int) -> Floats:
        """One of the four, four times."""
        return self.arranged(self, [index] * LANES)

    def arranged(self, other: Floats, lanes: list[int]) -> Floats:
        """The given lanes of the eight numbers of self and other."""
        mask = ir.Constant(LANE_NUMBERS, lanes)
        return Floats(self.builder, self.builder.shuffle_vector(self.value, other.value, mask))

    def total(self) -> Floats:
        """The sum of the four, four times."""
        pairs = self + self.arranged(self, [1, 0, 3, 2])
        return pairs + pairs.arranged(pairs, [2, 3, 0, 1])

    def greatest(self) -> Floats:
        """The greatest of the four, four times."""
        pairs = self.at_least(self.arranged(self, [1, 0, 3, 2]))
        return pairs.at_least(pairs.arranged(pairs, [2, 3, 0, 1]))

    def _call(self, name: str, *arguments: Floats) -> Floats:
        values = [argument.value for argument in arguments]
        intrinsic = declare(
            self.builder.module, f"llvm.{name}.v{LANES}f32", FLOATS, [FLOATS] * len(values)
        )
        return Floats(self.builder, self.builder.call(intrinsic, values))


def constant(builder: ir.IRBuilder, value: float) -> Floats:
    return vector_of(builder, [value] * LANES)


def vector_of(builder: ir.IRBuilder, values: list[float]) -> Floats:
    return Floats(builder, ir.Constant(FLOATS, values))


def _repeat(builder: ir.IRBuilder, scalar: ir.Value) -> Floats:
    empty = ir.Constant(FLOATS, ir.Undefined)
    first = builder.insert_element(empty, scalar, ir.Constant(LANE, 0))
    return Floats(builder, first).lane(0)


def transposed(rows: list[Floats]) -> list[Floats]:
    """Four rows of four -> its columns."""
    low = [rows[0].arranged(rows[2], [0, 4, 1, 5]), rows[1].arranged(rows[3], [0, 4, 1, 5])]
    high = [rows[0].arranged(rows[2], [2, 6, 3, 7]), rows[1].arranged(rows[3], [2, 6, 3, 7])]
    return [
        half[0].arranged(half[1], lanes)
        for half in (low, high)
        for lanes in ([0, 4, 1, 5], [2, 6, 3, 7])
    ]


# exp(x) = 2^n * exp(r), x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts, so
# that n times the first is exact.
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
_LEAST_EXPONENT, _GREATEST_EXPONENT = -87.0, 88.0


def exp(x: Floats) -> Floats:
    """e^x to about one unit in the last place; e^-87 for anything less."""
    builder = x.builder
    x = x.at_least(_LEAST_EXPONENT).at_most(_GREATEST_EXPONENT)
    twos = (x * _LOG2_E).nearest()
    rest = x.plus_product(twos, -_LN2_HIGH).plus_product(twos, -_LN2_LOW)
    series = constant(builder, 1 / 5040)
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        series = constant(builder, 1 / factorial).plus_product(series, rest)
    exponent = builder.fptosi(twos.value, LANE_NUMBERS)
    bits = builder.shl(
        builder.add(exponent, ir.Constant(LANE_NUMBERS, [127] * LANES)),
        ir.Constant(LANE_NUMBERS, [23] * LANES),
    )
    return series * Floats(builder, builder.bitcast(bits, FLOATS))


class Memory:
    """An address; indices count its elements, float32 or counts."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value, element: ir.Type = FLOAT) -> None:
        self.builder, self.value, self.element = builder, value, element

    def from_(self, index: Count | int) -> Memory:
        """The same memory, `index` elements further on."""
        moved = self.builder.gep(self.value, [number(index)], source_etype=self.element)
        return Memory(self.builder, moved, self.element)

    def vector(self, index: Count | int = 0) -> Floats:
        loaded = self.builder.load(self.from_(index).value, typ=FLOATS, align=4)
        return Floats(self.builder, loaded)

    def repeated(self, index: Count | int = 0) -> Floats:
        """One number, four times."""
        scalar = self.builder.load(self.from_(index).value, typ=FLOAT, align=4)
        return _repeat(self.builder, scalar)

    def prefetch(self, index: Count | int = 0) -> None:
        """Fetches the cache line ahead of its use."""
        kinds = [POINTER, LANE, LANE, LANE]
        intrinsic = declare(self.builder.module, "llvm.prefetch.p0", ir.VoidType(), kinds)
        read, keep, data = (ir.Constant(LANE, value) for value in (0, 3, 1))
        self.builder.call(intrinsic, [self.from_(index).value, read, keep, data])

    def put(self, numbers: Floats, index: Count | int = 0) -> None:
        self.builder.store(numbers.value, self.from_(index).value, align=4)

    def count(self, index: Count | int = 0) -> Count:
        return Count(self.builder, self.builder.load(self.from_(index).value, typ=COUNT, align=8))

    def put_count(self, value: Count, index: Count | int = 0) -> None:
        self.builder.store(value.value, self.from_(index).value, align=8)

    def is_null(self, how: str) -> ir.Value:
        """`how`: "==", or "!=" for the opposite."""
        return self.builder.icmp_unsigned(how, self.value, ir.Constant(POINTER, None))


class Function:
    """One function under construction, without a result."""

    def __init__(
        self, module: ir.Module, name: str, arguments: list[ir.Type], *, exported: bool = False
    ) -> None:
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
        if not exported:
            self.function.linkage = "internal"
            self.function.attributes.add("noinline")
        self.builder = ir.IRBuilder(self.function.append_basic_block())

    @property
    def arguments(self) -> list[Any]:
        """A Memory or a Count for each."""
        kinds: dict[ir.Type, Callable[..., Any]] = {POINTER: Memory, COUNT: Count}
        return [kinds[value.type](self.builder, value) for value in self.function.args]

    def zero(self) -> Floats:
        return constant(self.builder, 0.0)

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
        self, start: Count | int, stop: Count | int, sums: list[Floats], step: int = 1
    ) -> Iterator[tuple[Count, list[Floats]]]:
        """A loop with `sums` in registers: its body replaces the values of the given list, which
        holds the last ones after the loop."""
        builder, before = self.builder, self.builder.block
        head, body, after = (builder.append_basic_block() for _ in range(3))
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(COUNT)
        index.add_incoming(number(start), before)
        carried = [builder.phi(FLOATS) for _ in sums]
        for phi, first in zip(carried, sums, strict=True):
            phi.add_incoming(first.value, before)
        count = Count(builder, index)
        builder.cbranch(count.compare("<", stop), body, after)
        builder.position_at_end(body)
        running = [Floats(builder, phi) for phi in carried]
        yield count, running
        index.add_incoming((count + step).value, builder.block)
        for phi, now in zip(carried, running, strict=True):
            phi.add_incoming(now.value, builder.block)
        builder.branch(head)
        builder.position_at_end(after)
        running[:] = [Floats(builder, phi) for phi in carried]

    @contextmanager
    def claim(self, counter: Memory, items: Count) -> Iterator[Count]:
        """For each item that no other thread has claimed; `counter` starts at 0."""
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


def declare(module: ir.Module, name: str, result: ir.Type, arguments: list[ir.Type]) -> ir.Value:
    known = module.globals.get(name)
    return known or ir.Function(module, ir.FunctionType(result, arguments), name)


class Arguments:
    """The 8-byte fields of the ctypes structure `kind` at `structure`."""

    def __init__(self, structure: Memory, kind: type[ctypes.Structure]) -> None:
        slots = Memory(structure.builder, structure.value, COUNT)
        names = [field[0] for field in kind._fields_]
        self._slots = {name: slots.from_(slot) for slot, name in enumerate(names)}

    def count(self, name: str) -> Count:
        return self._slots[name].count()

    def floats(self, name: str) -> Memory:
        """The float32 numbers at the field's address."""
        slot = self._slots[name]
        return Memory(slot.builder, slot.builder.load(slot.value, typ=POINTER, align=8))

    def counts(self, name: str) -> Memory:
        """The 64-bit integers at the field's address."""
        found = self.floats(name)
        return Memory(found.builder, found.value, COUNT)

    def number(self, name: str) -> Memory:
        """The field itself, one float32."""
        slot = self._slots[name]
        return Memory(slot.builder, slot.value)

    def counter(self, name: str) -> Memory:
        """The field itself, an integer."""
        return self._slots[name]
