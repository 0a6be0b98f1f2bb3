"""Compiled code of gated activations."""

from __future__ import annotations

import math
from collections.abc import Callable

from llvmlite import ir

from baton.kernels.cpu.compiler import AVX512
from baton.kernels.cpu.ir_builder import COUNT, POINTER, Function
from baton.kernels.cpu.vectors import BFLOAT16, Floats, constant, exp, times_sigmoid
from baton.kernels.linear import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation


def _gelu_exponent(x: Floats) -> Floats:
    """x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)), with u = root(2 / pi) * (x + 0.044715 x^3)"""
    twice = 2.0 * math.sqrt(2.0 / math.pi)
    return x * (constant(x.builder, twice, x.lanes) + x * x * (twice * 0.044715))


def _clamped_swiglu(gate: Floats, up: Floats) -> tuple[Floats, Floats, Floats]:
    gate, up = gate.at_most(SWIGLU_LIMIT), up.at_most(SWIGLU_LIMIT).at_least(-SWIGLU_LIMIT)
    return gate, gate * SWIGLU_ALPHA, up + 1.0


GATES: dict[Activation, Callable[[Floats, Floats], tuple[Floats, Floats, Floats]]] = {
    "silu": lambda gate, up: (gate, gate, up),
    "gelu_tanh": lambda gate, up: (gate, _gelu_exponent(gate), up),
    "clamped_swiglu": _clamped_swiglu,
}
"""Each activation's x, e and y, made of gate and up: it is x / (1 + exp(-e)) * y."""


def gate_code(
    module: ir.Module, name: Activation, panel: int, lanes: int, element: ir.Type
) -> Function:
    """gated = activation(gate) * up for one panel [rows, panel]: (gate, up, gated, rows, stride of
    gated's rows)"""
    types = [POINTER, POINTER, POINTER, COUNT, COUNT]
    code = Function(module, f"gate_{name}", types, lanes=lanes)
    gate, up, gated, rows, stride = code.arguments
    gated = gated.of(element)
    one = code.zero() + 1.0
    is_short = element == BFLOAT16 and lanes == AVX512.lanes
    with code.loop(0, rows) as row:
        for column in range(0, panel, lanes):
            at = row * panel + column
            x, exponent, factor = GATES[name](gate.vector(at), up.vector(at))
            if is_short:
                share = times_sigmoid(x, exponent)
            else:
                share = x / (one + exp(code.zero() - exponent))
            gated.put(share * factor, row * stride + column)
    code.end()
    return code
