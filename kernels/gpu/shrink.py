"""Shrink: the first of an adapter's two products (kernels/gpu/low_rank.py).

Many programs share a row's inputs. Each stores its sums, and the last of them adds up those of all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu.low_rank import (
    DEPTH,
    TILE_ROWS,
    ProductAdapters,
    Shrunk,
    rows_of_tile,
)
from baton.kernels.gpu.tilings import STAGE_BYTES

SPLITS = 8
"""Most programs that share a row's inputs."""

LEAST_SPLIT = 512
"""Fewest inputs of such a program."""

SHRINK_STAGES = 4
"""Most stages of shrink's loop: each but one has a buffer."""

MOST_LANES = 128
"""Most rows of A that a program of shrink multiplies at once, of all parts of a layer. Then inputs
are read once for all parts."""

MOST_BUFFER = 96 << 10
"""Most bytes of a buffer; some types need other room beside it."""


def split_of(inputs: int) -> int:
    """Inputs that one program of shrink sums."""
    return max(LEAST_SPLIT, triton.cdiv(triton.cdiv(inputs, SPLITS), DEPTH) * DEPTH)


def shrink(x: Tensor, adapters: ProductAdapters) -> Shrunk:
    """x [T, K] @ A.T of each row's adapter."""
    stack, rows, (count, depth) = adapters.stack, adapters.rows, x.shape
    parts, splits = len(stack.ends), splits_of(depth)
    shape = parts, count, stack.rank
    together = parts if parts * stack.rank <= MOST_LANES else 1
    lanes = triton.next_power_of_2(together * stack.rank)
    loop = loop_of(lanes, x.dtype)
    sums = x.new_empty(splits, *shape, dtype=torch.float32)
    found = x.new_empty(shape, dtype=stack.b.dtype)
    _shrink[(splits, parts // together, len(rows.tiles))](
        x,
        stack.a,
        rows.order,
        rows.tiles,
        sums,
        found,
        adapters.done,
        count,
        stack.a.stride(0),
        INPUTS=depth,
        SPLIT=split_of(depth),
        PARTS=parts,
        TOGETHER=together,
        RANK=stack.rank,
        LANES=lanes,
        TILE_ROWS=TILE_ROWS,
        DEPTH=loop[0],
        STAGES=loop[1],
        num_warps=4,
        enable_fp_fusion=False,
    )
    return Shrunk(found, adapters)


def splits_of(inputs: int) -> int:
    return triton.cdiv(inputs, split_of(inputs))


def loop_of(lanes: int, dtype: torch.dtype) -> tuple[int, int]:
    """The depth and the stages of a loop that multiplies TILE_ROWS rows by `lanes` rows of A."""
    number = (TILE_ROWS + lanes) * dtype.itemsize
    depth = DEPTH if number * DEPTH <= MOST_BUFFER else DEPTH // 2
    return depth, min(SHRINK_STAGES, 1 + STAGE_BYTES // (number * depth))


@triton.jit(
    do_not_specialize=["rows"],
    do_not_specialize_on_alignment=["order_pointer", "tiles_pointer", "done_pointer"],
)
def _shrink(
    x_pointer,
    a_pointer,
    order_pointer,
    tiles_pointer,
    sums_pointer,
    shrunk_pointer,
    done_pointer,
    rows,
    slot_stride,
    INPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    PARTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    RANK: tl.constexpr,
    LANES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums a split of the inputs of a tile, for one part of the layer or for all: TOGETHER parts.
    A lane is a row of A."""
    splits: tl.constexpr = (INPUTS + SPLIT - 1) // SPLIT
    split, first_part, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, row, inside = rows_of_tile(order_pointer, tiles_pointer, tile, TILE_ROWS)
    if slot >= 0:
        lane = tl.arange(0, LANES)
        in_lanes = lane < TOGETHER * RANK
        a_at = slot.to(tl.int64) * slot_stride + (first_part * RANK + lane) * INPUTS
        sums = split_sums(
            x_pointer + row.to(tl.int64) * INPUTS, inside, a_pointer + a_at, in_lanes, split,
            INPUTS, SPLIT, TILE_ROWS, LANES, DEPTH, STAGES,
        )  # fmt: skip
        part = first_part + lane // RANK
        to = (part * rows.to(tl.int64))[None, :] + row[:, None]
        to = to * RANK + (lane % RANK)[None, :]
        mask = inside[:, None] & in_lanes[None, :]
        split_size = rows.to(tl.int64) * (PARTS * RANK)
        last = True
        if splits > 1:
            tl.store(sums_pointer + split * split_size + to, sums, mask=mask)
            last = is_last(done_pointer + tile * PARTS + first_part, splits)
            if last:
                sums = add_splits(sums_pointer + to, mask, split_size, splits)
        if last:
            tl.store(shrunk_pointer + to, sums.to(shrunk_pointer.dtype.element_ty), mask=mask)


@triton.jit
def split_sums(
    x_at,
    in_rows,
    a_at,
    in_lanes,
    split,
    INPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The products of rows x_at [ROWS] and of a_at [LANES], over the inputs of a split."""
    lane = tl.arange(0, DEPTH)
    sums = tl.zeros([ROWS, LANES], dtype=tl.float32)
    begin = split * SPLIT
    end = tl.minimum(begin + SPLIT, INPUTS)
    for start in tl.range(begin, end, DEPTH, num_stages=STAGES):
        x_mask, a_mask = in_rows[:, None], in_lanes[:, None]
        if INPUTS % DEPTH != 0:
            in_depth = (start + lane < INPUTS)[None, :]
            x_mask, a_mask = x_mask & in_depth, a_mask & in_depth
        x = tl.load(x_at[:, None] + (start + lane)[None, :], mask=x_mask, other=0.0)
        a = tl.load(a_at[:, None] + (start + lane)[None, :], mask=a_mask, other=0.0)
        sums = tl.dot(x, tl.trans(a), sums, input_precision="ieee")
    return sums


@triton.jit
def is_last(done_pointer, SPLITS: tl.constexpr):
    """True if the programs of all other splits have stored their sums. Then sets the counter to
    0 again."""
    tl.debug_barrier()
    last = tl.atomic_add(done_pointer, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(done_pointer, 0)
    return last


@triton.jit
def add_splits(at, mask, split_size, SPLITS: tl.constexpr):
    """Adds up all splits' sums, in order."""
    sums = tl.load(at, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        sums += tl.load(at + split * split_size, mask=mask, other=0.0)
    return sums
