"""The decoder: embeddings, layers, final norm and head, as fused weights and one forward.

Rotary embeddings keep a head's dimensions as neighbouring pairs, so that a pair is one
complex number and its rotation one complex product. Checkpoints keep the two halves of a
pair head_dim / 2 apart; `interleave_pairs` joins them when weights are loaded. Queries and
keys are permuted alike, so their products do not change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from baton.engine.architecture import Architecture, Rope
from baton.kernels.attention import ChunkReads, DecodeReads, chunk_attention, decode_attention
from baton.kernels.cache import LayerCache, rotate_and_write_
from baton.kernels.linear import GatedLinear, Linear, RMSNorm


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """One sequence's rows [start, end) of a batch, and what they read, by window."""

    start: int
    end: int
    reads: dict[int | None, ChunkReads]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What all layers of one step share.

    Rows are tokens: first one for each decoding sequence, then the chunks.
    """

    tokens: Tensor  # [T]
    rotation: Tensor  # [T, 1, head_dim / 2], complex
    writes: Tensor  # [T, 2], rows of LayerCache.tokens
    decoding: int
    decode_reads: dict[int | None, DecodeReads]  # by window; empty when nothing decodes
    chunks: list[ChunkRows]
    samples: Tensor  # [n], the rows whose logits are needed, in order
    sample_reads: DecodeReads | None  # of those rows, in the last layer; None without any


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
        """Lays the weights out as this CPU's compiled products read them."""
        for layer in self.layers:
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                linear.pack()
        self.head.pack()

    def forward(self, batch: StepBatch, caches: list[LayerCache]) -> Tensor:
        """Writes the batch's keys and values; the last layer's output for its samples,
        [n, hidden]."""
        hidden = self.embedding[batch.tokens]
        for layer, cache in zip(self.layers[:-1], caches, strict=False):
            query = self._project(layer, hidden, batch, cache)
            attended = self._attend(layer, query, batch, cache)
            hidden = self._finish(layer, hidden, attended)
        return self._last_layer(hidden, batch, caches[-1])

    def _last_layer(self, hidden: Tensor, batch: StepBatch, cache: LayerCache) -> Tensor:
        """After its keys and values, only the rows whose logits are needed are computed."""
        layer = self.layers[-1]
        query = self._project(layer, hidden, batch, cache)
        if batch.sample_reads is None:
            return hidden[:0]
        if len(batch.samples) < len(batch.tokens):
            hidden, query = hidden[batch.samples], query[batch.samples]
        attended = decode_attention(query, cache, batch.sample_reads)
        return self._finish(layer, hidden, attended)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocabulary] of `forward`'s output."""
        return self.head(hidden, self.norm)

    def _project(self, layer: Layer, hidden: Tensor, batch: StepBatch, cache: LayerCache) -> Tensor:
        """Queries [T, heads, dim]; keys and values are stored."""
        heads = self.architecture.heads
        qkv = layer.qkv(hidden, layer.attention_norm)
        qkv = qkv.view(len(hidden), -1, self.architecture.head_dim)
        norms = (layer.query_norm, layer.key_norm) if layer.query_norm and layer.key_norm else None
        rotation = batch.rotation if layer.rotates else None
        rotate_and_write_(qkv, heads, norms, rotation, cache, batch.writes)
        return qkv[:, :heads]

    def _attend(self, layer: Layer, query: Tensor, batch: StepBatch, cache: LayerCache) -> Tensor:
        """[T, heads * dim]."""
        parts = []
        if batch.decoding:
            reads = batch.decode_reads[layer.window]
            parts.append(decode_attention(query[: batch.decoding], cache, reads))
        for chunk in batch.chunks:
            rows = slice(chunk.start, chunk.end)
            parts.append(chunk_attention(query[rows], cache, chunk.reads[layer.window]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _finish(self, layer: Layer, hidden: Tensor, attended: Tensor) -> Tensor:
        hidden = layer.output.add_to(hidden, attended)
        return layer.down.add_to(hidden, layer.gate_up(hidden, layer.mlp_norm))


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position, by pair: [head_dim / 2], float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain


def rotations(positions: Tensor, frequencies: Tensor, attention_factor: float) -> Tensor:
    """Unit rotations times `attention_factor`: positions [T] -> [T, 1, head_dim / 2], complex64."""
    angles = torch.outer(positions.float(), frequencies).unsqueeze_(1)
    return torch.polar(torch.full_like(angles, attention_factor), angles)


def interleave_pairs(weight: Tensor, head_dim: int) -> Tensor:
    """Rows [heads * head_dim, ...] of a projection, with each pair's rows side by side."""
    halves = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between interpolated."""
    turns = rope.original_context * plain / (2 * math.pi)  # within the original context
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / rope.factor


def _yarn(rope: Rope, plain: Tensor, head_dim: int) -> Tensor:
    """Pairs that turn often keep their frequency; pairs that turn rarely are stretched."""
    low, high = _yarn_range(rope, head_dim)
    pair = torch.arange(head_dim // 2, dtype=torch.float32)
    stretched = ((pair - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - stretched) * plain + stretched * plain / rope.factor


def _yarn_range(rope: Rope, head_dim: int) -> tuple[float, float]:
    """The pairs that turn beta_fast and beta_slow times within the original context."""

    def pair_that_turns(times: float) -> float:
        wavelength = rope.original_context / (times * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high if high != low else high + 0.001
