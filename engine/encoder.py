"""Encoders of the BERT family, as sentence-transformers packages them: texts to vectors.

Attention looks both ways, so there are no pages: an input is computed whole, in one step. Inputs of
one step lie one after the other, without padding; those of one length share their attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, scaled_dot_product_attention

from baton.core.encoder_config import EncoderConfig
from baton.engine.checkpoint import Checkpoint
from baton.kernels.linear import Linear

CPU = torch.device("cpu")
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
    """Reads tensors, whose names may begin with the model's kind."""

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
        """One layer of those names' outputs, one after the other, laid out for this CPU."""
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


@dataclass(frozen=True, slots=True)
class _Group:
    """Neighbouring inputs of one length."""

    start: int  # its first row
    count: int
    length: int

    def of(self, rows: Tensor) -> Tensor:
        """rows [n, size] of all inputs -> [count, length, size] of these."""
        end = self.start + self.count * self.length
        return rows[self.start : end].view(self.count, self.length, -1)


class Encoder:
    def __init__(self, folder: Path, device: torch.device = CPU) -> None:
        config = self.config = EncoderConfig.read(folder)
        weights = _Weights(folder, config, device)
        self._device = device
        self._words = weights.tensor(WORDS, config.vocabulary, config.hidden)
        places = weights.tensor(
            "embeddings.position_embeddings.weight", config.positions, config.hidden
        )
        types = weights.tensor(
            "embeddings.token_type_embeddings.weight", config.types, config.hidden
        )
        self._places = places[config.first_position :] + types[0]  # all tokens are of type 0
        self._norm = weights.norm("embeddings.LayerNorm")
        self._layers = [weights.layer(index) for index in range(config.layers)]

    @torch.inference_mode()
    def embed(self, inputs: Sequence[Sequence[int]]) -> Tensor:
        """[inputs, hidden], in float32 on the host, not normalized. Each input has 1 to
        config.max_tokens tokens."""
        order = sorted(range(len(inputs)), key=lambda index: len(inputs[index]))
        groups = list(_groups([len(inputs[index]) for index in order]))
        tokens = [token for index in order for token in inputs[index]]
        places = [place for index in order for place in range(len(inputs[index]))]
        rows = self._words[torch.tensor(tokens, device=self._device)]
        rows = self._norm(rows + self._places[torch.tensor(places, device=self._device)])
        for layer in self._layers:
            attended = self._attend(layer.qkv(rows), groups)
            rows = layer.attention_norm(layer.out.add_to(rows, attended))
            rows = layer.norm(layer.down.add_to(rows, gelu(layer.up(rows))))
        pooled = torch.cat([self._pool(group.of(rows)) for group in groups]).cpu()
        vectors = torch.empty_like(pooled)
        vectors[order] = pooled
        return vectors

    def _attend(self, qkv: Tensor, groups: list[_Group]) -> Tensor:
        """qkv [n, 3 * hidden] -> [n, hidden]"""
        attended = [self._attend_alike(group.of(qkv)) for group in groups]
        return torch.cat(attended)

    def _attend_alike(self, qkv: Tensor) -> Tensor:
        """qkv [count, length, 3 * hidden] -> [count * length, hidden]"""
        count, length, _ = qkv.shape
        # [3, count, heads, length, size of a head]
        parts = qkv.view(count, length, 3, self.config.heads, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(parts[0], parts[1], parts[2])
        return attended.transpose(1, 2).reshape(count * length, -1)

    def _pool(self, rows: Tensor) -> Tensor:
        """rows [count, length, hidden] -> [count, hidden]"""
        return rows[:, 0] if self.config.pooling == "cls_token" else rows.mean(1)


def _groups(lengths: Sequence[int]) -> Iterator[_Group]:
    start = 0
    for length, alike in groupby(lengths):
        count = len(list(alike))
        yield _Group(start, count, length)
        start += count * length
