"""Loads a checkpoint's tensors straight into the model's fused buffers.

Where several ranks run the model, each reads only its own part (engine/architecture.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from baton.engine.architecture import Architecture, Split
from baton.engine.checkpoint import Checkpoint, Cut
from baton.engine.model import Layer, Model
from baton.engine.rope import interleave_pairs
from baton.engine.tensor_parallel import Group, SummedLinear
from baton.kernels.linear import GatedLinear, Linear, RMSNorm


def load_model(
    folder: Path,
    architecture: Architecture,
    dtype: torch.dtype,
    device: str,
    progress: Callable[[float], None] | None = None,
    group: Group | None = None,
) -> Model:
    """Reads the weights in `folder` into fused buffers; with a group, this rank's part of them.

    `architecture` is that of the whole model, the model's own that of its part.
    """
    return _Loader(Checkpoint(folder, progress), architecture, dtype, device, group).load()


class _Loader:
    def __init__(
        self,
        checkpoint: Checkpoint,
        architecture: Architecture,
        dtype: torch.dtype,
        device: str,
        group: Group | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._group = group
        self._split = group.split if group else Split()
        self._architecture = self._split.of(architecture)
        self._dtype = dtype
        self._device = device

    def load(self) -> Model:
        shape = self._architecture
        embedding = self._tensor("model.embed_tokens.weight", shape.vocabulary_size, shape.hidden)
        layers = [self._layer(index) for index in range(shape.layers)]
        norm = self._norm("model.norm.weight", shape.hidden)
        head = self._head(embedding)
        self._checkpoint.finish()
        return Model(shape, embedding, layers, norm, head)

    def _head(self, embedding: Tensor) -> Linear:
        """On ranks that do not sample, one that scores no token."""
        if self._split.rank or self._architecture.tied_embeddings:
            self._checkpoint.skip("lm_head.weight")
            return Linear(embedding[:0] if self._split.rank else embedding)
        return Linear(self._tensor("lm_head.weight", *embedding.shape))

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
            output=self._summed(
                attention + "o_proj", shape.heads * shape.head_dim, bias=shape.output_bias
            ),
            mlp_norm=self._norm(prefix + "post_attention_layernorm.weight", shape.hidden),
            gate_up=GatedLinear(
                *self._fused(
                    mlp,
                    {"gate_proj": shape.intermediate, "up_proj": shape.intermediate},
                    bias=shape.mlp_bias,
                )
            ),
            down=self._summed(mlp + "down_proj", shape.intermediate, bias=shape.mlp_bias),
            window=shape.windows[index],
            rotates=shape.rotates[index],
        )

    def _qkv(self, prefix: str) -> Linear:
        shape = self._architecture
        query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        sizes = {"q_proj": query, "k_proj": key, "v_proj": key}
        return Linear(
            *self._fused(prefix, sizes, bias=shape.qkv_bias, rotated=("q_proj", "k_proj"))
        )

    def _fused(
        self, prefix: str, sizes: dict[str, int], *, bias: bool, rotated: tuple[str, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of projections of the residual, {name: outputs}, as one."""
        weight = self._empty(sum(sizes.values()), self._architecture.hidden)
        biases = self._empty(sum(sizes.values())) if bias else None
        start = 0
        for name, size in sizes.items():
            arrange = self._interleave if name in rotated else None
            rows, cut = slice(start, start + size), self._cut(0, size)
            self._checkpoint.copy(f"{prefix}{name}.weight", weight[rows], arrange, cut)
            if biases is not None:
                self._checkpoint.copy(f"{prefix}{name}.bias", biases[rows], arrange, cut)
            start += size
        return weight, biases

    def _summed(self, name: str, inputs: int, *, bias: bool) -> Linear:
        """A projection onto the residual, of which other ranks have the other inputs."""
        weight, biases = self._empty(self._architecture.hidden, inputs), None
        self._checkpoint.copy(f"{name}.weight", weight, cut=self._cut(1, inputs))
        if bias and self._split.rank:
            self._checkpoint.skip(f"{name}.bias")
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


SPREAD = 0.02


def random_model(
    whole: Architecture, dtype: torch.dtype, device: str, group: Group | None = None
) -> Model:
    """Weights as a fresh model has them, the same every time; norms of one.

    With a group: this rank's part of the same model.
    """
    source = torch.Generator(device).manual_seed(0)
    split = group.split if group else Split()

    def normal(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(0.0, SPREAD, generator=source)

    def fused(sizes: list[int], bias: bool) -> tuple[Tensor, Tensor | None]:
        weight = normal(sum(sizes), whole.hidden)
        biases = normal(sum(sizes)) if bias else None
        return _own(weight, sizes, split), None if biases is None else _own(biases, sizes, split)

    def summed(inputs: int, bias: bool) -> Linear:
        weight = _own(normal(whole.hidden, inputs).t(), [inputs], split).t().contiguous()
        biases = normal(whole.hidden) if bias else None
        if group is None:
            return Linear(weight, biases)
        return SummedLinear(weight, None if split.rank else biases, group)

    def norm(size: int) -> RMSNorm:
        return RMSNorm(torch.ones(size, dtype=dtype, device=device), whole.norm_epsilon)

    def layer(index: int) -> Layer:
        queries, keys = whole.heads * whole.head_dim, whole.kv_heads * whole.head_dim
        return Layer(
            attention_norm=norm(whole.hidden),
            qkv=Linear(*fused([queries, keys, keys], whole.qkv_bias)),
            query_norm=norm(whole.head_dim) if whole.query_key_norm else None,
            key_norm=norm(whole.head_dim) if whole.query_key_norm else None,
            output=summed(queries, whole.output_bias),
            mlp_norm=norm(whole.hidden),
            gate_up=GatedLinear(*fused([whole.intermediate] * 2, whole.mlp_bias)),
            down=summed(whole.intermediate, whole.mlp_bias),
            window=whole.windows[index],
            rotates=whole.rotates[index],
        )

    embedding = normal(whole.vocabulary_size, whole.hidden)
    layers = [layer(index) for index in range(whole.layers)]
    scores = embedding if whole.tied_embeddings else normal(*embedding.shape)
    head = Linear(scores[:0] if split.rank else scores)
    return Model(split.of(whole), embedding, layers, norm(whole.hidden), head)


def _own(tensor: Tensor, sizes: list[int], split: Split) -> Tensor:
    """A rank's rows of each of several blocks of rows."""
    if split.size == 1:
        return tensor
    blocks = torch.split_with_sizes(tensor, sizes)
    return torch.cat([block.chunk(split.size)[split.rank] for block in blocks])
