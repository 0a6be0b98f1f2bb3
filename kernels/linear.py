"""Linear layers, with the norm before them and the gate or sum after them.

On a CPU compiled products (kernels/cpu) do all of this in one pass, and a row's results do not
depend on the other rows. Where they are not available, each is an operation of torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels.cpu import compiler
from baton.kernels.exact_codes import ExactWeight, FineGrid, encode
from baton.kernels.fp8 import Fp8Weight, fp8_product, quantize_to_fp8
from baton.kernels.integers import (
    IntegerWeight,
    integer_product,
    quantize_to_int4,
    quantize_to_int8,
)
from baton.kernels.packed import Grid, PackedWeight, pack, quantize_to_packed

if TYPE_CHECKING:
    from baton.kernels.cpu.panels import Panels
    from baton.kernels.low_rank import AdaptedRows

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
"""The activation of a gate: x / (1 + exp(-x)); gelu in its tanh approximation; or gpt-oss's, which
also changes up: gate / (1 + exp(-SWIGLU_ALPHA gate)) * (up + 1), with the gate clamped from above
and up from both sides."""

WeightCodes = Literal["int8", "int4", "fp8", "packed_int8", "packed_int4"]
"""Formats of quantized weights: integers on CPUs (kernels/integers.py), FP8 (kernels/fp8.py) and
packed integers on GPUs (kernels/packed.py)."""

Codes = IntegerWeight | ExactWeight | Fp8Weight | PackedWeight
AnyGrid = Grid | FineGrid

QUANTIZE: dict[WeightCodes, Callable[[Tensor], Codes | None]] = {
    "int8": quantize_to_int8,
    "int4": quantize_to_int4,
    "fp8": quantize_to_fp8,
    "packed_int8": partial(quantize_to_packed, bits=8),
    "packed_int4": partial(quantize_to_packed, bits=4),
}

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


class RMSNorm:
    """x / sqrt(mean(x^2) + epsilon) * weight, over the last dimension."""

    __slots__ = ("_floor", "_scaled", "epsilon", "weight", "wide")

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        size = weight.shape[0]
        self.weight = weight  # [size], in the type of the rows or float32
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
        lanes = compiler.lanes_for(x.shape[1], compiler.registers())
        if lanes and compiler.suits(x.dtype, x.device):
            from baton.kernels.cpu.norm import add_normed  # imports llvmlite

            return add_normed(residual, x, self)
        return self(x).add_(residual)


class _Product:
    """x @ weight.T + bias, of the weight or of its codes."""

    __slots__ = ("_codes", "bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias  # [out]
        self._codes: Codes | None = None

    @property
    def kept(self) -> Tensor | Fp8Weight | PackedWeight:
        """The weight as a GPU's products read it."""
        return self._codes if isinstance(self._codes, Fp8Weight | PackedWeight) else self.weight

    def quantize(self, kind: WeightCodes) -> bool:
        """Replaces the weight by codes; False if this format has none for its inputs."""
        return self._keep(QUANTIZE[kind](self.weight))

    def keep_codes(self, grid: AnyGrid) -> bool:
        """Replaces the weight by its codes in this grid; False if they do not represent it."""
        if isinstance(grid, FineGrid):
            return self._keep(encode(self.weight, grid))
        return self._keep(pack(self.weight, grid))

    def _keep(self, codes: Codes | None) -> bool:
        if codes is not None:
            self._codes, self.weight = codes, _shape_only(self.weight)
        return codes is not None

    def _product(self, x: Tensor, added: Tensor | None) -> Tensor:
        """The product plus `added`. With codes it is not yet in x's type."""
        if self._codes:
            return _plus(_plus(_product_of_codes(x, self._codes), self.bias), added)
        return _plus(functional.linear(x, self.weight, self.bias), added)


