"""Linear layers, with the norm before them and the gate or sum after them.

On a CPU compiled products (kernels/cpu) do all of this in one pass, and a row's numbers do not
depend on the other rows; where there are none, each is an operation of torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.cpu import compiler

if TYPE_CHECKING:
    from baton.kernels.cpu.panels import Panels


class RMSNorm:
    """x / sqrt(mean(x^2) + epsilon) * weight, over the last dimension."""

    __slots__ = ("_floor", "_scaled", "epsilon", "weight")

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        size = weight.shape[0]
        self.weight = weight  # [size]
        self.epsilon = epsilon
        self._scaled = weight * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * epsilon), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        if x.dtype != torch.float32:
            return functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        # hypot(|x|, sqrt(size * epsilon)) = sqrt(size) * sqrt(mean(x^2) + epsilon), in two
        # operations instead of the five of the written formula.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._floor)
        return torch.div(x, length).mul_(self._scaled)


class Linear:
    """x @ weight.T + bias."""

    __slots__ = ("_panels", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias  # [out]
        self._panels: Panels | None = None

    def pack(self) -> None:
        """Moves the weight into panels where there is compiled code for it."""
        if self._panels is None:
            self._panels = _panels(self.weight, self.bias)
            self.weight = self.weight if self._panels is None else _shape_only(self.weight)

    def __call__(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """x [rows, in], normalized if a norm is given -> [rows, out]."""
        if self._panels:
            return self._panels.product(x, norm)
        return functional.linear(norm(x) if norm else x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [rows, out] + self(x)."""
        if self._panels:
            return self._panels.add_to(residual, x)
        if self.bias is None:
            return torch.addmm(residual, x, self.weight.t())
        return self(x).add_(residual)


class GatedLinear:
    """silu(x @ gate.T) * (x @ up.T), each with its bias; gate and up are halves of one weight."""

    __slots__ = ("_panels", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [2 * out, in]
        self.bias = bias  # [2 * out]
        self._panels: tuple[Panels, Panels] | None = None

    def pack(self) -> None:
        """As Linear.pack."""
        if self._panels is None:
            biases = (None, None) if self.bias is None else self.bias.chunk(2)
            gate, up = map(_panels, self.weight.chunk(2), biases)
            self._panels = (gate, up) if gate and up else None
            self.weight = self.weight if self._panels is None else _shape_only(self.weight)

    def __call__(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """x [rows, in], normalized -> [rows, out]."""
        if self._panels:
            gate, up = self._panels
            return gate.gated(up, x, norm)
        return silu_and_multiply(functional.linear(norm(x), self.weight, self.bias))


def _panels(weight: Tensor, bias: Tensor | None) -> Panels | None:
    if not compiler.suits(weight):
        return None
    from baton.kernels.cpu.panels import Panels, suits  # imports llvmlite

    return Panels(weight, bias) if suits(weight) else None


def _shape_only(weight: Tensor) -> Tensor:
    """Replaces a weight whose numbers are in panels alone."""
    return torch.empty_like(weight, device="meta")


def silu_and_multiply(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 * size] -> silu(gate) * up, [T, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
