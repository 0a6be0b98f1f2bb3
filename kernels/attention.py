"""Attention over paged keys and values: one query per sequence, or one sequence's chunk.

Compiled code (kernels/cpu) reads the pages in place. Where it is not available, the pages are
gathered for torch's fused attention, which is fastest without a mask and with many rows per
call. So query heads that share a key head are rows of one matrix, and a chunk is cut into
blocks: the past of a block needs no mask, the block itself always the same small one, and the
two are merged by their normalizers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.cache import LayerCache, by_heads, gather, keys_values
from baton.kernels.cpu import compiler

if TYPE_CHECKING:
    from baton.kernels.cpu.paged_attention import CompiledAttention

BLOCK = 128
"""Tokens of a chunk that are attended together; half as many for a short prompt."""


class Scoring(NamedTuple):
    """How scores are made: query @ key * `scale`, then, with a cap, cap * tanh(score / cap)."""

    scale: float
    cap: float | None = None


@dataclass(frozen=True)
class DecodeReads:
    """The pages and positions that single queries read, one query per sequence. Made once per
    step for all layers of one window."""

    tables: Tensor  # [B, width], page ids; a short list repeats its last page
    start: Tensor  # [B], the position of a table's first token
    first: Tensor  # [B], the position of the first visible token
    end: Tensor  # [B], the position after the last visible token
    longest: int  # most tokens of any table up to `end`
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
    """The pages and positions that one chunk's queries read. The pages end with the chunk."""

    pages: Tensor  # [n], page ids
    start: int  # the position of their first token
    position: int  # the position of the chunk's first token
    end: int  # the position after its last token
    window: int | None  # None if the layer's window hides none of these tokens

    @functools.cached_property
    def mask(self) -> Tensor:
        """[tokens, tokens of the pages], added to scores: -inf for hidden tokens."""
        keys = torch.arange(self.start, self.end, device=self.pages.device)
        queries = torch.arange(self.position, self.end, device=self.pages.device).unsqueeze(1)
        return visibility(queries, keys, self.window, torch.float32)


