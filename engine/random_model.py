"""A model of any shape with random weights, straight on its device: for measurements."""

from __future__ import annotations

import torch
from torch import Tensor

from baton.engine.architecture import Architecture
from baton.engine.group import Group
from baton.engine.model import Layer, Model
from baton.engine.split import Split
from baton.engine.split_linear import SummedLinear
from baton.kernels.linear import GatedLinear, Linear
from baton.kernels.norm import RMSNorm

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
