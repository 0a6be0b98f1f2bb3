"""Attention of a prompt's long chunks: our kernel or, in fast numerics, cuDNN's.

Ours reads contiguous keys and values: those of the chunk itself, if nothing precedes it, else
all of its context, gathered from the pages. A row gets the bits that it gets in a short chunk
or when it decodes.

cuDNN's attention is faster, but it supports neither windows nor sinks, its bits depend on how a
prompt was cut into chunks, and it takes 40 ms to prepare for each pair of lengths. So only a few
lengths are used, and all their pairs are prepared at start:

- The new tokens, with those before them back to a multiple of `LIBRARY_TOKENS`, are attended
  causally, as rows rounded up to such a multiple. The results of the extra queries are
  dropped; the extra keys come after all real queries.
- Earlier tokens are gathered from their pages and attended without a mask, in parts of a few
  lengths. Parts are merged by their normalizers.

Shorter chunks, and others of recorded steps, are attended from their pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from baton.core.page_reach import first_page
from baton.engine.architecture import Architecture
from baton.engine.gpu.numerics import Numerics
from baton.kernels.gpu import long_attention
from baton.kernels.gpu.chunk_attention import merge_attended
from baton.kernels.gpu.fixed_order import SPLIT
from baton.kernels.gpu.pages import gather_tokens
from baton.kernels.gpu.rotary import HeadShape

LIBRARY_TOKENS = 512
LONG_PART = 8192

RECORDED_CONTEXT = 8192
"""Up to this context a recorded step gains more than the faster attention of long chunks."""


@dataclass(frozen=True, slots=True)
class LongChunk:
    """Rows [first, first + count) of a batch: one sequence's positions from `start` on."""

    first: int
    count: int
    start: int
    slot: int  # the sequence's row of the page table

    @property
    def before(self) -> int:
        """Earlier tokens that are attended without a mask."""
        return self.start // LIBRARY_TOKENS * LIBRARY_TOKENS

    @property
    def aligned(self) -> bool:
        return self.start == self.before and self.count % LIBRARY_TOKENS == 0


def supports(
    shape: Architecture, dtype: torch.dtype, device: torch.device, numerics: Numerics
) -> bool:
    """True if a model's long chunks are attended here instead of like short ones."""
    if shape.score_cap is not None:
        return False
    if shape.latent:
        return numerics is Numerics.FAST and dtype.itemsize == 2
    if numerics is Numerics.INVARIANT:
        return long_attention.supports(shape.head_dim, dtype, device)
    if shape.sinks:
        return False
    fits = dtype.itemsize == 2 and shape.head_dim % 8 == 0 and shape.head_dim <= 128
    return fits and all(window is None for window in shape.windows)


def is_long(count: int, start: int, page_size: int, recorded: int) -> bool:
    """True if a chunk is attended here. `recorded`: the most rows of a recorded step."""
    most = recorded if start + count <= RECORDED_CONTEXT else LIBRARY_TOKENS
    return count > most and (start == 0 or LIBRARY_TOKENS % page_size == 0)


def prepare(
    shape: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    chunk_tokens: int,
    context: int,
    progress: Callable[[float], None],
) -> None:
    """Makes cuDNN prepare every pair of lengths that chunks of a context can need."""
    rows = min(_rounded_up(chunk_tokens), _rounded_up(context)) + LIBRARY_TOKENS
    heads = shape.heads + 2 * shape.kv_heads
    chunk = torch.zeros(rows, heads, shape.head_dim, dtype=dtype, device=device)
    past = torch.zeros(2, context, shape.kv_heads, shape.head_dim, dtype=dtype, device=device)
    lengths = range(LIBRARY_TOKENS, rows + 1, LIBRARY_TOKENS)
    for done, length in enumerate(lengths):
        query, keys, values = _split(chunk[:length], shape.heads, shape.kv_heads)
        _attend(query, keys, values, shape.score_scale, causal=True)
        for size in _part_sizes(context):
            _attend(query, past[0, :size], past[1, :size], shape.score_scale, causal=False)
        progress((done + 1) / len(lengths))


