"""Vectors of float32 as values of compiled code, and the operations on them.

Operations are compiled as they are written: none is reordered, and only `plus_product` rounds a
product and a sum once. Equal steps give equal bits in any function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from llvmlite import ir

from baton.kernels.cpu import compiler

QUAD = 4
"""Lanes of the smallest vectors."""

FLOAT = ir.FloatType()
CODE, BFLOAT16, LANE = ir.IntType(8), ir.IntType(16), ir.IntType(32)
HALF_BYTE = ir.IntType(4)
"""Marks memory with codes of four bits. Its elements are loaded as bytes."""


def element_of(dtype: torch.dtype) -> ir.Type:
    """The element type of memory that holds numbers of `dtype`."""
    known = {torch.float32: FLOAT, torch.bfloat16: BFLOAT16, torch.int8: CODE}
    return HALF_BYTE if dtype == torch.uint8 else known[dtype]


def size_of(element: ir.Type) -> int:
    """Bytes of an element in memory."""
    return 4 if element == FLOAT else int(element.width) // 8


def floats_type(lanes: int) -> ir.VectorType:
    return ir.VectorType(FLOAT, lanes)


def lane_numbers(values: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(LANE, len(values)), values)


def _floats_operator(operation: str) -> Callable[[Floats, Floats | float], Floats]:
    return lambda self, other: Floats(
        self.builder, getattr(self.builder, operation)(self.value, self._same(other).value)
    )


class Floats:
    """The float32 numbers of one vector."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder, self.value = builder, value

    @property
    def lanes(self) -> int:
        return int(self.value.type.count)

    def _same(self, other: Floats | float) -> Floats:
        if isinstance(other, Floats):
            return other
        return constant(self.builder, other, self.lanes)

    __add__ = _floats_operator("fadd")
    __sub__ = _floats_operator("fsub")
    __mul__ = _floats_operator("fmul")
    __truediv__ = _floats_operator("fdiv")

    def plus_product(self, one: Floats, other: Floats | float) -> Floats:
        """self + one * other, rounded once."""
        return self._call("fma", one, self._same(other), self)

    def at_least(self, other: Floats | float) -> Floats:
        """NaN stays NaN."""
        return self._call("maximum", self, self._same(other), fastmath=("nsz",))

    def or_greater(self, other: Floats) -> Floats:
        """As at_least for numbers that are not NaN: on x86_64 one instruction instead of three."""
        return self._call("maxnum", self, other, fastmath=("nnan", "nsz"))

    def or_greater_magnitude(self, other: Floats | float) -> Floats:
        """The greater of numbers without signs; NaN is greater than any."""
        builder, kind = self.builder, ir.VectorType(LANE, self.lanes)
        bits = [builder.bitcast(each.value, kind) for each in (self, self._same(other))]
        greater = declare(builder.module, f"llvm.umax.v{self.lanes}i32", kind, [kind, kind])
        return Floats(builder, builder.bitcast(builder.call(greater, bits), self.value.type))

    def at_most(self, other: Floats | float) -> Floats:
        """NaN stays NaN."""
        return self._call("minimum", self, self._same(other), fastmath=("nsz",))

    def magnitude(self) -> Floats:
        return self._call("fabs", self)

    def nearest(self) -> Floats:
        """Rounds to whole numbers, ties to even."""
        return self._call("roundeven", self)

    def root(self) -> Floats:
        return self._call("sqrt", self)

    def lane(self, index: int) -> Floats:
        """One lane, repeated in all lanes."""
        return self.arranged(self, [index] * self.lanes)

    def arranged(self, other: Floats, lanes: list[int]) -> Floats:
        """The given lanes; `other`'s are numbered after self's."""
        mask = lane_numbers(lanes)
        return Floats(self.builder, self.builder.shuffle_vector(self.value, other.value, mask))

    def total(self) -> Floats:
        """The sum of all lanes, in all lanes: neighbours first, then neighbouring pairs, and so
        on."""
        return self._folded(Floats.__add__)

    def greatest(self) -> Floats:
        """The largest of all lanes, in all lanes."""
        return self._folded(Floats.or_greater)

    def greatest_magnitude(self) -> Floats:
        """As `greatest`, by or_greater_magnitude."""
        return self._folded(Floats.or_greater_magnitude)

    def _folded(self, combine: Callable[[Floats, Floats], Floats]) -> Floats:
        folded, distance = self, 1
        while distance < self.lanes:
            folded = combine(
                folded, folded.arranged(folded, [lane ^ distance for lane in range(self.lanes)])
            )
            distance *= 2
        return folded

    def spread(self, lanes: int) -> Floats:
        """The only lane, in `lanes`."""
        return self.arranged(self, [0] * lanes)

    def above(self, number: float) -> ir.Value:
        """A condition for each lane; NaN is above any number."""
        return self.builder.fcmp_unordered(">", self.value, self._same(number).value)

    def where(self, condition: ir.Value, other: Floats) -> Floats:
        """self where the condition holds, other elsewhere."""
        return Floats(self.builder, self.builder.select(condition, self.value, other.value))

    def _call(self, name: str, *arguments: Floats, fastmath: tuple[str, ...] = ()) -> Floats:
        values = [argument.value for argument in arguments]
        kind = self.value.type
        intrinsic = declare(
            self.builder.module, f"llvm.{name}.v{self.lanes}f32", kind, [kind] * len(values)
        )
        return Floats(self.builder, self.builder.call(intrinsic, values, fastmath=fastmath))


