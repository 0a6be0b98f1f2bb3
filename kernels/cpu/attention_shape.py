"""What compiled attention is written for, and what it reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llvmlite import ir

from baton.kernels.cpu import amx
from baton.kernels.cpu.ir_builder import COUNT, LINE, Count, Memory
from baton.kernels.cpu.vectors import BFLOAT16, CODE, FLOAT, HALF_BYTE, QUAD, size_of

SPLIT = 256
"""Tokens whose weights share one greatest score; a multiple of any number of lanes."""

WEIGHTS_STRIDE = SPLIT + 16
"""Numbers from one row's weights to the next's: not a power of two, which would place all rows
in few sets of the first cache."""

ROWS_ON_TILES = 32
"""As many rows as leave their scores of a split in the first cache: from tile registers to vectors
and back they go through memory."""

MANY_ROWS = 18
"""From as many rows on, keys are laid out for them (attention_columns.py)."""

ROWS_BY_COLUMNS = 48
"""As many rows as leave their scores of a split in the first cache, or close to it."""

LONGEST_COLUMN = 128
"""Sums over lanes are a small part of scores of longer heads, for which code would be long."""


@dataclass(frozen=True)
class Heads:
    """The shape that code is compiled for."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    value_offset: int  # numbers from a key to its value; 0: the key's first are its value
    page_size: int
    head_stride: int  # numbers from one head's key to the next's
    element: ir.Type  # of queries and results
    stored: ir.Type  # of keys and values; codes have their scales behind them
    lanes: int
    registers: int
    scale: float  # of scores
    cap: float | None
    amx: bool = False  # products are of tile registers (amx.py)

    @property
    def scaled(self) -> bool:
        """Whether products are of codes, without their scales."""
        return bool(self.stored == CODE)

    @property
    def unpacked(self) -> bool:
        """Whether products are of copies, since codes of four bits are no operands."""
        return bool(self.stored == HALF_BYTE)

    @property
    def multiplied(self) -> Heads:
        """With keys and values as products take them."""
        return replace(self, stored=self.operand, value_offset=0) if self.unpacked else self

    @property
    def operand(self) -> ir.Type:
        """Of queries and weights, as products take them."""
        return BFLOAT16 if self.amx else FLOAT

    @property
    def aligned(self) -> int:
        """Tokens that sums take at once, from a multiple of it."""
        return amx.INPUTS if self.amx else self.lanes

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Rows of a tile: of a tile register, or as many as fill the registers with their scores
        with four tokens."""
        if self.amx:
            return amx.HALF
        return (self.registers - 4) // QUAD - (self.registers > 16)

    @property
    def columns(self) -> bool:
        """Whether keys are laid out for many rows (attention_columns.py): with AVX-512 alone."""
        wide = self.lanes == 16 and self.registers > 16
        return wide and not self.amx and self.head_dim <= LONGEST_COLUMN

    @property
    def copies_values(self) -> bool:
        """Whether values are copied for many rows, since each read would widen them again."""
        return self.columns and self.stored in (BFLOAT16, CODE)

    @property
    def rows_at_once(self) -> int:
        """Rows whose scores, weights and sums are made before those of the next."""
        if self.columns:
            return ROWS_BY_COLUMNS
        return ROWS_ON_TILES if self.amx else 1 << 30

    @property
    def rows_weighed(self) -> int:
        """Rows whose weights are made together."""
        return 2 if self.columns else 1

    def vectors(self, rows: int) -> int:
        """Vectors of each row's result that are summed at a time."""
        every = self.value_dim // self.lanes
        at_most = max(1, (self.registers - 4) // rows)
        return max(n for n in range(1, at_most + 1) if every % n == 0)

    @property
    def token_stride(self) -> int:
        return self.kv_heads * self.head_stride

    @property
    def part_numbers(self) -> int:
        """A part: its weighted sum, then greatest score and sum of weights, each in all lanes."""
        return self.value_dim + 2 * self.lanes


@dataclass(frozen=True)
class ContextSplit:
    """What rows of one key head read of one split."""

    keys: Memory  # of the head, in page 0
    values: Memory
    places: Memory  # [tokens], offsets from there
    tokens: Count
    rows: Count


@dataclass(frozen=True)
class PageTable:
    """Where a sequence's tokens are."""

    table: Memory  # page ids
    stride: Count  # numbers from one page to the next
    start: Count  # the position of the table's first token


@dataclass(frozen=True)
class Step:
    """Some tokens of a split, for a tile of rows."""

    row: Count  # the first
    rows: Count
    token: Count  # the first
    tokens: Count


def prefetch_value(shape: Heads, key: Memory) -> None:
    """The value of a key's token, for the weighted sum: rows are too far apart for the hardware's
    prefetcher."""
    line = LINE // size_of(shape.stored)
    for start in range(0, shape.value_dim if shape.value_offset else 0, line):
        key.prefetch(shape.value_offset + start)


def clamped_places(
    numbers: Memory, places: Memory, first: Count, tokens: Count, count: int
) -> list[Memory]:
    """The numbers of tokens from the first on; past the last token, its own."""
    places, last = places.of(COUNT), tokens - 1
    return [numbers.from_(places.count((first + each).at_most(last))) for each in range(count)]
