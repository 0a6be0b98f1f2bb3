"""Fills the model's fused buffers, from a checkpoint or with random numbers.

Where several ranks run the model, each keeps only its own part (architecture.Split).
"""

from __future__ import annotations

import zlib
from functools import partial

import torch
from torch import Tensor

from baton.engine.architecture import Architecture, Split
from baton.engine.checkpoint import Arrange, Checkpoint, Cut
from baton.engine.model import Layer, Model, interleave_pairs
from baton.engine.tensor_parallel import Group, SummedLinear
from baton.kernels.linear import GatedLinear, Linear, RMSNorm

SPREAD = 0.02
"""Standard deviation of random weights."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class RandomTensors:
    """As a Checkpoint, for measurements: the same numbers every time; norms are one.

    Numbers depend on a tensor's name and whole shape alone, so that ranks agree on them.
    """

    def __init__(self, device: str) -> None:
        self._generator = torch.Generator(device)

    def __contains__(self, name: str) -> bool:
        """Tied weights are stored once."""
        return name != HEAD

    def copy(
        self, name: str, target: Tensor, arrange: Arrange | None = None, cut: Cut | None = None
    ) -> None:
        if name.endswith("norm.weight"):
            target.fill_(1.0)
            return
        self._generator.manual_seed(zlib.crc32(name.encode()))
        shape = cut.whole_shape(target) if cut else target.shape
        whole = target.new_empty(shape).normal_(0.0, SPREAD, generator=self._generator)
        target.copy_(cut.of(whole, target) if cut else whole)

    def skip(self, name: str) -> None:
        pass

    def finish(self) -> None:
        pass


def load_model(
    source: Checkpoint | RandomTensors,
    architecture: Architecture,
    dtype: torch.dtype,
    device: str,
    group: Group | None = None,
) -> Model:
    """Loads the source's weights; with a group, this rank's part of them.

    `architecture` is the whole model's; the returned model has that of its part.
    """
    return _Loader(source, architecture, dtype, device, group).load()


class _Loader:
    def __init__(
        self,
        source: Checkpoint | RandomTensors,
        architecture: Architecture,
        dtype: torch.dtype,
        device: str,
        group: Group | None,
    ) -> None:
        self._source = source
        self._group = group
        self._split = group.split if group else Split()
        self._architecture = self._split.of(architecture)
        self._dtype = dtype
        self._device = device

    def load(self) -> Model:
        shape = self._architecture
        embedding = self._embedding()
        layers = [self._layer(index) for index in range(shape.layers)]
        norm = self._norm("model.norm.weight", shape.hidden)
        head = self._head(embedding)
        self._source.finish()
        return Model(shape, embedding, layers, norm, head)

    def _embedding(self) -> Tensor:
        """A tied matrix may be stored as either of the two."""
        shape, source = self._architecture, self._source
        other = shape.tied_embeddings and EMBEDDING not in source and HEAD in source
        return self._tensor(HEAD if other else EMBEDDING, shape.vocabulary_size, shape.hidden)

    def _head(self, embedding: Tensor) -> Linear:
        """Without rows on ranks that do not sample.

        A config may call a head tied that is stored and differs from the embedding: then, as in
        transformers, it is not tied.
        """
        tied = self._architecture.tied_embeddings
        if self._split.rank:
            self._source.skip(HEAD)
            return Linear(embedding[:0])
        if tied and HEAD not in self._source:
            return Linear(embedding)
        head = self._tensor(HEAD, *embedding.shape)
        return Linear(embedding if tied and torch.equal(head, embedding) else head)

    def _layer(self, index: int) -> Layer:
        shape = self._architecture
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        normed = shape.query_key_norm
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        qkv = {"q_proj": query, "k_proj": key, "v_proj": key}
        gate_up = {"gate_proj": shape.intermediate, "up_proj": shape.intermediate}
        return Layer(
            attention_norm=self._norm(prefix + "input_layernorm.weight", shape.hidden),
            qkv=Linear(*self._fused(attention, qkv, bias=shape.qkv_bias)),
            query_norm=self._head_norm(attention + "q_norm.weight") if normed else None,
            key_norm=self._head_norm(attention + "k_norm.weight") if normed else None,
            output=self._summed(attention + "o_proj", query, bias=shape.output_bias),
            mlp_norm=self._norm(prefix + "post_attention_layernorm.weight", shape.hidden),
            gate_up=GatedLinear(*self._fused(mlp, gate_up, bias=shape.mlp_bias)),
            down=self._summed(mlp + "down_proj", shape.intermediate, bias=shape.mlp_bias),
            window=shape.windows[index],
            rotates=shape.rotates[index],
        )

    def _fused(
        self, prefix: str, sizes: dict[str, int], *, bias: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of projections of the residual, {name: outputs}, as one."""
        weight = self._empty(sum(sizes.values()), self._architecture.hidden)
        biases = self._empty(sum(sizes.values())) if bias else None
        start = 0
        for name, size in sizes.items():
            arrange = self._interleave if name in ("q_proj", "k_proj") else None
            rows, cut = slice(start, start + size), self._cut(0, size)
            self._source.copy(f"{prefix}{name}.weight", weight[rows], arrange, cut)
            if biases is not None:
                self._source.copy(f"{prefix}{name}.bias", biases[rows], arrange, cut)
            start += size
        return weight, biases

    def _summed(self, name: str, inputs: int, *, bias: bool) -> Linear:
        """A projection onto the residual; other ranks have the other inputs."""
        weight, biases = self._empty(self._architecture.hidden, inputs), None
        self._source.copy(f"{name}.weight", weight, cut=self._cut(1, inputs))
        if bias and self._split.rank:
            self._source.skip(f"{name}.bias")
        elif bias:
            biases = self._tensor(f"{name}.bias", self._architecture.hidden)
        return SummedLinear(weight, biases, self._group) if self._group else Linear(weight, biases)

    def _cut(self, dimension: int, size: int) -> Cut:
        """This rank's `size` of what all ranks share evenly."""
        return Cut(dimension, self._split.rank * size, self._split.size * size)

    def _norm(self, name: str, size: int) -> RMSNorm:
        return RMSNorm(self._tensor(name, size), self._architecture.norm_epsilon)

    def _head_norm(self, name: str) -> RMSNorm:
        weight = self._empty(self._architecture.head_dim)
        self._source.copy(name, weight, self._interleave)
        return RMSNorm(weight, self._architecture.norm_epsilon)

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self._empty(*shape)
        self._source.copy(name, tensor)
        return tensor

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    @property
    def _interleave(self) -> Arrange:
        return partial(interleave_pairs, head_dim=self._architecture.head_dim)
