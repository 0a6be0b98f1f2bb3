"""Products of few rows with packed weights on Hopper, which decode while they multiply.

The same sums in the same order as kernels/gpu/linear.py, so the same bits, but in Gluon, where the
kernel decides when to wait for a product: one runs while the next tile is decoded into other
registers. A program's time is then that of its chain of products, 16 inputs each.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from baton.kernels.gpu.fixed_order import COMPILED
from baton.kernels.gpu.packed_tiles import numbers
from baton.kernels.gpu.prefetch import piece_for, prefetch
from baton.kernels.gpu.row_results import Extras, finish
from baton.kernels.gpu.tilings import LinearTiling, hopper_tiling_for, stages_for
from baton.kernels.packed import PackedWeight

WARP_OUTPUTS = gl.constexpr(16)
"""Outputs per warp, gates and ups both counted."""

# Their names changed after Triton 3.6.
load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

WHOLE_ROWS = gl.constexpr(64)
"""From this many rows on, results change layout before they are stored: fewer instructions."""

EIGHT = gl.constexpr(8)
"""A thread has two outputs, this many apart: a gate and its up."""


def tiling_for(x: Tensor, outputs: int, *, gated: bool) -> LinearTiling | None:
    """The tiling of a product; None if this kernel cannot compute it, or others are as fast.

    It needs Hopper, whole tiles, an even number of turns, and at least as many turns as are loaded
    ahead (loads that never happen do not compile).
    """
    if not COMPILED.value or x.dtype == torch.float32 or not _hopper(x.device):
        return None
    rows, depth = x.shape
    every = 2 * outputs if gated else outputs
    found = hopper_tiling_for(every, rows, depth)
    if found is None or every % found.outputs or depth % (2 * found.depth):
        return None
    return found if depth >= found.stages * found.depth else None


def multiply(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    out: Tensor,
    outputs: int,
    extras: Extras,
    tiling: LinearTiling,
) -> None:
    """Multiplies rows x and applies `extras`."""
    rows, depth = x.shape
    block_n, block_m = tiling.outputs // 2 if extras.gates else tiling.outputs, tiling.rows
    programs, threads = outputs // block_n, 32 * tiling.warps
    piece = piece_for(extras.ahead, programs * threads)
    _packed_rows[(programs, triton.cdiv(rows, block_m))](
        x,
        weight.words,
        weight.scales,
        *extras.tensors(x, bias, out),
        rows,
        outputs,
        piece,
        extras.epsilon,
        **extras.constants(depth, outputs, bias),
        AHEAD=threads if piece else 0,
        BITS=weight.bits,
        GROUP=weight.group,
        EXACT=weight.exact,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=tiling.depth,
        ROOMS=stages_for(tiling, block_m, False, weight.bits, 8 * x.itemsize),
        WARPS=tiling.warps,
        num_warps=tiling.warps,
        enable_fp_fusion=False,
    )


@functools.cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@triton.constexpr_function
def _words_layout(groups, blocks, tile):
    """The layout of words [groups, blocks, outputs, 4] in registers: a thread has the words with
    its weights of a product's tile (see kernels/packed.py)."""
    registers = [[0, 0, 8, 0], *([0, block, 0, 0] for block in _powers(blocks))]
    registers += [[number, 0, 0, 0] for number in _powers(groups)]
    lanes = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]]
    warps = [[0, 0, WARP_OUTPUTS.value * warp, 0] for warp in _powers(tile // WARP_OUTPUTS.value)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [groups, blocks, tile, 4])


@triton.constexpr_function
def _blocks_layout(blocks, tile):
    """The same for the blocks of all groups."""
    registers = [[0, 8, 0], *([block, 0, 0] for block in _powers(blocks))]
    lanes = [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[0, WARP_OUTPUTS.value * warp, 0] for warp in _powers(tile // WARP_OUTPUTS.value)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [blocks, tile, 4])


@triton.constexpr_function
def _stored_layout(outputs, warps):
    """The layout of results [outputs, rows] to be stored: a thread has 16 contiguous bytes."""
    threads = min(32, outputs // 8)
    return gl.BlockedLayout([8, 1], [threads, 32 // threads], [1, warps], [0, 1])


@triton.constexpr_function
def _powers(size):
    """The powers of two below `size`."""
    return [1 << power for power in range(size.bit_length() - 1)]


@gluon.jit
def _output(first, n, outputs, GATED: gl.constexpr):
    """The row of the weight that a tile has as row n: GATED tiles alternate eight gates and their
    ups."""
    gated = first + n // 16 * EIGHT + n % EIGHT + n // EIGHT % 2 * outputs
    return gated if GATED else first + n


@gluon.jit
def _copy(
    rooms,
    room,
    turn,
    x_pointer,
    words_pointer,
    scales_pointer,
    first,
    first_row,
    rows,
    outputs,
    K: gl.constexpr,
    BITS: gl.constexpr,
    GROUP: gl.constexpr,
    GATED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Starts to load the rows, words and scales of a turn, if it exists."""
    of_x: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_K, BLOCK_K // 8], [WARPS, 1], [1, 0]
    )
    blocks: gl.constexpr = rooms[1].shape[1]
    groups: gl.constexpr = rooms[2].shape[1]
    tile: gl.constexpr = rooms[1].shape[2]
    apart: gl.constexpr = min(blocks, WARPS)
    of_words: gl.constexpr = gl.BlockedLayout(
        [1, 1, 4], [1, 32, 1], [apart, WARPS // apart, 1], [2, 1, 0]
    )
    of_scales: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [2, WARPS // 2], [1, 0])
    stride = outputs * (2 if GATED else 1)
    if turn < K // BLOCK_K:
        row = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, of_x))
        lane = turn * BLOCK_K + gl.arange(0, BLOCK_K, gl.SliceLayout(0, of_x))
        load(
            rooms[0].index(room),
            x_pointer + row[:, None] * K + lane[None, :],
            mask=(row < rows)[:, None] & (lane < K)[None, :],
        )
        block = turn * blocks + gl.arange(0, blocks, gl.SliceLayout(1, gl.SliceLayout(2, of_words)))
        n = gl.arange(0, tile, gl.SliceLayout(0, gl.SliceLayout(2, of_words)))
        word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, of_words)))
        at = block[:, None, None] * stride + _output(first, n, outputs, GATED)[None, :, None]
        load(
            rooms[1].index(room),
            words_pointer + at * 4 + word[None, None, :],
            eviction_policy="evict_first",
        )
        group = turn * BLOCK_K // GROUP + gl.arange(0, groups, gl.SliceLayout(1, of_scales))
        n = gl.arange(0, tile, gl.SliceLayout(0, of_scales))
        at = group[:, None] * stride + _output(first, n, outputs, GATED)[None, :]
        load(rooms[2].index(room), scales_pointer + at)
    async_copy.commit_group()


@gluon.jit
def _decoded(
    rooms,
    room,
    BITS: gl.constexpr,
    EXACT: gl.constexpr,
    BLOCK_K: gl.constexpr,
    SUMS: gl.constexpr,
):
    """Decodes a tile's weights into the layout of an operand."""
    all_blocks: gl.constexpr = rooms[1].shape[1]
    groups: gl.constexpr = rooms[2].shape[1]
    blocks: gl.constexpr = all_blocks // groups
    tile: gl.constexpr = rooms[1].shape[2]
    of_words: gl.constexpr = _words_layout(groups, blocks, tile)
    words = rooms[1].index(room).load(_blocks_layout(all_blocks, tile))
    words = gl.reshape(words, (groups, blocks, tile, 4))
    words = gl.convert_layout(words, of_words, assert_trivial=True)
    scales = rooms[2].index(room).load(gl.SliceLayout(1, gl.SliceLayout(3, of_words)))
    weights = numbers(words, scales, BITS, EXACT, rooms[0].dtype, tile, BLOCK_K)
    return gl.convert_layout(weights, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)


@gluon.jit
def _next(room, ROOMS: gl.constexpr):
    return gl.where(room == ROOMS - 1, 0, room + 1)


@gluon.jit(do_not_specialize=["rows", "piece"])
def _packed_rows(
    x_pointer,
    words_pointer,
    scales_pointer,
    bias_pointer,
    out_pointer,
    squares_pointer,
    norm_pointer,
    scaled_pointer,
    ahead_pointer,
    rows,
    outputs,
    piece,
    epsilon,
    PARTS: gl.constexpr,
    BLOCK_PARTS: gl.constexpr,
    K: gl.constexpr,
    BIAS: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    ADDS: gl.constexpr,
    AHEAD: gl.constexpr,
    SQUARES: gl.constexpr,
    BITS: gl.constexpr,
    GROUP: gl.constexpr,
    EXACT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    ROOMS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """ROOMS: turns in shared memory or in flight. BLOCK_N: outputs per program."""
    dtype: gl.constexpr = x_pointer.dtype.element_ty
    tile: gl.constexpr = 2 * BLOCK_N if GATED else BLOCK_N
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    cubic: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    of_sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    blocks: gl.constexpr = BLOCK_K * BITS // 128
    groups: gl.constexpr = max(1, BLOCK_K // GROUP)
    program = gl.program_id(0)
    first, first_row = program * BLOCK_N, gl.program_id(1) * BLOCK_M
    rooms = (
        gl.allocate_shared_memory(dtype, [ROOMS, BLOCK_M, BLOCK_K], swizzled),
        gl.allocate_shared_memory(gl.int32, [ROOMS, blocks, tile, 4], cubic),
        gl.allocate_shared_memory(gl.int32, [ROOMS, groups, tile], plain),
    )
    for turn in gl.static_range(ROOMS - 1):
        _copy(
            rooms, turn, turn, x_pointer, words_pointer, scales_pointer, first, first_row, rows,
            outputs, K, BITS, GROUP, GATED, BLOCK_M, BLOCK_K, WARPS,
        )  # fmt: skip
    sums = gl.zeros([tile, BLOCK_M], gl.float32, of_sums)
    async_copy.wait_group(ROOMS - 2)
    barrier()
    fence_async_shared()
    weights = _decoded(rooms, 0, BITS, EXACT, BLOCK_K, of_sums)
    others = weights
    room, free = 0, ROOMS - 1
    for turn in range(0, K // BLOCK_K, 2):
        # The weights of two turns have their own registers and names: with one variable, the
        # compiler would decode the next weights only after the product that reads the last.
        for half in gl.static_range(2):
            using = weights if half == 0 else others
            sums = warpgroup_mma(using, rooms[0].index(room).permute((1, 0)), sums, is_async=True)
            if half == 0:
                sums, others = warpgroup_mma_wait(1, deps=[sums, others])
            else:
                sums, weights = warpgroup_mma_wait(1, deps=[sums, weights])
            # Now the previous product has ended in all warps and the next turn's data is there.
            async_copy.wait_group(ROOMS - 3)
            barrier()
            fence_async_shared()
            _copy(
                rooms, free, turn + half + ROOMS - 1, x_pointer, words_pointer, scales_pointer,
                first, first_row, rows, outputs, K, BITS, GROUP, GATED, BLOCK_M, BLOCK_K, WARPS,
            )  # fmt: skip
            free, room = room, _next(room, ROOMS)
            if half == 0:
                others = _decoded(rooms, room, BITS, EXACT, BLOCK_K, of_sums)
            else:
                weights = _decoded(rooms, room, BITS, EXACT, BLOCK_K, of_sums)
    sums, weights, others = warpgroup_mma_wait(0, deps=[sums, weights, others])
    if AHEAD > 0:
        threads: gl.constexpr = gl.BlockedLayout([1], [32], [AHEAD // 32], [0])
        prefetch(ahead_pointer, piece, gl.program_id(0), gl.arange(0, AHEAD, threads))
    sums, ups = sums.to(dtype), sums.to(dtype)
    if GATED:
        halves = gl.permute(gl.reshape(sums, (tile // 16, 2, 8, BLOCK_M)), (0, 2, 3, 1))
        gates, ups = gl.split(halves)
        sums = gl.reshape(gates, (BLOCK_N, BLOCK_M))
        ups = gl.reshape(ups, (BLOCK_N, BLOCK_M))
    if BLOCK_M >= WHOLE_ROWS:
        sums = gl.convert_layout(sums, _stored_layout(BLOCK_N, WARPS))
        ups = gl.convert_layout(ups, _stored_layout(BLOCK_N, WARPS)) if GATED else sums
    sums, ups = sums.to(gl.float32), ups.to(gl.float32)
    row, column = first_row + gl.arange(0, BLOCK_M), first + gl.arange(0, BLOCK_N)
    line, part = first_row + gl.arange(0, BLOCK_M), gl.arange(0, BLOCK_PARTS)
    if ADDS:
        part = program * (BLOCK_N // SQUARES) + gl.arange(0, BLOCK_N // SQUARES)
    finish(
        sums, ups, row, column, line, part, bias_pointer, out_pointer, squares_pointer,
        norm_pointer, scaled_pointer, rows, outputs, epsilon, PARTS, BLOCK_PARTS, K, BIAS, GATED,
        ACTIVATION, ADDS, SQUARES, BLOCK_M, BLOCK_N,
    )  # fmt: skip
