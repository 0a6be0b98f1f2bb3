"""The decoder: embeddings, layers, final norm and head, as fused weights and one forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.architecture import Architecture
from kernels.activation import silu_and_multiply
from kernels.attention import ChunkReads, DecodeReads, chunk_attention, decode_attention
from kernels.cache import LayerCache, write_
from kernels.linear import Linear
from kernels.norm import RMSNorm
from kernels.rotary import rotate_


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's rows [start, end) of a batch, and what they read in layers of each window."""

    start: int
    end: int
    reads: dict[int | None, ChunkReads]


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything about one step that does not differ between layers.

    Rows are tokens: first one for each decoding sequence, then the chunks.
    """

    tokens: Tensor  # [T]
    rotation: Tensor  # [T, 1, head_dim / 2], complex
    writes: Tensor  # [T, 2], rows of LayerCache.tokens
    decoding: int
    decode_reads: dict[int | None, DecodeReads]  # by window; empty when nothing decodes
    chunks: list[Chunk]
    samples: Tensor  # [n], the rows whose next token is wanted


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights."""

    attention_norm: RMSNorm
    qkv: Linear
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    output: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear
    window: int | None
    rotates: bool


@dataclass(frozen=True, slots=True)
class Model:
    architecture: Architecture
    embedding: Tensor  # [vocabulary, hidden]
    layers: list[Layer]
    norm: RMSNorm
    head: Linear

    def forward(self, batch: Batch, caches: list[LayerCache]) -> Tensor:
        """Writes the batch's keys and values, and returns logits [n, vocabulary] of its samples."""
        hidden = self.embedding[batch.tokens]
        for layer, cache in zip(self.layers[:-1], caches, strict=False):
            query, keys_values = self._project(layer, hidden, batch, cache)
            attended = self._attend(layer, query, keys_values, batch, cache)
            hidden = self._finish(layer, hidden, attended)
        return self._last_layer(hidden, batch, caches[-1])

    def _last_layer(self, hidden: Tensor, batch: Batch, cache: LayerCache) -> Tensor:
        """What follows the last keys and values matters only to the rows that sample."""
        layer = self.layers[-1]
        query, keys_values = self._project(layer, hidden, batch, cache)
        if not len(batch.samples):
            return hidden.new_empty(0, self.architecture.vocabulary_size)
        attended = self._attend(layer, query, keys_values, batch, cache)
        if len(batch.samples) < len(batch.tokens):
            hidden, attended = hidden[batch.samples], attended[batch.samples]
        return self.head(self.norm(self._finish(layer, hidden, attended)))

    def _project(
        self, layer: Layer, hidden: Tensor, batch: Batch, cache: LayerCache
    ) -> tuple[Tensor, Tensor]:
        """Queries [T, heads, dim] and [T, 2 * kv_heads, dim] keys and values, these also stored."""
        heads, kv_heads = self.architecture.heads, self.architecture.kv_heads
        qkv = layer.qkv(layer.attention_norm(hidden))
        qkv = qkv.view(len(hidden), -1, self.architecture.head_dim)
        if layer.query_norm and layer.key_norm:
            qkv[:, :heads] = layer.query_norm(qkv[:, :heads])
            qkv[:, heads : heads + kv_heads] = layer.key_norm(qkv[:, heads : heads + kv_heads])
        if layer.rotates:
            rotate_(qkv, heads + kv_heads, batch.rotation)
        query, keys_values = qkv.tensor_split((heads,), dim=1)
        write_(cache, batch.writes, keys_values)
        return query, keys_values

    def _attend(
        self, layer: Layer, query: Tensor, keys_values: Tensor, batch: Batch, cache: LayerCache
    ) -> Tensor:
        """[T, heads * dim]."""
        parts = []
        if batch.decoding:
            reads = batch.decode_reads[layer.window]
            rows = slice(0, batch.decoding)
            parts.append(decode_attention(query[rows], keys_values[rows], cache, reads))
        for chunk in batch.chunks:
            rows = slice(chunk.start, chunk.end)
            chunk_reads = chunk.reads[layer.window]
            parts.append(chunk_attention(query[rows], keys_values[rows], cache, chunk_reads))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _finish(self, layer: Layer, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = layer.output.add_to(hidden, attended)
        gated = silu_and_multiply(layer.gate_up(layer.mlp_norm(hidden)))
        return layer.down.add_to(hidden, gated)
