"""LoRA adapters of the products between latents and heads (kernels/latent.py).

For each head there are two products, with the module's A and the head's part of its B: queries go
through B, then A; attention's results go through A, then B. As in kernels/gpu/low_rank.py, they are
added to a product that is rounded already, in tiles of rows with one adapter, so that a row's bits
do not depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton.kernels.gpu.low_rank import TILE_ROWS, AdapterStack, SlotRows, rows_of_tile

DEPTH = 64
"""Inputs of a head per iteration."""

NARROW_RANK = 64
"""Up to this rank a program adds to more columns at once."""


class _Side(NamedTuple):
    """A or B in all slots, as one of the two products reads it."""

    weight: Tensor  # begins at the first number that is read
    head: int  # stride of heads
    input: int  # stride of inputs
    output: int  # stride of outputs


@dataclass(frozen=True, slots=True)
class LatentAdapters:
    """Adapters of the module that makes keys and values of latents. Outputs of a head are its
    key's, then its value's."""

    stack: AdapterStack  # a [slots, rank, latent]; b [slots, heads * (plain + value), rank]
    rows: SlotRows  # a step's rows
    sampled: SlotRows  # the rows that its last layer attends

    def of_samples(self) -> LatentAdapters:
        return replace(self, rows=self.sampled)

    def absorb(self, plain: Tensor, absorbed: Tensor) -> None:
        """Adds what adapters make of queries [T, heads, plain] to absorbed [T, heads, latent or
        more]."""
        first = self._of_heads(plain.shape[1], 0)
        first = first._replace(input=first.output, output=first.input)
        size = self.stack.a.shape[2]
        self._add(plain, first, _Side(self.stack.a, 0, size, 1), absorbed[..., :size])

    def expand(self, attended: Tensor, values: Tensor) -> None:
        """Adds what adapters make of attended [T, heads, latent] to values [T, heads, value]."""
        size = self.stack.a.shape[2]
        second = self._of_heads(values.shape[1], -values.shape[2])
        self._add(attended, _Side(self.stack.a, 0, 1, size), second, values)

    def expand_chunk(self, slot: int, latents: Tensor, keys: Tensor, values: Tensor) -> None:
        """Adds what the adapter in `slot` makes of latents [tokens, latent] to keys [heads, tokens,
        plain] and values [heads, tokens, value] of one sequence, with the matrix library."""
        heads, _, plain = keys.shape
        shrunk = torch.mm(latents, self.stack.a[slot].t()).expand(heads, -1, -1)
        weight = self.stack.b[slot].unflatten(0, (heads, -1)).transpose(1, 2)
        keys.baddbmm_(shrunk, weight[..., :plain])
        values.baddbmm_(shrunk, weight[..., plain:])

    def _of_heads(self, heads: int, start: int) -> _Side:
        """B from a head's output `start` on; a negative one counts from the end."""
        by_head = self.stack.b.unflatten(1, (heads, -1))
        return _Side(by_head[:, :, start:], by_head.stride(1), 1, self.stack.rank)

    def _add(self, x: Tensor, first: _Side, second: _Side, out: Tensor) -> None:
        """x [T, heads, K] -> out [T, heads, N] += x @ first @ second."""
        tiles, heads, outputs = len(self.rows.tiles), *out.shape[1:]
        block = 128 if self.stack.rank <= NARROW_RANK else 64
        _add_to_heads[(tiles, heads, triton.cdiv(outputs, block))](
            x,
            first.weight,
            second.weight,
            out,
            self.rows.order,
            self.rows.tiles,
            x.stride(0),
            x.stride(1),
            out.stride(0),
            out.stride(1),
            first.weight.stride(0),
            second.weight.stride(0),
            K=x.shape[2],
            N=outputs,
            RANK=self.stack.rank,
            FIRST_HEAD=first.head,
            FIRST_INPUT=first.input,
            FIRST_OUTPUT=first.output,
            SECOND_HEAD=second.head,
            SECOND_INPUT=second.input,
            SECOND_OUTPUT=second.output,
            BLOCK_M=TILE_ROWS,
            BLOCK_K=DEPTH,
            BLOCK_N=block,
            num_warps=4,
            num_stages=2,
            enable_fp_fusion=False,
        )


@triton.jit(do_not_specialize_on_alignment=["order_pointer", "tiles_pointer"])
def _add_to_heads(
    x_pointer,
    first_pointer,
    second_pointer,
    out_pointer,
    order_pointer,
    tiles_pointer,
    x_stride,
    x_head,
    out_stride,
    out_head,
    first_slot,
    second_slot,
    K: tl.constexpr,
    N: tl.constexpr,
    RANK: tl.constexpr,
    FIRST_HEAD: tl.constexpr,
    FIRST_INPUT: tl.constexpr,
    FIRST_OUTPUT: tl.constexpr,
    SECOND_HEAD: tl.constexpr,
    SECOND_INPUT: tl.constexpr,
    SECOND_OUTPUT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """FIRST_* and SECOND_* are strides of both products' weights."""
    slot, row, inside = rows_of_tile(order_pointer, tiles_pointer, tl.program_id(0), BLOCK_M)
    if slot < 0:
        return
    head, row, slot = tl.program_id(1).to(tl.int64), row.to(tl.int64)[:, None], slot.to(tl.int64)
    rank, lane = tl.arange(0, RANK), tl.arange(0, BLOCK_K)
    x_at = x_pointer + row * x_stride + head * x_head + lane[None, :]
    first_at = first_pointer + slot * first_slot + head * FIRST_HEAD
    first_at += lane[:, None] * FIRST_INPUT + rank[None, :] * FIRST_OUTPUT
    sums = tl.zeros([BLOCK_M, RANK], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        in_depth = start + lane < K
        x = tl.load(x_at + start, mask=inside[:, None] & in_depth[None, :], other=0.0)
        weight = tl.load(first_at + start * FIRST_INPUT, mask=in_depth[:, None], other=0.0)
        sums = tl.dot(x, weight, sums, input_precision="ieee")
    column = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_columns = (column < N)[None, :]
    second_at = second_pointer + slot * second_slot + head * SECOND_HEAD
    second_at += rank[:, None] * SECOND_INPUT + column[None, :] * SECOND_OUTPUT
    weight = tl.load(second_at, mask=in_columns, other=0.0)
    added = tl.dot(sums.to(weight.dtype), weight, input_precision="ieee")
    at = out_pointer + row * out_stride + head * out_head + column[None, :]
    mask = inside[:, None] & in_columns
    product = tl.load(at, mask=mask, other=0.0)
    tl.store(at, (product.to(tl.float32) + added).to(product.dtype), mask=mask)
