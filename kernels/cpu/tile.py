"""The shape and types that a product's code is compiled for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from llvmlite import ir

from baton.kernels.cpu import amx, compiler, integer_product
from baton.kernels.cpu.ir_builder import Count
from baton.kernels.cpu.vectors import BFLOAT16, CODE, FLOAT, LANE
from baton.kernels.integers import Bits

VECTORS = 3
"""Vectors per panel."""

BYTES_OF_GROUP = 8
"""Of an output's scale and offset."""

Size = TypeVar("Size", int, Count)


@dataclass(frozen=True)
class Tile:
    """Some rows times a panel of outputs."""

    lanes: int
    rows: int  # rows of a block; a multiple of QUAD unless x is encoded
    element: ir.Type  # type of x, weights and results
    amx: bool = False  # sums are in tile registers (amx.py)
    bits: Bits | None = None  # of a weight's codes; x is then encoded too (integer_product.py)
    narrow: bool = False  # weights are bfloat16 and x is float32
    group: int = 0  # inputs of a group of codes that lose nothing (exact_codes.py); 0: no codes

    @property
    def panel(self) -> int:
        return amx.OUTPUTS if self.amx else VECTORS * self.lanes

    @property
    def block_element(self) -> ir.Type:
        return self.element if self.amx else FLOAT

    @property
    def weight_element(self) -> ir.Type:
        if self.group:
            return CODE
        return LANE if self.bits else BFLOAT16 if self.narrow else self.element

    @property
    def few_rows(self) -> int:
        """Most rows of a block that has the layout of a single row."""
        return self.rows if self.bits and compiler.has_byte_dot() else 1

    def block_depth(self, inputs: Size) -> Size:
        """Elements per row of a block."""
        return integer_product.block_depth(inputs, self.bits) if self.bits else inputs

    def panel_depth(self, inputs: Size) -> Size:
        """Elements per output of a panel."""
        if self.group:
            return inputs + inputs // self.group * BYTES_OF_GROUP
        return integer_product.panel_depth(inputs, self.bits) if self.bits else inputs
