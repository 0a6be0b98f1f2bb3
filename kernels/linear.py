"""Linear layers, with the norm before them and the gate or sum after them.

On a CPU compiled products (kernels/cpu) do all of this in one pass, and a row's numbers do not
depend on the other rows; where there are none, each is an operation of torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.cpu import compiler
from baton.kernels.int8 import Int8Weight, int8_product, quantize_weight

if TYPE_CHECKING:
    from baton.kernels.cpu.panels import Panels

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
"""Of a gate: x / (1 + exp(-x)); gelu by its approximation with tanh; or gpt-oss's, which also
changes what the gate multiplies: gate / (1 + exp(-SWIGLU_ALPHA gate)) * (up + 1), with the gate
clamped from above and up from both sides."""

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


class RMSNorm:
    """x / sqrt(mean(x^2) + epsilon) * weight, over the last dimension."""

    __slots__ = ("_floor", "_scaled", "epsilon", "weight", "wide")

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        size = weight.shape[0]
        self.weight = weight  # [size], of what is normalized or float32
        self.wide = weight.float()
        self.epsilon = epsilon
        self._scaled = self.wide * math.sqrt(size)
        self._floor = torch.tensor(math.sqrt(size * epsilon), device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        if x.dtype != torch.float32:
            kind = torch.promote_types(x.dtype, self.weight.dtype)
            weight = self.weight.to(kind)
            return functional.rms_norm(x.to(kind), weight.shape, weight, self.epsilon).to(x.dtype)
        # hypot(|x|, sqrt(size * epsilon)) = sqrt(size) * sqrt(mean(x^2) + epsilon), in two
        # operations instead of the five of the written formula.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._floor)
        return torch.div(x, length).mul_(self._scaled)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + self(x), both [rows, size]."""
        if compiler.suits(x) and compiler.lanes_for(x.shape[1], compiler.registers()):
            from baton.kernels.cpu.norm import add_normed  # imports llvmlite

            return add_normed(residual, x, self)
        return self(x).add_(residual)


class Linear:
    """x @ weight.T + bias."""

    __slots__ = ("_codes", "_panels", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias  # [out]
        self._codes: Int8Weight | None = None
        self._panels: Panels | None = None

    def quantize(self) -> None:
        """Keeps the weight as int8 codes alone."""
        self._codes = quantize_weight(self.weight)
        self.weight = _shape_only(self.weight)

    def pack(self) -> None:
        """Moves the weight into panels where there is compiled code for it."""
        if self._panels is None:
            self._panels = _panels(self._codes or self.weight, self.bias)
        if self._panels:
            self._codes, self.weight = None, _shape_only(self.weight)

    def __call__(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """x [rows, in], normalized if a norm is given -> [rows, out]."""
        if self._panels:
            return self._panels.product(x, norm)
        x = norm(x) if norm else x
        if self._codes:
            return _plus(int8_product(x, self._codes), self.bias).to(x.dtype)
        return functional.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor, after: RMSNorm | None = None) -> Tensor:
        """residual [rows, out] + self(x), normalized if a norm is given."""
        if after:
            return after.add_to(residual, self(x))
        if self._panels:
            return self._panels.add_to(residual, x)
        if self._codes:
            added = _plus(residual, self.bias)
            return _plus(int8_product(x, self._codes), added).to(residual.dtype)
        if self.bias is None:
            return torch.addmm(residual, x, self.weight.t())
        return self(x).add_(residual)


class GatedLinear:
    """activation(x @ gate.T) * (x @ up.T), each with its bias; gate and up are halves of one
    weight."""

    __slots__ = ("_codes", "_panels", "activation", "bias", "weight")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, activation: Activation = "silu"
    ) -> None:
        self.weight = weight  # [2 * out, in]
        self.bias = bias  # [2 * out]
        self.activation = activation
        self._codes: Int8Weight | None = None
        self._panels: tuple[Panels, Panels] | None = None

    def quantize(self) -> None:
        """As Linear.quantize."""
        self._codes = quantize_weight(self.weight)
        self.weight = _shape_only(self.weight)

    def pack(self) -> None:
        """As Linear.pack."""
        if self._panels is None:
            biases = (None, None) if self.bias is None else self.bias.chunk(2)
            halves = self._codes.halves() if self._codes else self.weight.chunk(2)
            gate, up = map(_panels, halves, biases)
            self._panels = (gate, up) if gate and up else None
        if self._panels:
            self._codes, self.weight = None, _shape_only(self.weight)

    def __call__(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """x [rows, in], normalized if a norm is given -> [rows, out]."""
        if self._panels:
            gate, up = self._panels
            return gate.gated(up, x, norm, self.activation)
        x = norm(x) if norm else x
        if self._codes:
            product = _plus(int8_product(x, self._codes), self.bias)
            return gate_and_multiply(product, self.activation).to(x.dtype)
        return gate_and_multiply(functional.linear(x, self.weight, self.bias), self.activation)


class HeadLinear:
    """x @ weight.T of each head, with weights of its own."""

    __slots__ = ("_each", "weight")

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [heads, out, in]
        self._each = [Linear(each) for each in weight]

    def pack(self) -> None:
        """As Linear.pack."""
        for linear in self._each:
            linear.pack()
        if all(linear.weight.is_meta for linear in self._each):
            self.weight = _shape_only(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, heads, in] -> [rows, heads, out]."""
        found = [linear(x[:, head]) for head, linear in enumerate(self._each)]
        return torch.stack(found, dim=1)


def _plus(numbers: Tensor, more: Tensor | None) -> Tensor:
    return numbers if more is None else numbers + more


def _panels(weight: Tensor | Int8Weight, bias: Tensor | None) -> Panels | None:
    if not compiler.suits(weight):
        return None
    from baton.kernels.cpu.panels import Panels, suits  # imports llvmlite

    return Panels(weight, bias) if suits(weight) else None


def describe_int8(dtype: str) -> str:
    """Which code multiplies int8 weights in this process, with rows of that type."""
    if not compiler.available() or dtype == "float16":
        return "multiplied by torch, slower than unquantized ones"
    dot = "the CPU's dot products" if compiler.has_dot() else "no dot products in the CPU"
    return f"multiplied by compiled code, with {dot}"


def _shape_only(weight: Tensor) -> Tensor:
    """Replaces a weight whose numbers are in panels alone."""
    return torch.empty_like(weight, device="meta")


def gate_and_multiply(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up [T, 2 * size] -> activation(gate) * up, [T, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate).mul_(up)
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh").mul_(up)
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (gate * SWIGLU_ALPHA).sigmoid_().mul_(gate).mul_(up.add_(1.0))
