"""Weights in float32 as codes of one byte that lose nothing.

A checkpoint that was quantized and then dequantized has weights on a grid: those of a group of
inputs are `code * scale + offset`, rounded once. Codes take 1.25 bytes or 1.5 instead of 4, and a
product has the same bits as one of the float32 weights: compiled code (kernels/cpu/product.py)
computes each weight again, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from baton.kernels.cpu import compiler
from baton.kernels.integers import MOST
from baton.kernels.packed import INPUTS, Grid


class FineGrid(NamedTuple):
    """The scales and offsets of a weight's codes: [outputs, groups] each, float32."""

    scales: Tensor
    offsets: Tensor
    group: int

    def to(self, device: str) -> FineGrid:
        return self.changed(lambda each: each.to(device))

    def changed(self, change: Callable[[Tensor], Tensor]) -> FineGrid:
        """Applies `change` to both tensors."""
        return FineGrid(change(self.scales), change(self.offsets), self.group)

    def in_groups_of(self, group: int) -> FineGrid:
        """The same grid in groups that divide its own."""
        times = self.group // group
        scales, offsets, _ = self.changed(lambda each: each.repeat_interleave(times, dim=1))
        return FineGrid(scales, offsets, group)


class ExactWeight(NamedTuple):
    """A weight in float32 as codes."""

    codes: Tensor  # [outputs, inputs], int8
    grid: FineGrid
    dtype: torch.dtype = torch.float32

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def changed(self, change: Callable[[Tensor], Tensor]) -> ExactWeight:
        """Applies `change` to each tensor."""
        return ExactWeight(change(self.codes), self.grid.changed(change))

    def numbers(self) -> Tensor:
        """The weight in float32."""
        return _decoded(self.codes.float(), self.grid)


def fine_grid(grid: Grid) -> FineGrid:
    """The same grid for codes of one signed byte."""
    middle = float(1 << grid.bits - 1)
    return FineGrid(grid.scales, (middle - grid.zeros) * grid.scales, INPUTS)


def join_fine(grids: Sequence[FineGrid | None]) -> FineGrid | None:
    """The grid of weights joined by outputs; None if one has no grid."""
    known = [grid for grid in grids if grid is not None]
    if not known or len(known) < len(grids):
        return None
    group = min(grid.group for grid in known)
    scales, offsets, _ = zip(*(grid.in_groups_of(group) for grid in known), strict=True)
    return FineGrid(torch.cat(scales), torch.cat(offsets), group)


def encode(weight: Tensor, grid: FineGrid) -> ExactWeight | None:
    """weight [outputs, inputs], float32; None if codes of this grid do not represent it exactly."""
    if weight.dtype != torch.float32 or weight.shape[1] % grid.group:
        return None
    codes, most = _encoded(weight, grid)
    if most > MOST or not _multiplies_exactly(grid.scales, int(most)):
        return None
    return ExactWeight(codes, grid)


def _encoded(weight: Tensor, grid: FineGrid) -> tuple[Tensor, float]:
    """The codes and the largest one, more than MOST if codes do not represent the weight."""
    if compiler.suits(weight.dtype, weight.device):
        from baton.kernels.cpu.encoding import encoded  # imports llvmlite

        codes, largest = encoded(weight, *grid)
        return codes, float(largest.max())
    numbers = _codes(weight, grid)
    exact = torch.equal(_decoded(numbers, grid), weight)
    return numbers.to(torch.int8), float(numbers.abs().max()) if exact else torch.inf


def _multiplies_exactly(scales: Tensor, most: int) -> bool:
    """Whether products of scales and codes up to `most` are not rounded, so that it does not matter
    whether a code's product and sum are rounded once or twice."""
    unused = (1 << most.bit_length()) - 1
    return not bool((scales.contiguous().view(torch.int32) & unused).any())


def _codes(weight: Tensor, grid: FineGrid) -> Tensor:
    scales, offsets = (each.unsqueeze(2) for each in grid[:2])
    inverses = torch.where(scales == 0, 0.0, 1.0 / scales)
    grouped = weight.view(len(weight), -1, grid.group)
    return ((grouped - offsets) * inverses).round().view_as(weight)


def _decoded(codes: Tensor, grid: FineGrid) -> Tensor:
    scales, offsets = (each.unsqueeze(2) for each in grid[:2])
    grouped = codes.view(len(codes), -1, grid.group)
    return torch.addcmul(offsets, grouped, scales).view_as(codes)
