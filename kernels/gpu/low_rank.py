"""LoRA adapters of products, in a step whose rows may have different adapters.

Adapters are in slots, at fixed addresses, so that recorded steps can be replayed. Shrink sums
inputs in fixed parts of a row, in tiles of rows with one adapter. Expand adds to a product that is
rounded already: within the product of few rows (kernels/gpu/linear.py), or in place. So rows
without an adapter keep their bits, and a row's sums run in one order whatever the other rows are:
other adapters add zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 32
"""Rows per tile: as many as a product of few rows has, so that an adapter has one tile there."""

LEAST_RANK = 16
"""The smallest depth of the hardware's products."""

DEPTH = 128
"""Inputs per iteration of shrink; columns of B, of several adapters, per iteration of expand."""

SPLITS = 8
"""Most programs that share a row's inputs."""

LEAST_SPLIT = 512
"""Fewest inputs of such a program."""

SHRINK_STAGES = 4
"""Most stages of shrink's loop: each but one has a buffer."""

STAGE_BYTES = 224 << 10
"""Shared memory of a multiprocessor for what a program loads ahead."""

EXPAND_COLUMNS, MOST_TURNS = 128, 4
"""Columns of a product that a program of expand adds to in one turn, and its most turns: it reads
and adds up shrink's results for its rows once."""

EXPAND_PROGRAMS = 1024
"""How many programs of expand fill the chip."""


@dataclass(frozen=True, slots=True)
class AdapterStack:
    """One linear layer's A and B in all slots. If the layer joins several modules (its parts), each
    has its own rows of A, and its own rows of B with the same columns."""

    a: Tensor  # [slots, parts * rank, inputs]
    b: Tensor  # [slots, outputs, rank], with the adapters' scales
    ends: tuple[int, ...]  # where each part's outputs end

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
class Shrunk:
    """The result of shrink, to be expanded."""

    parts: Tensor  # [splits, parts, T, rank], float32: sums over splits of a row's inputs
    stack: AdapterStack
    rows: SlotRows


def padded_rank(rank: int) -> int:
    """The rank of a stack's matrices, which are padded with zeros."""
    return max(LEAST_RANK, triton.next_power_of_2(rank))


def split_of(inputs: int) -> int:
    """Inputs that one program of shrink sums."""
    return max(LEAST_SPLIT, triton.cdiv(triton.cdiv(inputs, SPLITS), DEPTH) * DEPTH)


@lru_cache
def can_overlap(device: torch.device) -> bool:
    """True if a product of few rows can start while its shrink still runs, and wait for it at its
    end."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _shrink_stages(x: Tensor, stack: AdapterStack) -> int:
    buffer = (TILE_ROWS + stack.rank) * DEPTH * x.element_size()
    return min(SHRINK_STAGES, 1 + STAGE_BYTES // buffer)


def shrink(x: Tensor, stack: AdapterStack, rows: SlotRows) -> Shrunk:
    """x [T, K] @ A.T of each row's adapter."""
    count, depth = x.shape
    parts, split = len(stack.ends), split_of(depth)
    splits = triton.cdiv(depth, split)
    out = x.new_empty(splits, parts, count, stack.rank, dtype=torch.float32)
    _shrink[(splits, parts, len(rows.tiles))](
        x,
        stack.a,
        rows.order,
        rows.tiles,
        out,
        count,
        stack.a.stride(0),
        K=depth,
        SPLIT=split,
        RANK=stack.rank,
        BLOCK_M=TILE_ROWS,
        BLOCK_K=DEPTH,
        OVERLAPS=can_overlap(x.device),
        num_warps=4,
        num_stages=_shrink_stages(x, stack),
        enable_fp_fusion=False,
    )
    return Shrunk(out, stack, rows)


