"""The tilings of products of few rows (kernels/gpu/linear.py)."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import triton
from torch import Tensor

from baton.kernels.fp8 import Fp8Weight
from baton.kernels.gpu.fp8_rows import library_multiplies
from baton.kernels.packed import PackedWeight

Weight = Tensor | Fp8Weight | PackedWeight

MOST_ROWS = 32
MOST_GATED_ROWS = 64
FP8_TILE_ROWS = 64
FP8_ROWS_ONTO = 16
PACKED_TILE_ROWS = 128
PACKED_ROWS = 512
"""Beyond these row counts the matrix library is faster: MOST_ROWS for plain weights,
MOST_GATED_ROWS for wide gates, FP8_TILE_ROWS for FP8, FP8_ROWS_ONTO for FP8 products onto the
residual, and PACKED_ROWS for packed weights, with the time to decode them."""


@dataclass(frozen=True, slots=True)
class LinearTiling:
    outputs: int  # per program
    depth: int  # inputs per iteration of its loop
    warps: int
    stages: int
    rows: int = MOST_ROWS  # most rows per program


MULTIPROCESSORS = 132
"""Multiprocessors of an H200, for which tilings were measured."""

STAGE_BYTES = 224 << 10
"""Shared memory of a multiprocessor for what a program loads ahead."""

MIDDLE = LinearTiling(64, 128, 4, 6)
SHALLOW = LinearTiling(64, 64, 4, 8)
WIDE = LinearTiling(128, 128, 8, 3)
"""Measured on an H200, for 1 to 32 rows of Llama 3.2 1B, Phi 3 mini and Llama 3.1 8B."""


def tiling_for(outputs: int, rows: int) -> LinearTiling:
    """Few outputs need small tiles to fill the chip; many are read faster in large ones."""
    if rows > MOST_ROWS:  # a plain weight of a model with packed ones: see most_rows
        return LinearTiling(64, 128, 4, 4, PACKED_TILE_ROWS)
    if outputs < 8192:
        return MIDDLE
    return WIDE if is_wide(outputs) else SHALLOW


def is_wide(outputs: int) -> bool:
    """True if large tiles fill the chip."""
    return outputs >= 12288


def gated_tiling_for(outputs: int, rows: int) -> LinearTiling:
    """Of gates; their ups have as many outputs."""
    if MOST_ROWS < rows <= MOST_GATED_ROWS and is_wide(outputs):
        return LinearTiling(64, 64, 4, 4, MOST_GATED_ROWS)
    return tiling_for(outputs, rows)


def fp8_tiling_for(outputs: int, rows: int) -> LinearTiling:
    """At least 64 outputs: smaller products use other instructions, with other bits."""
    if outputs >= 8192:
        return LinearTiling(128, 128, 8, 4, FP8_TILE_ROWS)
    # With more rows than a tile has, programs share a multiprocessor.
    return LinearTiling(64, 128, 4, 8 if rows <= FP8_TILE_ROWS else 6, FP8_TILE_ROWS)


def is_faster_without_scales(rows: int, weight: Weight) -> bool:
    """True if the matrix library is faster for a product onto the residual (fp8_rows.py)."""
    return isinstance(weight, Fp8Weight) and rows > FP8_ROWS_ONTO and library_multiplies(weight)


def packed_tiling_for(outputs: int, rows: int, gated: bool) -> LinearTiling:
    """At least 64 outputs, as in FP8; half of a gated product's are ups. Programs do not decode
    while they multiply, so with many rows several share a multiprocessor. Few outputs would leave
    some idle, so more programs decode the same weights for fewer rows each."""
    if gated:
        if rows <= MOST_ROWS:
            return LinearTiling(64, 128, 4, 4)
        return LinearTiling(128, 128 if rows <= 64 else 64, 8, 4, PACKED_TILE_ROWS)
    if rows <= MOST_ROWS or (rows <= 64 and outputs <= 4096):
        return LinearTiling(64, 256, 4, 4)
    if rows <= 64:
        return LinearTiling(64, 256, 4, 3, 64)
    if rows <= 128 or outputs <= 4096:
        return LinearTiling(64, 128, 4, 4, 64)
    return LinearTiling(64, 128, 4, 3, PACKED_TILE_ROWS)


def hopper_tiling_for(outputs: int, rows: int, depth: int) -> LinearTiling | None:
    """The tiling of packed products that decode while they multiply (packed_rows.py); None if
    packed_tiling_for's programs, which share a multiprocessor, are as fast. If half of the chip
    would be idle, two programs decode the same weights for half of the rows each."""
    if rows > PACKED_TILE_ROWS:
        return _hopper_tiling_of_many(outputs, rows)
    programs, share = outputs // 64, triton.next_power_of_2(rows)
    if 2 * programs <= MULTIPROCESSORS:
        share //= 2
    share = max(8, share)
    if share > (16 if programs > MULTIPROCESSORS else PACKED_TILE_ROWS):
        return None
    if programs <= MULTIPROCESSORS and share <= MOST_ROWS and depth % 512 == 0:
        return LinearTiling(64, 256, 4, 4, share)
    return LinearTiling(64, 128, 4, 6 if share <= 64 else 4, share)


def _hopper_tiling_of_many(outputs: int, rows: int) -> LinearTiling | None:
    """The largest tiles that keep most of the chip busy."""
    tiles, parts = outputs // 128, triton.cdiv(rows, PACKED_TILE_ROWS)
    programs = tiles * triton.cdiv(parts, 2)
    chips = triton.cdiv(programs, MULTIPROCESSORS)
    if tiles * parts >= 0.8 * 2 * chips * MULTIPROCESSORS:
        return LinearTiling(128, 64, 8, 4, 2 * PACKED_TILE_ROWS)
    if 2 * tiles * parts <= MULTIPROCESSORS:
        return LinearTiling(64, 128, 4, 6, PACKED_TILE_ROWS)
    if rows <= 2 * PACKED_TILE_ROWS:
        return None
    if tiles * parts <= MULTIPROCESSORS:
        return LinearTiling(128, 128, 8, 4, PACKED_TILE_ROWS)
    return LinearTiling(64, 64, 4, 4, PACKED_TILE_ROWS)


def row_block(tiling: LinearTiling, rows: int) -> int:
    return min(max(16, triton.next_power_of_2(rows)), tiling.rows)


def stages_for(tiling: LinearTiling, block_m: int, gated: bool, code_bits: int, bits: int) -> int:
    """How many iterations are loaded ahead: the tiling's stages, or as many as fit. Weights have
    `code_bits` each, rows' numbers `bits`."""
    turn = tiling.outputs * (1 + gated) * code_bits + block_m * bits
    return min(tiling.stages, STAGE_BYTES // (turn * tiling.depth // 8))


def most_rows(weights: Iterable[Weight]) -> tuple[int, int]:
    """The most rows for which our kernels multiply: weights with codes, and plain weights.

    With packed weights in the model both are the same: our kernels leave a row's squares in parts,
    which only they add up.
    """
    every = list(weights)
    if any(isinstance(weight, PackedWeight) for weight in every):
        return PACKED_ROWS, PACKED_ROWS
    fp8 = [weight for weight in every if isinstance(weight, Fp8Weight)]
    return FP8_TILE_ROWS if all(map(library_multiplies, fp8)) else sys.maxsize, MOST_ROWS
