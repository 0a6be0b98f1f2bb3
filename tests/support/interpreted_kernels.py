"""Triton's interpreter at several times its speed, for a process that compiles no kernel.

Nearly all of its time goes into bookkeeping around numpy's operations: it patches its language at
each launch and whenever a kernel calls a function, builds the type of each result anew, looks for
the type of each operand among all that there are, and computes for each integer operation whether
it has overflowed, which it reports only when it debugs. interpreted_operations.py does without most
of it.
And it rounds to FP8 as GPUs do: a number that rounds up to a power of two becomes half of it there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import numpy as np
import torch
from interpreted_memory import copied, load, reduced, store
from interpreted_operations import (
    BITWISE,
    COMPARISONS,
    OF_FLOATS,
    OF_INTEGERS,
    UNARY,
    Function,
    binary,
    convert,
    fused,
    index,
    initialize,
    initialize_handle,
    kept,
    rearranged,
    split,
    unary,
    where,
)
from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

BINARY = {*COMPARISONS, *BITWISE, *OF_INTEGERS, *OF_FLOATS}
REVERSED = {f"__r{name[2:]}": name for name in {*OF_INTEGERS, *OF_FLOATS} if name.startswith("__")}
QUICK: dict[str, Callable[[Function], Function]] = {
    **{name: functools.partial(binary, name) for name in BINARY},
    **{
        reverse: functools.partial(binary, name, reverse=True) for reverse, name in REVERSED.items()
    },
    **{name: functools.partial(unary, name) for name in UNARY},
    "__getitem__": index,
    "to": convert,
    "where": where,
    "load": load,
    "store": store,
    "fma": fused,
    "split": split,
    "arange": kept,
    "full": kept,
    "reshape": lambda slow: rearranged(slow, lambda data, sizes: data.reshape(sizes)),
    "permute": lambda slow: rearranged(slow, lambda data, axes: data.transpose(axes)),
}
"""For operations that are done without the interpreter's bookkeeping, by name."""


def speed_up() -> None:
    """For a process in which no kernel is compiled."""
    _patch_language_once()
    _keep_dtypes()
    _keep_block_types()
    core.tensor.__init__ = initialize
    interpreter.TensorHandle.__init__ = initialize_handle
    interpreter.TensorHandle.set_attr = lambda self, key, value: None
    interpreter.interpreter_builder.options = replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    _broadcast_at_once()
    _keep_constants()
    _call_at_once()
    _keep_tensors()
    _reduce_at_once()
    _round_to_fp8()


def _patch_language_once() -> None:
    patch, patched = interpreter._patch_lang, set[FunctionType]()

    def patch_new(function: FunctionType) -> interpreter._LangPatchScope:
        if function not in patched:
            patched.add(function)
            patch(function)
        return interpreter._LangPatchScope()  # restores nothing

    interpreter._patch_lang = patch_new


def _keep_dtypes() -> None:
    find, found = interpreter._get_np_dtype, dict[str, np.dtype[Any]]()

    def numpy_dtype(dtype: core.dtype) -> np.dtype[Any]:
        if dtype.name not in found:
            found[dtype.name] = find(dtype)
        return found[dtype.name]

    interpreter._get_np_dtype = numpy_dtype


def _keep_block_types() -> None:
    """And their sizes as Python's own tuples, beside those of the language."""
    make, made = core.block_type.__init__, dict[tuple[Any, ...], dict[str, Any]]()

    def initialize(self: core.block_type, element_ty: core.dtype, shape: Any) -> None:
        if type(shape) is not tuple or core.constexpr in map(type, shape):
            shape = tuple(size.value if type(size) is core.constexpr else size for size in shape)
        key = (element_ty.name, shape)
        if key not in made:
            make(self, element_ty, list(shape))
            made[key] = {name: vars(self)[name] for name in ("shape", "numel", "name")}
        vars(self).update(made[key], element_ty=element_ty, sizes=shape)

    core.block_type.__init__ = initialize


def _broadcast_at_once() -> None:
    def broadcast(
        self: TritonSemantic, lhs: core.tensor, rhs: core.tensor
    ) -> tuple[core.tensor, core.tensor]:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        shape = _joint_shape(_block_shape(lhs), _block_shape(rhs))
        return _spread(lhs, shape), _spread(rhs, shape)

    TritonSemantic.broadcast_impl_value = broadcast


_joint_shape = functools.cache(np.broadcast_shapes)


def _block_shape(tensor: core.tensor) -> tuple[int, ...]:
    return tensor.type.sizes if tensor.type.is_block() else ()


def _spread(tensor: core.tensor, shape: tuple[int, ...]) -> core.tensor:
    own = _block_shape(tensor)
    if own == shape:
        return tensor
    handle, dtype = tensor.handle, tensor.dtype
    data = copied(handle.data, shape, None if own else interpreter._get_np_dtype(dtype))
    return core.tensor(interpreter.TensorHandle(data, dtype), core.block_type(dtype, shape))


def _keep_constants() -> None:
    """But for zeros, which are equal with either sign."""
    make, made = TritonSemantic.scalar_constant, dict[tuple[Any, ...], core.tensor]()

    def constant(self: TritonSemantic, value: Any, dtype: core.dtype) -> core.tensor:
        key = (type(value), value, dtype.name)
        if key not in made:
            tensor = make(self, value, dtype)
            if not value:
                return tensor
            made[key] = tensor
        return made[key]

    TritonSemantic.scalar_constant = constant


def _call_at_once() -> None:
    """Functions of the language, without the check that a kernel calls them."""

    def patch(owner: object, name: str, member: Any, builder: object, scope: Any) -> None:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **named)

        scope.set_attr(owner, name, QUICK[name](call) if _is_quick(owner, name) else call)

    interpreter._patch_attr = patch


def _is_quick(owner: object, name: str) -> bool:
    """Members of tensors, and functions of the modules under the same names."""
    return name in QUICK and owner in (core.tensor, core, language, language.math)


def _keep_tensors() -> None:
    convert = TritonSemantic.to_tensor

    def tensor(self: TritonSemantic, value: Any, check_type: bool = True) -> Any:
        return value if type(value) is core.tensor else convert(self, value, check_type)

    TritonSemantic.to_tensor = tensor


def _reduce_at_once() -> None:
    language.sum = reduced(language.sum, np.add)
    language.max = reduced(language.max, np.fmax)


def _round_to_fp8() -> None:
    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (core.float32, core.float8e4nv):
            return convert(data, source, target, mode)
        return torch.from_numpy(data.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = rounded