def expand_onto(product: Tensor, shrunk: Shrunk) -> None:
    """Adds the rows' adapters to product [T, N], which is rounded already; rounds the sum."""
    stack, rows = shrunk.stack, shrunk.rows
    first_end, second_end = stack.inner_ends
    count, outputs = product.shape
    blocks = triton.cdiv(outputs, EXPAND_COLUMNS)
    spare = len(rows.tiles) * blocks // EXPAND_PROGRAMS
    turns = min(MOST_TURNS, triton.next_power_of_2(spare + 1) // 2) or 1
    _expand_onto[(len(rows.tiles), triton.cdiv(blocks, turns))](
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
        SPLITS=shrunk.parts.shape[0],
        PARTS=shrunk.parts.shape[1],
        RANK=stack.rank,
        TURNS=turns,
        BLOCK_M=TILE_ROWS,
        BLOCK_N=EXPAND_COLUMNS,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit(
    do_not_specialize=["rows"], do_not_specialize_on_alignment=["order_pointer", "tiles_pointer"]
)
def _shrink(
    x_pointer,
    a_pointer,
    order_pointer,
    tiles_pointer,
    out_pointer,
    rows,
    slot_stride,
    K: tl.constexpr,
    SPLIT: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_launch_dependents()
    split, part = tl.program_id(0), tl.program_id(1)
    slot, row, inside = rows_of_tile(order_pointer, tiles_pointer, tl.program_id(2), BLOCK_M)
    if slot < 0:
        return
    rank, lane = tl.arange(0, RANK), tl.arange(0, BLOCK_K)
    x_at = x_pointer + row.to(tl.int64)[:, None] * K + lane[None, :]
    a_at = a_pointer + slot.to(tl.int64) * slot_stride + (part * RANK + rank)[:, None] * K
    a_at += lane[None, :]
    sums = tl.zeros([BLOCK_M, RANK], dtype=tl.float32)
    for start in range(split * SPLIT, tl.minimum(split * SPLIT + SPLIT, K), BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_at + start, mask=inside[:, None], other=0.0)
            a = tl.load(a_at + start)
        else:
            in_depth = (start + lane < K)[None, :]
            x = tl.load(x_at + start, mask=inside[:, None] & in_depth, other=0.0)
            a = tl.load(a_at + start, mask=in_depth, other=0.0)
        sums = tl.dot(x, tl.trans(a), sums, input_precision="ieee")
    to = (split * tl.num_programs(1) + part).to(tl.int64) * rows + row
    tl.store(out_pointer + to[:, None] * RANK + rank[None, :], sums, mask=inside[:, None])


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
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    TURNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    slot, row, inside = rows_of_tile(order_pointer, tiles_pointer, tl.program_id(0), BLOCK_M)
    if slot < 0:
        return
    rank = tl.arange(0, RANK)[None, :]
    held, x = -1, tl.zeros([RANK, BLOCK_M], dtype=b_pointer.dtype.element_ty)
    for turn in range(TURNS):
        start = (tl.program_id(1) * TURNS + turn) * BLOCK_N
        column = start + tl.arange(0, BLOCK_N)
        at = product_pointer + row.to(tl.int64)[None, :] * outputs + column[:, None]
        mask = inside[None, :] & (column < outputs)[:, None]
        product = tl.load(at, mask=mask, other=0.0)
        added = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
        first, last = _parts_of(start, BLOCK_N, outputs, FIRST_END, SECOND_END)
        for part in range(first, last + 1):
            if part != held:
                x = _shrunk_rows(shrunk_pointer, part, row, inside, rows, SPLITS, PARTS, RANK)
                x, held = x.to(b_pointer.dtype.element_ty), part
            own = (column < outputs) & (_part_of(column, FIRST_END, SECOND_END) == part)
            b_at = b_pointer + slot.to(tl.int64) * slot_stride + column[:, None] * RANK + rank
            b = tl.load(b_at, mask=own[:, None], other=0.0)
            added = tl.dot(b, x, added, input_precision="ieee")
        tl.store(at, (product.to(tl.float32) + added).to(product.dtype), mask=mask)


@triton.jit
def _part_of(column, FIRST_END: tl.constexpr, SECOND_END: tl.constexpr):
    return (column >= FIRST_END).to(tl.int32) + (column >= SECOND_END).to(tl.int32)


@triton.jit
def _parts_of(
    start, COUNT: tl.constexpr, outputs, FIRST_END: tl.constexpr, SECOND_END: tl.constexpr
):
    """The first and the last part among COUNT columns from `start` on."""
    last = tl.minimum(start + COUNT, outputs) - 1
    return _part_of(start, FIRST_END, SECOND_END), _part_of(last, FIRST_END, SECOND_END)


@triton.jit
def _shrunk_rows(
    shrunk_pointer,
    part,
    row,
    inside,
    rows,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
):
    """Shrink's sums over all inputs, added up in order: [RANK, rows], float32."""
    at = shrunk_pointer + (part * rows + row)[None, :] * RANK + tl.arange(0, RANK)[:, None]
    sums = tl.load(at, mask=inside[None, :], other=0.0)
    for split in tl.static_range(1, SPLITS):
        there = at + split * PARTS * rows.to(tl.int64) * RANK
        sums += tl.load(there, mask=inside[None, :], other=0.0)
    return sums


@triton.jit
def added_columns(
    slots_pointer,
    tiles_pointer,
    shrunk_pointer,
    b_pointer,
    start,
    rows,
    outputs,
    tiles,
    slot_stride,
    FIRST_END: tl.constexpr,
    SECOND_END: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What adapters add to columns from `start` on, of few rows: [BLOCK_N, BLOCK_M], float32."""
    row, lane = tl.arange(0, BLOCK_M), tl.arange(0, DEPTH)
    slot = tl.load(slots_pointer + row, mask=row < rows, other=-1)
    column = start + tl.arange(0, BLOCK_N)
    b_at = b_pointer + column[:, None] * RANK + (lane % RANK)[None, :]
    added = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    first, last = _parts_of(start, BLOCK_N, outputs, FIRST_END, SECOND_END)
    for part in range(first, last + 1):
        x = _shrunk_rows(shrunk_pointer, part, row, slot >= 0, rows, SPLITS, PARTS, RANK)
        x = x.to(b_pointer.dtype.element_ty)
        own = (column < outputs) & (_part_of(column, FIRST_END, SECOND_END) == part)
        for tile in range(0, tiles, DEPTH // RANK):
            # One product for several adapters: each has its own rows, and zeros for the others.
            at, of_tile = tile + lane // RANK, tile + tl.arange(0, DEPTH // RANK)
            known = tl.load(tiles_pointer + 3 * at, mask=at < tiles, other=-1)
            b_mask = own[:, None] & (known >= 0)[None, :]
            b = tl.load(b_at + known.to(tl.int64)[None, :] * slot_stride, mask=b_mask, other=0.0)
            known = tl.load(tiles_pointer + 3 * of_tile, mask=of_tile < tiles, other=-1)
            mine = slot[None, None, :] == known[:, None, None]
            wide = tl.where(mine, x[None, :, :], tl.zeros_like(x)[None, :, :])
            wide = tl.reshape(wide, (DEPTH, BLOCK_M))
            added = tl.dot(b, wide, added, input_precision="ieee")
    return added