class Linear(_Product):
    """x @ weight.T + bias."""

    __slots__ = ("_panels",)

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self._panels: Panels | None = None

    def pack(self, *, of_few_rows: bool = False) -> None:
        """Moves the weight into panels if there is compiled code for it. For products of few rows
        they are in bfloat16 where that loses nothing; with many rows widening costs more than it
        saves."""
        if self._panels is None:
            weight = self._codes or self.weight
            self._panels = _panels(weight, self.bias, of_few_rows and _fits_bfloat16(weight))
        if self._panels:
            self._codes, self.weight = None, _shape_only(self.weight)

    def __call__(
        self, x: Tensor, norm: RMSNorm | None = None, adapted: AdaptedRows | None = None
    ) -> Tensor:
        """x [rows, in], normalized if a norm is given -> [rows, out]. Includes what the rows'
        adapters add."""
        added = adapted.added(self, x, norm) if adapted else None
        if self._panels:
            return self._panels.product(x, norm, added)
        x = norm(x) if norm else x
        return self._product(x, added).to(x.dtype)

    def logits(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """self(x, norm), which compiled code does not round: the largest of 50,000 logits are often
        equal in bfloat16."""
        return self._panels.unrounded(x, norm) if self._panels else self(x, norm)

    def add_to(
        self,
        residual: Tensor,
        x: Tensor,
        after: RMSNorm | None = None,
        adapted: AdaptedRows | None = None,
    ) -> Tensor:
        """residual [rows, out] + self(x), which is normalized if a norm is given."""
        if after:
            return after.add_to(residual, self(x, None, adapted))
        added = adapted.added(self, x) if adapted else None
        if added is not None:
            residual = added.add_(residual)
        if self._panels:
            return self._panels.add_to(residual, x)
        if self._codes:
            addend = _plus(residual, self.bias)
            return _plus(_product_of_codes(x, self._codes), addend).to(residual.dtype)
        if self.bias is None:
            return torch.addmm(residual, x, self.weight.t())
        return self(x).add_(residual)


class GatedLinear(_Product):
    """activation(x @ gate.T) * (x @ up.T), each product with its bias. gate and up are the halves
    of one weight [2 * out, in]."""

    __slots__ = ("_panels", "activation")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, activation: Activation = "silu"
    ) -> None:
        super().__init__(weight, bias)
        self.activation = activation
        self._panels: tuple[Panels, Panels] | None = None

    def pack(self) -> None:
        """As Linear.pack."""
        if self._panels is None:
            biases = (None, None) if self.bias is None else self.bias.chunk(2)
            gate, up = map(_panels, self._halves(), biases)
            self._panels = (gate, up) if gate and up else None
        if self._panels:
            self._codes, self.weight = None, _shape_only(self.weight)

    def _halves(self) -> Sequence[Tensor | Codes]:
        whole = self._codes or self.weight
        if isinstance(whole, PackedWeight):
            return whole, whole
        if isinstance(whole, Tensor):
            return whole.chunk(2)
        if isinstance(whole, Fp8Weight):
            return whole.halves()
        return [
            whole.changed(lambda each: each.chunk(2)[0]),
            whole.changed(lambda each: each.chunk(2)[1]),
        ]

    def __call__(
        self, x: Tensor, norm: RMSNorm | None, adapted: AdaptedRows | None = None
    ) -> Tensor:
        """x [rows, in], normalized if a norm is given -> [rows, out]. Adapters add to gate and
        up."""
        added = adapted.added(self, x, norm) if adapted else None
        if self._panels:
            gate, up = self._panels
            return gate.gated(up, x, norm, self.activation, added)
        x = norm(x) if norm else x
        return gate_and_multiply(self._product(x, added), self.activation).to(x.dtype)


AnyLinear = Linear | GatedLinear


class HeadLinear:
    """x @ weight.T for each head, each with its own weight."""

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


def _product_of_codes(x: Tensor, codes: Codes) -> Tensor:
    """x @ weight.T, in float32, or in the weight's type if its codes are packed."""
    if isinstance(codes, PackedWeight | ExactWeight):
        return functional.linear(x, codes.numbers())
    return integer_product(x, codes) if isinstance(codes, IntegerWeight) else fp8_product(x, codes)


def _fits_bfloat16(weight: Tensor | Codes) -> bool:
    """Whether float32 weights lose nothing in bfloat16, as those of models published in it."""
    if not isinstance(weight, Tensor) or weight.dtype != torch.float32:
        return False
    # In most other models the first row already loses something.
    pieces = (weight[:1], *torch.split(weight, 4096))
    return all(torch.equal(some.bfloat16().float(), some) for some in pieces)


def _panels(weight: Tensor | Codes, bias: Tensor | None, narrow: bool = False) -> Panels | None:
    if isinstance(weight, Fp8Weight | PackedWeight):
        return None
    if not compiler.suits(weight.dtype, weight.device):
        return None
    from baton.kernels.cpu.panels import Panels, suits  # imports llvmlite

    return Panels(weight, bias, narrow=narrow) if suits(weight) else None


def describe_integers(dtype: str) -> str:
    """Says which code multiplies integer weights and rows of `dtype` in this process."""
    if not compiler.available() or dtype == "float16":
        return "multiplied by torch, slower than unquantized ones"
    has_dot = compiler.has_dot() or compiler.has_byte_dot()
    dot = "the CPU's dot products" if has_dot else "no dot products in the CPU"
    return f"multiplied by compiled code, with {dot}"


def _shape_only(weight: Tensor) -> Tensor:
    """Stands in for a weight that is only kept as codes or panels."""
    return torch.empty_like(weight, device="meta")


def gate_and_multiply(gate_up: Tensor, activation: Activation) -> Tensor:
    """gate_up [T, 2 * size] -> activation(gate) * up, [T, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate).mul_(up)
    if activation == "gelu_tanh":
        # torch has other code for rows with gaps, whose last bits differ.
        return functional.gelu(gate.contiguous(), approximate="tanh").mul_(up)
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (gate * SWIGLU_ALPHA).sigmoid_().mul_(gate).mul_(up.add_(1.0))
