"""Compiled code that rotates queries and keys by their positions, and stores keys and values.

A pair of neighbouring numbers is complex: (a, b) rotated by (c, s) is
(a * c - b * s, b * c + a * s), two pairs per vector.
"""

from __future__ import annotations

import ctypes
import functools

from llvmlite import ir
from torch import Tensor

from baton.kernels.cpu import compiler
from baton.kernels.cpu.compiler import Library
from baton.kernels.cpu.ir_builder import (
    LANES,
    POINTER,
    Arguments,
    Count,
    Floats,
    Function,
    Memory,
    vector_of,
)


class RotationArguments(ctypes.Structure):
    """Arguments of the compiled function."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("qkv", ctypes.c_void_p),  # [rows, queries, keys and values], rotated in place
        ("query_numbers", ctypes.c_int64),
        ("key_numbers", ctypes.c_int64),
        ("rotation", ctypes.c_void_p),  # [rows, head_dim], complex; or null
        ("head_dim", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),  # [any, key_numbers]
        ("places", ctypes.c_void_p),  # [rows, 2], where a row's key and value go in tokens
        ("rows_claimed", ctypes.c_int64),  # 0 at first
    )


def rotate_and_write(
    qkv: Tensor, heads: int, rotation: Tensor | None, tokens: Tensor, places: Tensor
) -> None:
    """qkv [T, heads + 2 * kv_heads, head_dim], rotation [T, 1, head_dim / 2], complex, tokens
    [any, kv_heads * head_dim] and places [T, 2]."""
    rows, _, head_dim = qkv.shape
    arguments = RotationArguments(
        rows,
        qkv.data_ptr(),
        heads * head_dim,
        tokens.shape[1],
        None if rotation is None else rotation.data_ptr(),
        head_dim,
        tokens.data_ptr(),
        places.data_ptr(),
    )
    compiler.run(_address(), arguments, alone=rows <= FEW_ROWS)


FEW_ROWS = 8
"""Rows that one thread rotates before another could start."""


@functools.cache
def _address() -> int:
    return _library().address("rotate_and_write")


@functools.cache
def _library() -> Library:
    module = ir.Module("rotation")
    code = Function(module, "rotate_and_write", [POINTER], exported=True)
    given = Arguments(code.arguments[0], RotationArguments)
    queries, keys = given.count("query_numbers"), given.count("key_numbers")
    with code.claim(given.counter("rows_claimed"), given.count("rows")) as row:
        numbers = given.floats("qkv").from_(row * (queries + keys * 2))
        rotation = given.floats("rotation")
        with code.when(rotation.is_null("!=")):
            _rotate(code, numbers, queries + keys, rotation, row, given.count("head_dim"))
        for half in range(2):
            place = given.counts("places").count(row * 2 + half)
            target = given.floats("tokens").from_(place * keys)
            with code.loop(0, keys, step=LANES) as index:
                target.put(numbers.vector(queries + keys * half + index), index)
    code.end()
    return Library(module)


def _rotate(
    code: Function, numbers: Memory, count: Count, rotation: Memory, row: Count, head_dim: Count
) -> None:
    turn = rotation.from_(row * head_dim)
    with code.loop(0, head_dim, step=LANES) as dim:
        pairs = turn.vector(dim)
        cosines, sines = pairs.arranged(pairs, [0, 0, 2, 2]), pairs.arranged(pairs, [1, 1, 3, 3])
        signed = sines * vector_of(code.builder, [-1.0, 1.0, -1.0, 1.0])
        with code.loop(0, count // head_dim) as head:
            at = head * head_dim + dim
            x = numbers.vector(at)
            numbers.put(_rotated(x, cosines, signed), at)


def _rotated(x: Floats, cosines: Floats, signed_sines: Floats) -> Floats:
    return (x * cosines).plus_product(x.arranged(x, [1, 0, 3, 2]), signed_sines)
