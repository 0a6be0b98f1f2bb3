"""Compiled code that normalizes queries and keys, rotates them by their positions, and stores
keys and values.

A pair of neighbouring numbers is complex: (a, b) rotated by (c, s) is
(a * c - b * s, b * c + a * s). Every number is computed from its own head's alone, or, if the
norms are of all heads, from its own row's.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from llvmlite import ir
from torch import Tensor

from baton.kernels.cpu import compiler
from baton.kernels.cpu.compiler import Library, Registers
from baton.kernels.cpu.ir_builder import COUNT, POINTER, Arguments, Count, Function, Memory
from baton.kernels.cpu.norm import inverse_root
from baton.kernels.cpu.vectors import FLOAT, Floats, element_of, vector_of
from baton.kernels.linear import RMSNorm


class RotationArguments(ctypes.Structure):
    """Arguments of the compiled function."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("qkv", ctypes.c_void_p),  # [rows, queries, keys and values], changed in place
        ("query_numbers", ctypes.c_int64),
        ("key_numbers", ctypes.c_int64),
        ("query_norm", ctypes.c_void_p),  # float32 [query_norm_size], or null
        ("query_norm_size", ctypes.c_int64),  # head_dim, or query_numbers
        ("query_epsilon", ctypes.c_float),
        ("key_norm", ctypes.c_void_p),
        ("key_norm_size", ctypes.c_int64),
        ("key_epsilon", ctypes.c_float),
        ("rotation", ctypes.c_void_p),  # float32 [rows, head_dim], complex; or null
        ("head_dim", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),  # [any, key_numbers]
        ("places", ctypes.c_void_p),  # [rows, 2], where a row's key and value go in tokens
        ("rows_claimed", ctypes.c_int64),  # 0 at first
    )


def rotate_and_write(
    qkv: Tensor,
    heads: int,
    norms: tuple[RMSNorm, RMSNorm] | None,
    rotation: Tensor | None,
    tokens: Tensor,
    places: Tensor,
) -> None:
    """qkv [T, heads + 2 * kv_heads, head_dim], norms of queries and keys, rotation
    [T, 1, head_dim / 2], complex, tokens [any, kv_heads * head_dim] and places [T, 2]."""
    rows, _, head_dim = qkv.shape
    arguments = RotationArguments(rows, qkv.data_ptr(), heads * head_dim, tokens.shape[1])
    if norms:
        query, key = norms
        arguments.query_norm, arguments.query_epsilon = query.wide.data_ptr(), query.epsilon
        arguments.key_norm, arguments.key_epsilon = key.wide.data_ptr(), key.epsilon
        arguments.query_norm_size, arguments.key_norm_size = len(query.wide), len(key.wide)
    arguments.rotation = None if rotation is None else rotation.data_ptr()
    arguments.head_dim = head_dim
    arguments.tokens, arguments.places = tokens.data_ptr(), places.data_ptr()
    address = compiled_rotation(head_dim, qkv.dtype, compiler.registers())
    compiler.run(address, arguments, alone=rows <= FEW_ROWS)


FEW_ROWS = 8
"""Rows that one thread rotates before another could start."""


@functools.cache
def compiled_rotation(head_dim: int, dtype: torch.dtype, registers: Registers) -> int:
    """The address of the compiled function."""
    lanes = compiler.lanes_for(head_dim, registers)
    return _library(lanes, element_of(dtype)).address("rotate_and_write")


@functools.cache
def _library(lanes: int, element: ir.Type) -> Library:
    module = ir.Module("rotation")
    code = Function(module, "rotate_and_write", [POINTER], lanes=lanes, exported=True)
    given = Arguments(code.arguments[0], RotationArguments)
    queries, keys = given.count("query_numbers"), given.count("key_numbers")
    head_dim, rotation = given.count("head_dim"), given.memory("rotation")
    with code.claim(given.field("rows_claimed"), given.count("rows")) as row:
        numbers = given.memory("qkv", element).from_(row * (queries + keys * 2))
        for kind, of_kind, count in (
            ("query", numbers, queries),
            ("key", numbers.from_(queries), keys),
        ):
            norm, size = given.memory(f"{kind}_norm"), given.count(f"{kind}_norm_size")
            with code.when(norm.is_null("!=")):
                epsilon = given.field(f"{kind}_epsilon", FLOAT)
                _normalize(code, of_kind, count, norm, epsilon, size)
        with code.when(rotation.is_null("!=")):
            _rotate(code, numbers, queries + keys, rotation.from_(row * head_dim), head_dim)
        for half in range(2):
            place = given.memory("places", COUNT).count(row * 2 + half)
            target = given.memory("tokens", element).from_(place * keys)
            with code.loop(0, keys, step=lanes) as index:
                target.put(numbers.vector(queries + keys * half + index), index)
    code.end()
    return Library(module)


def _normalize(
    code: Function, numbers: Memory, count: Count, norm: Memory, epsilon: Memory, size: Count
) -> None:
    """Each `size` numbers over the root of their mean square."""
    with code.loop(0, count // size) as index:
        some = numbers.from_(index * size)
        scale = inverse_root(code, some, epsilon, size)
        with code.loop(0, size, step=code.lanes) as at:
            some.put(some.vector(at) * scale * norm.vector(at), at)


def _rotate(code: Function, numbers: Memory, count: Count, turn: Memory, head_dim: Count) -> None:
    pairs_of_lanes = [lane // 2 * 2 for lane in range(code.lanes)]
    signs = vector_of(code.builder, [-1.0, 1.0] * (code.lanes // 2))
    with code.loop(0, head_dim, step=code.lanes) as dim:
        pairs = turn.vector(dim)
        cosines = pairs.arranged(pairs, pairs_of_lanes)
        sines = pairs.arranged(pairs, [lane + 1 for lane in pairs_of_lanes]) * signs
        with code.loop(0, count // head_dim) as head:
            at = head * head_dim + dim
            numbers.put(_rotated(numbers.vector(at), cosines, sines), at)


def _rotated(x: Floats, cosines: Floats, signed_sines: Floats) -> Floats:
    swapped = x.arranged(x, [lane ^ 1 for lane in range(x.lanes)])
    return (x * cosines).plus_product(swapped, signed_sines)
