"""The shapes that attention is compiled for, and the values that its parts pass on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llvmlite import ir

from baton.kernels.cpu import amx
from baton.kernels.cpu.ir_builder import COUNT, LINE, Count, Memory
from baton.kernels.cpu.vectors import BFLOAT16, CODE, FLOAT, HALF_BYTE, QUAD, size_of

SPLIT = 256
"""Tokens whose weights share one highest score; a multiple of any number of lanes."""

WEIGHTS_STRIDE = SPLIT + 16
"""Numbers from one row's weights to the next's: not a power of two, which would place all rows
in few sets of the L1 cache."""

ROWS_ON_TILES = 32
"""Rows whose scores of a split fit into the L1 cache: scores go from tile registers to vectors and
back through memory."""

MANY_ROWS = 18
"""From this many rows on, keys are laid out for them (attention_columns.py)."""

ROWS_BY_COLUMNS = 48
"""Rows whose scores of a split fit into the L1 cache, or nearly so."""

LONGEST_COLUMN = 128
"""Longest head dimension with keys laid out: for longer ones sums over lanes matter little, and
the code would be long."""


@dataclass(frozen=True)
class Heads:
    """The shape that code is compiled for."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    value_offset: int  # numbers from a key to its value; 0: the value is the key's first numbers
    page_size: int
    head_stride: int  # numbers from one head's key to the next's
    element: ir.Type  # type of queries and results
    stored: ir.Type  # type of keys and values; codes have their scales behind them
    lanes: int
    registers: int
    scale: float  # factor of scores
    cap: float | None
    amx: bool = False  # products use tile registers (amx.py)

    @property
    def scaled(self) -> bool:
        """True if products multiply codes without their scales."""
        return bool(self.stored == CODE)

    @property
    def unpacked(self) -> bool:
        """True if products multiply decoded copies: codes of four bits cannot be operands."""
        return bool(self.stored == HALF_BYTE)

    @property
    def multiplied(self) -> Heads:
        """This shape with keys and values as products read them."""
        return replace(self, stored=self.operand, value_offset=0) if self.unpacked else self

    @property
    def operand(self) -> ir.Type:
        """The type in which products read queries and weights."""
        return BFLOAT16 if self.amx else FLOAT

    @property
    def aligned(self) -> int:
        """Tokens that sums take at once, starting at a multiple of it."""
        return amx.INPUTS if self.amx else self.lanes

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> int:
        """Rows of a tile: those of a tile register, or as many as fill the registers with their
        scores for four tokens."""
        if self.amx:
            return amx.HALF
        return (self.registers - 4) // QUAD - (self.registers > 16)

    @property
    def columns(self) -> bool:
        """True if keys are laid out for many rows (attention_columns.py): only with AVX-512."""
        wide = self.lanes == 16 and self.registers > 16
        return wide and not self.amx and self.head_dim <= LONGEST_COLUMN

    @property
    def copies_values(self) -> bool:
        """True if values are copied for many rows, since each read would widen them again."""
        return self.columns and self.stored in (BFLOAT16, CODE)

    @property
    def rows_at_once(self) -> int:
        """Rows whose scores, weights and sums are computed before those of the next rows."""
        if self.columns:
            return ROWS_BY_COLUMNS
        return ROWS_ON_TILES if self.amx else 1 << 30

    @property
    def rows_scored(self) -> int:
        """Rows whose scores are computed together: with tile registers two tiles, which share each
        register of keys."""
        return 2 * self.rows if self.amx else self.rows

    @property
    def rows_weighed(self) -> tuple[int, ...]:
        """Rows whose weights are computed together: as many as there are left, the most first."""
        if self.amx:
            return (4, 2, 1)
        return (2, 1) if self.columns else (1,)

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
        """Numbers of a part: its weighted sum, then its highest score and its sum of weights, each
        in all lanes."""
        return self.value_dim + 2 * self.lanes


@dataclass(frozen=True)
class ContextSplit:
    """One key head's tokens of one split, and how many rows read them."""

    keys: Memory  # of the head, in page 0
    values: Memory
    places: Memory  # [tokens], offsets from `keys` and `values`
    tokens: Count
    rows: Count

    def of_head(self, offset: Count) -> ContextSplit:
        """The same tokens of the key head that is `offset` numbers further."""
        return replace(self, keys=self.keys.from_(offset), values=self.values.from_(offset))


@dataclass(frozen=True)
class PageTable:
    """The page table of a sequence."""

    table: Memory  # page ids
    stride: Count  # numbers from one page to the next
    start: Count  # the position of the table's first token


@dataclass(frozen=True)
class Step:
    """Some tokens of a split, for a tile of rows."""

    row: Count  # first row
    rows: Count
    token: Count  # first token
    tokens: Count


def prefetch_key(shape: Heads, key: Memory, keep: int = 3) -> None:
    """Into L1, or with `keep` 2 into L2. A head's keys are too far apart for the hardware's
    prefetcher."""
    for start in range(0, shape.head_dim, LINE // size_of(shape.stored)):
        key.prefetch(start, keep)


def prefetch_value(shape: Heads, key: Memory) -> None:
    """The value of a key's token, for the weighted sum."""
    line = LINE // size_of(shape.stored)
    for start in range(0, shape.value_dim if shape.value_offset else 0, line):
        key.prefetch(shape.value_offset + start)


def clamped_places(
    numbers: Memory, places: Memory, first: Count, tokens: Count, count: int
) -> list[Memory]:
    """The numbers of `count` tokens from `first` on; past the last token, those of the last."""
    places, last = places.of(COUNT), tokens - 1
    return [numbers.from_(places.count((first + each).at_most(last))) for each in range(count)]
