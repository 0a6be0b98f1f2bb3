"""Weights laid out for compiled products, and the calls of these products."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels import huge_pages
from baton.kernels.cpu import amx, compiler, integer_product
from baton.kernels.cpu.compiler import AVX2
from baton.kernels.cpu.gates import GATES
from baton.kernels.cpu.product import (
    INPUTS_PER_TURN,
    OUTPUTS_PER_ITEM,
    ROWS_PER_ITEM,
    ProductArguments,
    library,
)
from baton.kernels.cpu.tile import Tile
from baton.kernels.cpu.vectors import element_of
from baton.kernels.exact_codes import ExactWeight
from baton.kernels.integers import IntegerWeight
from baton.kernels.linear import Activation, RMSNorm

Weight = Tensor | IntegerWeight | ExactWeight

OUTPUTS_STREAMED = 384
"""Outputs that a thread claims at once for few rows, in panels of AVX-512 and tile registers: these
prefetch the next panel."""

FEW_ROWS = 16
"""Up to this many rows one thread lays them out: it ends before another could start."""


def host_tile(weight: Weight, *, narrow: bool = False) -> Tile:
    """The tile that fills this CPU's registers."""
    registers, element = compiler.registers(), element_of(weight.dtype)
    if isinstance(weight, IntegerWeight):
        return Tile(*integer_product.tile_sizes(weight.bits), element, bits=weight.bits)
    whole = _matrix(weight).shape[1] % amx.INPUTS == 0
    if weight.dtype == torch.bfloat16 and whole and compiler.has_amx():
        return Tile(amx.LANES, amx.ROWS, element, amx=True)
    rows = 4 if registers.number == AVX2.number else 8
    group = weight.grid.group if isinstance(weight, ExactWeight) else 0
    return Tile(registers.lanes, rows, element, narrow=narrow, group=group)