def own_attention(
    qkv: Tensor, chunk: LongChunk, page_table: Tensor, kv_layer: Tensor, shape: HeadShape
) -> Tensor:
    """qkv [rows, (heads + 2 * kv_heads) * dim], rotated and stored -> [count, heads * dim]."""
    mine = qkv[chunk.first : chunk.first + chunk.count]
    if chunk.start:
        tokens, page_size = chunk.start + chunk.count, kv_layer.shape[2]
        keys, values = qkv.new_empty(2, tokens, shape.kv_heads, shape.head_dim)
        # Pages before the first in reach may have been returned. What is read of their tokens, up
        # to a split, gets weight 0.
        first = first_page(shape.window, chunk.start, page_size)
        gone = first * page_size
        values[max(0, gone - SPLIT) : gone] = 0
        pages = page_table[chunk.slot, first:]
        gather_tokens(kv_layer, pages, tokens - gone, keys[gone:], values[gone:])
    else:
        by_head = mine.view(chunk.count, -1, shape.head_dim)
        _, keys, values = _split(by_head, shape.heads, shape.kv_heads)
    out = qkv.new_empty(chunk.count, shape.heads * shape.head_dim)
    return long_attention.long_attention(mine, keys, values, chunk.start, shape, out)


def library_attention(
    qkv: Tensor, chunk: LongChunk, page_table: Tensor, kv_layer: Tensor, shape: HeadShape
) -> Tensor:
    """Like own_attention, by cuDNN."""
    pages = page_table[chunk.slot]
    rows = _causal_rows(qkv, chunk, pages, kv_layer, shape)
    query, keys, values = _split(rows, shape.heads, shape.kv_heads)
    scale = shape.scoring.scale
    attended, weight = _attend(query, keys, values, scale, causal=True)
    if chunk.before:
        past = qkv.new_empty(2, chunk.before, shape.kv_heads, shape.head_dim)
        gather_tokens(kv_layer, pages, chunk.before, past[0], past[1])
        for part in _parts(chunk.before):
            earlier = _attend(query, past[0, part], past[1, part], scale, causal=False)
            merge_attended(attended, weight, *earlier)
    skipped = chunk.start - chunk.before
    mine = attended[0].transpose(0, 1)[skipped : skipped + chunk.count]
    return mine.reshape(chunk.count, -1)


def _causal_rows(
    qkv: Tensor, chunk: LongChunk, pages: Tensor, kv_layer: Tensor, shape: HeadShape
) -> Tensor:
    """[rows, heads + 2 * kv_heads, dim]: the chunk, what is between it and `before`, and zeros."""
    mine = qkv[chunk.first : chunk.first + chunk.count].view(chunk.count, -1, shape.head_dim)
    if chunk.aligned:
        return mine
    skipped = chunk.start - chunk.before
    rows = mine.new_zeros(_rounded_up(skipped + chunk.count), *mine.shape[1:])
    rows[skipped : skipped + chunk.count] = mine
    if skipped:
        _, keys, values = _split(rows, shape.heads, shape.kv_heads)
        between = pages[chunk.before // kv_layer.shape[2] :]
        gather_tokens(kv_layer, between, skipped, keys, values)
    return rows


def _split(rows: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    """rows [T, heads + 2 * kv_heads, dim] -> queries, keys and values."""
    return rows.tensor_split((heads, heads + kv_heads), dim=1)


def _parts(tokens: int) -> Iterator[slice]:
    """Cuts a multiple of LIBRARY_TOKENS into the longest prepared parts."""
    start = 0
    while start < tokens:
        size = _part_sizes(tokens - start)[-1]
        yield slice(start, start + size)
        start += size


def _part_sizes(most: int) -> list[int]:
    """Prepared sizes up to `most`: powers of two, and between long ones also halfway."""
    powers = [LIBRARY_TOKENS << step for step in range((most // LIBRARY_TOKENS).bit_length())]
    halfway = [power * 3 // 2 for power in powers if power >= LONG_PART]
    return sorted(size for size in powers + halfway if size <= most)


def _rounded_up(tokens: int) -> int:
    return -(-tokens // LIBRARY_TOKENS) * LIBRARY_TOKENS


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """[T, heads, dim] over [tokens, kv_heads, dim] -> [1, heads, T, dim] and [1, heads, T, 1]."""
    query, keys, values = (each.transpose(0, 1)[None] for each in (query, keys, values))
    if query.device.type == "cuda":
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, keys, values, None, True, 0.0, causal, False, scale=scale
        )
        return found[0], found[1].view(1, query.shape[1], -1, 1)
    return _attend_on_cpu(query, keys, values, scale, causal)


def _attend_on_cpu(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """The library's attention on a CPU, for tests."""
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(group, dim=1).double() for each in (keys, values))
    scores = query.double() @ keys.transpose(2, 3) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores.masked_fill_(hidden, -torch.inf)
    attended = functional.softmax(scores, dim=-1) @ values
    weight = scores.logsumexp(dim=-1, keepdim=True)
    return attended.to(query.dtype), weight.float()
