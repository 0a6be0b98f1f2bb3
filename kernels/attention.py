"""Attention over paged keys and values: one query a sequence, or one sequence's chunk.

The CPU's fused attention is at its best without a mask, with many rows a call.
So query heads that share a key head are laid out as rows of one matrix, and a
chunk is cut into blocks: what lies before a block needs no mask, what lies
within it the same small one every time, and the two are merged by their
normalizers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cache import LayerCache, gather

BLOCK = 128
"""Tokens of a chunk whose queries are attended together."""


@dataclass(frozen=True, slots=True)
class DecodeReads:
    """What the decode queries of one step read: made once, used by every layer of one window."""

    rows: Tensor  # [2, B * pages]
    first: int  # the gathered tokens that any query sees: [first, last)
    last: int
    mask: Tensor | None  # [B, 1, 1, last - first], added to the scores


@dataclass(frozen=True, slots=True)
class ChunkReads:
    """What the queries of one chunk read: pages that end with the chunk itself."""

    rows: Tensor | None  # [2, pages]; None: the chunk is all there is
    length: int  # tokens of the gathered pages that are in use
    mask: Tensor | None  # [count, length], added to the scores; None: all of the past is seen


def decode_attention(query: Tensor, cache: LayerCache, reads: DecodeReads) -> Tensor:
    """query [B, heads, head_dim], one token a sequence -> [B, heads * head_dim]."""
    batch, heads, head_dim = query.shape
    # [2, B * pages, page_size, kv_heads, dim] -> [2, B, kv_heads, tokens, dim]
    found = gather(cache, reads.rows).unflatten(1, (batch, -1)).flatten(2, 3)
    keys, values = found[:, :, reads.first : reads.last].transpose(2, 3).unbind()
    groups = query.unflatten(1, (keys.shape[1], -1))
    attended = functional.scaled_dot_product_attention(groups, keys, values, reads.mask)
    return attended.reshape(batch, heads * head_dim)


def chunk_attention(
    query: Tensor, keys_values: Tensor, cache: LayerCache, reads: ChunkReads
) -> Tensor:
    """query [T, heads, head_dim] and keys_values [T, 2 * kv_heads, head_dim] of one sequence's
    chunk, which the cache already holds -> [T, heads * head_dim]."""
    if reads.rows is None:
        keys, values = (half.transpose(0, 1) for half in keys_values.chunk(2, dim=1))
    else:
        found = gather(cache, reads.rows).flatten(1, 2)[:, : reads.length]
        keys, values = found.transpose(1, 2).unbind()  # [kv_heads, length, dim]
    groups = query.unflatten(1, (keys.shape[0], -1)).transpose(0, 1)  # [kv_heads, T, group, dim]
    attend = _causal if reads.mask is None else _masked
    return attend(groups, keys, values, reads.mask).transpose(0, 1).reshape(len(query), -1)


def _masked(groups: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """groups [kv_heads, T, group, dim] -> the same, with any mask."""
    shared = (-1, groups.shape[2], -1, -1)
    attended = functional.scaled_dot_product_attention(
        groups.transpose(1, 2),
        keys.unsqueeze(1).expand(shared),
        values.unsqueeze(1).expand(shared),
        mask,
    )
    return attended.transpose(1, 2)


def _causal(groups: Tensor, keys: Tensor, values: Tensor, _: Tensor | None) -> Tensor:
    """groups [kv_heads, T, group, dim], the last T of the keys' positions -> the same."""
    count, before = groups.shape[1], keys.shape[1] - groups.shape[1]
    whole = count // BLOCK * BLOCK
    parts = []
    if whole:
        parts.append(_blocks(groups[:, :whole], keys[:, : before + whole], values[:, : before + whole], BLOCK))
    if whole < count:
        parts.append(_blocks(groups[:, whole:], keys, values, count - whole))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _blocks(groups: Tensor, keys: Tensor, values: Tensor, size: int) -> Tensor:
    """Causal attention of whole blocks of `size` tokens, the last of the keys' positions."""
    kv_heads, count, group, head_dim = groups.shape
    before = keys.shape[1] - count
    rows = groups.reshape(kv_heads, count // size, size * group, head_dim)
    own_keys, own_values = (own[:, before:].unflatten(1, (-1, size)) for own in (keys, values))
    attended, weight = _attend(rows, own_keys, own_values, _triangle(size, group, groups))
    for block in range(count // size):
        past = slice(0, before + block * size)
        if past.stop:
            rows_of_block = rows[:, block : block + 1]
            earlier, earlier_weight = _attend(rows_of_block, keys[:, None, past], values[:, None, past])
            share = (earlier_weight - weight[:, block : block + 1]).sigmoid_().unsqueeze(-1)
            attended[:, block : block + 1].lerp_(earlier, share.to(attended.dtype))
    return attended.view(kv_heads, count, group, head_dim)


def _attend(
    rows: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """rows [B, C, R, dim] over [B, C, tokens, dim] -> the answer, and [B, C, R] log normalizers."""
    attended, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        rows, keys, values, attn_mask=mask
    )
    return attended, weight


def _triangle(size: int, group: int, like: Tensor) -> Tensor:
    positions = torch.arange(size, device=like.device)
    mask = visibility(positions.unsqueeze(1), positions, None, like.dtype)
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
