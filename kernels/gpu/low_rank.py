"""LoRA adapters of products, in a step whose rows may have different adapters.

Adapters are in slots, at fixed addresses, so that recorded steps can be replayed. Shrink sums
inputs in fixed parts of a row, in tiles of rows with one adapter. Expand adds to a product that is
rounded already. So rows without an adapter keep their bits, and a row's sums run in one order
whatever the other rows are: other adapters add zeros.

With few rows both are part of the product's kernel (kernels/gpu/few_adapters.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 32
"""Rows per tile: as many as a product of few rows has, so that an adapter has one tile there."""

LEAST_RANK = 16
"""The smallest depth of the hardware's products."""

DEPTH = 128
"""Inputs per iteration of shrink; columns of B, of several adapters, per iteration of expand."""

EXPAND_COLUMNS = 128
"""Columns of a product that a program of expand adds to."""

MOST_PARTS = 3
"""Most parts of a layer: queries, keys and values."""


@dataclass(frozen=True, slots=True)
class AdapterStack:
    """One linear layer's A and B in all slots. If the layer joins several modules (its parts), each
    has its own rows of A, and its own rows of B with the same columns."""

    a: Tensor  # [slots, parts * rank, inputs]
    b: Tensor  # [slots, outputs, rank], with the adapters' scales
    ends: tuple[int, ...]  # where each part's outputs end
    number: int = 0  # among the model's stacks

    @property
    def rank(self) -> int:
        return self.b.shape[2]

    @property
    def inner_ends(self) -> tuple[int, int]:
        """Where the second part and the third begin."""
        last = self.ends[-1]
        first, second, *_ = (*self.ends[:-1], last, last)
        return first, second


@dataclass(frozen=True, slots=True)
class SlotRows:
    """The rows of a step, sorted by the slots of their adapters; all int32."""

    slots: Tensor  # [T]: each row's slot; -1 without an adapter
    order: Tensor  # [T]: the rows, sorted by their slots
    tiles: (
        Tensor  # [n, 3]: slot, first place in `order`, number of rows; then empty ones of slot -1
    )


@dataclass(frozen=True, slots=True)
class ProductAdapters:
    """The adapters of a product's rows."""

    stack: AdapterStack
    rows: SlotRows
    done: Tensor
    """[parts * n or more], int32: how many programs have summed their part of a tile's inputs; 0
    between kernels."""
    ready: Tensor
    """[1], int32: how many programs of the product have shrunk their tiles; 0 before it."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The result of shrink, to be expanded."""

    parts: Tensor  # [parts, T, rank]
    adapters: ProductAdapters


def padded_rank(rank: int) -> int:
    """The rank of a stack's matrices, which are padded with zeros."""
    return max(LEAST_RANK, triton.next_power_of_2(rank))


def expand_onto(product: Tensor, shrunk: Shrunk) -> None:
    """Adds the rows' adapters to product [T, N], which is rounded already; rounds the sum."""
    stack, rows = shrunk.adapters.stack, shrunk.adapters.rows
    first_end, second_end = stack.inner_ends
    count, outputs = product.shape
    _expand_onto[(len(rows.tiles), triton.cdiv(outputs, EXPAND_COLUMNS))](
        product,
        stack.b,
        shrunk.parts,
        rows.order,
        rows.tiles,
        count,
        outputs,
        stack.b.stride(0),
        FIRST_END=first_end,
        SECOND_END=second_end,
        RANK=stack.rank,
        BLOCK_M=TILE_ROWS,
        BLOCK_N=EXPAND_COLUMNS,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit
def rows_of_tile(order_pointer, tiles_pointer, tile, BLOCK_M: tl.constexpr):
    """A tile's slot, its rows, and a mask of those that exist."""
    slot, start = tl.load(tiles_pointer + 3 * tile), tl.load(tiles_pointer + 3 * tile + 1)
    count = tl.load(tiles_pointer + 3 * tile + 2)
    lane = tl.arange(0, BLOCK_M)
    inside = lane < count
    row = tl.load(order_pointer + start + lane, mask=inside, other=0)
    return slot, row, inside


@triton.jit(
    do_not_specialize=["rows"], do_not_specialize_on_alignment=["order_pointer", "tiles_pointer"]
)
def _expand_onto(
    product_pointer,
    b_pointer,
    shrunk_pointer,
    order_pointer,
    tiles_pointer,
    rows,
    outputs,
    slot_stride,
    FIRST_END: tl.constexpr,
    SECOND_END: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    slot, row, inside = rows_of_tile(order_pointer, tiles_pointer, tl.program_id(0), BLOCK_M)
    if slot < 0:
        return
    start = tl.program_id(1) * BLOCK_N
    column = start + tl.arange(0, BLOCK_N)
    at = product_pointer + row.to(tl.int64)[None, :] * outputs + column[:, None]
    mask = inside[None, :] & (column < outputs)[:, None]
    product = tl.load(at, mask=mask, other=0.0)
    added = added_to_tile(
        shrunk_pointer, b_pointer + slot.to(tl.int64) * slot_stride, row, inside, start, rows,
        outputs, FIRST_END, SECOND_END, RANK, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    tl.store(at, (product.to(tl.float32) + added).to(product.dtype), mask=mask)


@triton.jit
def added_to_tile(
    shrunk_pointer,
    b_pointer,
    row,
    inside,
    start,
    rows,
    outputs,
    FIRST_END: tl.constexpr,
    SECOND_END: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What an adapter adds to columns from `start` on, of its tile's rows: [BLOCK_N, BLOCK_M],
    float32. b is that of its slot."""
    column, rank = start + tl.arange(0, BLOCK_N), tl.arange(0, RANK)
    added = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    first, last = _parts_of(start, BLOCK_N, outputs, FIRST_END, SECOND_END)
    for part in range(first, last + 1):
        x_at = shrunk_pointer + (part * rows + row)[None, :] * RANK + rank[:, None]
        x = tl.load(x_at, mask=inside[None, :], other=0.0)
        own = (column < outputs) & (part_of(column, FIRST_END, SECOND_END) == part)
        b_at = b_pointer + column[:, None] * RANK + rank[None, :]
        b = tl.load(b_at, mask=own[:, None], other=0.0)
        added = tl.dot(b, x, added, input_precision="ieee")
    return added


@triton.jit
def part_of(column, FIRST_END: tl.constexpr, SECOND_END: tl.constexpr):
    return (column >= FIRST_END).to(tl.int32) + (column >= SECOND_END).to(tl.int32)


@triton.jit
def _parts_of(
    start, COUNT: tl.constexpr, outputs, FIRST_END: tl.constexpr, SECOND_END: tl.constexpr
):
    """The first and the last part among COUNT columns from `start` on."""
    last = tl.minimum(start + COUNT, outputs) - 1
    return part_of(start, FIRST_END, SECOND_END), part_of(last, FIRST_END, SECOND_END)
