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

    __slots__ = ("_packed", "_transposed", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias  # [out]
        self._transposed = weight.t()
        self._packed = _pack(weight) if _packing_pays(weight) else None

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out]."""
        if len(x) == 1 and self.bias is None:
            return torch.mm(x, self._transposed)
        if len(x) == 1 or self._packed is None:
            return functional.linear(x, self.weight, self.bias)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return product

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [rows, out] + self(x)."""
        if len(x) == 1 and self.bias is None:
            return torch.addmm(residual, x, self._transposed)
        return self(x).add_(residual)


def _packing_pays(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and platform.machine() == "aarch64"
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed
