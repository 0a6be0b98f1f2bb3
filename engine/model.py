"""The decoder: embeddings, layers, final norm and head, as fused weights and one forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.architecture import Architecture
from engine.rope import interleave_pairs
from engine.weights import Checkpoint
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
            rotate_(qkv[:, : heads + kv_heads], batch.rotation)
        keys_values = qkv[:, heads:]
        write_(cache, batch.writes, keys_values)
        return qkv[:, :heads], keys_values

    def _attend(
        self, layer: Layer, query: Tensor, keys_values: Tensor, batch: Batch, cache: LayerCache
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
        hidden = layer.output(attended).add_(hidden)
        return layer.down(silu_and_multiply(layer.gate_up(layer.mlp_norm(hidden)))).add_(hidden)


def load_model(
    folder: Path,
    architecture: Architecture,
    dtype: torch.dtype,
    device: str,
    progress: Callable[[float], None] | None = None,
) -> Model:
    """Reads the weights in `folder` into fused buffers."""
    return _Loader(Checkpoint(folder, progress), architecture, dtype, device).load()


class _Loader:
    def __init__(
        self, checkpoint: Checkpoint, architecture: Architecture, dtype: torch.dtype, device: str
    ) -> None:
        self._checkpoint = checkpoint
        self._architecture = architecture
        self._dtype = dtype
        self._device = device

    def load(self) -> Model:
        shape = self._architecture
        embedding = self._tensor("model.embed_tokens.weight", shape.vocabulary_size, shape.hidden)
        layers = [self._layer(index) for index in range(shape.layers)]
        norm = self._norm("model.norm.weight", shape.hidden)
        if shape.tied_embeddings:
            self._checkpoint.skip("lm_head.weight")
            head = Linear(embedding)
        else:
            head = Linear(self._tensor("lm_head.weight", shape.vocabulary_size, shape.hidden))
        self._checkpoint.finish()
        return Model(shape, embedding, layers, norm, head)

    def _layer(self, index: int) -> Layer:
        shape = self._architecture
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        normed = shape.query_key_norm
        return Layer(
            attention_norm=self._norm(prefix + "input_layernorm.weight", shape.hidden),
            qkv=self._qkv(attention),
            query_norm=self._head_norm(attention + "q_norm.weight") if normed else None,
            key_norm=self._head_norm(attention + "k_norm.weight") if normed else None,
            output=self._linear(
                attention,
                {"o_proj": shape.hidden},
                shape.heads * shape.head_dim,
                bias=shape.output_bias,
            ),
            mlp_norm=self._norm(prefix + "post_attention_layernorm.weight", shape.hidden),
            gate_up=self._linear(
                mlp,
                {"gate_proj": shape.intermediate, "up_proj": shape.intermediate},
                shape.hidden,
                bias=shape.mlp_bias,
            ),
            down=self._linear(
                mlp, {"down_proj": shape.hidden}, shape.intermediate, bias=shape.mlp_bias
            ),
            window=shape.windows[index],
            rotates=shape.rotates[index],
        )

    def _qkv(self, prefix: str) -> Linear:
        shape = self._architecture
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        sizes = {"q_proj": query, "k_proj": key, "v_proj": key}
        return self._linear(
            prefix, sizes, shape.hidden, bias=shape.qkv_bias, rotated=("q_proj", "k_proj")
        )

    def _linear(
        self,
        prefix: str,
        sizes: dict[str, int],
        inputs: int,
        *,
        bias: bool,
        rotated: tuple[str, ...] = (),
    ) -> Linear:
        """Projections of one input, {name: outputs}, as one."""
        weight = self._empty(sum(sizes.values()), inputs)
        biases = self._empty(sum(sizes.values())) if bias else None
        start = 0
        for name, size in sizes.items():
            arrange = self._interleave if name in rotated else None
            rows = slice(start, start + size)
            self._checkpoint.copy(f"{prefix}{name}.weight", weight[rows], arrange)
            if biases is not None:
                self._checkpoint.copy(f"{prefix}{name}.bias", biases[rows], arrange)
            start += size
        return Linear(weight, biases)

    def _norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self._tensor(name, size), self._architecture.norm_epsilon)

    def _head_norm(self, name: str) -> RMSNorm:
        weight = self._empty(self._architecture.head_dim)
        self._checkpoint.copy(name, weight, self._interleave)
        return RMSNorm(weight, self._architecture.norm_epsilon)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self._empty(*shape)
        self._checkpoint.copy(name, tensor)
        return tensor

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    @property
    def _interleave(self) -> Callable[[Tensor], Tensor]:
        return partial(interleave_pairs, head_dim=self._architecture.head_dim)
