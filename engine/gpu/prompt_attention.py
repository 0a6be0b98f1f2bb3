"""Attention of prompts: a library's kernel where it is the fastest, ours elsewhere.

cuDNN's attention runs at twice the speed of ours on long chunks, but takes 40 ms
to prepare for each pair of lengths, knows no pages and no window. So a chunk of
more than `LIBRARY_TOKENS` is rounded up to a multiple of it: what the extra
queries compute is thrown away, and the extra keys come after all real queries.
What lies before the chunk is gathered from its pages and attended in a second
call without a mask, when its length is such a multiple too; the two are merged
by their normalizers. Shorter chunks are ours: their steps are recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.architecture import Architecture
from kernels.gpu.decode_attention import HeadShape
from kernels.gpu.pages import gather_tokens

LIBRARY_TOKENS = 512


@dataclass(frozen=True, slots=True)
class LongChunk:
    """Rows [first, first + count) of a batch: one sequence's positions from `start` on."""

    first: int
    count: int
    start: int
    slot: int  # the sequence's row of the page table


def runs(shape: Architecture, dtype: torch.dtype) -> bool:
    """Whether the library can run a model's attention at all."""
    known = dtype in (torch.bfloat16, torch.float16)
    fits = shape.head_dim % 8 == 0 and shape.head_dim <= 128
    return known and fits and not any(window is not None for window in shape.windows)


def takes(count: int, start: int, page_size: int) -> bool:
    """Whether a chunk is one for the library."""
    aligned = start % LIBRARY_TOKENS == 0 and (start == 0 or LIBRARY_TOKENS % page_size == 0)
    return count > LIBRARY_TOKENS and aligned


def long_chunk_attention(
    qkv: Tensor, chunk: LongChunk, page_table: Tensor, kv_layer: Tensor, shape: HeadShape
) -> Tensor:
    """qkv [rows, (heads + 2 * kv_heads) * dim], turned -> [count, heads * dim]."""
    heads, kv_heads = shape.heads, shape.kv_heads
    mine = _rounded_up(qkv[chunk.first : chunk.first + chunk.count])
    mine = mine.view(len(mine), heads + 2 * kv_heads, shape.head_dim)
    query, keys, values = mine.tensor_split((heads, heads + kv_heads), dim=1)
    attended, weight = _attend(query, keys, values, causal=True)
    if chunk.start:
        before = kv_layer.new_empty(2, chunk.start, kv_heads, shape.head_dim)
        gather_tokens(kv_layer, page_table[chunk.slot], chunk.start, before[0], before[1])
        earlier, earlier_weight = _attend(query, before[0], before[1], causal=False)
        share = (earlier_weight - weight).sigmoid_().to(attended.dtype)
        attended = torch.lerp(attended, earlier, share)
    return attended[0].transpose(0, 1)[: chunk.count].reshape(chunk.count, -1)


def _rounded_up(rows: Tensor) -> Tensor:
    """rows [count, ...] and zeros up to a multiple of LIBRARY_TOKENS."""
    extra = -len(rows) % LIBRARY_TOKENS
    return functional.pad(rows, (0, 0, 0, extra)) if extra else rows


def _attend(query: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """[T, heads, dim] over [tokens, kv_heads, dim] -> [1, heads, T, dim] and [1, heads, T, 1]."""
    query, keys, values = (each.transpose(0, 1)[None] for each in (query, keys, values))
    if query.device.type == "cuda":
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, keys, values, None, True, 0.0, causal, False
        )
        return found[0], found[1].view(1, query.shape[1], -1, 1)
    return _attend_plainly(query, keys, values, causal)


def _attend_plainly(
    query: Tensor, keys: Tensor, values: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """The library's twin."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(group, dim=1).double() for each in (keys, values))
    scores = query.double() @ keys.transpose(2, 3) * query.shape[3] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores.masked_fill_(hidden, -torch.inf)
    attended = functional.softmax(scores, dim=-1) @ values
    weight = scores.logsumexp(dim=-1, keepdim=True)
    return attended.to(query.dtype), weight.float()
