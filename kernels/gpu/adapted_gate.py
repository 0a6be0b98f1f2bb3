"""The gated activation of a product of many rows, some with adapters: expand and gate in one
kernel, so that gates and ups are read once and never stored again."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu.fixed_order import awaited, gate, inverse_size, settle
from baton.kernels.gpu.low_rank import TILE_ROWS, Shrunk
from baton.kernels.gpu.norm import Scaled
from baton.kernels.linear import Activation

COLUMNS = 64
"""Gates, and as many ups, of a program."""


def expand_and_gate(
    gate_up: Tensor,
    shrunk: Shrunk,
    source: Scaled,
    bias: Tensor | None,
    activation: Activation,
) -> Tensor:
    """As expand_onto, then gate_and_multiply, but leaves `gate_up` as it is."""
    (rows, columns), stack, order = gate_up.shape, shrunk.adapters.stack, shrunk.adapters.rows
    size = columns // 2
    out, tiles = gate_up.new_empty(rows, size), len(order.tiles)
    # Each adapter, and the rows without one, may have a tile that is not full.
    most = rows // TILE_ROWS + min(tiles, len(stack.a)) + 1
    _expand_and_gate[(most, triton.cdiv(size, COLUMNS))](
        gate_up,
        gate_up if source.squares is None else source.squares,
        gate_up if bias is None else bias,
        stack.b,
        shrunk.parts,
        order.order,
        order.tiles,
        out,
        source.epsilon,
        rows,
        tiles,
        stack.b.stride(0),
        SIZE=size,
        K=source.x.shape[1],
        SCALED=source.squares is not None,
        BIAS=bias is not None,
        ACTIVATION=activation,
        UP_PART=len(stack.ends) - 1,
        RANK=stack.rank,
        BLOCK_M=TILE_ROWS,
        BLOCK_N=COLUMNS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


@triton.jit(
    do_not_specialize=["rows", "tiles"],
    do_not_specialize_on_alignment=["order_pointer", "tiles_pointer"],
)
def _expand_and_gate(
    gate_up_pointer,
    squares_pointer,
    bias_pointer,
    b_pointer,
    shrunk_pointer,
    order_pointer,
    tiles_pointer,
    out_pointer,
    epsilon,
    rows,
    tiles,
    slot_stride,
    SIZE: tl.constexpr,
    K: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    UP_PART: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    slot, start, count = _tile_of(tl.program_id(0), tiles_pointer, rows, tiles, BLOCK_M)
    if count <= 0:
        return
    lane, rank = tl.arange(0, BLOCK_M), tl.arange(0, RANK)
    row = tl.load(order_pointer + start + lane, mask=lane < count, other=-1)
    inside = row >= 0  # the order of a recorded step is not filled before its first replay
    row = tl.maximum(row, 0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_size = column < SIZE
    # All loads come before the first product, which waits for them.
    mask = inside[:, None] & in_size[None, :]
    at = gate_up_pointer + row.to(tl.int64)[:, None] * (2 * SIZE) + column[None, :]
    gates = tl.load(at, mask=mask, other=0.0)
    ups = tl.load(at + SIZE, mask=mask, other=0.0)
    x_at = shrunk_pointer + row[:, None] * RANK + rank[None, :]
    x = tl.load(x_at, mask=inside[:, None], other=0.0)
    up_x = tl.load(x_at + UP_PART * rows * RANK, mask=inside[:, None], other=0.0)
    b_at = b_pointer + slot.to(tl.int64) * slot_stride + column[None, :] * RANK + rank[:, None]
    b = tl.load(b_at, mask=in_size[None, :] & (slot >= 0), other=0.0)
    up_b = tl.load(b_at + SIZE * RANK, mask=in_size[None, :] & (slot >= 0), other=0.0)
    size, bias, up_bias = 1.0, 0.0, 0.0
    if SCALED:
        squares = tl.load(squares_pointer + row, mask=inside, other=0.0)
        size = inverse_size(squares, epsilon, K)[:, None]
    if BIAS:
        bias = tl.load(bias_pointer + column, mask=in_size, other=0.0).to(tl.float32)[None, :]
        up_bias = tl.load(bias_pointer + SIZE + column, mask=in_size, other=0.0)
        up_bias = up_bias.to(tl.float32)[None, :]
    gates = settle(_expanded(gates, x, b, slot), size, bias, SCALED, BIAS)
    ups = settle(_expanded(ups, up_x, up_b, slot), size, up_bias, SCALED, BIAS)
    product = gate(gates, ups, ACTIVATION).to(out_pointer.dtype.element_ty)
    tl.store(out_pointer + row.to(tl.int64)[:, None] * SIZE + column[None, :], product, mask=mask)


@triton.jit
def _expanded(product, x, b, slot):
    """A rounded product with what an adapter adds, float32; rounded, too."""
    added = tl.zeros(product.shape, dtype=tl.float32)
    added = awaited(tl.dot(x, b, added, input_precision="ieee"))
    added = tl.where(slot >= 0, added, -0.0)  # which changes no number, not even -0
    return (product.to(tl.float32) + added).to(product.dtype).to(tl.float32)


@triton.jit
def _tile_of(number, tiles_pointer, rows, tiles, BLOCK_M: tl.constexpr):
    """The slot, the first place in the order and the number of rows of a tile. Tiles of rows
    without an adapter, whose slot is -1, come first, as in the order."""
    plain = rows
    if tl.load(tiles_pointer) >= 0:
        plain = tl.load(tiles_pointer + 1)
    tile, start = number - tl.cdiv(plain, BLOCK_M), number * BLOCK_M
    known = (tile >= 0) & (tile < tiles)
    entry = tiles_pointer + 3 * tile
    slot = tl.load(entry, mask=known, other=-1)
    count = tl.minimum(plain - start, BLOCK_M)
    if tile >= 0:
        start = tl.load(entry + 1, mask=known, other=0)
        count = tl.load(entry + 2, mask=known, other=0)
    return slot, start, count
