"""Attention of one new token per sequence over its pages.

The kernel does everything between the projection of queries, keys and values and that of the
output: it norms and rotates the new token's query and key, stores key and value into their
page, and attends.

A context is cut into splits so that a small batch fills the chip. Query heads that share a
key head are rows of one matrix, so each key and value is read once. The first split also
handles the new token, from registers: no program waits for another's store. A second kernel
merges the splits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_SPLITS = 32
SHORTEST_SPLIT = 64
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class SplitWorkspace:
    """The splits' results for the merging kernel. Successive calls may share it."""

    partial: Tensor  # [batch * heads * splits, head_dim], float32
    weight: Tensor  # [batch * heads * splits], float32, log2 of each split's normalizer

    @classmethod
    def make(
        cls, batch: int, heads: int, kv_heads: int, head_dim: int, device: torch.device
    ) -> SplitWorkspace:
        rows = max(splits_for(size, kv_heads) * size for size in range(1, batch + 1)) * heads
        return cls(
            torch.empty(rows, head_dim, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
        )


def splits_for(batch: int, kv_heads: int) -> int:
    """Programs that share one sequence's context: enough to fill the chip, no more."""
    wanted = triton.cdiv(512, batch * kv_heads)
    return min(triton.next_power_of_2(wanted), MOST_SPLITS)


@dataclass(frozen=True, slots=True)
class AttentionTiling:
    tokens: int  # per iteration of a program's loop
    warps: int
    stages: int


MANY_PROGRAMS = 1024


def tiling_for(programs: int, splits: int, block_d: int) -> AttentionTiling:
    """Many small programs keep the memory busy by their number, few by what each loads at once;
    splits load further ahead than whole contexts."""
    if programs >= MANY_PROGRAMS:
        return AttentionTiling(16, 1, 3)
    return AttentionTiling(64 if block_d <= 128 else 32, 2, 3 if splits > 1 else 2)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The shape of a layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    rotates: bool
    epsilon: float


def decode_attention(
    qkv: Tensor,
    cos_sin: Tensor,
    rows: Tensor,
    positions: Tensor,
    page_table: Tensor,
    kv_layer: Tensor,
    shape: HeadShape,
    workspace: SplitWorkspace,
    out: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
) -> Tensor:
    """qkv [B, (heads + 2 * kv_heads) * dim], not yet rotated -> out [B, heads * dim].

    rows [B] are the sequences' rows of page_table [sequences, pages], positions [B] those of
    the new tokens; a row with a negative position is skipped. cos_sin [positions, dim] holds
    a position's cosines, then its sines. kv_layer [page, 2, token, kv_head, dim] is one
    layer of the pool.
    """
    batch, group = len(qkv), shape.heads // shape.kv_heads
    splits = splits_for(batch, shape.kv_heads)
    block_d = max(16, triton.next_power_of_2(shape.head_dim))
    tiling = tiling_for(batch * shape.kv_heads, splits, block_d)
    _decode[(batch, shape.kv_heads, splits)](
        qkv,
        cos_sin,
        rows,
        positions,
        page_table,
        kv_layer,
        query_norm if query_norm is not None else qkv,
        key_norm if key_norm is not None else qkv,
        workspace.partial,
        workspace.weight,
        out,
        shape.head_dim**-0.5 * LOG2_E,
        shape.epsilon,
        shape.window or 0,
        page_table.stride(0),
        kv_layer.stride(0),
        kv_layer.stride(1),
        PAGE_SIZE=kv_layer.shape[2],
        HEADS=shape.heads,
        KV_HEADS=shape.kv_heads,
        GROUP=group,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        DIM=shape.head_dim,
        BLOCK_D=block_d,
        BLOCK_N=tiling.tokens,
        SPLITS=splits,
        SHORTEST=SHORTEST_SPLIT,
        ROTATES=shape.rotates,
        NORMS=query_norm is not None,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    if splits > 1:
        _merge[(batch, shape.heads)](
            positions,
            workspace.partial,
            workspace.weight,
            out,
            shape.window or 0,
            HEADS=shape.heads,
            DIM=shape.head_dim,
            BLOCK_D=block_d,
            BLOCK_N=tiling.tokens,
            SPLITS=splits,
            SHORTEST=SHORTEST_SPLIT,
            num_warps=4,
        )
    return out


@triton.jit(do_not_specialize_on_alignment=["rows_pointer", "positions_pointer"])
def _decode(
    qkv_pointer,
    cos_sin_pointer,
    rows_pointer,
    positions_pointer,
    table_pointer,
    kv_pointer,
    query_norm_pointer,
    key_norm_pointer,
    partial_pointer,
    weight_pointer,
    out_pointer,
    scale,
    epsilon,
    window,
    table_stride,
    page_stride,
    value_offset,
    PAGE_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    ROTATES: tl.constexpr,
    NORMS: tl.constexpr,
):
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions_pointer + sequence)
    first = tl.maximum(position - window + 1, 0) if window > 0 else 0
    length = tl.maximum(tl.cdiv(position - first, SPLITS), SHORTEST)
    length = tl.cdiv(length, BLOCK_N) * BLOCK_N
    active = tl.maximum(tl.cdiv(position - first, length), 1)
    live = (position >= 0) & (split < active)
    row = tl.load(rows_pointer + sequence).to(tl.int64)
    table = table_pointer + row * table_stride
    start = first + split * length
    end = tl.minimum(start + length, position)
    lane = tl.arange(0, BLOCK_N)
    if live:
        dtype = qkv_pointer.dtype.element_ty
        dim = tl.arange(0, BLOCK_D)
        in_dim = dim < DIM
        inside = head * DIM + dim
        member = tl.arange(0, BLOCK_G)
        in_group = (member < GROUP)[:, None] & in_dim[None, :]

        # The queries of the heads that share this key head: [BLOCK_G, BLOCK_D].
        new = qkv_pointer + sequence.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * DIM)
        at = (head * GROUP + member)[:, None] * DIM + dim[None, :]
        query = tl.load(new + at, mask=in_group, other=0.0).to(tl.float32)
        if NORMS:
            size = tl.rsqrt(tl.sum(query * query, axis=1) / DIM + epsilon)
            norm = tl.load(query_norm_pointer + dim, mask=in_dim, other=0.0).to(tl.float32)
            query = (query * size[:, None] * norm[None, :]).to(dtype).to(tl.float32)
        turn = cos_sin_pointer + position.to(tl.int64) * DIM + dim // 2
        if ROTATES:
            cos = tl.load(turn, mask=in_dim, other=0.0)
            sin = tl.load(turn + DIM // 2, mask=in_dim, other=0.0)
            other = (head * GROUP + member)[:, None] * DIM + (dim ^ 1)[None, :]
            partner = tl.load(new + other, mask=in_group, other=0.0).to(tl.float32)
            if NORMS:
                swapped = tl.load(query_norm_pointer + (dim ^ 1), mask=in_dim, other=0.0)
                partner = (partner * size[:, None] * swapped.to(tl.float32)[None, :]).to(dtype)
                partner = partner.to(tl.float32)
            # Of a pair (a, b): a cos - b sin, and b cos + a sin.
            sin = tl.where(dim % 2 == 0, -sin, sin)
            query = query * cos[None, :] + partner * sin[None, :]
        query = query.to(dtype)

        highest = tl.full([BLOCK_G], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BLOCK_G], dtype=tl.float32)
        sums = tl.zeros([BLOCK_G, BLOCK_D], dtype=tl.float32)
        if split == 0:
            key_at = new + (HEADS + head) * DIM
            key = tl.load(key_at + dim, mask=in_dim, other=0.0).to(tl.float32)
            if NORMS:
                key_size = tl.rsqrt(tl.sum(key * key, axis=0) / DIM + epsilon)
                key_norm = tl.load(key_norm_pointer + dim, mask=in_dim, other=0.0).to(tl.float32)
                key = (key * key_size * key_norm).to(dtype).to(tl.float32)
            if ROTATES:
                cos_key = tl.load(turn, mask=in_dim, other=0.0)
                sin_key = tl.load(turn + DIM // 2, mask=in_dim, other=0.0)
                key_partner = tl.load(key_at + (dim ^ 1), mask=in_dim, other=0.0).to(tl.float32)
                if NORMS:
                    swapped_key = tl.load(key_norm_pointer + (dim ^ 1), mask=in_dim, other=0.0)
                    key_partner = (key_partner * key_size * swapped_key.to(tl.float32)).to(dtype)
                    key_partner = key_partner.to(tl.float32)
                key = key * cos_key + key_partner * tl.where(dim % 2 == 0, -sin_key, sin_key)
            key = key.to(dtype)
            value = tl.load(new + (HEADS + KV_HEADS + head) * DIM + dim, mask=in_dim, other=0.0)
            page = tl.load(table + position // PAGE_SIZE).to(tl.int64)
            spot = kv_pointer + page * page_stride + (position % PAGE_SIZE) * (KV_HEADS * DIM)
            tl.store(spot + head * DIM + dim, key, mask=in_dim)
            tl.store(spot + value_offset + head * DIM + dim, value, mask=in_dim)
            score = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], axis=1)
            highest = score * scale
            total += 1.0
            sums += value.to(tl.float32)[None, :]

        for block in range(start, end, BLOCK_N):
            token = block + lane
            seen = token < end
            pages = tl.load(table + token // PAGE_SIZE, mask=seen, other=0).to(tl.int64)
            spots = pages * page_stride + (token % PAGE_SIZE) * (KV_HEADS * DIM)
            # keys [BLOCK_D, BLOCK_N], values [BLOCK_N, BLOCK_D]
            keys = tl.load(
                kv_pointer + spots[None, :] + inside[:, None],
                mask=seen[None, :] & in_dim[:, None],
                other=0.0,
            )
            scores = tl.dot(query, keys, out_dtype=tl.float32, input_precision="ieee") * scale
            scores = tl.where(seen[None, :], scores, float("-inf"))
            values = tl.load(
                kv_pointer + value_offset + spots[:, None] + inside[None, :],
                mask=seen[:, None] & in_dim[None, :],
                other=0.0,
            )
            higher = tl.maximum(highest, tl.max(scores, axis=1))
            weights = tl.exp2(scores - higher[:, None])
            fade = tl.exp2(highest - higher)
            total = total * fade + tl.sum(weights, axis=1)
            sums = sums * fade[:, None]
            sums = tl.dot(weights.to(dtype), values, sums, input_precision="ieee")
            highest = higher

        sums = sums / total[:, None]
        out = out_pointer + sequence.to(tl.int64) * (HEADS * DIM) + at
        if active == 1:
            tl.store(out, sums.to(dtype), mask=in_group)
        else:
            # [sequence, head, split], each group's rows side by side
            spare = (sequence * HEADS + head * GROUP + member) * SPLITS
            spot = partial_pointer + (spare + split)[:, None] * DIM + dim[None, :]
            tl.store(spot, sums, mask=in_group)
            tl.store(weight_pointer + spare + split, highest + tl.log2(total), mask=member < GROUP)


@triton.jit(do_not_specialize_on_alignment=["positions_pointer"])
def _merge(
    positions_pointer,
    partial_pointer,
    weight_pointer,
    out_pointer,
    window,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions_pointer + sequence)
    first = tl.maximum(position - window + 1, 0) if window > 0 else 0
    length = tl.maximum(tl.cdiv(position - first, SPLITS), SHORTEST)
    length = tl.cdiv(length, BLOCK_N) * BLOCK_N
    active = tl.cdiv(position - first, length)
    if active > 1:
        part, dim = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
        row = sequence.to(tl.int64) * HEADS + head
        at = row * SPLITS + part
        share = tl.load(weight_pointer + at, mask=part < active, other=float("-inf"))
        share = tl.exp2(share - tl.max(share, axis=0))
        found = tl.load(
            partial_pointer + at[:, None] * DIM + dim[None, :],
            mask=(part < active)[:, None] & (dim < DIM)[None, :],
            other=0.0,
        )
        merged = tl.sum(found * share[:, None], axis=0) / tl.sum(share, axis=0)
        to = out_pointer + row * DIM + dim
        tl.store(to, merged.to(out_pointer.dtype.element_ty), mask=dim < DIM)
