"""Compiled code that finds the codes of float32 weights on a grid (kernels/exact_codes.py)."""

from __future__ import annotations

import ctypes
import functools

import torch
from llvmlite import ir
from torch import Tensor

from baton.kernels.cpu import compiler
from baton.kernels.cpu.compiler import Library
from baton.kernels.cpu.ir_builder import POINTER, Arguments, Function, Memory
from baton.kernels.cpu.vectors import CODE, LANE, ROUNDING, Floats

NOT_ON_GRID = 1e9
"""More than any code."""


class EncodeArguments(ctypes.Structure):
    """Arguments of the compiled function."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("weight", ctypes.c_void_p),  # [rows, inputs]
        ("scales", ctypes.c_void_p),  # [rows, groups]
        ("offsets", ctypes.c_void_p),  # [rows, groups]
        ("codes", ctypes.c_void_p),  # int8 [rows, inputs]
        ("most", ctypes.c_void_p),  # [rows], each row's largest code, or NOT_ON_GRID
        ("rows_claimed", ctypes.c_int64),  # 0 at first
    )


def encoded(weight: Tensor, scales: Tensor, offsets: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Returns the codes and each row's largest one, or NOT_ON_GRID."""
    weight, scales, offsets = weight.contiguous(), scales.contiguous(), offsets.contiguous()
    codes, most = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    arguments = EncodeArguments(
        *weight.shape,
        weight.data_ptr(),
        scales.data_ptr(),
        offsets.data_ptr(),
        codes.data_ptr(),
        most.data_ptr(),
    )
    address = _library(compiler.registers().lanes, group).address("encode")
    compiler.run(address, arguments)
    return codes, most


@functools.cache
def _library(lanes: int, group: int) -> Library:
    return Library(_module, lanes, group)


def _module(lanes: int, group: int) -> ir.Module:
    module = ir.Module("encoding")
    code = Function(module, "encode", [POINTER], lanes=lanes, exported=True)
    given = Arguments(code.arguments[0], EncodeArguments)
    inputs, zero = given.count("inputs"), code.zero()
    groups = inputs // group
    with code.claim(given.field("rows_claimed"), given.count("rows")) as row:
        weight = given.memory("weight").from_(row * inputs)
        codes = given.memory("codes", CODE).from_(row * inputs)
        grids = [given.memory(name).from_(row * groups) for name in ("scales", "offsets")]
        with code.sum_loop(0, groups, [zero, zero]) as (index, found):
            scale, offset = (each.repeated(index) for each in grids)
            inverse = ((zero + 1.0) / scale).where(scale.magnitude().above(0.0), zero)
            for start in range(0, group, lanes):
                at = index * group + start
                number = weight.vector(at)
                shifted = (number - offset) * inverse + ROUNDING
                nearest = shifted - ROUNDING
                missed = (offset.plus_product(nearest, scale) - number).magnitude()
                found[0] = found[0].at_least(nearest.magnitude())
                found[1] = found[1].at_least(missed)
                _put_last_bytes(codes.from_(at), shifted)
        most, missed = (each.greatest() for each in found)
        worst = (zero + NOT_ON_GRID).where(missed.above(0.0), most)
        out = given.memory("most").in_lanes(1)
        out.put(worst.arranged(worst, [0]), row)
    code.end()
    return module


def _put_last_bytes(target: Memory, shifted: Floats) -> None:
    """Stores whole numbers of one byte, which are the last bits of numbers plus ROUNDING."""
    builder = shifted.builder
    integers = builder.bitcast(shifted.value, ir.VectorType(LANE, shifted.lanes))
    codes = builder.trunc(integers, ir.VectorType(CODE, shifted.lanes))
    builder.store(codes, target.value, align=1)
