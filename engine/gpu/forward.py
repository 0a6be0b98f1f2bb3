"""The decoder on a GPU: the layers over a batch of rows, in two forms.

Few rows cost what reading the weights costs: products with the norms, the gate and the sums
inside them (kernels/gpu/linear.py), five kernels per layer. Many rows use the matrix library's
products, with one kernel each between them. Where several ranks share the model, their parts
are summed before they are added to the residual, in either form.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from baton.engine.model import Model
from baton.engine.tensor_parallel import SummedLinear
from baton.kernels.gpu.linear import (
    Scaled,
    few_rows,
    few_rows_alone,
    few_rows_onto,
    silu_and_multiply,
    squares_for,
)
from baton.kernels.gpu.norm import add_and_norm, add_and_scale, rms_norm
from baton.kernels.gpu.tokens import embed
from baton.kernels.linear import GatedLinear, Linear

SPLIT_ROWS = range(65, 257)
"""With this many rows a product onto the residual has tiles for half of the chip: it is split
into two products over half of the inputs each, which the next norm adds up."""

Attend = Callable[[int, Tensor], Tensor]
"""(layer, qkv [T, (heads + 2 * kv_heads) * dim], not yet rotated) -> [T, heads * dim].
Also stores the rows' keys and values."""


def few_rows_forward(model: Model, tokens: Tensor, attend: Attend, logits: Tensor) -> Tensor:
    """tokens [T] -> logits [T, vocabulary], for up to `MOST_ROWS` rows."""
    shape, rows, device = model.architecture, len(tokens), tokens.device
    epsilon, dtype = shape.norm_epsilon, model.embedding.dtype

    def empty(size: int) -> Tensor:
        return torch.empty(rows, size, dtype=dtype, device=device)

    def onto(linear: Linear, x: Tensor, norm: Tensor) -> None:
        if isinstance(linear, SummedLinear):
            part = few_rows_alone(x, linear.weight, empty(shape.hidden), linear.bias)
            add_and_scale(linear.group.sum(part), residual, norm, later)
        else:
            few_rows_onto(x, linear.weight, residual, norm, later, linear.bias)

    residual, scaled = empty(shape.hidden), empty(shape.hidden)
    first = Scaled(scaled, torch.empty(1, rows, dtype=torch.float32, device=device), epsilon)
    summed = isinstance(model.layers[0].output, SummedLinear)
    squares = first.squares if summed else squares_for(rows, shape.hidden, device)
    later = Scaled(scaled, squares, epsilon)
    qkv, gated = empty(len(model.layers[0].qkv.weight)), empty(shape.intermediate)
    embed(tokens, model.embedding, model.layers[0].attention_norm.weight, residual, first)
    source = first
    for index, layer in enumerate(model.layers):
        few_rows(source, layer.qkv.weight, qkv, layer.qkv.bias)
        onto(layer.output, attend(index, qkv), layer.mlp_norm.weight)
        source = later
        few_rows(source, layer.gate_up.weight, gated, layer.gate_up.bias, gated=True)
        onto(layer.down, gated, _norm_after(model, index))
    return few_rows(source, model.head.weight, logits) if len(model.head.weight) else logits


def many_rows_forward(
    model: Model, tokens: Tensor, attend: Attend, samples: Tensor | None = None
) -> Tensor:
    """tokens [T] -> the head's input, [n, hidden], for rows `samples` [n] or for all.

    With `samples`, the last layer's `attend` returns only those rows.
    """
    epsilon = model.architecture.norm_epsilon
    residual = functional.embedding(tokens, model.embedding)
    normed = rms_norm(residual, model.layers[0].attention_norm.weight, epsilon)
    last = len(model.layers) - 1
    for index, layer in enumerate(model.layers):
        attended = attend(index, _product(layer.qkv, normed))
        if index == last and samples is not None:
            residual = residual[samples]
        normed = _onto(residual, layer.output, attended, layer.mlp_norm.weight, epsilon)
        gated = silu_and_multiply(_product(layer.gate_up, normed))
        normed = _onto(residual, layer.down, gated, _norm_after(model, index), epsilon)
    return normed


def logits_of(model: Model, normed: Tensor, out: Tensor | None = None) -> Tensor:
    """normed [n, hidden], the last layer's output -> [n, vocabulary]; [n, 0] on ranks without
    a head."""
    if not len(model.head.weight):
        return normed[:, :0]
    return torch.mm(normed, model.head.weight.t(), out=out)


def _onto(residual: Tensor, linear: Linear, x: Tensor, norm: Tensor, epsilon: float) -> Tensor:
    """residual += linear(x); then its norm."""
    if isinstance(linear, SummedLinear):
        total = linear.group.sum(_product(linear, x))
        return add_and_norm(total[None], residual, norm, epsilon)
    if _is_split(linear, x):
        parts = torch.bmm(_halves(x).transpose(0, 1), _halves(linear.weight).permute(1, 2, 0))
        return add_and_norm(parts, residual, norm, epsilon)
    torch.addmm(residual, x, linear.weight.t(), out=residual)
    if linear.bias is not None:
        residual += linear.bias
    return rms_norm(residual, norm, epsilon)


def _is_split(linear: Linear, x: Tensor) -> bool:
    rows, size = x.shape
    plain = x.dtype is torch.bfloat16 and linear.bias is None and size % 128 == 0
    return plain and rows in SPLIT_ROWS


def _halves(matrix: Tensor) -> Tensor:
    """[rows, size] -> [rows, 2, size / 2]."""
    return matrix.view(len(matrix), 2, -1)


def _product(linear: Linear | GatedLinear, x: Tensor) -> Tensor:
    return functional.linear(x, linear.weight, linear.bias)


def _norm_after(model: Model, index: int) -> Tensor:
    """The weight of the norm after layer `index`."""
    if index + 1 < len(model.layers):
        return model.layers[index + 1].attention_norm.weight
    return model.norm.weight
