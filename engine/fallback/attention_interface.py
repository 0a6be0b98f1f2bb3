"""Attention over pages, as transformers' models call it.

A model calls `attend` once per layer, with rows [1, heads, T, dim] of all sequences of a step,
rotated already. It stores keys and values in the layer's pages and reads what each row sees from
there. Only the step and the layer's window decide what a row may see. The mask that a model passes
along just notes that window: `note_window` writes it and the inspection reads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface

from baton.engine.model import ChunkRows
from baton.kernels.attention import (
    ChunkReads,
    DecodeReads,
    Scoring,
    masked_attention,
    visibility,
)
from baton.kernels.cache import LayerCache, by_heads, gather, write_

NAME = "baton"
"""The name of our attention among transformers' implementations."""

QUERIES = 256
"""Rows of a chunk attended together, since their scores are kept in memory."""


@dataclass(slots=True)
class PagedStep:
    """What the layers of one step read and write."""

    caches: list[LayerCache]
    writes: list[Tensor]  # by table, [T, 2], rows of LayerCache.tokens
    decoding: int
    decode_reads: list[DecodeReads]  # by table, of the first `decoding` rows
    chunks: list[ChunkRows]
    layer: int = 0  # the next to attend

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, sinks: Tensor | None
    ) -> Tensor:
        """query, key, value [heads, T, dim] of the next layer -> [T, heads, value's dim]. Sinks
        [heads] are scores without a value."""
        cache = self.caches[self.layer]
        self.layer += 1
        size = value.shape[2]
        wide = functional.pad(value, (0, key.shape[2] - size))
        write_(cache, self.writes[cache.table], torch.cat((key, wide)).transpose(0, 1).contiguous())
        parts = []
        if self.decoding:
            rows = query[:, : self.decoding]
            parts.append(_of_queries(rows, cache, self.decode_reads[cache.table], scoring, sinks))
        for chunk in self.chunks:
            rows = query[:, chunk.start : chunk.end]
            parts.append(_of_chunk(rows, cache, chunk.reads[cache.table], scoring, sinks))
        return torch.cat(parts)[..., :size]


_step: ContextVar[PagedStep] = ContextVar("step")


@contextlib.contextmanager
def running(step: PagedStep) -> Iterator[None]:
    """Models that run in this context use the step's pages."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """transformers' attention function. The inspection has checked all that `others` may hold."""
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    attended = _step.get().attend(query[0], key[0], value[0], Scoring(scale, softcap), s_aux)
    return attended[None], None


def note_window(local_size: int | None = None, **others: object) -> Tensor:
    """transformers' mask function: the window of a layer, 0 without one, as [1, 1, 1, 1]."""
    return torch.full((1, 1, 1, 1), local_size or 0, device="cpu")


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, note_window)


class PassingCache:
    """A cache that keeps nothing: pages do. `attend` gets a step's own keys and values."""

    is_sliding: tuple[bool, ...] = ()
    is_compileable = False

    def update(self, keys: Tensor, values: Tensor, *others: object) -> tuple[Tensor, Tensor]:
        return keys, values

    def get_seq_length(self, *others: object) -> int:
        return 0

    def get_query_offset(self, *others: object) -> int:
        return 0

    def get_mask_sizes(self, queries: int, *others: object) -> tuple[int, int]:
        return queries, 0


def _of_queries(
    query: Tensor, cache: LayerCache, reads: DecodeReads, scoring: Scoring, sinks: Tensor | None
) -> Tensor:
    """query [heads, B, dim], one row per sequence -> [B, heads, dim]."""
    heads, batch, dim = query.shape
    found = by_heads(gather(cache, reads.tables.flatten()), cache, batch)
    keys, values = found[:, :, :, : reads.longest].unbind()
    groups = query.transpose(0, 1).reshape(batch, keys.shape[1], -1, dim)
    if sinks is not None:
        sinks = sinks.view(keys.shape[1], -1, 1)
    attended = masked_attention(groups, keys, values, reads.mask, scoring, sinks)
    return attended.reshape(batch, heads, dim)


def _of_chunk(
    query: Tensor, cache: LayerCache, reads: ChunkReads, scoring: Scoring, sinks: Tensor | None
) -> Tensor:
    """query [heads, T, dim] of one sequence -> [T, heads, dim]."""
    heads, count, dim = query.shape
    found = by_heads(gather(cache, reads.pages), cache, 1)
    keys, values = found[:, 0, :, None, : reads.end - reads.start].unbind()
    groups = query.view(len(keys), -1, count, dim)
    if sinks is not None:
        sinks = sinks.view(len(keys), -1, 1, 1)
    seen = torch.arange(reads.start, reads.end, device=query.device)
    parts = []
    for start in range(0, count, QUERIES):
        rows = groups[:, :, start : start + QUERIES]
        first = reads.position + start
        asking = torch.arange(first, first + rows.shape[2], device=query.device).unsqueeze(1)
        mask = visibility(asking, seen, reads.window, torch.float32)
        parts.append(masked_attention(rows, keys, values, mask, scoring, sinks))
    return torch.cat(parts, dim=2).reshape(heads, count, dim).transpose(0, 1)
