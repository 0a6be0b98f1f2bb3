"""Operations of interpreted kernels straight in numpy, at a fraction of the interpreter's time.

What the language decides for each operation (types, casts, shapes, constants) depends only on its
operands' kinds, their types and shapes. An operation on new kinds runs as the interpreter has it,
which also raises what it should; later ones on the same kinds are one call of numpy, the one that
the interpreter makes. What is not done here stays with the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter

Array = np.ndarray[Any, np.dtype[Any]]
Function = Callable[..., Any]
Tensor = core.tensor
Choice = tuple["Kind", Function, Function]

SIMPLE = {"int1", "fp32", "fp64"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
"""Types that numpy has, whose casts are numpy's but for those to int1."""

COMPARISONS: dict[str, Function] = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
BITWISE: dict[str, Function] = {
    "__and__": np.bitwise_and,
    "__or__": np.bitwise_or,
    "__xor__": np.bitwise_xor,
}
OF_INTEGERS: dict[str, Function] = BITWISE | {
    "__floordiv__": lambda a, b: (a - np.fmod(a, b)) // b,
    "__mod__": np.fmod,
    "__add__": np.add,
    "__sub__": np.subtract,
    "__mul__": np.multiply,
    "__lshift__": np.left_shift,
    "__rshift__": np.right_shift,
    "maximum": np.maximum,
    "minimum": np.minimum,
}
OF_FLOATS: dict[str, Function] = {
    "__truediv__": np.divide,
    "__add__": np.add,
    "__sub__": np.subtract,
    "__mul__": np.multiply,
    "maximum": np.fmax,
    "minimum": np.fmin,
}
DIVISIONS = {"__floordiv__", "__mod__", "__truediv__"}
UNARY: dict[str, Function] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log2": np.log2,
    "floor": np.floor,
    "__neg__": np.negative,
}


@dataclass(frozen=True, eq=False)
class Kind:
    """One object for all tensors of a type and shape."""

    type: core.dtype
    dtype: core.dtype
    sizes: tuple[int, ...]
    shape: core.tuple
    numel: core.constexpr
    numpy: np.dtype[Any] | None


_kinds: dict[tuple[str, tuple[int, ...]], Kind] = {}
_make_tensor: Function = core.tensor.__init__


def kind_of(type: core.dtype) -> Kind:
    key = (type.scalar.name, type.sizes if type.is_block() else ())
    if key not in _kinds:
        sample = object.__new__(Tensor)
        _make_tensor(sample, None, type)
        simple = type.scalar.name in SIMPLE
        numpy = interpreter._get_np_dtype(type.scalar) if simple else None
        _kinds[key] = Kind(type, type.scalar, key[1], sample.shape, sample.numel, numpy)
    return _kinds[key]


def kind_like(dtype: core.dtype, sizes: tuple[int, ...]) -> Kind:
    return _kinds.get((dtype.name, sizes)) or kind_of(
        core.block_type(dtype, sizes) if sizes else dtype
    )


def initialize(self: Tensor, handle: object, type: core.dtype) -> None:
    """Tensor's: its size and shape, which nothing changes, are those of all of its kind."""
    kind = kind_of(type)
    self.handle, self.kind, self.type, self.dtype = handle, kind, type, kind.dtype
    self.shape, self.numel = kind.shape, kind.numel


def initialize_handle(self: Any, data: Array, dtype: core.dtype) -> None:
    self.data, self.dtype = data, dtype


def made(data: Array, kind: Kind) -> Tensor:
    handle = object.__new__(interpreter.TensorHandle)
    handle.data, handle.dtype = data, kind.dtype
    tensor = object.__new__(Tensor)
    tensor.handle, tensor.kind, tensor.type, tensor.dtype = handle, kind, kind.type, kind.dtype
    tensor.shape, tensor.numel = kind.shape, kind.numel
    return tensor


def plain(value: Any) -> Any:
    return value.value if type(value) is core.constexpr else value


def kind_or_number(value: Any) -> object:
    """What decides about an operand. Numbers of all types and signs differ as text."""
    if type(value) is Tensor:
        return value.kind
    return repr(value) if type(value) in (int, float, bool) else None


def constant(value: Any, dtype: core.dtype) -> Array:
    data: Array = interpreter.interpreter_semantic.scalar_constant(value, dtype).handle.data
    return data


