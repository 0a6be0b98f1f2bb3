"""The bias, gate, residual and norm that follow a product of few rows (kernels/gpu/linear.py)."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu.fixed_order import (
    gate,
    inverse_size,
    part_sums,
    settle,
    square_columns,
    square_sums,
)
from baton.kernels.gpu.low_rank import ProductAdapters
from baton.kernels.gpu.norm import Scaled
from baton.kernels.linear import Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """The operations before and after a product."""

    source: Scaled | None = None
    norm: Tensor | None = None
    target: Scaled | None = None
    gates: Activation | None = None
    ahead: Tensor | None = None
    adapters: ProductAdapters | None = None
    onto: bool = False  # the product is for a residual, which another kernel adds

    @property
    def epsilon(self) -> float:
        return self.source.epsilon if self.source else 0.0

    def tensors(self, x: Tensor, bias: Tensor | None, out: Tensor) -> tuple[Tensor, ...]:
        """The tensors that `finish` reads and writes, and the one to prefetch; x for those that are
        None."""
        scaled = self.target or self.source
        squares = scaled.squares if scaled else None
        return (
            x if bias is None else bias,
            out,
            x if squares is None else squares,
            x if self.norm is None else self.norm,
            self.target.x if self.target else out,
            x if self.ahead is None else self.ahead,
        )

    def constants(
        self, depth: int, outputs: int, bias: Tensor | None
    ) -> dict[str, int | bool | str]:
        squares = self.source.squares if self.source else None
        return {
            "PARTS": 0 if squares is None else len(squares),
            "BLOCK_PARTS": 1 if squares is None else triton.next_power_of_2(len(squares)),
            "K": depth,
            "BIAS": bias is not None,
            "GATED": self.gates is not None,
            "ACTIVATION": self.gates or "",
            "ADDS": self.target is not None,
            "SQUARES": square_columns(outputs),
        }


@triton.jit
def finish(
    sums,
    ups,
    row,
    column,
    line,
    part,
    bias_pointer,
    out_pointer,
    squares_pointer,
    norm_pointer,
    scaled_pointer,
    rows,
    outputs,
    epsilon,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    K: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADDS: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Finishes and stores a program's products [columns, rows], which are rounded as the matrix
    library's. `ups` are those of gated products. `line` are the rows again and `part` their parts
    of squares, which the program adds up or, with ADDS, writes; in Gluon both have another
    layout."""
    at = row.to(tl.int64)[None, :] * outputs + column[:, None]
    in_columns = column < outputs
    mask = (row < rows)[None, :] & in_columns[:, None]
    squares_at = squares_pointer + part[:, None] * rows + line[None, :]
    dtype = out_pointer.dtype.element_ty
    bias = 0.0
    if BIAS:
        bias = tl.load(bias_pointer + column, mask=in_columns, other=0.0).to(tl.float32)[:, None]
    if ADDS:
        # Rounded where products of many rows are: the product, plus its bias, plus the residual.
        if BIAS:
            sums = (sums + bias).to(dtype).to(tl.float32)
        sums += tl.load(out_pointer + at, mask=mask, other=0.0).to(tl.float32)
        sums = tl.where(mask, sums.to(dtype).to(tl.float32), 0.0)
        norm = tl.load(norm_pointer + column, mask=in_columns, other=0.0).to(tl.float32)
        tl.store(scaled_pointer + at, (sums * norm[:, None]).to(dtype), mask=mask)
        squares = tl.reshape(sums, (BLOCK_N // SQUARES, SQUARES, BLOCK_M))
        inside = (line < rows)[None, :] & (part * SQUARES < outputs)[:, None]
        tl.store(squares_at, square_sums(squares, 1, SQUARES), mask=inside)
    else:
        # The row's size has not been applied yet.
        size = 1.0
        if PARTS > 0:
            inside = (line < rows)[None, :] & (part < PARTS)[:, None]
            squares = tl.load(squares_at, mask=inside, other=0.0)
            size = inverse_size(part_sums(squares, 0, BLOCK_PARTS), epsilon, K)[None, :]
        sums = settle(sums, size, bias, PARTS > 0, BIAS)
        if GATED:
            up_bias = 0.0
            if BIAS:
                up_bias = tl.load(bias_pointer + outputs + column, mask=in_columns, other=0.0)
                up_bias = up_bias.to(tl.float32)[:, None]
            sums = gate(sums, settle(ups, size, up_bias, PARTS > 0, BIAS), ACTIVATION)
    tl.store(out_pointer + at, sums.to(dtype), mask=mask)
