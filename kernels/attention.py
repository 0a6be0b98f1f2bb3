"""Attention over paged keys and values: one query per sequence, or one sequence's chunk.

Compiled code (kernels/cpu) reads the pages where they are. Where there is none, the pages are
gathered for torch's fused attention, which is fastest without a mask and with many rows per
call. So query heads that share a key head are rows of one matrix, and a chunk is cut into
blocks: the past of a block needs no mask, the block itself the same small one every time, and
the two are merged by their normalizers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.cache import LayerCache, by_heads, gather, page_rows
from baton.kernels.cpu import compiler

if TYPE_CHECKING:
    from baton.kernels.cpu.paged_attention import CompiledAttention

BLOCK = 128
"""Tokens of a chunk attended together; half of it for a short prompt."""


@dataclass(frozen=True)
class DecodeReads:
    """What single queries read, one per sequence: made once per step for all layers of one
    window."""

    tables: Tensor  # [B, width], page ids; a short list repeats its last page
    start: Tensor  # [B], the position of a table's first token
    first: Tensor  # [B], of the first visible token
    end: Tensor  # [B], of the one after the last visible
    longest: int  # tokens of a table up to `end`, at most
    cut: bool  # whether some table starts later than position 0

    @functools.cached_property
    def mask(self) -> Tensor:
        """[B, 1, 1, longest], added to scores: -inf for hidden tokens."""
        tokens = self.start.unsqueeze(1) + torch.arange(self.longest, device=self.tables.device)
        hidden = (tokens < self.first.unsqueeze(1)) | (tokens >= self.end.unsqueeze(1))
        mask = torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)
        return mask.view(len(self.tables), 1, 1, -1)


@dataclass(frozen=True)
class ChunkReads:
    """What one chunk's queries read: pages that end with the chunk itself."""

    pages: Tensor  # [n], page ids
    start: int  # the position of their first token
    position: int  # of the chunk's first token
    end: int  # of the one after its last
    window: int | None  # None: no token of these is hidden by the layer's window

    @functools.cached_property
    def mask(self) -> Tensor | None:
        """[tokens, tokens of the pages], added to scores; None: all of the past is visible."""
        if self.window is None:
            return None
        keys = torch.arange(self.start, self.end, device=self.pages.device)
        queries = torch.arange(self.position, self.end, device=self.pages.device).unsqueeze(1)
        return visibility(queries, keys, self.window, torch.float32)


def decode_attention(query: Tensor, cache: LayerCache, reads: DecodeReads) -> Tensor:
    """query [B, heads, head_dim], one per sequence, whose tokens are in the cache
    -> [B, heads * head_dim]."""
    if compiled := _compiled(query.shape[1], cache.kv):
        return compiled.of_queries(query, cache.kv, reads)
    batch, heads, head_dim = query.shape
    rows = page_rows(reads.tables.flatten(), cache.layers)
    found = by_heads(gather(cache, rows), cache, batch, head_dim)
    keys, values = found[:, :, :, : reads.longest].unbind()
    groups = query.view(batch, keys.shape[1], -1, head_dim)
    mask = reads.mask.to(query.dtype)
    attended = functional.scaled_dot_product_attention(groups, keys, values, mask)
    return attended.reshape(batch, heads * head_dim)


def prepare_attention(heads: int, cache: LayerCache) -> None:
    """Compiles ahead of the first call."""
    _compiled(heads, cache.kv)


def _compiled(heads: int, kv: Tensor) -> CompiledAttention | None:
    if not compiler.suits(kv):
        return None
    from baton.kernels.cpu.paged_attention import paged_attention  # imports llvmlite

    return paged_attention(heads, kv)


def chunk_attention(query: Tensor, cache: LayerCache, reads: ChunkReads) -> Tensor:
    """query [T, heads, head_dim] of one sequence's chunk, whose tokens are in the cache
    -> [T, heads * head_dim]."""
    if compiled := _compiled(query.shape[1], cache.kv):
        return compiled.of_chunk(query, cache.kv, reads)
    rows = page_rows(reads.pages, cache.layers)
    found = by_heads(gather(cache, rows), cache, 1, query.shape[2]).squeeze(1)
    keys, values = found[:, :, : reads.end - reads.start].contiguous().unbind()
    groups = query.view(len(query), len(keys), -1, query.shape[2]).transpose(
        0, 1
    )  # [kv_heads, T, group, dim]
    if reads.mask is None:
        attended = _causal(groups, keys, values)
    else:
        attended = _masked(groups, keys, values, reads.mask.to(query.dtype))
    return attended.transpose(0, 1).reshape(len(query), -1)


def _masked(groups: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """groups [kv_heads, T, group, dim] -> the same shape, with any mask."""
    shared = (-1, groups.shape[2], -1, -1)
    attended = functional.scaled_dot_product_attention(
        groups.transpose(1, 2),
        keys.unsqueeze(1).expand(shared),
        values.unsqueeze(1).expand(shared),
        mask,
    )
    return attended.transpose(1, 2)


def _causal(groups: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """groups [kv_heads, T, group, dim] at the last T of the keys' positions -> the same shape."""
    count, before = groups.shape[1], keys.shape[1] - groups.shape[1]
    size = BLOCK if keys.shape[1] > 2 * BLOCK else BLOCK // 2
    whole = count // size * size
    parts = []
    if whole:
        seen = before + whole
        parts.append(_blocks(groups[:, :whole], keys[:, :seen], values[:, :seen], size))
    if whole < count:
        parts.append(_blocks(groups[:, whole:], keys, values, count - whole))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _blocks(groups: Tensor, keys: Tensor, values: Tensor, size: int) -> Tensor:
    """Causal attention of whole blocks of `size` tokens at the last of the keys' positions."""
    kv_heads, count, group, head_dim = groups.shape
    before = keys.shape[1] - count
    rows = groups.reshape(kv_heads, count // size, size * group, head_dim)
    own_keys, own_values = (
        own[:, before:].view(kv_heads, -1, size, head_dim) for own in (keys, values)
    )
    attended, weight = _attend(
        rows, own_keys, own_values, _triangle(size, group, rows.dtype, rows.device)
    )
    for block in range(count // size):
        past = slice(0, before + block * size)
        if past.stop:
            rows_of_block = rows[:, block : block + 1]
            earlier, earlier_weight = _attend(
                rows_of_block, keys[:, None, past], values[:, None, past]
            )
            share = (earlier_weight - weight[:, block : block + 1]).sigmoid_().unsqueeze(-1)
            attended[:, block : block + 1].lerp_(earlier, share.to(attended.dtype))
    return attended.view(kv_heads, count, group, head_dim)


def _attend(
    rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """rows [B, C, R, dim] over [B, C, tokens, dim] -> the result, and log normalizers [B, C, R]."""
    attended, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows, keys, values, attn_mask=mask
    )
    return attended, weight


@functools.lru_cache(maxsize=64)
def _triangle(size: int, group: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The mask within a block, for `group` queries per token: [size * group, size]."""
    positions = torch.arange(size, device=device)
    mask = visibility(positions.unsqueeze(1), positions, None, dtype)
    return mask.repeat_interleave(group, 0)


def visibility(queries: Tensor, keys: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where the query at a position sees the key at a position, -inf elsewhere.

    queries [..., Q, 1] and keys [..., 1, K] hold positions.
    """
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.zeros(hidden.shape, dtype=dtype, device=keys.device).masked_fill_(
        hidden, -torch.inf
    )
