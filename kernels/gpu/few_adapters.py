"""Adapters within a product of few rows (kernels/gpu/linear.py): kernels for them would cost as
much as their bytes.

The product's first programs shrink, on multiprocessors that the others leave idle; the others wait
for them after their sums. Waiting is safe: programs start in the order of their numbers.

One product has the adapters of several tiles, a group: each of its WIDTH lanes is a row of A, or a
column of B, of one of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu.low_rank import DEPTH, TILE_ROWS, ProductAdapters, part_of
from baton.kernels.gpu.prefetch import LINE, can_prefetch, prefetch_lines
from baton.kernels.gpu.shrink import (
    add_splits,
    is_last,
    loop_of,
    split_of,
    split_sums,
    splits_of,
)
from baton.kernels.gpu.tilings import MULTIPROCESSORS

MOST_TILES = tl.constexpr(TILE_ROWS)
"""Each row may have its own tile."""

LEAST_SHRINKERS = 16
"""Fewest programs that shrink, even if the product leaves fewer multiprocessors idle."""

NAMES = (
    *("slots_pointer", "tiles_pointer", "shrunk_x_pointer", "a_pointer", "b_pointer"),
    *("split_sums_pointer", "shrunk_pointer", "done_pointer", "ready_pointer"),
    *("tiles", "groups", "shrinkers", "a_stride", "b_stride", "b_lines"),
    *("SPLIT", "MODULES", "RANK", "WIDTH", "DEPTH", "STAGES"),
    *("FIRST_END", "SECOND_END", "AHEAD_OF_B"),
)
"""The arguments of a product's kernel that are for adapters."""


def adapter_arguments(
    x: Tensor, adapters: ProductAdapters | None, programs: int, threads: int, block_m: int
) -> tuple[int, dict[str, Tensor | int]]:
    """For a product of rows x with `programs` programs, of `threads` and `block_m` rows each: how
    many programs come before these, and the kernel's arguments."""
    if adapters is None:
        return 0, dict.fromkeys(NAMES, 0)
    stack, rows, inputs = adapters.stack, adapters.rows, x.shape[1]
    parts, splits, width = len(stack.ends), splits_of(inputs), max(DEPTH, stack.rank)
    groups = triton.cdiv(len(rows.tiles) * stack.rank, width)
    shrinkers = max(-programs % MULTIPROCESSORS, LEAST_SHRINKERS)
    shrinkers = min(shrinkers, groups * parts * splits)
    sums = x.new_empty(splits, parts, block_m, stack.rank, dtype=torch.float32)
    shrunk = x.new_empty(parts, groups, block_m, width, dtype=stack.b.dtype)
    values = (
        *(rows.slots, rows.tiles, x, stack.a, stack.b),
        *(sums, shrunk, adapters.done, adapters.ready),
        *(len(rows.tiles), groups, shrinkers, stack.a.stride(0), stack.b.stride(0)),
        stack.b[0].nbytes // LINE.value,
        *(split_of(inputs), parts, stack.rank, width, *loop_of(width, x.dtype)),
        *stack.inner_ends,
        threads if can_prefetch(x.device) else 0,
    )
    return shrinkers, dict(zip(NAMES, values, strict=True))