class Integers:
    """The 32-bit integers of one vector."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder, self.value = builder, value

    def __add__(self, other: Integers) -> Integers:
        return Integers(self.builder, self.builder.add(self.value, other.value))

    def plus_pairs(self, one: ir.Value, other: ir.Value) -> Integers:
        """Adds the products of each lane's two numbers of 16 bits: VPMADDWD and a sum, or
        VPDPWSSD."""
        builder, whole = self.builder, ir.VectorType(LANE, one.type.count)
        products = builder.mul(*(builder.sext(each, whole) for each in (one, other)))
        places = (lane_numbers(list(range(first, whole.count, 2))) for first in (0, 1))
        halves = [builder.shuffle_vector(products, products, each) for each in places]
        return self + Integers(builder, builder.add(*halves))

    def as_floats(self) -> Floats:
        kind = floats_type(self.value.type.count)
        return Floats(self.builder, self.builder.sitofp(self.value, kind))


def constant(builder: ir.IRBuilder, value: float, lanes: int) -> Floats:
    return vector_of(builder, [value] * lanes)


def vector_of(builder: ir.IRBuilder, values: list[float]) -> Floats:
    return Floats(builder, ir.Constant(floats_type(len(values)), values))


def repeat(builder: ir.IRBuilder, scalar: ir.Value, lanes: int) -> Floats:
    empty = ir.Constant(floats_type(lanes), ir.Undefined)
    first = builder.insert_element(empty, scalar, ir.Constant(LANE, 0))
    return Floats(builder, first).lane(0)


def transposed(rows: list[Floats]) -> list[Floats]:
    """Transposes a square: as many rows as each has lanes. Each turn interleaves the rows of the
    first half with those of the second."""
    size = len(rows)
    half = size // 2
    low = [
        lane for pair in zip(range(half), range(size, size + half), strict=True) for lane in pair
    ]
    high = [lane + half for lane in low]
    for _ in range(half.bit_length()):
        pairs = zip(rows[:half], rows[half:], strict=True)
        rows = [one.arranged(other, lanes) for one, other in pairs for lanes in (low, high)]
    return rows


def totals(four: list[Floats]) -> Floats:
    """The sums of four vectors, in four lanes. Adds neighbours, then neighbouring pairs, then the
    halves of the rest: the fewest instructions on Arm and on x86_64."""
    first, second = _pair_sums(four[0], four[1]), _pair_sums(four[2], four[3])
    sums = _pair_sums(first, second)
    while sums.lanes > QUAD:
        half = sums.lanes // 2
        low, high = list(range(half)), list(range(half, 2 * half))
        sums = sums.arranged(sums, low) + sums.arranged(sums, high)
    return sums


def _pair_sums(one: Floats, other: Floats) -> Floats:
    """In each four lanes: two sums of neighbours from `one`, then two from `other`."""
    starts = [start for quad in range(0, one.lanes, QUAD) for start in (quad, one.lanes + quad)]
    even = [start + lane for start in starts for lane in (0, 2)]
    return one.arranged(other, even) + one.arranged(other, [lane + 1 for lane in even])


# exp(x) = 2^n * exp(r), x = n ln 2 + r with |r| <= ln 2 / 2. ln 2 is split in two parts, so
# that n times the first is exact. Adding 3 * 2^22 puts n in the last bits of a number.
LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
_LEAST_EXPONENT, _GREATEST_EXPONENT = -86.0, 88.0
ROUNDING = 12582912.0


def exp(x: Floats) -> Floats:
    """e^x to about one unit in the last place; e^-86 for x below -86."""
    return exp_of_negative(x.at_most(_GREATEST_EXPONENT))


def exp_of_negative(x: Floats) -> Floats:
    """As exp, for x that are not far above 0."""
    builder = x.builder
    x = x.at_least(_LEAST_EXPONENT)
    shifted = constant(builder, ROUNDING, x.lanes).plus_product(x, LOG2_E)
    twos = shifted - ROUNDING
    rest = x.plus_product(twos, -_LN2_HIGH).plus_product(twos, -_LN2_LOW)
    # Terms are added in pairs, then pairs in pairs: fewer of them wait for each other.
    terms = [constant(builder, 1 / math.factorial(n), x.lanes) for n in range(8)]
    power = rest
    while len(terms) > 1:
        terms = [low.plus_product(high, power) for low, high in pairwise(terms)][::2]
        power = power * power
    return _times_power(terms[0], shifted)


def _times_power(numbers: Floats, shifted: Floats) -> Floats:
    """numbers * 2^n, with n in the last bits of `shifted`."""
    builder, lanes = numbers.builder, numbers.lanes
    integers = ir.VectorType(LANE, lanes)
    exponent = builder.shl(builder.bitcast(shifted.value, integers), lane_numbers([23] * lanes))
    bits = builder.add(builder.bitcast(numbers.value, integers), exponent)
    return Floats(builder, builder.bitcast(bits, numbers.value.type))


# An approximation of 2^r for r from 0 to 1, to 8e-5.
_POWERS_OF_2 = (0.99992522, 0.69583353, 0.2260672, 0.07802449)


def power_of_2(x: Floats) -> Floats:
    """2^x to a little more than bfloat16's precision, on AVX-512."""
    rest = above_floor(x)
    total = constant(x.builder, _POWERS_OF_2[-1], x.lanes)
    for term in _POWERS_OF_2[-2::-1]:
        total = constant(x.builder, term, x.lanes).plus_product(total, rest)
    return times_power(total, x)


