"""The compiled attention of decoding, called with tensors."""

from __future__ import annotations

import functools

from torch import Tensor

from baton.kernels.cpu import compiler
from baton.kernels.cpu.code import LANES
from baton.kernels.cpu.decode_attention import SPLIT, AttentionArguments, Heads, library


class CompiledAttention:
    """Attention of one query a sequence over pages, for one shape of heads and pages."""

    def __init__(self, shape: Heads) -> None:
        self._shape = shape
        self._attend = library(shape).address("attend")
        self._merge = library(shape).address("merge")

    def __call__(
        self, query: Tensor, kv: Tensor, tables: Tensor, first: Tensor, end: Tensor, longest: int
    ) -> Tensor:
        """query [B, heads, head_dim], kv [page, 2, token, kv_head, dim], the rest as in DecodeReads
        -> [B, heads * head_dim]."""
        shape, batch, splits = self._shape, query.shape[0], -(-longest // SPLIT)
        items = batch * splits * (shape.heads // shape.queries)
        part_numbers = batch * shape.heads * splits * shape.part_numbers
        scratch, parts = compiler.scratch(items * shape.scratch_numbers, part_numbers)
        out = query.new_empty(batch, shape.heads * shape.head_dim)
        arguments = AttentionArguments(
            query.data_ptr(),
            query.stride(0),
            kv.data_ptr(),
            kv.stride(0),
            tables.data_ptr(),
            tables.shape[1],
            first.data_ptr(),
            end.data_ptr(),
            batch,
            splits,
            scratch,
            parts,
            out.data_ptr(),
        )
        compiler.run(self._attend, arguments)
        compiler.run(self._merge, arguments, alone=True)
        return out


@functools.cache
def compiled_attention(
    heads: int, page_size: int, kv_heads: int, head_dim: int
) -> CompiledAttention | None:
    """None where there is no code for the shape."""
    if head_dim % LANES:
        return None
    return CompiledAttention(Heads(heads, kv_heads, head_dim, page_size))
