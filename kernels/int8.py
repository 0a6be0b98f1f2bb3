"""Numbers as int8 codes: weights, keys and values.

Products are of weights in int8, which have a scale for each 32 inputs, and rows in int16, which
have one scale each.

    x @ weight.T = row's scale * sum over groups of (sum of codes' products) * (output's scale)

A group's sum is of integers, exact in any order, then rounded to float32; groups are added in
order. So a row's result does not depend on the other rows, on tiles or on threads. Compiled code
(kernels/cpu/int8_product.py) gives the same bits.

Rows in int8 would be twice as fast to multiply, but lose more than weights do, even with a scale
for each 32 inputs.

A key or value of one head has one scale, which is behind its codes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from baton.kernels import SCALE_BYTES

GROUP = 32
MOST = 127.0
MOST_OF_ROW = 127.0 * 256
"""So that its upper byte is a code of int8, and its lower byte another."""

LEAST_PEAK = 1e-30
"""Zeros have a scale too."""


class Int8Weight(NamedTuple):
    """A weight as codes, for products in `dtype`."""

    codes: Tensor  # [outputs, inputs], int8
    scales: Tensor  # [outputs, groups], float32
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def halves(self) -> list[Int8Weight]:
        """Of the outputs."""
        parts = zip(self.codes.chunk(2), self.scales.chunk(2), strict=True)
        return [Int8Weight(codes, scales, self.dtype) for codes, scales in parts]


def quantize_weight(weight: Tensor) -> Int8Weight:
    """weight [outputs, inputs]"""
    codes, scales = _quantize(_grouped(weight.float()), MOST)
    codes = codes.to(torch.int8).flatten(1)[:, : weight.shape[1]]
    return Int8Weight(codes.contiguous(), scales, weight.dtype)


def int8_product(x: Tensor, weight: Int8Weight) -> Tensor:
    """x [rows, inputs] -> [rows, outputs], float32, without rounding to x's type."""
    codes, scales = _quantize(x.float(), MOST_OF_ROW)
    total = torch.zeros(len(x), len(weight.codes))
    for group, factors in enumerate(weight.scales.t()):
        part = slice(group * GROUP, (group + 1) * GROUP)
        sums = torch.mm(codes[:, part].double(), weight.codes[:, part].double().t())  # exact
        total += sums.float() * factors
    return total * scales.unsqueeze(1)


def head_codes(heads: Tensor) -> Tensor:
    """heads [..., head_dim] -> [..., head_dim + SCALE_BYTES], int8. Compiled code
    (kernels/cpu/rotation.py) gives the same bits."""
    codes, scales = _quantize(heads.float(), MOST)
    return torch.cat((codes.to(torch.int8), scales.unsqueeze(-1).view(torch.int8)), dim=-1)


def head_numbers(codes: Tensor) -> Tensor:
    """What `head_codes` stand for, [..., head_dim], float32."""
    scales = codes[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return codes[..., :-SCALE_BYTES] * scales


def _quantize(x: Tensor, most: float) -> tuple[Tensor, Tensor]:
    """x [..., size] -> its codes, of the same shape, and scales [...]."""
    peaks = x.abs().amax(dim=-1).clamp(min=LEAST_PEAK)
    # torch divides a number by a tensor in two steps, each rounded.
    factors = torch.full_like(peaks, most) / peaks
    return (x * factors.unsqueeze(-1)).round(), peaks / most


def _grouped(rows: Tensor) -> Tensor:
    """[rows, size] -> [rows, groups, GROUP]; the last group is filled up."""
    return functional.pad(rows, (0, -rows.shape[1] % GROUP)).unfold(1, GROUP, GROUP)