def decode_attention(
    query: Tensor,
    cache: LayerCache,
    reads: DecodeReads,
    scoring: Scoring,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [B, heads, head_dim], one per sequence, whose tokens are in the cache
    -> [B, heads * value_dim]. sinks [heads], float32: each head's additional score, of a token
    without a value."""
    if compiled := _compiled(query.shape[1], cache, scoring, query.dtype):
        return compiled.of_queries(query, cache.kv, reads, sinks)
    batch, heads, head_dim = query.shape
    found = by_heads(gather(cache, reads.tables.flatten()), cache, batch)
    keys, values = keys_values(found[:, :, :, : reads.longest], cache)
    groups = query.view(batch, keys.shape[1], -1, head_dim).to(keys.dtype)
    by_group = None if sinks is None else sinks.view(keys.shape[1], -1, 1)
    attended = masked_attention(groups, keys, values, reads.mask, scoring, by_group)
    return attended.reshape(batch, heads * cache.value_dim).to(query.dtype)


def prepare_attention(heads: int, cache: LayerCache, scoring: Scoring, dtype: torch.dtype) -> None:
    """Compiles the code for queries in `dtype` ahead of the first call."""
    _compiled(heads, cache, scoring, dtype)


def _compiled(
    heads: int, cache: LayerCache, scoring: Scoring, dtype: torch.dtype
) -> CompiledAttention | None:
    if not compiler.suits(dtype, cache.kv.device):
        return None
    from baton.kernels.cpu.paged_attention import paged_attention  # imports llvmlite

    return paged_attention(heads, cache, scoring, dtype)


def masked_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scoring: Scoring,
    sinks: Tensor | None,
) -> Tensor:
    """query [..., rows, dim] over keys and values [..., tokens, dim], sinks [..., rows or 1, 1]
    -> [..., rows, value_dim]. All but the query are broadcast."""
    if scoring.cap is None and sinks is None:
        shared = (*query.shape[:-2], -1, -1)
        return functional.scaled_dot_product_attention(
            query,
            keys.expand(shared),
            values.expand(shared),
            mask.to(query.dtype),
            scale=scoring.scale,
        )
    kind = torch.promote_types(query.dtype, torch.float32)
    found = (query.to(kind) @ keys.to(kind).transpose(-1, -2)).mul_(scoring.scale)
    if scoring.cap is not None:
        found = found.div_(scoring.cap).tanh_().mul_(scoring.cap)
    found += mask
    if sinks is not None:
        found = torch.cat((found, sinks.to(kind).expand(*found.shape[:-1], 1)), dim=-1)
    weights = found.softmax(dim=-1)[..., : keys.shape[-2]]
    return (weights @ values.to(kind)).to(query.dtype)


def chunk_attention(
    query: Tensor,
    cache: LayerCache,
    reads: ChunkReads,
    scoring: Scoring,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [T, heads, head_dim] of one sequence's chunk, whose tokens are in the cache
    -> [T, heads * value_dim]. Sinks are as in decode_attention."""
    if compiled := _compiled(query.shape[1], cache, scoring, query.dtype):
        return compiled.of_chunk(query, cache.kv, reads, sinks)
    found = by_heads(gather(cache, reads.pages), cache, 1).squeeze(1)
    keys, values = keys_values(found[:, :, : reads.end - reads.start].contiguous(), cache)
    # [kv_heads, T, group, dim]
    groups = query.view(len(query), len(keys), -1, query.shape[2]).to(keys.dtype).transpose(0, 1)
    plain = reads.window is None and scoring.cap is None and sinks is None
    if plain and keys.shape == values.shape:
        attended = _causal(groups, keys, values, scoring.scale)
    else:
        by_group = None if sinks is None else sinks.view(len(keys), -1, 1, 1)
        # [kv_heads, group, T, dim]
        attended = masked_attention(
            groups.transpose(1, 2), keys[:, None], values[:, None], reads.mask, scoring, by_group
        ).transpose(1, 2)
    return attended.transpose(0, 1).reshape(len(query), -1).to(query.dtype)


def _causal(groups: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """groups [kv_heads, T, group, dim] at the last T of the keys' positions -> the same shape."""
    count, before = groups.shape[1], keys.shape[1] - groups.shape[1]
    size = BLOCK if keys.shape[1] > 2 * BLOCK else BLOCK // 2
    whole = count // size * size
    parts = []
    if whole:
        seen = before + whole
        parts.append(_blocks(groups[:, :whole], keys[:, :seen], values[:, :seen], size, scale))
    if whole < count:
        parts.append(_blocks(groups[:, whole:], keys, values, count - whole, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _blocks(groups: Tensor, keys: Tensor, values: Tensor, size: int, scale: float) -> Tensor:
    """Causal attention of whole blocks of `size` tokens at the last of the keys' positions."""
    kv_heads, count, group, head_dim = groups.shape
    before = keys.shape[1] - count
    rows = groups.reshape(kv_heads, count // size, size * group, head_dim)
    own_keys, own_values = (
        own[:, before:].view(kv_heads, -1, size, head_dim) for own in (keys, values)
    )
    triangle = _triangle(size, group, rows.dtype, rows.device)
    attended, weight = _attend(rows, own_keys, own_values, scale, triangle)
    for block in range(count // size):
        past = slice(0, before + block * size)
        if past.stop:
            rows_of_block = rows[:, block : block + 1]
            earlier, earlier_weight = _attend(
                rows_of_block, keys[:, None, past], values[:, None, past], scale
            )
            share = (earlier_weight - weight[:, block : block + 1]).sigmoid_().unsqueeze(-1)
            attended[:, block : block + 1].lerp_(earlier, share.to(attended.dtype))
    return attended.view(kv_heads, count, group, head_dim)


def _attend(
    rows: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """rows [B, C, R, dim] over [B, C, tokens, dim] -> the result, and log normalizers [B, C, R]."""
    attended, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows, keys, values, attn_mask=mask, scale=scale
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