@triton.jit
def shrink_first(
    program,
    slots_pointer,
    tiles_pointer,
    x_pointer,
    a_pointer,
    b_pointer,
    sums_pointer,
    shrunk_pointer,
    done_pointer,
    ready_pointer,
    rows,
    tiles,
    groups,
    shrinkers,
    a_stride,
    b_stride,
    b_lines,
    INPUTS: tl.constexpr,
    SPLIT: tl.constexpr,
    MODULES: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    AHEAD_OF_B: tl.constexpr,
):
    """The work of one of the programs that shrink. An item is a split of the inputs, for one part
    of the layer and one group of tiles. The result is [parts, groups, BLOCK_M, WIDTH], with zeros
    in the lanes of other adapters. Then the programs prefetch B."""
    row = tl.arange(0, BLOCK_M)
    slot = tl.load(slots_pointer + row, mask=row < rows, other=-1)
    active = _count_groups(tiles_pointer, tiles, RANK, WIDTH)
    splits: tl.constexpr = (INPUTS + SPLIT - 1) // SPLIT
    items = active * MODULES * splits
    for item in range(program, items, shrinkers):
        split, pair = item % splits, item // splits
        part, group = pair % MODULES, pair // MODULES
        number = part * groups + group
        lane, rank = tl.arange(0, WIDTH), tl.arange(0, RANK)
        known = _slots_of_lanes(group, tiles_pointer, tiles, RANK, WIDTH)
        a_at = known.to(tl.int64) * a_stride + (part * RANK + lane % RANK) * INPUTS
        sums = split_sums(
            x_pointer + row.to(tl.int64) * INPUTS, slot >= 0, a_pointer + a_at, known >= 0, split,
            INPUTS, SPLIT, BLOCK_M, WIDTH, DEPTH, STAGES,
        )  # fmt: skip
        mine = (slot[:, None] == known[None, :]) & (slot >= 0)[:, None]
        last = True
        if splits > 1:  # a row has one adapter, so splits need no lanes
            split_size: tl.constexpr = MODULES * BLOCK_M * RANK
            at = sums_pointer + (part * BLOCK_M + row)[:, None] * RANK
            tl.store(at + split * split_size + (lane % RANK)[None, :], sums, mask=mine)
            last = is_last(done_pointer + number, splits)
            if last:
                added = add_splits(at + rank[None, :], True, split_size, splits)
                sums = tl.broadcast_to(added[:, None, :], (BLOCK_M, WIDTH // RANK, RANK))
                sums = tl.reshape(sums, (BLOCK_M, WIDTH))
        if last:
            to = shrunk_pointer + (number * BLOCK_M + row)[:, None] * WIDTH + lane[None, :]
            tl.store(to, tl.where(mine, sums, 0.0).to(shrunk_pointer.dtype.element_ty))
    tl.debug_barrier()
    tl.atomic_add(ready_pointer, 1, sem="release")
    if AHEAD_OF_B > 0:
        line = program * AHEAD_OF_B + tl.arange(0, AHEAD_OF_B)
        for tile in range(tiles):
            known = tl.load(tiles_pointer + 3 * tile)
            if known >= 0:
                at = b_pointer + known.to(tl.int64) * b_stride
                for first in range(0, b_lines, shrinkers * AHEAD_OF_B):
                    prefetch_lines(at, first + line, b_lines)


@triton.jit
def known_before(
    slots_pointer,
    tiles_pointer,
    rows,
    tiles,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """What `adapt` needs and does not depend on the product: the slots of the first group's lanes,
    which rows have an adapter, and how many groups have."""
    row = tl.arange(0, BLOCK_M)
    adapted = tl.load(slots_pointer + row, mask=row < rows, other=-1)[None, :] >= 0
    lanes = _slots_of_lanes(0, tiles_pointer, tiles, RANK, WIDTH)
    return lanes, adapted, _count_groups(tiles_pointer, tiles, RANK, WIDTH)


@triton.jit
def adapt(
    sums,
    ups,
    known,
    start,
    tiles_pointer,
    b_pointer,
    shrunk_pointer,
    ready_pointer,
    dtype: tl.constexpr,
    outputs,
    tiles,
    groups,
    shrinkers,
    b_stride,
    GATED: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    FIRST_END: tl.constexpr,
    SECOND_END: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Adds what adapters add to products [BLOCK_N, BLOCK_M] of columns from `start` on, and to
    their ups, which are rounded as the matrix library's; rounds the sums. `known` is
    known_before's."""
    # What does not depend on the programs that shrink is loaded before waiting for them.
    lanes, adapted, active = known
    up_start, every = start + outputs, outputs * (2 if GATED else 1)
    b = _load_b(lanes, b_pointer, start, every, b_stride, RANK, WIDTH, BLOCK_N)
    if GATED:
        up_b = _load_b(lanes, b_pointer, up_start, every, b_stride, RANK, WIDTH, BLOCK_N)
    _await(ready_pointer, shrinkers)
    number = part_of(start, FIRST_END, SECOND_END) * groups
    x = _load_lanes(shrunk_pointer, number, WIDTH, BLOCK_M)
    if GATED:
        number = part_of(up_start, FIRST_END, SECOND_END) * groups
        up_x = _load_lanes(shrunk_pointer, number, WIDTH, BLOCK_M)
    added = _added_columns(
        b, x, tiles_pointer, shrunk_pointer, b_pointer, start, tiles, active, groups, every,
        b_stride, FIRST_END, SECOND_END, RANK, WIDTH, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    sums = tl.where(adapted, (sums + added).to(dtype).to(tl.float32), sums)
    if GATED:
        added = _added_columns(
            up_b, up_x, tiles_pointer, shrunk_pointer, b_pointer, up_start, tiles, active,
            groups, every, b_stride, FIRST_END, SECOND_END, RANK, WIDTH, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        ups = tl.where(adapted, (ups + added).to(dtype).to(tl.float32), ups)
    return sums, ups


@triton.jit
def _await(pointer, count):
    """Waits until programs that run beside this one have counted up to `count`."""
    while tl.atomic_add(pointer, 0, sem="acquire") < count:
        pass


@triton.jit
def _count_groups(tiles_pointer, tiles, RANK: tl.constexpr, WIDTH: tl.constexpr):
    """How many groups have adapters; these come first."""
    tile = tl.arange(0, MOST_TILES) * (WIDTH // RANK)
    slots = tl.load(tiles_pointer + 3 * tile, mask=tile < tiles, other=-1)
    return tl.sum((slots >= 0).to(tl.int32))


@triton.jit
def _load_b(
    slot,
    b_pointer,
    start,
    outputs,
    slot_stride,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Columns from `start` on of B, of the adapters in the slots [WIDTH] of a group's lanes:
    [BLOCK_N, WIDTH]."""
    column, lane = start + tl.arange(0, BLOCK_N), tl.arange(0, WIDTH)
    at = column[:, None] * RANK + (slot.to(tl.int64) * slot_stride + lane % RANK)[None, :]
    mask = (column < outputs)[:, None] & (slot >= 0)[None, :]
    return tl.load(b_pointer + at, mask=mask, other=0.0)


@triton.jit
def _slots_of_lanes(group, tiles_pointer, tiles, RANK: tl.constexpr, WIDTH: tl.constexpr):
    """With few rows, one product has the adapters of WIDTH / RANK tiles, a group. Returns the slot
    of each of its lanes [WIDTH], or -1."""
    tile = group * (WIDTH // RANK) + tl.arange(0, WIDTH) // RANK
    return tl.load(tiles_pointer + 3 * tile, mask=tile < tiles, other=-1)


@triton.jit
def _load_lanes(shrunk_pointer, number, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr):
    """What few rows shrank to in all lanes of a part and group: [WIDTH, BLOCK_M]."""
    row = number * BLOCK_M + tl.arange(0, BLOCK_M)
    return tl.load(shrunk_pointer + row[None, :] * WIDTH + tl.arange(0, WIDTH)[:, None])


@triton.jit
def _added_columns(
    b,
    x,
    tiles_pointer,
    shrunk_pointer,
    b_pointer,
    start,
    tiles,
    active,
    groups,
    outputs,
    slot_stride,
    FIRST_END: tl.constexpr,
    SECOND_END: tl.constexpr,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What adapters add to columns from `start` on, of few rows: [BLOCK_N, BLOCK_M], float32. `b`
    and `x` are _load_b's and _load_lanes' of the first group and part. Each row has zeros in the
    lanes of other adapters."""
    first = part_of(start, FIRST_END, SECOND_END)
    last = part_of(tl.minimum(start + BLOCK_N, outputs) - 1, FIRST_END, SECOND_END)
    part_of_column = part_of(start + tl.arange(0, BLOCK_N), FIRST_END, SECOND_END)
    added = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for part in range(first, last + 1):
        own = (part_of_column == part)[:, None]
        for group in range(active):
            if (group > 0) | (part > first):
                lanes = _slots_of_lanes(group, tiles_pointer, tiles, RANK, WIDTH)
                b = _load_b(lanes, b_pointer, start, outputs, slot_stride, RANK, WIDTH, BLOCK_N)
                x = _load_lanes(shrunk_pointer, part * groups + group, WIDTH, BLOCK_M)
            added = tl.dot(tl.where(own, b, tl.zeros_like(b)), x, added, input_precision="ieee")
    return added
