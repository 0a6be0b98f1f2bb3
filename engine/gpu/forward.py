"""The decoder on a GPU: the layers over a batch of rows.

Few rows cost what reading the weights costs: products with the norms, the gate and the sums
inside them (kernels/gpu/linear.py), five kernels per layer. Many rows use the matrix library's
products, with one kernel each between them. Both give a row the same bits, if the library does
not cut the inputs of a product into parts (`Numerics`). Where several ranks share the model,
their parts are summed before they are added to the residual, in either form.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from baton.engine.gpu.numerics import Numerics
from baton.engine.model import Model
from baton.engine.tensor_parallel import SummedLinear
from baton.kernels.gpu.linear import (
    MOST_ROWS,
    few_rows,
    few_rows_alone,
    few_rows_onto,
    silu_and_multiply,
)
from baton.kernels.gpu.norm import Scaled, embed, rms_norm, scale_rows
from baton.kernels.gpu.rotary import Projected
from baton.kernels.linear import Linear

SPLIT_ROWS = range(65, 257)
"""With this many rows a product onto the residual has tiles for half of the chip: where a
row's bits may depend on the batch, it is split into two products over half of the inputs
each, which the next norm adds up."""

Attend = Callable[[int, Projected], Tensor]
"""(layer, queries, keys and values of T rows) -> [T, heads * dim]. Also stores the rows' keys
and values."""


class Forward:
    """The layers of a model, in one of the numerics."""

    def __init__(self, model: Model, numerics: Numerics) -> None:
        self._model = model
        self._epsilon = model.architecture.norm_epsilon
        self._numerics = numerics
        # In float16 rows are normed before the product: see kernels/gpu/norm.py.
        self._late_size = model.embedding.dtype != torch.float16

    def __call__(self, tokens: Tensor, attend: Attend, samples: Tensor | None = None) -> Tensor:
        """tokens [T] -> the head's input, [n, hidden], for rows `samples` [n] or for all.

        With `samples`, the last layer's `attend` returns only those rows.
        """
        with self._numerics.library(len(tokens)):
            return self._layers(tokens, attend, samples)

    def _layers(self, tokens: Tensor, attend: Attend, samples: Tensor | None) -> Tensor:
        model = self._model
        first = model.layers[0].attention_norm.weight
        residual, source = embed(tokens, model.embedding, first, self._epsilon)
        last = len(model.layers) - 1
        for index, layer in enumerate(model.layers):
            attended = attend(index, self._project(layer.qkv, source))
            if index == last and samples is not None:
                residual = residual[samples]
            source = self._onto(residual, layer.output, attended, layer.mlp_norm.weight)
            gated = self._gated(layer.gate_up.weight, layer.gate_up.bias, source)
            following = model.norm if index == last else model.layers[index + 1].attention_norm
            source = self._onto(residual, layer.down, gated, following.weight)
        return rms_norm(residual, model.norm.weight, self._epsilon)

    def logits(self, normed: Tensor, out: Tensor | None = None) -> Tensor:
        """The head's input [n, hidden] -> [n, vocabulary]; [n, 0] on ranks without a head."""
        weight = self._model.head.weight
        if not len(weight):
            return normed[:, :0]
        with self._numerics.library(len(normed)):
            return self._product(weight, normed, out)

    def _is_few(self, x: Tensor) -> bool:
        return len(x) <= MOST_ROWS

    def _product(self, weight: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        if self._is_few(x):
            return few_rows_alone(x, weight, out)
        return torch.mm(x, weight.t(), out=out)

    def _project(self, linear: Linear, source: Scaled) -> Projected:
        if self._is_few(source.x) and self._late_size:
            return Projected(few_rows(source, linear.weight, linear.bias))
        return Projected(self._product(linear.weight, source.x), source, linear.bias)

    def _gated(self, weight: Tensor, bias: Tensor | None, source: Scaled) -> Tensor:
        if self._is_few(source.x):
            return few_rows(source, weight, bias, gated=True)
        return silu_and_multiply(self._product(weight, source.x), source, bias)

    def _onto(self, residual: Tensor, linear: Linear, x: Tensor, norm: Tensor) -> Scaled:
        """residual += linear(x); then scaled for its norm."""
        if self._is_few(x) and not isinstance(linear, SummedLinear):
            scaled = few_rows_onto(x, linear.weight, residual, norm, self._epsilon, linear.bias)
            return scaled if self._late_size else scale_rows(residual, norm, self._epsilon)
        if self._numerics is Numerics.FAST and _is_split(linear, x):
            parts = torch.bmm(_halves(x).transpose(0, 1), _halves(linear.weight).permute(1, 2, 0))
            return scale_rows(residual, norm, self._epsilon, parts)
        part = self._product(linear.weight, x)
        if linear.bias is not None:
            part += linear.bias
        if isinstance(linear, SummedLinear):
            part = linear.group.sum(part)
        return scale_rows(residual, norm, self._epsilon, part[None])


def _is_split(linear: Linear, x: Tensor) -> bool:
    rows, size = x.shape
    whole = linear.bias is None and not isinstance(linear, SummedLinear)
    return x.dtype is torch.bfloat16 and whole and size % 128 == 0 and rows in SPLIT_ROWS


def _halves(matrix: Tensor) -> Tensor:
    """[rows, size] -> [rows, 2, size / 2]."""
    return matrix.view(len(matrix), 2, -1)
