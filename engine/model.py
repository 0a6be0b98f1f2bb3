"""The decoder: embeddings, layers, final norm and head, as fused weights and one forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.architecture import Architecture
from baton.engine.tensor_parallel import SummedNorms
from baton.kernels.attention import (
    ChunkReads,
    DecodeReads,
    Scoring,
    chunk_attention,
    decode_attention,
)
from baton.kernels.cache import LayerCache, rotate_and_write_
from baton.kernels.experts import MLP, Experts
from baton.kernels.latent import LatentHeads
from baton.kernels.linear import Linear, RMSNorm, WeightCodes
from baton.kernels.low_rank import AdaptedRows


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """One sequence's rows [start, end) of a batch, and what they read, by table."""

    start: int
    end: int
    reads: list[ChunkReads]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step's inputs, which all layers share.

    Rows are tokens: first one for each decoding sequence, then the chunks.
    """

    tokens: Tensor  # [T]
    rotations: list[Tensor]  # by rope, [T, 1, head_dim / 2], complex
    writes: list[Tensor]  # by table, [T, k/v], rows of LayerCache.tokens
    decoding: int
    decode_reads: list[DecodeReads]  # by table; empty when nothing decodes
    chunks: list[ChunkRows]
    samples: Tensor  # [n], the rows whose logits are needed, in order
    sample_reads: DecodeReads | None  # of those rows, in the last layer; None without any
    adapted: AdaptedRows | None = None  # None if no row has an adapter
    sample_adapted: AdaptedRows | None = None  # the same for `samples`


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights. Norms named `_after` apply to what is added to the residual."""

    attention_norm: RMSNorm | None
    qkv: Linear
    latent: LatentHeads | None
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    summed_norms: SummedNorms | None  # instead of both, if a norm spans the ranks
    scoring: Scoring
    sinks: Tensor | None  # [heads], float32
    output: Linear
    attention_after: RMSNorm | None
    mlp_norm: RMSNorm | None
    mlp: MLP | Experts
    mlp_after: RMSNorm | None
    window: int | None
    rope: int | None  # index in the architecture's ropes
    balance: Tensor | None = None  # factors by which key_balance scaled qkv's first outputs

    def quantize(self, kind: WeightCodes) -> None:
        """Keeps weights as codes, except those between latents and heads."""
        for part in (self.qkv, self.output, self.mlp):
            part.quantize(kind)


@dataclass(frozen=True, slots=True)
class Model:
    architecture: Architecture
    embedding: Tensor  # [vocabulary, hidden]
    embedding_scale: float
    layers: list[Layer]
    norm: RMSNorm
    head: Linear

    def pack(self) -> None:
        """Lays the weights out as this CPU's compiled products read them."""
        for layer in self.layers:
            for part in (layer.qkv, layer.latent, layer.summed_norms, layer.output, layer.mlp):
                if part:
                    part.pack()
        self.head.pack(of_few_rows=True)

    def forward(self, batch: StepBatch, caches: list[LayerCache]) -> Tensor:
        """Writes the batch's keys and values. Returns the last layer's output for its samples,
        [n, hidden]."""
        return self.run_layers(self.embed(batch.tokens), batch, caches)

    def embed(self, tokens: Tensor) -> Tensor:
        """[T, hidden]"""
        hidden = self.embedding[tokens]
        if self.embedding_scale != 1.0:
            hidden *= self.embedding_scale
        return hidden

    def run_layers(self, hidden: Tensor, batch: StepBatch, caches: list[LayerCache]) -> Tensor:
        """`forward` from embedded tokens, which it does not change."""
        for layer, cache in zip(self.layers[:-1], caches, strict=False):
            query = self._project(layer, hidden, batch, cache)
            attended = self._attend(layer, query, batch, cache)
            hidden = self._finish(layer, hidden, attended, batch.adapted)
        return self._last_layer(hidden, batch, caches[-1])

    def _last_layer(self, hidden: Tensor, batch: StepBatch, cache: LayerCache) -> Tensor:
        """Writes keys and values of all rows; computes only rows whose logits are needed."""
        layer = self.layers[-1]
        query = self._project(layer, hidden, batch, cache)
        if batch.sample_reads is None:
            return hidden[:0]
        if len(batch.samples) < len(batch.tokens):
            hidden, query = hidden[batch.samples], query[batch.samples]
        attended = decode_attention(query, cache, batch.sample_reads, layer.scoring, layer.sinks)
        return self._finish(layer, hidden, attended, batch.sample_adapted)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocabulary] of `forward`'s output."""
        return self.finish_logits(self.head.logits(hidden, self.norm))

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Turns the head's product into logits, in place."""
        divisor, cap = self.architecture.logit_divisor, self.architecture.logit_cap
        if divisor != 1.0:
            logits.div_(divisor)
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def _project(self, layer: Layer, hidden: Tensor, batch: StepBatch, cache: LayerCache) -> Tensor:
        """Queries [T, heads, dim]; keys and values are stored."""
        heads = self.architecture.heads
        qkv = layer.qkv(hidden, layer.attention_norm, batch.adapted)
        if layer.latent:
            qkv = layer.latent.queries_and_latent(qkv, batch.adapted)
        if layer.summed_norms:
            layer.summed_norms.normalize_(qkv)
        qkv = qkv.view(len(hidden), -1, self.architecture.head_dim)
        norms = layer.query_norm, layer.key_norm
        rotation = None if layer.rope is None else batch.rotations[layer.rope]
        rotate_and_write_(qkv, heads, norms, rotation, cache, batch.writes[cache.table])
        return qkv[:, :heads]

    def _attend(self, layer: Layer, query: Tensor, batch: StepBatch, cache: LayerCache) -> Tensor:
        """[T, heads * value_dim]."""
        parts = []
        if batch.decoding:
            single, rows = batch.decode_reads[cache.table], query[: batch.decoding]
            parts.append(decode_attention(rows, cache, single, layer.scoring, layer.sinks))
        for chunk in batch.chunks:
            reads, rows = chunk.reads[cache.table], query[chunk.start : chunk.end]
            parts.append(chunk_attention(rows, cache, reads, layer.scoring, layer.sinks))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _finish(
        self, layer: Layer, hidden: Tensor, attended: Tensor, adapted: AdaptedRows | None
    ) -> Tensor:
        if layer.latent:
            attended = layer.latent.values(attended, adapted)
        hidden = layer.output.add_to(hidden, attended, layer.attention_after, adapted)
        return layer.mlp.add_to(hidden, layer.mlp_norm, layer.mlp_after, adapted)
