"""Compiled code that normalizes queries and keys, rotates them by their positions, and stores
keys and values, as they are or as codes (kernels/integers.py, kernels/half_bytes.py).

A pair of neighbouring numbers is a complex number: (a, b) rotated by (c, s) is
(a * c - b * s, b * c + a * s). A number depends on its own head only or, if norms are over all
heads, on its own row only.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING

import torch
from llvmlite import ir
from torch import Tensor

from baton.kernels import SCALE_BYTES
from baton.kernels.cpu import compiler
from baton.kernels.cpu.compiler import Library
from baton.kernels.cpu.half_byte_heads import put_half_bytes
from baton.kernels.cpu.integer_codes import factor_and_scale
from baton.kernels.cpu.ir_builder import COUNT, POINTER, Arguments, Count, Function, Memory
from baton.kernels.cpu.norm import inverse_root
from baton.kernels.cpu.vectors import CODE, FLOAT, HALF_BYTE, Floats, element_of, vector_of
from baton.kernels.integers import MOST
from baton.kernels.linear import RMSNorm

if TYPE_CHECKING:
    from baton.kernels.cache import LayerCache


class RotationArguments(ctypes.Structure):
    """Arguments of the compiled function."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("qkv", ctypes.c_void_p),  # [rows, queries, keys and values], changed in place
        ("query_numbers", ctypes.c_int64),
        ("key_numbers", ctypes.c_int64),
        ("query_norm", ctypes.c_void_p),  # float32 [query_norm_size], or null
        ("query_norm_size", ctypes.c_int64),  # that of a head, of its first numbers or of all heads
        ("query_norms", ctypes.c_int64),  # how many times the norm is applied, to one size each
        ("query_epsilon", ctypes.c_float),
        ("key_norm", ctypes.c_void_p),
        ("key_norm_size", ctypes.c_int64),
        ("key_norms", ctypes.c_int64),
        ("key_epsilon", ctypes.c_float),
        ("rotation", ctypes.c_void_p),  # float32 [rows, head_dim], complex; or null
        ("head_dim", ctypes.c_int64),
        ("tokens", ctypes.c_void_p),  # [any, token_numbers]
        ("token_numbers", ctypes.c_int64),  # numbers of a token's keys, with their scales
        ("places", ctypes.c_void_p),  # [rows, k/v], the rows of `tokens` for key and value
        ("rows_claimed", ctypes.c_int64),  # 0 at first
    )


def rotate_and_write(
    qkv: Tensor,
    heads: int,
    norms: tuple[RMSNorm | None, RMSNorm | None],
    rotation: Tensor | None,
    cache: LayerCache,
    places: Tensor,
) -> None:
    """qkv [T, heads + k/v * kv_heads, head_dim], norms of queries and keys, rotation
    [T, 1, head_dim / 2], complex, and places [T, k/v], rows of cache.tokens."""
    (rows, _, head_dim), tokens = qkv.shape, cache.tokens
    numbers = {"query": heads * head_dim, "key": cache.kv.shape[3] * head_dim}
    arguments = RotationArguments(rows, qkv.data_ptr(), *numbers.values())
    for kind, norm in zip(numbers, norms, strict=True):
        if norm:
            size = len(norm.wide)
            setattr(arguments, f"{kind}_norm", norm.wide.data_ptr())
            setattr(arguments, f"{kind}_epsilon", norm.epsilon)
            setattr(arguments, f"{kind}_norm_size", size)
            setattr(arguments, f"{kind}_norms", numbers[kind] // max(size, head_dim))
    arguments.rotation = None if rotation is None else rotation.data_ptr()
    arguments.head_dim = head_dim
    arguments.tokens, arguments.places = tokens.data_ptr(), places.data_ptr()
    arguments.token_numbers = tokens.shape[1]
    address = compiled_rotation(cache.lanes, qkv.dtype, tokens.dtype, cache.kv.shape[1])
    compiler.run(address, arguments, alone=rows <= compiler.FEW_ROWS)


@functools.cache
def compiled_rotation(lanes: int, dtype: torch.dtype, stored: torch.dtype, parts: int) -> int:
    """The address of the compiled function; `parts` are k/v."""
    kinds = element_of(dtype), element_of(stored)
    return _library(lanes, *kinds, parts).address("rotate_and_write")


@functools.cache
def _library(lanes: int, element: ir.Type, stored: ir.Type, parts: int) -> Library:
    return Library(_module, lanes, element, stored, parts)


def _module(lanes: int, element: ir.Type, stored: ir.Type, parts: int) -> ir.Module:
    module = ir.Module("rotation")
    code = Function(module, "rotate_and_write", [POINTER], lanes=lanes, exported=True)
    given = Arguments(code.arguments[0], RotationArguments)
    queries, keys = given.count("query_numbers"), given.count("key_numbers")
    head_dim, rotation = given.count("head_dim"), given.memory("rotation")
    with code.claim(given.field("rows_claimed"), given.count("rows")) as row:
        numbers = given.memory("qkv", element).from_(row * (queries + keys * parts))
        for kind, of_kind in (("query", numbers), ("key", numbers.from_(queries))):
            norm, size = given.memory(f"{kind}_norm"), given.count(f"{kind}_norm_size")
            with code.when(norm.is_null("!=")):
                epsilon = given.field(f"{kind}_epsilon", FLOAT)
                _normalize(code, of_kind, given.count(f"{kind}_norms"), norm, epsilon, size)
        with code.when(rotation.is_null("!=")):
            _rotate(code, numbers, queries + keys, rotation.from_(row * head_dim), head_dim)
        for part in range(parts):
            place = given.memory("places", COUNT).count(row * parts + part)
            target = given.memory("tokens", stored).from_(place * given.count("token_numbers"))
            source = numbers.from_(queries + keys * part)
            if stored in (CODE, HALF_BYTE):
                put = _put_codes if stored == CODE else put_half_bytes
                put(code, source, target, keys // head_dim, head_dim)
            else:
                with code.loop(0, keys, step=lanes) as index:
                    target.put(source.vector(index), index)
    code.end()
    return module


def _put_codes(
    code: Function, source: Memory, target: Memory, heads: Count, head_dim: Count
) -> None:
    """Stores each head's numbers as codes, with their scale behind them."""
    with code.loop(0, heads) as head:
        numbers = source.from_(head * head_dim)
        codes = target.from_(head * (head_dim + SCALE_BYTES))
        factor, scale = factor_and_scale(code, numbers.vector, head_dim, MOST)
        with code.loop(0, head_dim, step=code.lanes) as at:
            codes.put(numbers.vector(at) * factor, at)
        codes.from_(head_dim).of(FLOAT).in_lanes(1).put(scale.arranged(scale, [0]))


def _normalize(
    code: Function, numbers: Memory, count: Count, norm: Memory, epsilon: Memory, size: Count
) -> None:
    """Applies an RMS norm over `size` numbers, `count` times."""
    with code.loop(0, count) as index:
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
