"""A linear layer that picks its matrix product by the number of rows."""

from __future__ import annotations

import platform

import torch
from torch import Tensor
from torch.nn import functional


class Linear:
    """x @ weight.T + bias.

    On Arm CPUs the plain product is at its best for one row (a matrix-vector
    product, bound by memory) and at its worst for the few rows of a decode
    batch, where packed weights are up to twice as fast. Both copies are kept.
    """

    __slots__ = ("bias", "packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias  # [out]
        self.packed = _pack(weight) if _packing_pays(weight) else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out]."""
        if self.packed is None or x.shape[0] == 1:
            return functional.linear(x, self.weight, self.bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.packed, self.bias, "none", [], ""
        )
        return product


def _packing_pays(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and platform.machine() == "aarch64"
        and torch.backends.mkldnn.is_available()
    )


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed
