"""Weights of a panel kept as codes that lose nothing (kernels/exact_codes.py).

A panel has the codes [inputs, outputs], then [groups, scale/offset, outputs].
"""

from __future__ import annotations

from llvmlite import ir

from baton.kernels.cpu.ir_builder import COUNT, POINTER, Count, Function, Memory
from baton.kernels.cpu.tile import Tile
from baton.kernels.cpu.vectors import FLOAT, QUAD, Floats


def decode_code(module: ir.Module, tile: Tile) -> Function:
    """Computes a panel's weights: (panel, inputs, weights)"""
    code = Function(module, "decode", [POINTER, COUNT, POINTER], lanes=tile.lanes)
    panel, inputs, weights = code.arguments
    panel = panel.of(tile.weight_element)
    with code.loop(0, inputs, step=QUAD) as first:
        grid = grid_of_group(panel, tile, first, inputs)
        for turn in range(QUAD):
            start = (first + turn) * tile.panel
            for vector, (scale, offset) in enumerate(grid):
                place = start + tile.lanes * vector
                weights.put(offset.plus_product(panel.vector(place), scale), place)
    code.end()
    return code


def grid_of_group(
    panel: Memory, tile: Tile, first: Count, inputs: Count
) -> list[tuple[Floats, Floats]]:
    """The scales and offsets of the outputs for the group of input `first`, by vector."""
    grids = panel.from_(inputs * tile.panel).of(FLOAT)
    scales = grids.from_(first // tile.group * (2 * tile.panel))
    places = range(0, tile.panel, tile.lanes)
    return [(scales.vector(place), scales.vector(tile.panel + place)) for place in places]
