"""Encoders of the BERT family, as sentence-transformers packages them: texts to vectors.

Attention looks both ways, so there are no pages: an input is computed whole, in one step. The rows
of a step's inputs are concatenated without padding; inputs of equal length, or on a GPU of similar
length, share their attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from baton.core.encoder_config import EncoderConfig
from baton.engine.checkpoint import Checkpoint
from baton.kernels.linear import Linear

CPU = torch.device("cpu")
GPU_PADDING = 32
"""On a GPU, inputs whose lengths round up to the same multiple of this share their attention: many
small kernels would take longer than padding. On a CPU only inputs of one length do."""
WORDS = "embeddings.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    bias: Tensor
    epsilon: float

    def __call__(self, rows: Tensor) -> Tensor:
        return layer_norm(rows, self.weight.shape, self.weight, self.bias, self.epsilon)


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: Linear
    out: Linear
    attention_norm: _Norm
    up: Linear
    down: Linear
    norm: _Norm


class _Weights:
    """Reads tensors, whose names may have the model's type as prefix."""

    def __init__(self, folder: Path, config: EncoderConfig, device: torch.device) -> None:
        self._checkpoint = Checkpoint(folder)
        self._config = config
        self._device = device
        prefixes = ("", "bert.", "roberta.")
        self._prefix = next((each for each in prefixes if each + WORDS in self._checkpoint), "")

    def tensor(self, name: str, *shape: int) -> Tensor:
        target = torch.empty(shape)
        self._checkpoint.copy(self._prefix + name, target)
        return target.to(self._device)

    def linear(self, out: int, size: int, *names: str) -> Linear:
        """One layer with the outputs of all `names`, packed for this CPU."""
        weights = [self.tensor(f"{name}.weight", out, size) for name in names]
        biases = [self.tensor(f"{name}.bias", out) for name in names]
        made = Linear(torch.cat(weights), torch.cat(biases))
        made.pack()
        return made

    def norm(self, name: str) -> _Norm:
        hidden = self._config.hidden
        weight, bias = (self.tensor(f"{name}.{part}", hidden) for part in ("weight", "bias"))
        return _Norm(weight, bias, self._config.epsilon)

    def layer(self, index: int) -> _Layer:
        hidden, inner = self._config.hidden, self._config.inner
        name = f"encoder.layer.{index}"
        parts = (f"{name}.attention.self.{part}" for part in ("query", "key", "value"))
        return _Layer(
            self.linear(hidden, hidden, *parts),
            self.linear(hidden, hidden, f"{name}.attention.output.dense"),
            self.norm(f"{name}.attention.output.LayerNorm"),
            self.linear(inner, hidden, f"{name}.intermediate.dense"),
            self.linear(hidden, inner, f"{name}.output.dense"),
            self.norm(f"{name}.output.LayerNorm"),
        )


class _Group:
    """Neighbouring inputs that share their attention, of one length or padded to it."""

    def __init__(self, start: int, lengths: Sequence[int], device: torch.device) -> None:
        """`start` is the first row of the first input."""
        self._rows = slice(start, start + sum(lengths))
        self._shape = count, longest = len(lengths), max(lengths)
        self.mask: Tensor | None = None  # [count, 1, 1, longest]; False at padding
        if min(lengths) == longest:
            return
        places = torch.arange(longest).expand(count, longest)
        mask = places < torch.tensor(lengths)[:, None]
        begins = start + torch.tensor([0, *accumulate(lengths)][:-1])
        self.mask = mask[:, None, None].to(device)
        # Padding repeats the input's first row.
        self._padded = (begins[:, None] + places * mask).to(device)  # [count, longest]
        self._kept = mask.flatten().nonzero()[:, 0].to(device)
        self._weights = (mask / mask.sum(1, keepdim=True))[..., None].to(device)

    def of(self, rows: Tensor) -> Tensor:
        """rows [n, size] of all inputs -> [count, longest, size] of this group."""
        if self.mask is None:
            return rows[self._rows].view(*self._shape, -1)
        return rows[self._padded]

    def without_padding(self, rows: Tensor) -> Tensor:
        """rows [count, longest, size] -> [rows of the group, size]."""
        flat = rows.reshape(-1, rows.shape[-1])
        return flat if self.mask is None else flat[self._kept]

    def mean(self, rows: Tensor) -> Tensor:
        """rows [count, longest, size] -> [count, size]"""
        return rows.mean(1) if self.mask is None else (rows * self._weights).sum(1)


class Encoder:
    def __init__(self, folder: Path, device: torch.device = CPU) -> None:
        config = self.config = EncoderConfig.read(folder)
        weights = _Weights(folder, config, device)
        self._device = device
        self._padding = GPU_PADDING if device.type == "cuda" else 1
        self._words = weights.tensor(WORDS, config.vocabulary, config.hidden)
        positions = weights.tensor(
            "embeddings.position_embeddings.weight", config.positions, config.hidden
        )
        types = weights.tensor(
            "embeddings.token_type_embeddings.weight", config.types, config.hidden
        )
        self._positions = positions[config.first_position :] + types[0]  # all tokens are of type 0
        self._norm = weights.norm("embeddings.LayerNorm")
        self._layers = [weights.layer(index) for index in range(config.layers)]

    @torch.inference_mode()
    def embed(self, inputs: Sequence[Sequence[int]]) -> Tensor:
        """[inputs, hidden], in float32 on the host, not normalized. Each input has 1 to
        config.max_tokens tokens."""
        order = sorted(range(len(inputs)), key=lambda index: len(inputs[index]))
        groups = list(self._groups([len(inputs[index]) for index in order]))
        tokens = [token for index in order for token in inputs[index]]
        positions = [position for index in order for position in range(len(inputs[index]))]
        rows = self._words[torch.tensor(tokens, device=self._device)]
        rows = self._norm(rows + self._positions[torch.tensor(positions, device=self._device)])
        for layer in self._layers:
            attended = self._attend(layer.qkv(rows), groups)
            rows = layer.attention_norm(layer.out.add_to(rows, attended))
            rows = layer.norm(layer.down.add_to(rows, gelu(layer.up(rows))))
        pooled = torch.cat([self._pool(rows, group) for group in groups]).cpu()
        vectors = torch.empty_like(pooled)
        vectors[order] = pooled
        return vectors

    def _attend(self, qkv: Tensor, groups: list[_Group]) -> Tensor:
        """qkv [n, 3 * hidden] -> [n, hidden]"""
        return torch.cat([self._attend_together(qkv, group) for group in groups])

    def _attend_together(self, qkv: Tensor, group: _Group) -> Tensor:
        """-> [rows of the group, hidden]"""
        rows = group.of(qkv)
        # [3, count, heads, length, size of a head]
        parts = rows.view(*rows.shape[:2], 3, self.config.heads, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(parts[0], parts[1], parts[2], group.mask)
        return group.without_padding(attended.transpose(1, 2).flatten(2))

    def _pool(self, rows: Tensor, group: _Group) -> Tensor:
        """rows [n, hidden] -> [inputs of the group, hidden]"""
        own = group.of(rows)
        return own[:, 0] if self.config.pooling == "cls_token" else group.mean(own)

    def _groups(self, lengths: Sequence[int]) -> Iterator[_Group]:
        """Groups inputs of these lengths, which are sorted."""
        start = 0
        for _, alike in groupby(lengths, key=lambda length: -(-length // self._padding)):
            some = list(alike)
            yield _Group(start, some, self._device)
            start += sum(some)
