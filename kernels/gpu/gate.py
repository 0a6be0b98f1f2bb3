"""The gate of an MLP, after a product of many rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu.fixed_order import gate, inverse_size, settle
from baton.kernels.gpu.norm import Scaled
from baton.kernels.linear import Activation

GATE_BLOCK = 1024
"""Elements per program: with 4 warps, one 16-byte load of each half per thread."""


def gate_and_multiply(
    gate_up: Tensor, source: Scaled, bias: Tensor | None, activation: Activation
) -> Tensor:
    """gate_up [T, 2 * size], the product of `source` -> activation(gate) * up, [T, size]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    _gate_and_multiply[(rows, triton.cdiv(size, GATE_BLOCK))](
        gate_up,
        gate_up if source.squares is None else source.squares,
        gate_up if bias is None else bias,
        out,
        source.epsilon,
        SIZE=size,
        K=source.x.shape[1],
        SCALED=source.squares is not None,
        BIAS=bias is not None,
        ACTIVATION=activation,
        BLOCK=GATE_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _gate_and_multiply(
    gate_up_pointer,
    squares_pointer,
    bias_pointer,
    out_pointer,
    epsilon,
    SIZE: tl.constexpr,
    K: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate_at = gate_up_pointer + row * (2 * SIZE) + column
    gates = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(gate_at + SIZE, mask=inside, other=0.0).to(tl.float32)
    size, bias, up_bias = 1.0, 0.0, 0.0
    if SCALED:
        size = inverse_size(tl.load(squares_pointer + row), epsilon, K)
    if BIAS:
        bias = tl.load(bias_pointer + column, mask=inside, other=0.0).to(tl.float32)
        up_bias = tl.load(bias_pointer + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    gates = settle(gates, size, bias, SCALED, BIAS)
    product = gate(gates, settle(ups, size, up_bias, SCALED, BIAS), ACTIVATION)
    tl.store(
        out_pointer + row * SIZE + column, product.to(out_pointer.dtype.element_ty), mask=inside
    )