class Panels:
    """A weight [outputs, inputs] and its bias [outputs], laid out for compiled code."""

    __slots__ = (
        "_addend",
        "_addresses",
        "_balance",
        "_bias",
        "_count",
        "_inputs",
        "_missing",
        "_outputs",
        "_panels",
        "_tile",
    )

    def __init__(self, weight: Weight, bias: Tensor | None, *, narrow: bool = False) -> None:
        """`narrow`: numbers in float32 are kept in bfloat16, which holds them as well."""
        self._tile = host_tile(weight, narrow=narrow)
        outputs, inputs = _matrix(weight).shape
        # A weight with fewer outputs than a panel is padded.
        self._missing = max(0, self._tile.panel - outputs)
        if self._missing:
            weight = _padded(weight, self._missing)
            bias = None if bias is None else functional.pad(bias, (0, self._missing))
        self._balance = weight.balance if isinstance(weight, IntegerWeight) else None
        self._outputs = outputs + self._missing
        self._panels = huge_pages.copied(_packed(weight, self._tile))
        self._inputs = inputs
        self._count = len(self._panels)
        self._bias = bias
        zeros = torch.zeros(self._outputs, dtype=weight.dtype)
        self._addend = zeros if bias is None else bias
        compiled = library(self._tile)  # when a model is loaded, not at its first step
        names = ("lay_out", "product", "unrounded", *GATES)
        self._addresses = {name: compiled.address(name) for name in names}

    def product(self, x: Tensor, norm: RMSNorm | None, added: Tensor | None = None) -> Tensor:
        """x [rows, inputs], normalized if a norm is given -> [rows, outputs]. `added` [rows,
        outputs] is added to it."""
        return self._product(x, norm, *self._addends(added))

    def unrounded(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """The product of normalized x, in float32."""
        return self._product(x, norm, self._addend, 0, name="unrounded", dtype=torch.float32)

    def _addends(self, added: Tensor | None) -> tuple[Tensor, int]:
        """The numbers that are added to a product, and their stride from row to row."""
        if added is None:
            return self._addend, 0
        if self._missing:
            added = functional.pad(added, (0, self._missing))
        return (added if self._bias is None else added + self._bias).contiguous(), self._outputs

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [rows, outputs] + the product of x."""
        return self._product(x, None, *self._addends(residual))

    def gated(
        self,
        up: Panels,
        x: Tensor,
        norm: RMSNorm | None,
        activation: Activation,
        added: Tensor | None = None,
    ) -> Tensor:
        """activation(product) * up's product. `added` [rows, 2 * outputs] is added to both."""
        x = x.contiguous()
        halves = (None, None) if added is None else added.chunk(2, dim=1)
        (addend, stride), (up_addend, _) = self._addends(halves[0]), up._addends(halves[1])
        gated = x.new_empty(x.shape[0], self._outputs)
        (blocks,) = compiler.scratch(self._block_numbers(x))
        arguments = self._arguments(x, norm, blocks, addend, stride, gated.data_ptr())
        arguments.up_panels, arguments.up_addend = up._panels.data_ptr(), up_addend.data_ptr()
        return self._run(activation, arguments, gated)

    def _product(
        self,
        x: Tensor,
        norm: RMSNorm | None,
        addend: Tensor,
        stride: int,
        *,
        name: str = "product",
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(x.shape[0], self._outputs, dtype=dtype)
        (blocks,) = compiler.scratch(self._block_numbers(x))
        arguments = self._arguments(x, norm, blocks, addend, stride, out.data_ptr())
        return self._run(name, arguments, out)

    def _run(self, name: str, arguments: ProductArguments, out: Tensor) -> Tensor:
        rows: int = arguments.rows
        threads = torch.get_num_threads()
        each, part = _cut(self._count, rows, self._tile.panel, self._tile.rows, threads)
        arguments.panels_per_item, arguments.rows_per_item = each, part
        arguments.panels_between = (threads - 1) * each
        compiler.run(self._addresses["lay_out"], arguments, alone=rows <= FEW_ROWS)
        compiler.run(self._addresses[name], arguments)
        return out[:, : self._outputs - self._missing].contiguous() if self._missing else out

    def _block_numbers(self, x: Tensor) -> int:
        blocks = -(-x.shape[0] // self._tile.rows)
        return blocks * self._tile.rows * self._tile.block_depth(self._inputs)

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
            norm.wide.data_ptr() if norm else None,
            norm.epsilon if norm else 0.0,
            None if self._balance is None else self._balance.data_ptr(),
            blocks,
            self._panels.data_ptr(),
            self._outputs,
            addend.data_ptr(),
            addend_stride,
            out,
        )


def suits(weight: Weight) -> bool:
    """True if compiled code supports weights of this shape."""
    if isinstance(weight, IntegerWeight):
        return integer_product.suits(weight)
    outputs, inputs = _matrix(weight).shape
    return outputs > 0 and inputs > 0 and inputs % INPUTS_PER_TURN == 0


@functools.lru_cache(maxsize=1024)
def _cut(panels: int, rows: int, panel: int, block: int, threads: int) -> tuple[int, int]:
    """Panels and rows of a work item: all rows, or fewer if there are too few panels to keep all
    threads busy."""
    streamed = rows <= FEW_ROWS and panel >= amx.OUTPUTS
    outputs = OUTPUTS_STREAMED if streamed else OUTPUTS_PER_ITEM
    each = max(1, min(outputs // panel, panels // (2 * threads)))
    items = -(-panels // each)
    parts = max(1, min(-(-4 * threads // items), rows // ROWS_PER_ITEM))
    blocks = -(-rows // block)
    return each, max(1, -(-blocks // parts)) * block


def _matrix(weight: Weight) -> Tensor:
    """The weight's numbers, or its codes."""
    return weight if isinstance(weight, Tensor) else weight.codes


def _padded(weight: Weight, missing: int) -> Weight:
    if isinstance(weight, Tensor):
        return functional.pad(weight, (0, 0, 0, missing))
    return weight.changed(lambda each: functional.pad(each, (0, 0, 0, missing)))


def _packed(weight: Weight, tile: Tile) -> Tensor:
    """[outputs, inputs] -> [panels, inputs, panel]; the last panel holds the last outputs. Codes
    are followed by [groups, scale/offset, panel], as bytes."""
    if isinstance(weight, IntegerWeight):
        return integer_product.packed(weight, tile.panel)
    panel = tile.panel
    if isinstance(weight, ExactWeight):
        parts = (weight.codes, *weight.grid[:2])
        codes, *grid = (integer_product.in_panels(each, panel) for each in parts)
        pairs = torch.stack(grid, dim=2)
        return torch.cat((codes.flatten(1), pairs.flatten(1).view(torch.int8)), dim=1)
    if tile.narrow:
        weight = weight.bfloat16()
    if tile.amx:
        outputs, whole = len(weight), len(weight) // panel
        last = weight[-panel:] if outputs % panel else weight[:0]
        return amx.packed(torch.cat((weight[: whole * panel], last)))
    return integer_product.in_panels(weight, panel)
