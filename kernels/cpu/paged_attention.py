"""Calls the compiled attention over pages."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from baton.kernels.cpu import amx, compiler
from baton.kernels.cpu.attention_code import (
    AttentionCode,
    ChunkArguments,
    DecodeArguments,
    library,
)
from baton.kernels.cpu.attention_shape import SPLIT, Heads
from baton.kernels.cpu.vectors import element_of

if TYPE_CHECKING:
    from baton.kernels.attention import ChunkReads, DecodeReads, Scoring
    from baton.kernels.cache import LayerCache

UNLIMITED = 1 << 60
"""A window that hides nothing."""

FEW_SEQUENCES = 2
"""Up to this many sequences one thread merges the parts: it ends before another could start."""


class CompiledAttention:
    """Attention over pages, for one shape of heads and pages."""

    def __init__(self, shape: Heads) -> None:
        self._shape = shape
        self._code = AttentionCode(shape)
        address = library(shape).address
        self._attend, self._merge = address("attend"), address("merge")
        self._attend_chunk = address("attend_chunk")
        self._no_sinks = torch.full((shape.heads,), -torch.inf)

    def of_queries(
        self, query: Tensor, kv: Tensor, reads: DecodeReads, sinks: Tensor | None
    ) -> Tensor:
        """query [B, heads, head_dim], kv [page, k/v, token, kv_head, dim], sinks [heads], float32
        -> [B, heads * value_dim]."""
        shape, batch = self._shape, query.shape[0]
        splits = -(-reads.longest // SPLIT) + reads.cut
        threads = torch.get_num_threads()
        scratch, parts = compiler.scratch(
            2 * threads * self._code.decode_scratch.numbers,
            batch * shape.heads * splits * shape.part_numbers,
        )
        out = query.new_empty(batch, shape.heads * shape.value_dim)
        arguments = DecodeArguments(
            query.data_ptr(),
            query.stride(0),
            kv.data_ptr(),
            kv.stride(0),
            reads.tables.data_ptr(),
            reads.tables.shape[1],
            reads.start.data_ptr(),
            reads.first.data_ptr(),
            reads.end.data_ptr(),
            batch,
            splits,
            self._code.heads_of_item(batch * splits, threads),
            self._address(sinks),
            scratch,
            parts,
            out.data_ptr(),
        )
        compiler.run(self._attend, arguments)
        compiler.run(self._merge, arguments, alone=batch <= FEW_SEQUENCES)
        return out

    def of_chunk(
        self, query: Tensor, kv: Tensor, reads: ChunkReads, sinks: Tensor | None
    ) -> Tensor:
        """query [T, heads, head_dim] of one sequence's tokens -> [T, heads * value_dim]."""
        shape, count = self._shape, query.shape[0]
        threads = torch.get_num_threads()
        (scratch,) = compiler.scratch(threads * self._code.chunk_scratch.numbers)
        out = query.new_empty(count, shape.heads * shape.value_dim)
        arguments = ChunkArguments(
            query.data_ptr(),
            query.stride(0),
            kv.data_ptr(),
            kv.stride(0),
            reads.pages.data_ptr(),
            reads.start,
            reads.position,
            count,
            self._code.tokens_of_item(count, threads),
            reads.window or UNLIMITED,
            self._address(sinks),
            scratch,
            out.data_ptr(),
        )
        compiler.run(self._attend_chunk, arguments)
        return out

    def _address(self, sinks: Tensor | None) -> int:
        return (self._no_sinks if sinks is None else sinks).data_ptr()


def paged_attention(
    heads: int, cache: LayerCache, scoring: Scoring, dtype: torch.dtype
) -> CompiledAttention | None:
    """Compiled attention for queries in `dtype`; None if there is no code for the shape."""
    kv, sizes = cache.kv, (cache.head_dim, cache.value_dim)
    whole = math.gcd(*sizes) % amx.INPUTS == 0
    tiles = dtype == torch.bfloat16 and whole and compiler.has_amx()
    if not cache.lanes:
        return None
    how = cache.lanes, compiler.registers().number, tiles
    return _compiled(heads, *kv.shape[1:], *sizes, scoring, dtype, kv.dtype, *how)


@functools.cache
def _compiled(
    heads: int,
    parts: int,
    page_size: int,
    kv_heads: int,
    head_stride: int,
    head_dim: int,
    value_dim: int,
    scoring: Scoring,
    dtype: torch.dtype,
    stored: torch.dtype,
    lanes: int,
    registers: int,
    tiles: bool,
) -> CompiledAttention:
    return CompiledAttention(
        Heads(
            heads,
            kv_heads,
            head_dim,
            value_dim,
            (parts - 1) * page_size * kv_heads * head_stride,
            page_size,
            head_stride,
            element_of(dtype),
            element_of(stored),
            lanes,
            registers,
            *scoring,
            tiles,
        )
    )