def times_sigmoid(numbers: Floats, x: Floats) -> Floats:
    """numbers / (1 + e^-x) to a little more than bfloat16's precision, on AVX-512."""
    return numbers * reciprocal(power_of_2((x * -LOG2_E).at_most(_GREATEST_POWER)) + 1.0)


_GREATEST_POWER = 126.0


def reciprocal(x: Floats) -> Floats:
    """1 / x to 2^-14 (VRCP14PS)."""
    kind, mask = x.value.type, ir.IntType(16)
    name = "llvm.x86.avx512.rcp14.ps.512"
    operation = declare(x.builder.module, name, kind, [kind, kind, mask])
    rest = [ir.Constant(kind, None), ir.Constant(mask, 0xFFFF)]
    return Floats(x.builder, x.builder.call(operation, [x.value, *rest]))


def above_floor(x: Floats) -> Floats:
    """x - floor(x), and 0 for infinity (VREDUCEPS)."""
    return _masked_call("reduce", x, ir.Constant(LANE, _DOWN))


def times_power(numbers: Floats, x: Floats) -> Floats:
    """numbers * 2^floor(x) (VSCALEFPS)."""
    return _masked_call("scalef", numbers, x.value)


_DOWN, _AS_SET = 1, 4
"""Rounding modes: down, or the current mode."""