def cast_of(value: Any, dtype: core.dtype) -> Function | None:
    """Gives an operand's data in a type; None without a simple way."""
    if type(value) is not Tensor:
        data = constant(value, dtype)
        return lambda operand: data
    if value.dtype.name == dtype.name:
        return lambda operand: operand.handle.data
    if value.kind.numpy is None or dtype.name not in SIMPLE or dtype.name == "int1":
        return None
    numpy = interpreter._get_np_dtype(dtype)
    return lambda operand: operand.handle.data.astype(numpy)


def binary(name: str, slow: Function, reverse: bool = False) -> Function:
    """With `reverse`, the operation of the other operand with this one."""
    of_data: dict[object, tuple[Kind, Function]] = {}
    of_operands: dict[object, tuple[Kind, Function] | None] = {}

    def operate(self: Any, other: Any, **named: Any) -> Tensor:
        if type(other) is core.constexpr:
            other = other.value
        if type(self) is type(other) is Tensor:
            key: tuple[object, object] = (self.kind, other.kind)
            if key in of_data:
                kind, function = of_data[key]
                return made(function(self.handle.data, other.handle.data), kind)
        else:
            key = (kind_or_number(self), kind_or_number(other))
        recipe = of_operands.get(key)
        if recipe:
            kind, function = recipe
            return made(function(self, other), kind)
        result = slow(self, other, **named)
        if key not in of_operands:
            of_operands[key] = None if None in key or named else learn(key, self, other)
        return result

    def learn(key: object, self: Any, other: Any) -> tuple[Kind, Function] | None:
        lhs, rhs = (other, self) if reverse else (self, other)
        left, right = interpreter.interpreter_semantic.binary_op_type_checking_impl(
            lhs, rhs, True, True, True, name in DIVISIONS
        )
        if left.dtype.is_ptr() or right.dtype.is_ptr():
            return None if reverse or name != "__add__" else pointers_moved(lhs, rhs, left, right)
        function = function_for(name, left.dtype)
        first, second = cast_of(lhs, left.dtype), cast_of(rhs, left.dtype)
        if not (function and first and second):
            return None
        kind = kind_like(core.int1 if name in COMPARISONS else left.dtype, left.kind.sizes)
        if all(type(each) is Tensor and each.dtype is left.dtype for each in (lhs, rhs)):
            of_data[key] = kind, (lambda a, b: function(b, a)) if reverse else function
        if reverse:
            return kind, lambda self, other: function(first(other), second(self))
        return kind, lambda self, other: function(first(self), second(other))

    return operate


def function_for(name: str, dtype: core.dtype) -> Function | None:
    if dtype.name not in SIMPLE:
        return None
    if name in COMPARISONS:
        return COMPARISONS[name]
    if dtype.is_floating():
        return OF_FLOATS.get(name)
    # Sums of single bits wrap around.
    return (BITWISE if dtype.is_int1() else OF_INTEGERS).get(name)


