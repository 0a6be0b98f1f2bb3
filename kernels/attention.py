"""Attention over paged keys and values: one query a sequence, or one sequence's chunk."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cache import LayerCache, gather


@dataclass(frozen=True, slots=True)
class DecodeReads:
    """What the decode queries of one step read: made once, used by every layer of one window."""

    rows: Tensor  # [2, B * pages]
    first: int  # the first and the last + 1 token of the gathered pages that any query sees
    last: int
    mask: Tensor | None  # [B, 1, 1, last - first], added to the scores


@dataclass(frozen=True, slots=True)
class ChunkReads:
    """What one chunk of a prompt reads besides itself."""

    rows: Tensor | None  # [2, pages]; None: the chunk is all there is
    length: int  # tokens of the gathered pages that are in use
    mask: Tensor | None  # [count, length], added to the scores; None: causal


def decode_attention(query: Tensor, cache: LayerCache, reads: DecodeReads) -> Tensor:
    """query [B, heads, head_dim], one token a sequence -> [B, heads * head_dim]."""
    batch, heads, head_dim = query.shape
    # [2, B * pages, page_size, kv_heads, dim] -> [2, B, kv_heads, tokens, dim]
    found = gather(cache, reads.rows).unflatten(1, (batch, -1)).flatten(2, 3)
    keys, values = found[:, :, reads.first : reads.last].transpose(2, 3).unbind()
    # The queries that share a key head stand where a prompt's tokens would.
    groups = query.unflatten(1, (keys.shape[1], -1))
    attended = functional.scaled_dot_product_attention(groups, keys, values, reads.mask)
    return attended.reshape(batch, heads * head_dim)


def chunk_attention(
    query: Tensor, keys_values: Tensor, cache: LayerCache, reads: ChunkReads
) -> Tensor:
    """query [T, heads, head_dim], keys_values [T, 2 * kv_heads, head_dim] of one sequence's
    chunk, which is already in the cache -> [T, heads * head_dim]."""
    if reads.rows is None:
        keys, values = keys_values.chunk(2, dim=1)  # [T, kv_heads, dim]
    else:
        keys, values = gather(cache, reads.rows).flatten(1, 2)[:, : reads.length].unbind()
    kv_heads = keys.shape[1]
    # Key heads as the batch, and one key head for all the queries that share it.
    groups = query.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
    shared = (-1, groups.shape[1], -1, -1)
    attended = functional.scaled_dot_product_attention(
        groups,
        keys.transpose(0, 1).unsqueeze(1).expand(shared),
        values.transpose(0, 1).unsqueeze(1).expand(shared),
        reads.mask,
        is_causal=reads.mask is None,
    )
    return attended.permute(2, 0, 1, 3).reshape(query.shape[0], -1)


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