def _masked_call(name: str, x: Floats, other: ir.Value) -> Floats:
    """One of AVX-512's masked operations, in all lanes."""
    kind, mask = x.value.type, ir.IntType(16)
    kinds = [kind, other.type, kind, mask, LANE]
    operation = declare(x.builder.module, f"llvm.x86.avx512.mask.{name}.ps.512", kind, kinds)
    rest = [ir.Constant(kind, None), ir.Constant(mask, 0xFFFF), ir.Constant(LANE, _AS_SET)]
    return Floats(x.builder, x.builder.call(operation, [x.value, other, *rest]))


def tanh(x: Floats) -> Floats:
    """tanh, to about one unit in the last place of 1."""
    one = constant(x.builder, 1.0, x.lanes)
    return one - (one + one) / (one + exp(x + x))


def widened(builder: ir.IRBuilder, stored: ir.Value) -> Floats:
    """Converts bfloat16 numbers or int8 codes to float32."""
    lanes = stored.type.count
    integers = ir.VectorType(LANE, lanes)
    if stored.type.element == CODE:
        whole = builder.sext(stored, integers)
        return Floats(builder, builder.sitofp(whole, floats_type(lanes)))
    words = builder.zext(stored, integers)
    bits = builder.shl(words, lane_numbers([16] * lanes))
    return Floats(builder, builder.bitcast(bits, floats_type(lanes)))


class _BrainFloat(ir.Type):  # type: ignore[misc]
    """LLVM's own bfloat16, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"


def narrowed(numbers: Floats) -> ir.Value:
    """Rounds to bfloat16, ties to even; NaN stays NaN."""
    builder, lanes = numbers.builder, numbers.lanes
    if compiler.rounds_to_bfloat16():
        found = builder.fptrunc(numbers.value, ir.VectorType(_BrainFloat(), lanes))
        return builder.bitcast(found, ir.VectorType(BFLOAT16, lanes))
    bits = builder.bitcast(numbers.value, ir.VectorType(LANE, lanes))
    sixteen, one = lane_numbers([16] * lanes), lane_numbers([1] * lanes)
    odd = builder.and_(builder.lshr(bits, sixteen), one)
    rounded = builder.add(builder.add(bits, lane_numbers([0x7FFF] * lanes)), odd)
    is_nan = builder.fcmp_unordered("uno", numbers.value, numbers.value)
    chosen = builder.select(is_nan, lane_numbers([0x7FC00000] * lanes), rounded)
    return builder.trunc(builder.lshr(chosen, sixteen), ir.VectorType(BFLOAT16, lanes))


def whole_numbers(numbers: Floats) -> ir.Value:
    """Rounds to 32-bit integers, ties to even. Any integer for numbers beyond these and for NaN:
    x86_64 would convert lane by lane to define it."""
    return numbers.builder.fptosi(numbers.nearest().value, ir.VectorType(LANE, numbers.lanes))


def codes_of(numbers: Floats) -> ir.Value:
    """Rounds numbers from -127 to 127 to int8."""
    return numbers.builder.trunc(whole_numbers(numbers), ir.VectorType(CODE, numbers.lanes))


def paired(low: Floats, high: Floats) -> Floats:
    """Packs two vectors of bfloat16 numbers, one number of each per lane."""
    builder, integers = low.builder, ir.VectorType(LANE, low.lanes)
    bits = [builder.bitcast(each.value, integers) for each in (low, high)]
    shifted = builder.lshr(bits[0], lane_numbers([16] * low.lanes))
    return Floats(builder, builder.bitcast(builder.or_(shifted, bits[1]), low.value.type))


def rounded(numbers: Floats, element: ir.Type) -> Floats:
    """Rounds numbers as a store to memory of these elements followed by a load would."""
    if element == FLOAT:
        return numbers
    return widened(numbers.builder, narrowed(numbers))


def declare(module: ir.Module, name: str, result: ir.Type, arguments: list[ir.Type]) -> ir.Value:
    known = module.globals.get(name)
    return known or ir.Function(module, ir.FunctionType(result, arguments), name)
