"""Compiled code that adds normalized rows to a residual."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from llvmlite import ir
from torch import Tensor

from baton.kernels.cpu import compiler
from baton.kernels.cpu.compiler import Library
from baton.kernels.cpu.ir_builder import POINTER, Arguments, Count, Function, Memory
from baton.kernels.cpu.vectors import FLOAT, Floats, element_of, rounded
from baton.kernels.linear import RMSNorm


class NormArguments(ctypes.Structure):
    """Arguments of the compiled function."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("x", ctypes.c_void_p),  # [rows, size], as residual and out
        ("norm", ctypes.c_void_p),  # float32 [size]
        ("epsilon", ctypes.c_float),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows_claimed", ctypes.c_int64),  # 0 at first
    )


def add_normed(residual: Tensor, x: Tensor, norm: RMSNorm) -> Tensor:
    """residual + norm(x), both [rows, size]."""
    rows, size = x.shape
    x, residual = x.contiguous(), residual.contiguous()
    out = x.new_empty(rows, size)
    arguments = NormArguments(
        rows,
        size,
        x.data_ptr(),
        norm.wide.data_ptr(),
        norm.epsilon,
        residual.data_ptr(),
        out.data_ptr(),
    )
    lanes = compiler.lanes_for(size, compiler.registers())
    address = _library(lanes, element_of(x.dtype)).address("add_normed")
    compiler.run(address, arguments, alone=rows <= compiler.FEW_ROWS)
    return out


@functools.cache
def _library(lanes: int, element: ir.Type) -> Library:
    return Library(_module, lanes, element)


def _module(lanes: int, element: ir.Type) -> ir.Module:
    module = ir.Module("norm")
    code = Function(module, "add_normed", [POINTER], lanes=lanes, exported=True)
    given = Arguments(code.arguments[0], NormArguments)
    size, norm, epsilon = given.count("size"), given.memory("norm"), given.field("epsilon", FLOAT)
    with code.claim(given.field("rows_claimed"), given.count("rows")) as row:
        x, residual, out = (
            given.memory(name, element).from_(row * size) for name in ("x", "residual", "out")
        )
        scale = inverse_root(code, x, epsilon, size)
        with code.loop(0, size, step=lanes) as at:
            normed = rounded(x.vector(at) * scale * norm.vector(at), element)
            out.put(normed + residual.vector(at), at)
    code.end()
    return module


def inverse_root(code: Function, numbers: Memory, epsilon: Memory, size: Count) -> Floats:
    """1 / sqrt(mean of squares + epsilon) of `size` numbers, in all lanes."""
    with code.sum_loop(0, size, [code.zero()], step=code.lanes) as (at, squares):
        x = numbers.vector(at)
        squares[0] = squares[0].plus_product(x, x)
    mean = squares[0].total() / size.as_floats(code.lanes)
    return (code.zero() + 1.0) / (mean + epsilon.repeated()).root()


def normalized(
    code: Function, x: Memory, size: Count, norm: tuple[Memory, Memory] | None
) -> Callable[[Count], Floats]:
    """Returns a function that loads vectors of a row of x; if a norm's weight and epsilon are
    given, it normalizes and rounds them."""
    if norm is None:
        return x.vector
    weight, epsilon = norm
    scale = inverse_root(code, x, epsilon, size)
    return lambda at: rounded(x.vector(at) * scale * weight.vector(at), x.element)