def pointers_moved(
    pointers: Any, steps: Any, left: Tensor, right: Tensor
) -> tuple[Kind, Function] | None:
    """By integers, or by a number; `left` and `right` are both after casts."""
    if right.dtype.is_ptr() or type(pointers) is not Tensor:
        return None
    width = max(1, left.dtype.element_ty.primitive_bitwidth // 8)
    if type(steps) is Tensor:
        return (
            left.kind,
            lambda self, other: self.handle.data + width * other.handle.data.astype(np.uint64),
        )
    step = width * constant(steps, right.dtype).astype(np.uint64)
    return left.kind, lambda self, other: self.handle.data + step


def unary(name: str, slow: Function) -> Function:
    function = UNARY[name]

    def operate(self: Any) -> Tensor:
        if type(self) is Tensor and self.dtype is core.float32:
            return made(function(self.handle.data), self.kind)
        return slow(self)

    return operate


def where(slow: Function) -> Function:
    recipes: dict[object, Choice | None] = {}

    def learn(key: tuple[object, ...], x: Any, y: Any, result: Tensor) -> Choice | None:
        condition = key[0]
        if None in key or type(condition) is not Kind or condition.dtype is not core.int1:
            return None
        first, second = cast_of(x, result.dtype), cast_of(y, result.dtype)
        simple = result.dtype.name in SIMPLE and first and second
        return (result.kind, first, second) if simple else None  # type: ignore[return-value]

    def operate(condition: Any, x: Any, y: Any) -> Tensor:
        x, y = plain(x), plain(y)
        key = (kind_or_number(condition), kind_or_number(x), kind_or_number(y))
        recipe = recipes.get(key)
        if recipe:
            kind, first, second = recipe
            return made(np.where(condition.handle.data, first(x), second(y)), kind)
        result: Tensor = slow(condition, x, y)
        if key not in recipes:
            recipes[key] = learn(key, x, y, result)
        return result

    return operate


def convert(slow: Function) -> Function:
    kinds: dict[object, Kind | None] = {}

    def operate(self: Tensor, dtype: Any, *args: Any, **named: Any) -> Tensor:
        dtype = plain(dtype)
        if args or named:
            return slow(self, dtype, *args, **named)
        if dtype is self.dtype:
            return self
        key = (self.kind, dtype.name)
        kind = kinds.get(key)
        if kind:
            return made(self.handle.data.astype(kind.numpy), kind)
        result = slow(self, dtype)
        if key not in kinds:
            simple = self.dtype.name in SIMPLE and dtype.name in SIMPLE
            kinds[key] = result.kind if simple and dtype.name != "int1" else None
        return result

    return operate


WHOLE = slice(None)


def index(slow: Function) -> Function:
    kinds: dict[object, Kind] = {}

    def operate(self: Tensor, slices: Any) -> Tensor:
        if type(slices) is not tuple or not self.kind.sizes:
            return slow(self, slices)
        key = (self.kind, *(None if each is None else each == WHOLE for each in slices))
        kind = kinds.get(key)
        if kind:
            return made(self.handle.data.reshape(kind.sizes), kind)
        result = slow(self, slices)
        if False not in key:
            kinds[key] = result.kind
        return result

    return operate


def numbers_of(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sizes or axes, given one by one or as one list."""
    if len(values) == 1 and not isinstance(plain(values[0]), int):
        values = tuple(plain(values[0]))
    return tuple(map(plain, values))


def rearranged(slow: Function, function: Callable[[Array, tuple[int, ...]], Array]) -> Function:
    kinds: dict[object, Kind] = {}

    def operate(self: Tensor, *values: Any, **named: Any) -> Tensor:
        if named or not self.kind.sizes or not values:
            return slow(self, *values, **named)
        given = numbers_of(values)
        key = (self.kind, given)
        kind = kinds.get(key)
        if kind:
            return made(function(self.handle.data, given), kind)
        result = slow(self, *values)
        if result.kind.sizes:
            kinds[key] = result.kind
        return result

    return operate


def split(slow: Function) -> Function:
    kinds: dict[Kind, Kind] = {}

    def operate(self: Tensor) -> tuple[Tensor, Tensor]:
        kind = kinds.get(self.kind)
        if kind:
            data = self.handle.data
            return made(data[..., 0], kind), made(data[..., 1], kind)
        result: tuple[Tensor, Tensor] = slow(self)
        if result[0].kind.sizes:
            kinds[self.kind] = result[0].kind
        return result

    return operate


def fused(slow: Function) -> Function:
    def operate(x: Any, y: Any, z: Any) -> Tensor:
        kinds = {kind_or_number(each) for each in (x, y, z)}
        if len(kinds) > 1 or type(x) is not Tensor or x.dtype is not core.float32:
            return slow(x, y, z)
        data = interpreter._interpreter.fma_fp32(x.handle.data, y.handle.data, z.handle.data)
        return made(data, x.kind)

    return operate


def kept(slow: Function) -> Function:
    """For functions of numbers, sizes and types alone: nothing changes a tensor."""
    found: dict[object, Tensor] = {}

    def text(value: Any) -> str:
        listed = isinstance(value, list | tuple | core.tuple)
        return repr([plain(each) for each in value] if listed else value)

    def operate(*args: Any, **named: Any) -> Tensor:
        given = tuple(map(plain, args))
        if named or any(type(each) is Tensor for each in given):
            return slow(*args, **named)
        key = tuple(map(text, given))
        if key not in found:
            found[key] = slow(*args)
        return found[key]

    return operate
