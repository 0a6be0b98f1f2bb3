"""The gated activation of an MLP, after a product of many rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu.fixed_order import gate, inverse_size, settle
from baton.kernels.gpu.fp8_rows import Fp8Rows, empty_rows, row_warps, store_codes
from baton.kernels.gpu.norm import Scaled
from baton.kernels.linear import Activation

GATE_BLOCK = 1024
"""Elements per program: with 4 warps, one 16-byte load of each half per thread."""


def gate_and_multiply(
    gate_up: Tensor, source: Scaled, bias: Tensor | None, activation: Activation
) -> Tensor:
    """activation(gate) * up, [T, size], for gate_up [T, 2 * size], the product of `source`."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    grid = rows, triton.cdiv(size, GATE_BLOCK)
    _launch(grid, gate_up, source, bias, activation, (out, out), GATE_BLOCK, 4)
    return out


def gate_to_codes(
    gate_up: Tensor, source: Scaled, bias: Tensor | None, activation: Activation
) -> Fp8Rows:
    """As gate_and_multiply, but returns FP8 codes."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    found, block = empty_rows(rows, size, gate_up.device), triton.next_power_of_2(size)
    _launch((rows, 1), gate_up, source, bias, activation, found, block, row_warps(block))
    return found


def _launch(
    grid: tuple[int, int],
    gate_up: Tensor,
    source: Scaled,
    bias: Tensor | None,
    activation: Activation,
    out: tuple[Tensor, Tensor],
    block: int,
    warps: int,
) -> None:
    _gate_and_multiply[grid](
        gate_up,
        gate_up if source.squares is None else source.squares,
        gate_up if bias is None else bias,
        *out,
        source.epsilon,
        SIZE=gate_up.shape[1] // 2,
        K=source.x.shape[1],
        SCALED=source.squares is not None,
        BIAS=bias is not None,
        ACTIVATION=activation,
        CODES=isinstance(out, Fp8Rows),
        BLOCK=block,
        num_warps=warps,
        enable_fp_fusion=False,
    )


@triton.jit
def _gate_and_multiply(
    gate_up_pointer,
    squares_pointer,
    bias_pointer,
    out_pointer,
    scales_pointer,
    epsilon,
    SIZE: tl.constexpr,
    K: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """With CODES a program has a whole row."""
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
    if CODES:
        product = tl.where(inside, product.to(gate_up_pointer.dtype.element_ty).to(tl.float32), 0.0)
        store_codes(out_pointer, scales_pointer, product, row, column, SIZE)
    else:
        product = product.to(out_pointer.dtype.element_ty)
        tl.store(out_pointer + row * SIZE + column, product, mask=inside)
