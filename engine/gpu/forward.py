"""The decoder on a GPU: the layers over a batch of rows, in two forms.

A few rows cost what the weights take to read: products with the norms, the gate
and the sums inside them (kernels/gpu/linear.py), five kernels a layer. Many
rows are the matrix library's: its products, with one kernel each between them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from engine.model import Model
from kernels.gpu.activation import silu_and_multiply
from kernels.gpu.linear import Scaled, few_rows, few_rows_onto, squares_for
from kernels.gpu.norm import rms_norm
from kernels.gpu.step import embed
from kernels.linear import GatedLinear, Linear
from kernels.norm import RMSNorm

Attend = Callable[[int, Tensor], Tensor]
"""(layer, qkv [T, (heads + 2 * kv_heads) * dim], not yet turned) -> [T, heads * dim].
Stores the rows' keys and values on the way."""


def few_rows_forward(model: Model, tokens: Tensor, attend: Attend, logits: Tensor) -> Tensor:
    """tokens [T] -> logits [T, vocabulary], for up to `MOST_ROWS` rows."""
    shape, rows, device = model.architecture, len(tokens), tokens.device
    epsilon, dtype = shape.norm_epsilon, model.embedding.dtype

    def empty(size: int) -> Tensor:
        return torch.empty(rows, size, dtype=dtype, device=device)

    residual, scaled = empty(shape.hidden), empty(shape.hidden)
    first = Scaled(scaled, torch.empty(1, rows, dtype=torch.float32, device=device), epsilon)
    later = Scaled(scaled, squares_for(rows, shape.hidden, device), epsilon)
    qkv, gated = empty(len(model.layers[0].qkv.weight)), empty(shape.intermediate)
    embed(tokens, model.embedding, model.layers[0].attention_norm.weight, residual, first)
    source = first
    for index, layer in enumerate(model.layers):
        few_rows(source, layer.qkv.weight, qkv, layer.qkv.bias)
        attended = attend(index, qkv)
        output, down = layer.output, layer.down
        few_rows_onto(attended, output.weight, residual, layer.mlp_norm.weight, later, output.bias)
        few_rows(later, layer.gate_up.weight, gated, layer.gate_up.bias, gated=True)
        norm = _norm_after(model, index)
        few_rows_onto(gated, down.weight, residual, norm, later, down.bias)
        source = later
    return few_rows(source, model.head.weight, logits)


def many_rows_forward(
    model: Model, tokens: Tensor, attend: Attend, samples: Tensor | None = None
) -> Tensor:
    """tokens [T] -> what the last layer leaves, [n, hidden], for rows `samples` [n] or for all.

    What follows the last keys and values matters only to the rows that sample: with
    `samples`, `attend` gives only those of the last layer.
    """
    hidden = functional.embedding(tokens, model.embedding)
    last = len(model.layers) - 1
    for index, layer in enumerate(model.layers):
        qkv = _product(layer.qkv, _norm(model, hidden, layer.attention_norm))
        attended = attend(index, qkv)
        if index == last and samples is not None:
            hidden = hidden[samples]
        _add_product(hidden, layer.output, attended)
        gate_up = _product(layer.gate_up, _norm(model, hidden, layer.mlp_norm))
        _add_product(hidden, layer.down, silu_and_multiply(gate_up))
    return hidden


def logits_of(model: Model, hidden: Tensor, out: Tensor | None = None) -> Tensor:
    """hidden [n, hidden] of the last layer -> [n, vocabulary]."""
    return torch.mm(_norm(model, hidden, model.norm), model.head.weight.t(), out=out)


def _norm(model: Model, hidden: Tensor, norm: RMSNorm) -> Tensor:
    return rms_norm(hidden, norm.weight, model.architecture.norm_epsilon)


def _add_product(hidden: Tensor, linear: Linear, x: Tensor) -> None:
    """hidden += linear(x): the sum is part of the product."""
    torch.addmm(hidden, x, linear.weight.t(), out=hidden)
    if linear.bias is not None:
        hidden += linear.bias


def _product(linear: Linear | GatedLinear, x: Tensor) -> Tensor:
    return functional.linear(x, linear.weight, linear.bias)


def _norm_after(model: Model, index: int) -> Tensor:
    """The weight of the norm that reads what layer `index` leaves."""
    if index + 1 < len(model.layers):
        return model.layers[index + 1].attention_norm.weight
    return model.norm.weight
