"""A model of any shape with random weights, straight on its device: for measurements."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.architecture import Architecture
from engine.model import Layer, Model
from kernels.linear import GatedLinear, Linear
from kernels.norm import RMSNorm

SPREAD = 0.02


def random_model(shape: Architecture, dtype: torch.dtype, device: str) -> Model:
    """Weights as a fresh model has them, the same every time; norms of one."""
    source = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(0.0, SPREAD, generator=source)

    def linear(outputs: int, inputs: int, bias: bool) -> Linear:
        return Linear(normal(outputs, inputs), normal(outputs) if bias else None)

    def norm(size: int) -> RMSNorm:
        return RMSNorm(torch.ones(size, dtype=dtype, device=device), shape.norm_epsilon)

    def layer(index: int) -> Layer:
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        return Layer(
            attention_norm=norm(shape.hidden),
            qkv=linear(queries + 2 * keys, shape.hidden, shape.qkv_bias),
            query_norm=norm(shape.head_dim) if shape.query_key_norm else None,
            key_norm=norm(shape.head_dim) if shape.query_key_norm else None,
            output=linear(shape.hidden, queries, shape.output_bias),
            mlp_norm=norm(shape.hidden),
            gate_up=GatedLinear(
                normal(2 * shape.intermediate, shape.hidden),
                normal(2 * shape.intermediate) if shape.mlp_bias else None,
            ),
            down=linear(shape.hidden, shape.intermediate, shape.mlp_bias),
            window=shape.windows[index],
            rotates=shape.rotates[index],
        )

    embedding = normal(shape.vocabulary_size, shape.hidden)
    layers = [layer(index) for index in range(shape.layers)]
    head = Linear(embedding if shape.tied_embeddings else normal(*embedding.shape))
    return Model(shape, embedding, layers, norm(shape.hidden), head)
