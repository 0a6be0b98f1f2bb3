"""Weights in panels, and the compiled products with them."""

from __future__ import annotations

import functools

from torch import Tensor

from baton.kernels.cpu import compiler
from baton.kernels.cpu.product import BLOCK, INPUTS_A_TURN, PANEL, ProductArguments, library
from baton.kernels.norm import RMSNorm

FEW_ROWS = 2 * BLOCK
"""Rows that one thread has laid out before a second would have begun."""


class Panels:
    """A weight [outputs, inputs] and its bias [outputs], as compiled code reads them."""

    __slots__ = ("_addend", "_bias", "_inputs", "_outputs", "_panels")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._outputs, self._inputs = weight.shape
        self._panels = _packed(weight)
        self._bias = bias
        self._addend = weight.new_zeros(self._outputs) if bias is None else bias
        _address("product")  # compiled when a model is loaded, not at its first step

    def product(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """x [rows, inputs], normalized if there is a norm -> [rows, outputs]."""
        return self._product(x, norm, self._addend, 0)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [rows, outputs] + the product of x."""
        addend = residual if self._bias is None else residual + self._bias
        return self._product(x, None, addend, self._outputs)

    def gated(self, up: Panels, x: Tensor, norm: RMSNorm) -> Tensor:
        """silu(self's product) * up's."""
        x = x.contiguous()
        gated = x.new_empty(x.shape[0], self._outputs)
        size = gated.numel()
        blocks, gate, raised = compiler.scratch(self._block_numbers(x), size, size)
        arguments = self._arguments(x, norm, blocks, self._addend, 0, gate)
        arguments.up_panels, arguments.up_addend = up._panels.data_ptr(), up._addend.data_ptr()
        arguments.up_out, arguments.gated = raised, gated.data_ptr()
        _run("gated_product", arguments)
        return gated

    def _product(self, x: Tensor, norm: RMSNorm | None, addend: Tensor, stride: int) -> Tensor:
        x, addend = x.contiguous(), addend.contiguous()
        out = x.new_empty(x.shape[0], self._outputs)
        (blocks,) = compiler.scratch(self._block_numbers(x))
        arguments = self._arguments(x, norm, blocks, addend, stride, out.data_ptr())
        _run("product", arguments)
        return out

    def _block_numbers(self, x: Tensor) -> int:
        return -(-x.shape[0] // BLOCK) * BLOCK * self._inputs

    def _arguments(
        self,
        x: Tensor,
        norm: RMSNorm | None,
        blocks: int,
        addend: Tensor,
        addend_stride: int,
        out: int,
    ) -> ProductArguments:
        return ProductArguments(
            x.data_ptr(),
            x.shape[0],
            self._inputs,
            norm.weight.data_ptr() if norm else None,
            norm.epsilon if norm else 0.0,
            blocks,
            self._panels.data_ptr(),
            self._outputs,
            addend.data_ptr(),
            addend_stride,
            out,
        )


def suits(weight: Tensor) -> bool:
    """Whether there is compiled code for products with a weight of this shape."""
    outputs, inputs = weight.shape
    return outputs >= PANEL and inputs % INPUTS_A_TURN == 0


def _packed(weight: Tensor) -> Tensor:
    """[outputs, inputs] -> [panels, inputs, PANEL]; the last panel holds the last outputs."""
    outputs, inputs = weight.shape
    whole = outputs // PANEL
    packed = weight.new_empty(-(-outputs // PANEL), inputs, PANEL)
    packed[:whole] = weight[: whole * PANEL].view(whole, PANEL, inputs).transpose(1, 2)
    packed[-1] = weight[-PANEL:].t()
    return packed


def _run(name: str, arguments: ProductArguments) -> None:
    compiler.run(_address("lay_out"), arguments, alone=arguments.rows <= FEW_ROWS)
    compiler.run(_address(name), arguments)


@functools.cache
def _address(name: str) -> int:
    return library().address(name)
