"""Loads, stores and reductions of interpreted kernels, as interpreted_operations.py has others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from interpreted_operations import (
    Array,
    Function,
    Kind,
    Tensor,
    cast_of,
    kind_like,
    kind_or_number,
    made,
    plain,
)
from triton.language import core
from triton.runtime import interpreter

Spread = Callable[[Any], Array]
Load = tuple[Kind, np.dtype[Any], Spread, Spread]
Store = tuple[Spread, Spread]


@functools.cache
def everywhere(sizes: tuple[int, ...]) -> Array:
    return np.ones(sizes or 1, bool)


def spread_of(value: Any, dtype: core.dtype, sizes: tuple[int, ...]) -> Spread | None:
    """Gives an operand's data in a type and of these sizes; None without a simple way."""
    cast = cast_of(value, dtype)
    if cast is None:
        return None
    if type(value) is not Tensor:
        data = np.full(sizes or 1, cast(value))
        return lambda operand: data
    if value.kind.sizes == sizes:
        return cast
    try:
        if np.broadcast_shapes(value.kind.sizes, sizes) != sizes:
            return None
    except ValueError:
        return None
    return lambda operand: copied(cast(operand), sizes)


def copied(data: Array, sizes: tuple[int, ...], dtype: np.dtype[Any] | None = None) -> Array:
    """In less time than a view of numpy's."""
    spread = np.empty(sizes, dtype or data.dtype)
    spread[...] = data
    return spread


def mask_of(mask: Any, sizes: tuple[int, ...]) -> Spread | None:
    if mask is None:
        return lambda operand: everywhere(sizes)
    if type(mask) is Tensor and mask.dtype is not core.int1:
        return None
    return spread_of(mask, core.int1, sizes)


def element_of(pointer: Tensor) -> core.dtype | None:
    """Of a pointer. Single bits are bytes in memory."""
    if not pointer.dtype.is_ptr() or pointer.dtype.element_ty.is_int1():
        return None
    element: core.dtype = pointer.dtype.element_ty
    return element


def load(slow: Function) -> Function:
    recipes: dict[object, Load | None] = {}

    def learn(pointer: Tensor, mask: Any, other: Any, result: Tensor) -> Load | None:
        sizes, element = pointer.kind.sizes, element_of(pointer)
        if element is None or result.kind.sizes != sizes:
            return None
        masked = mask_of(mask, sizes)
        others = spread_of(0 if other is None else other, element, sizes)
        if masked is None or others is None:
            return None
        return result.kind, interpreter._get_np_dtype(element), masked, others

    def operate(pointer: Tensor, mask: Any = None, other: Any = None, **named: Any) -> Tensor:
        mask, other = plain(mask), plain(other)
        key = (pointer.kind, kind_or_number(mask), kind_or_number(other))
        recipe = recipes.get(key)
        if recipe:
            kind, numpy, masked, others = recipe
            data = interpreter._interpreter.load(
                pointer.handle.data, masked(mask), others(other), numpy
            )
            return made(data, kind)
        result: Tensor = slow(pointer, mask, other, **named)
        if key not in recipes:
            recipes[key] = learn(pointer, mask, other, result)
        return result

    return operate


def store(slow: Function) -> Function:
    recipes: dict[object, Store | None] = {}

    def learn(pointer: Tensor, value: Any, mask: Any) -> Store | None:
        sizes, element = pointer.kind.sizes, element_of(pointer)
        if element is None or kind_or_number(value) is None:
            return None
        values, masked = spread_of(value, element, sizes), mask_of(mask, sizes)
        return (values, masked) if values and masked else None

    def operate(pointer: Tensor, value: Any, mask: Any = None, **named: Any) -> Tensor | None:
        value, mask = plain(value), plain(mask)
        key = (pointer.kind, kind_or_number(value), kind_or_number(mask))
        recipe = recipes.get(key)
        if recipe:
            values, masked = recipe
            interpreter._interpreter.store(pointer.handle.data, values(value), masked(mask))
            return None
        result: Tensor = slow(pointer, value, mask, **named)
        if key not in recipes:
            recipes[key] = learn(pointer, value, mask)
        return result

    return operate


def reduced(slow: Function, ufunc: np.ufunc) -> Function:
    """For sums and maxima along an axis, or of all."""

    def operate(self: Tensor, axis: Any = None, **named: Any) -> Tensor:
        if named or self.dtype.name not in ("fp32", "int32", "int64") or not self.kind.sizes:
            return slow(self, axis, **named)
        data = ufunc.reduce(self.handle.data, axis=plain(axis), dtype=self.kind.numpy)
        if not data.shape:
            data = data.reshape(1)
            return made(data, kind_like(self.dtype, ()))
        return made(data, kind_like(self.dtype, data.shape))

    return operate
