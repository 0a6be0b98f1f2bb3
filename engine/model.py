"""The decoder: embeddings, layers, final norm and head, as fused weights and one forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.architecture import Architecture
from baton.kernels.attention import ChunkReads, DecodeReads, chunk_attention, decode_attention
from baton.kernels.cache import LayerCache, rotate_and_write_
from baton.kernels.linear import GatedLinear, Linear, RMSNorm


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """One sequence's rows [start, end) of a batch, and what they read in layers of each window."""

    start: int
    end: int
    reads: dict[int | None, ChunkReads]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Everything about one step that does not differ between layers.

    Rows are tokens: first one for each decoding sequence, then the chunks.
    """

    tokens: Tensor  # [T]
    rotation: Tensor  # [T, 1, head_dim / 2], complex
    writes: Tensor  # [T, 2], rows of LayerCache.tokens
    decoding: int
    decode_reads: dict[int | None, DecodeReads]  # by window; empty when nothing decodes
    chunks: list[ChunkRows]
    samples: Tensor  # [n], the rows whose logits are wanted, in order
    sample_reads: DecodeReads | None  # of those rows, in the last layer; None when there are none


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights."""

    attention_norm: RMSNorm
    qkv: Linear
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    output: Linear
    mlp_norm: RMSNorm
    gate_up: GatedLinear
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

    def pack(self) -> None:
        """Has the weights lie as the products of this machine's CPU read them best."""
        for layer in self.layers:
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                linear.pack()
        self.head.pack()

    def forward(self, batch: StepBatch, caches: list[LayerCache]) -> Tensor:
        """Writes the batch's keys and values, and returns what the last layer leaves of its
        samples, [n, hidden]."""
        hidden = self.embedding[batch.tokens]
        for layer, cache in zip(self.layers[:-1], caches, strict=False):
            query, keys_values = self._project(layer, hidden, batch, cache)
            attended = self._attend(layer, query, keys_values, batch, cache)
            hidden = self._finish(layer, hidden, attended)
        return self._last_layer(hidden, batch, caches[-1])

    def _last_layer(self, hidden: Tensor, batch: StepBatch, cache: LayerCache) -> Tensor:
        """What follows the last keys and values matters only to rows whose logits are wanted."""
        layer = self.layers[-1]
        query, _ = self._project(layer, hidden, batch, cache)
        if batch.sample_reads is None:
            return hidden[:0]
        if len(batch.samples) < len(batch.tokens):
            hidden, query = hidden[batch.samples], query[batch.samples]
        attended = decode_attention(query, cache, batch.sample_reads)
        return self._finish(layer, hidden, attended)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocabulary] of what `forward` returned."""
        return self.head(hidden, self.norm)

    def _project(
        self, layer: Layer, hidden: Tensor, batch: StepBatch, cache: LayerCache
    ) -> tuple[Tensor, Tensor]:
        """Queries [T, heads, dim] and [T, 2 * kv_heads, dim] keys and values, these also stored."""
        heads, kv_heads = self.architecture.heads, self.architecture.kv_heads
        qkv = layer.qkv(hidden, layer.attention_norm)
        qkv = qkv.view(len(hidden), -1, self.architecture.head_dim)
        if layer.query_norm and layer.key_norm:
            qkv[:, :heads] = layer.query_norm(qkv[:, :heads])
            qkv[:, heads : heads + kv_heads] = layer.key_norm(qkv[:, heads : heads + kv_heads])
        rotation = batch.rotation if layer.rotates else None
        rotate_and_write_(qkv, heads, rotation, cache, batch.writes)
        return qkv[:, :heads], qkv[:, heads:]

    def _attend(
        self, layer: Layer, query: Tensor, keys_values: Tensor, batch: StepBatch, cache: LayerCache
    ) -> Tensor:
        """[T, heads * dim]."""
        parts = []
        if batch.decoding:
            reads = batch.decode_reads[layer.window]
            parts.append(decode_attention(query[: batch.decoding], cache, reads))
        for chunk in batch.chunks:
            rows = slice(chunk.start, chunk.end)
            chunk_reads = chunk.reads[layer.window]
            parts.append(chunk_attention(query[rows], keys_values[rows], cache, chunk_reads))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _finish(self, layer: Layer, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = layer.output.add_to(hidden, attended)
        return layer.down.add_to(hidden, layer.gate_up(hidden, layer.mlp_norm))
